"""The linear as saved machine code: what to compile for a shape, and how to launch it.

Invariant: `compile_linear` builds exactly what `linear.linear` would launch with the same tile on
that chip, so tests and timings of one speak for the other.
"""

from __future__ import annotations

from torch import Tensor

from edge_runtime.kernels.cuda.compile import ORIN, Compiled, compile_kernel
from edge_runtime.kernels.cuda.driver import Function
from edge_runtime.kernels.cuda.linear import DIGIT_GROUPS, DeviceLinear, Digits
from edge_runtime.kernels.cuda.tiles import Tile
from edge_runtime.kernels.layout import padded
from edge_runtime.kernels.ops import View

_MMA_TYPES = {
    "x_ptr": "*i8",
    "sum_ptr": "*i32",
    "x_scale_ptr": "*fp32",
    "base_ptr": "*u8",
    "refine_ptr": "*u8",
    "mult_ptr": "*i16",
    "scale_ptr": "*fp32",
    "bias_ptr": "*fp32",
    "residual_ptr": "*fp32",
    "y_ptr": "*fp32",
    "M": "i32",
    "N": "i32",
    "mult_stride": "i32",
    "half_k": "i32",
}
_PROMPT_TYPES = {
    **{n: t for n, t in _MMA_TYPES.items() if n != "sum_ptr"},
    "digit_ptr": "*i8",
    "total_ptr": "*i32",
    "digit_rows": "i32",
}
_DOT4_TYPES = {
    **{name: kind for name, kind in _MMA_TYPES.items() if kind.startswith("*")},
    "x_ptr": "*i32",
    "base_ptr": "*i32",
    "refine_ptr": "*i32",
    "N": "i32",
}


def compile_linear(
    tile: Tile,
    view: View,
    group_size: int,
    *,
    groups: int = 2,
    row_tile: int = 1,
    even: bool = True,
    bias: bool = False,
    residual: bool = False,
    arch: int = ORIN,
) -> Compiled:
    """Compile one form. groups: of a row; dot4 needs it as it is, prompt padded to whole chunks,
    mma how far it can be unrolled."""
    from edge_runtime.kernels.cuda import linear_kernels as kernels
    from edge_runtime.kernels.cuda import prompt_kernels

    constants = {
        "G": group_size,
        "W8": view == "w8",
        "BIAS": bias,
        "RESIDUAL": residual,
        "EVEN": even,
        "BN": tile.rows,
        "ASM": True,
    }
    if tile.form == "dot4":
        return compile_kernel(
            kernels.linear_dot4,
            _DOT4_TYPES,
            {**constants, "BQ": tile.columns, "QUADS": groups * group_size // 32},
            num_warps=tile.warps,
            max_registers=tile.max_registers if group_size == 128 else None,
            arch=arch,
            unaligned=("N",),
        )
    if tile.form == "prompt":
        del constants["EVEN"]
        return compile_kernel(
            prompt_kernels.linear_prompt,
            _PROMPT_TYPES,
            {
                **constants,
                "GP": padded(groups, DIGIT_GROUPS),
                "BS": tile.columns // tile.strips,
                "TWO": tile.strips == 2,
                "ROWS": row_tile,
                "STAGES": tile.stages,
            },
            num_warps=tile.warps,
            max_registers=tile.max_registers if group_size == 128 else None,
            arch=arch,
            unaligned=("M", "N"),
        )
    return compile_kernel(
        kernels.linear_mma,
        _MMA_TYPES,
        {
            **constants,
            "BM": tile.columns,
            "UNROLL": tile.unroll(group_size, groups),
            "AHEAD": tile.ahead,
            "ROWS": row_tile,
            "STAGES": tile.stages,
        },
        num_warps=tile.warps,
        max_registers=tile.max_registers if group_size == 128 else None,
        arch=arch,
        unaligned=("M", "N"),
    )


def launch_linear(
    function: Function,
    tile: Tile,
    codes: Tensor,
    x_scale: Tensor,
    sums: Tensor | Digits,
    weight: DeviceLinear,
    out: Tensor,
    residual: Tensor | None = None,
    stream: int = 0,
) -> None:
    """Enqueue a loaded kernel; the tensors are those of `linear.linear`."""
    M, N = codes.shape[0], weight.num_outputs
    bias = weight.scale if weight.bias is None else weight.bias
    added = out if residual is None else residual
    mult = weight.mult
    if tile.form == "dot4":
        assert weight.mult_rows is not None
        mult = weight.mult_rows
    integers = sums if isinstance(sums, Digits) else (sums,)
    planes = (weight.base, weight.refine, mult)
    tensors = (codes, *integers, x_scale, *planes, weight.scale, bias, added)
    pointers = [t.data_ptr() for t in (*tensors, out)]
    if isinstance(sums, Digits):
        grid: tuple[int, ...] = (-(-N // tile.rows) * -(-M // tile.columns),)
        numbers = [M, N, sums.total.shape[0], mult.shape[1], weight.num_inputs // 2]
    elif tile.form == "dot4":
        grid, numbers = (-(-N // tile.rows),), [N]
    else:
        grid = (-(-N // tile.rows) * -(-M // tile.columns),)
        numbers = [M, N, mult.shape[1], weight.num_inputs // 2]
    function.launch(grid, [*pointers, *numbers], stream)
