"""Quantise one matrix: scales, base, refinement, errors; and make it runnable at once.

Invariant: what is written to disk and what is measured come from the same codes.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any, Literal

import numpy.typing as npt
import torch
from torch import Tensor

from edge_runtime.convert import quantize
from edge_runtime.convert.gptq import TARGET_DAMPING, factor_hessian
from edge_runtime.kernels import pack
from edge_runtime.kernels.reference.linear import ExactLinear


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """How matrices are nested."""

    group_size: int
    base: Literal["gptq", "rtn"] = "gptq"
    refine: Literal["gptq", "closed"] = "gptq"
    bound: float | None = 0.25


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Nested:
    """One nested matrix: q4, q_r int8 [N, Kp], mult int16 [N, Kp/G], scale fp32 [N]."""

    q4: Tensor
    qr: Tensor
    mult: Tensor
    scale: Tensor
    bias: Tensor | None
    group_size: int

    def planes(self, name: str) -> dict[str, npt.NDArray[Any]]:
        """Return the canonical planes by plane name, of a matrix on the host."""
        planes = {
            f"{name}.base": pack.pack_base(self.q4.numpy(), self.group_size),
            f"{name}.refine": pack.pack_refine(self.qr.numpy(), self.group_size),
            f"{name}.mult": self.mult.numpy(),
            f"{name}.scale": self.scale.numpy(),
        }
        if self.bias is not None:
            planes[f"{name}.bias"] = self.bias.numpy()
        return planes

    @classmethod
    def from_planes(
        cls,
        planes: dict[str, npt.NDArray[Any]],
        name: str,
        G: int,
        device: torch.device | str = "cpu",
    ) -> Nested:
        """Read planes back (a resumed conversion)."""

        def brought(array: npt.NDArray[Any]) -> Tensor:
            return torch.from_numpy(array).to(device)

        bias = planes.get(f"{name}.bias")
        return cls(
            q4=brought(pack.unpack_base(planes[f"{name}.base"], G)),
            qr=brought(pack.unpack_refine(planes[f"{name}.refine"], G)),
            mult=brought(planes[f"{name}.mult"]),
            scale=brought(planes[f"{name}.scale"]),
            bias=None if bias is None else brought(bias),
            group_size=G,
        )

    def cpu(self) -> Nested:
        """Return the matrix on the host; itself if it is there."""
        return Nested(
            q4=self.q4.cpu(),
            qr=self.qr.cpu(),
            mult=self.mult.cpu(),
            scale=self.scale.cpu(),
            bias=None if self.bias is None else self.bias.cpu(),
            group_size=self.group_size,
        )

    def rows(self, rows: slice) -> Nested:
        """Return some rows as a matrix of their own."""
        return Nested(
            q4=self.q4[rows],
            qr=self.qr[rows],
            mult=self.mult[rows],
            scale=self.scale[rows],
            bias=None if self.bias is None else self.bias[rows],
            group_size=self.group_size,
        )

    def codes(self, view: Literal["w8", "w4"]) -> Tensor:
        """Return the integer codes of a view, int16 [N, Kp]."""
        high = self.q4.short() * 16
        return high + self.qr if view == "w8" else high

    def linear(self, view: Literal["w8", "w4"]) -> ExactLinear:
        """Return a view that runs."""
        return ExactLinear(self.codes(view), self.mult, self.scale, self.bias, self.group_size)


def nest_matrix(
    W: Tensor, bias: Tensor | None, H: Tensor | None, recipe: Recipe, name: str
) -> tuple[Nested, dict[str, Any]]:
    """Nest W fp32 [N, K] with the Hessian H [K, K] of its inputs; return it and its report row."""
    started = time.perf_counter()
    G = recipe.group_size
    needs_factor = recipe.base == "gptq" or recipe.refine == "gptq"
    draft = target = None
    if needs_factor and H is not None:
        draft = factor_hessian(H, name=name)
        target = factor_hessian(H, name=name, least=TARGET_DAMPING)
    mult, scale = quantize.fit_scales(W, G, name=name)
    q4 = quantize.solve_base(
        W, draft, mult, scale, G, bound=recipe.bound, method=recipe.base, target=target, name=name
    )
    refined = quantize.solve_refine(W, target, q4, mult, scale, G, method=recipe.refine, name=name)
    nested = Nested(q4=q4, qr=refined.codes, mult=mult, scale=scale, bias=bias, group_size=G)
    row: dict[str, Any] = {
        "name": name,
        "shape": list(W.shape),
        "clipped_share": refined.clipped,
        "damping": target.damping if target else 0.0,
        "dead_inputs": target.dead if target else 0,
    }
    if H is not None:
        for view in ("w4", "w8"):
            hat = quantize.dequantize(nested.codes(view), mult, scale, G, W.shape[1])
            row[f"error_{view}"] = quantize.relative_error(W, hat, H)
    row["seconds"] = round(time.perf_counter() - started, 3)
    return nested, row


def rtn8_linear(W: Tensor, bias: Tensor | None, G: int, name: str) -> ExactLinear:
    """Plain W8 round-to-nearest of the same matrix: the yardstick of the target."""
    plain = quantize.rtn8(W, G, name=name)
    return ExactLinear(plain.codes.short(), plain.mult, plain.row_scale, bias, G)
