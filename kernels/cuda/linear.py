"""The dual-plane linear on the GPU: weights as the kernels read them, and the launcher.

    acc[n] = Σ_g m[n,g] · Σ_{k∈g} code[n,k] · x[k]     exact int64
    y[n]   = (fp32(acc) · x_scale) · S[n]  (+ bias[n])  (+ residual[n]),  each step rounded once

code = 16·q4 + q_r in the w8 view, 16·q4 in the w4 view. The planes are multiplied as they lie in
memory, (q4 << 4) | (q_r + 8) as int8 being the code plus 8; 8·Σx per group takes the 8 off again.
Bits are those of `reference.linear`. Refinement planes are not touched in the w4 view.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from edge_runtime.kernels.cuda import launch
from edge_runtime.kernels.cuda.launch import Kernel
from edge_runtime.kernels.cuda.sizes import DIGIT_GROUPS, SMALL_ROWS
from edge_runtime.kernels.cuda.tiles import Tile, choose
from edge_runtime.kernels.layout import padded
from edge_runtime.kernels.ops import LinearWeights, View

linear_mma = Kernel("linear_kernels", "linear_mma", plain=(10, 11), pdl=True)
linear_dot4 = Kernel("linear_kernels", "linear_dot4", plain=(10,), pdl=True)
linear_prompt = Kernel("prompt_kernels", "linear_prompt", plain=(11, 12))
sum_digits = Kernel("prompt_kernels", "sum_digits", plain=(3,))

MULT_PAD = 16  # rows of mult are padded to it: 128-bit loads at any N
MAX_DOT4_ROWS = 8
DIGIT_ROWS = 128  # rows of digits are padded to it: a multiple of every prompt tile's tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceLinear:
    """A nested matrix on a device. base, refine: uint8 [N/R, Kp/G, R, G/2], N padded with zeros to
    tiles of R rows, so that a program reads a group of R rows as one piece; R = 1 is the canonical
    order. mult: int16 [Kp/G, Np], N padded with zeros; scale, bias: fp32 [N]. mult_rows: int16
    [N, Kp/G], for the dp4a form only (R = 1)."""

    base: Tensor
    refine: Tensor
    mult: Tensor
    scale: Tensor
    bias: Tensor | None
    group_size: int
    mult_rows: Tensor | None = None

    @property
    def num_outputs(self) -> int:
        """N."""
        return self.scale.shape[0]

    @property
    def num_inputs(self) -> int:
        """Kp, inputs with padding."""
        return self.mult.shape[0] * self.group_size

    @property
    def row_tile(self) -> int:
        """R."""
        return self.base.shape[2]

    @classmethod
    def from_weights(
        cls, w: LinearWeights, device: torch.device | str, *, row_tile: int = 1, dot4: bool = False
    ) -> DeviceLinear:
        """Copy canonical planes to a device in tiles of `row_tile` rows (`tiles.ROW_TILES`). dot4:
        keep multipliers by row too."""

        def send(array: np.ndarray[Any, Any]) -> Tensor:
            return torch.from_numpy(np.array(array, order="C")).to(device)

        N, groups = w.mult.shape
        mult = np.zeros((groups, padded(N, MULT_PAD)), np.int16)
        mult[:, :N] = w.mult.T
        return cls(
            base=send(tiled(w.base, groups, row_tile)),
            refine=send(tiled(w.refine, groups, row_tile)),
            mult=send(mult),
            scale=send(w.scale),
            bias=None if w.bias is None else send(w.bias),
            group_size=w.group_size,
            mult_rows=send(w.mult) if dot4 else None,
        )


def tiled(plane: NDArray[np.uint8], groups: int, row_tile: int) -> NDArray[np.uint8]:
    """Reorder a canonical plane [N, Kp/2] to [N/R, Kp/G, R, G/2], N padded with zeros."""
    N, half = plane.shape
    rows = np.zeros((padded(N, row_tile), half), np.uint8)
    rows[:N] = plane
    tiles = rows.reshape(-1, row_tile, groups, half // groups)
    return np.ascontiguousarray(tiles.transpose(0, 2, 1, 3))


def group_sums(codes: Tensor, group_size: int) -> Tensor:
    """Return int32 [M, Kp/G], the sums of int8 codes [M, Kp] over each group of inputs."""
    M, Kp = codes.shape
    return codes.view(M, Kp // group_size, group_size).sum(-1, dtype=torch.int32)


class Digits(NamedTuple):
    """Sums of groups as `prompt_kernels` multiplies them: Σx = 128·high + low.

    digits: int8 [2, rows, padded groups], low ones first; total: int32 [rows], the sum of all
    groups. Rows and groups that are not there are zero.
    """

    digits: Tensor
    total: Tensor


def new_digits(M: int, groups: int, device: torch.device | str) -> Digits:
    """Room for the sums of M rows."""
    rows = padded(M, DIGIT_ROWS)
    shape = (2, rows, padded(groups, DIGIT_GROUPS))
    return Digits(
        torch.empty(shape, dtype=torch.int8, device=device),
        torch.empty(rows, dtype=torch.int32, device=device),
    )


def takes_digits(M: int, group_size: int) -> bool:
    """Whether a linear of M rows wants the sums as digits: it makes them itself otherwise."""
    return M > SMALL_ROWS and group_size > 32


def digits_of(sums: Tensor, out: Digits | None = None) -> Digits:
    """Return int32 sums [M, Kp/G] as digits, in `out` if given (its rows may be more than M)."""
    M, groups = sums.shape
    out = new_digits(M, groups, sums.device) if out is None else out
    rows = out.total.shape[0]
    sum_digits[(rows // 32,)](
        sums, *out, M, groups, rows, *sums.stride(), GP=out.digits.shape[2], BLOCK=32, num_warps=1
    )
    return out


def linear(
    codes: Tensor,
    x_scale: Tensor,
    sums: Tensor | Digits,
    weight: DeviceLinear,
    view: View,
    *,
    out: Tensor | None = None,
    residual: Tensor | None = None,
    tile: Tile | None = None,
) -> Tensor:
    """Return fp32 [M, N]. codes: int8 [M, Kp], x_scale: fp32 [M], sums: int32 [M, Kp/G].

    residual: fp32 [M, N], may be `out` itself. tile: in place of the table's. Nothing is allocated
    when `out` is given, and for more than 16 rows the sums as digits; nothing waits for the device.
    """
    M, N = codes.shape[0], weight.num_outputs
    assert codes.shape[1] == weight.num_inputs, (codes.shape, weight.num_inputs)
    assert M >= 1, M
    if out is None:
        out = torch.empty(M, N, dtype=torch.float32, device=codes.device)
    way = launch.way()
    if tile is None:
        arch = way.arch(codes.device)
        tile = choose(arch, view, M, N, weight.group_size, way.fewest_columns)
    bias = weight.scale if weight.bias is None else weight.bias
    tail = (weight.scale, bias, out if residual is None else residual, out)
    flags: dict[str, Any] = {
        "G": weight.group_size,
        "W8": view == "w8",
        "BIAS": weight.bias is not None,
        "RESIDUAL": residual is not None,
        "BN": tile.rows,
        "ASM": way.assembly,
        "num_warps": tile.warps,
        "maxnreg": tile.max_registers if weight.group_size == 128 else None,
        "enable_fp_fusion": False,
    }
    if tile.form == "prompt":
        _launch_prompt(codes, sums, x_scale, weight, tail, flags, tile)
        return out
    assert isinstance(sums, Tensor), f"{tile} takes sums as they are"
    tensors = (codes, sums, x_scale, weight.base, weight.refine)
    if tile.form == "dot4" and weight.mult_rows is not None:
        assert M <= MAX_DOT4_ROWS
        assert weight.row_tile == 1
        _launch_dot4(tensors, weight, tail, flags, tile)
        return out
    assert tile.form == "mma", f"{tile} for {M} rows, by-row multipliers: {weight.mult_rows}"
    groups = weight.mult.shape[0]
    grid = (-(-N // tile.rows) * -(-M // tile.columns),)
    linear_mma[grid](
        *tensors,
        weight.mult,
        *tail,
        M,
        N,
        weight.mult.shape[1],
        weight.num_inputs // 2,
        EVEN=N % tile.rows == 0,
        ROWS=weight.row_tile,
        BM=tile.columns,
        UNROLL=tile.unroll(weight.group_size, groups),
        AHEAD=tile.ahead,
        STAGES=tile.stages,
        **flags,
    )
    return out


def _launch_dot4(
    tensors: tuple[Tensor, ...],
    weight: DeviceLinear,
    tail: tuple[Tensor, ...],
    flags: dict[str, Any],
    tile: Tile,
) -> None:
    codes, sums, x_scale, base, refine = tensors
    N, quads = weight.num_outputs, weight.num_inputs // 32
    linear_dot4[(-(-N // tile.rows),)](
        codes.view(torch.int32),
        sums,
        x_scale,
        base.view(torch.int32),
        refine.view(torch.int32),
        weight.mult_rows,
        *tail,
        N,
        M=codes.shape[0],
        QUADS=quads,
        EVEN=N % tile.rows == 0,
        BQ=tile.columns,
        **flags,
    )


def _launch_prompt(
    codes: Tensor,
    sums: Tensor | Digits,
    x_scale: Tensor,
    weight: DeviceLinear,
    tail: tuple[Tensor, ...],
    flags: dict[str, Any],
    tile: Tile,
) -> None:
    M, N = codes.shape[0], weight.num_outputs
    if isinstance(sums, Tensor):
        sums = digits_of(sums)
    linear_prompt[(-(-N // tile.rows) * -(-M // tile.columns),)](
        codes,
        *sums,
        x_scale,
        weight.base,
        weight.refine,
        weight.mult,
        *tail,
        M,
        N,
        sums.total.shape[0],
        weight.mult.shape[1],
        weight.num_inputs // 2,
        GP=sums.digits.shape[2],
        ROWS=weight.row_tile,
        BS=tile.columns // tile.strips,
        TWO=tile.strips == 2,
        STAGES=tile.stages,
        **flags,
    )
