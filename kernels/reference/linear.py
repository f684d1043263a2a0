"""The exact integer linear in torch: fp32 dots within a group, fp64 sums across groups.

Invariant: every intermediate is an integer that its type holds exactly: a group's dot is below
128 · 136 · 127 < 2^24 (fp32), the whole sum below 2^15 · 2^22 · K/G < 2^53 (fp64). So the order in
which the library adds does not matter.
"""

from __future__ import annotations

import torch
from torch import Tensor

from edge_runtime.kernels import pack
from edge_runtime.kernels.ops import LinearWeights

WIDE_ROWS = 16  # above it one fp64 product beats many small fp32 ones


class ExactLinear:
    """One view of a nested matrix: codes fp32 [groups, G, N], multipliers fp64 [groups, 1, N]."""

    def __init__(
        self, codes: Tensor, mult: Tensor, scale: Tensor, bias: Tensor | None, group_size: int
    ) -> None:
        """codes: integers [N, Kp]; mult: integers [N, Kp/G]; scale, bias: fp32 [N]."""
        N, Kp = codes.shape
        grouped = codes.view(N, Kp // group_size, group_size)
        self.codes = grouped.permute(1, 2, 0).to(torch.float32).contiguous()
        self.mult = mult.double().T.contiguous()[:, None]
        self.scale = scale.float()
        self.bias = bias
        self.num_bytes = self.codes.nbytes + self.mult.nbytes

    @classmethod
    def from_weights(cls, w: LinearWeights, view: str) -> ExactLinear:
        """Make one view from packed planes."""
        codes = pack.unpack_base(w.base, w.group_size).astype("int16") * 16
        if view == "w8":
            codes += pack.unpack_refine(w.refine, w.group_size)
        bias = None if w.bias is None else torch.from_numpy(w.bias.copy())
        mult = torch.from_numpy(w.mult.copy())
        scale = torch.from_numpy(w.scale.copy())
        return cls(torch.from_numpy(codes), mult, scale, bias, w.group_size)

    def accumulate(self, x: Tensor) -> Tensor:
        """x: int8 codes as fp32 [M, Kp] -> exact integers fp64 [M, N]."""
        groups, G, N = self.codes.shape
        if x.shape[0] > WIDE_ROWS:
            wide = self.codes.double().mul_(self.mult).view(groups * G, N)
            return x.double() @ wide
        dots = torch.bmm(x.view(-1, groups, G).transpose(0, 1), self.codes)
        total = dots[0].double() * self.mult[0]
        for dot, mult in zip(dots[1:], self.mult[1:], strict=True):
            total.addcmul_(dot.double(), mult)
        return total

    def __call__(self, x: Tensor, x_scale: Tensor) -> Tensor:
        """y = (fp32(acc) · x_scale) · S (+ bias). x: [M, Kp] codes, x_scale: fp32 [M]."""
        acc = self.accumulate(x) + 0.0  # an integer zero has no sign, a float may say -0
        y = (acc.float() * x_scale[:, None]) * self.scale
        return y if self.bias is None else y + self.bias
