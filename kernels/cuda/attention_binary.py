"""RoPE with the KV write, and attention, as machine code: what to compile, how to launch it.

Invariant: each function compiles what `kv.rope_kv` or `attention.attention` launches with the same
tiles on that chip. Arguments of a launch go in the order of the kernel's parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from edge_runtime.kernels.cuda.attention import Workspace, softmax_scale
from edge_runtime.kernels.cuda.attention_tiles import (
    COMBINE_STAGES,
    COMBINE_WIDTH,
    Tiles,
    padded_half,
    value_slices,
)
from edge_runtime.kernels.cuda.cache import LayerCache
from edge_runtime.kernels.cuda.compile import ORIN, Compiled, compile_kernel
from edge_runtime.kernels.cuda.driver import Function
from edge_runtime.kernels.layout import KV_BLOCK

_KEYS = ("key_base_ptr", "key_refine_ptr")
_VALUES = ("value_base_ptr", "value_refine_ptr")
_NUMBERS = ("heads", "num_queries", "kv_heads")  # nothing is known about them
_TYPES = {
    "q_ptr": "*fp32",
    "y_ptr": "*fp32",
    "position_ptr": "*i32",
    "full_from_ptr": "*i32",
    **dict.fromkeys((*_KEYS, *_VALUES), "*u8"),
    "key_scale_ptr": "*fp16",
    "value_scale_ptr": "*fp16",
    "weight_ptr": "*i8",
    "stat_ptr": "*fp32",
    "partial_ptr": "*fp32",
    "num_queries": "i32",
    "heads": "i32",
    "T": "i32",
    "max_blocks": "i32",
    "softmax_scale": "fp32",
}


def compile_attention(tiles: Tiles, head_dim: int, group: int, *, arch: int = ORIN) -> Compiled:
    """Compile the first kernel in the form of `tiles`; of "rows" it is the only one."""
    from edge_runtime.kernels.cuda import (
        attention_kernels,
        attention_split_kernels,
        prefill_attention_kernels,
    )

    constants = {
        "GROUP": group,
        "D": head_dim,
        "HP": padded_half(head_dim, tiles.form),
        "BQ": tiles.queries,
        "STAGES": tiles.stages,
        "ASM": True,
    }
    kernel, types = attention_kernels.weigh_blocks, _TYPES
    if tiles.form == "rows":
        kernel = prefill_attention_kernels.attend_rows
    else:
        form = attention_kernels.COLS
        if tiles.form == "words":
            form = attention_kernels.WORDS
            types = _TYPES | dict.fromkeys((*_KEYS, *_VALUES, "weight_ptr"), "*i32")
        constants |= {"SPLIT": tiles.split, "FORM": form.value}
        if tiles.fused:
            kernel = attention_split_kernels.attend_split
    return _compile(kernel, types, constants, tiles.warps, arch, tiles.registers)


def compile_values(tiles: Tiles, head_dim: int, group: int, *, arch: int = ORIN) -> Compiled:
    """Compile the second kernel."""
    from edge_runtime.kernels.cuda import attention_values_kernels, combine_kernels

    if tiles.fused:
        constants = {
            "D": head_dim, "CHUNK": 512, "WIDTH": COMBINE_WIDTH, "STAGES": COMBINE_STAGES,
            }  # fmt: skip
        return _compile(combine_kernels.combine, _TYPES, constants, 1, arch)
    constants = {
        "GROUP": group,
        "D": head_dim,
        "R": tiles.value_rows,
        "BQ": tiles.columns,
        "WIDTH": tiles.width,
        "CHUNK": 64 * tiles.width,
        "STAGES": tiles.value_stages,
        "ASM": True,
    }
    kernel, registers = attention_values_kernels.add_values, tiles.value_registers
    return _compile(kernel, _TYPES, constants, tiles.width, arch, registers)


def _compile(
    kernel: Any,
    types: Mapping[str, str],
    constants: Mapping[str, Any],
    num_warps: int,
    arch: int,
    max_registers: int | None = None,
) -> Compiled:
    used = {n: t for n, t in types.items() if n in kernel.arg_names}
    return compile_kernel(
        kernel,
        used,
        constants,
        num_warps=num_warps,
        max_registers=max_registers,
        arch=arch,
        unaligned=tuple(n for n in _NUMBERS if n in used),
    )


def compile_rope_kv(head_dim: int, *, qk_norm: bool, rotate_kv: bool, arch: int = ORIN) -> Compiled:
    """Compile the kernel that rotates and writes."""
    from edge_runtime.kernels.cuda import kv_kernels

    floats = ("qkv_ptr", "cos_ptr", "sin_ptr", "q_norm_ptr", "k_norm_ptr", "q_ptr")
    types = {
        **dict.fromkeys(floats, "*fp32"),
        **dict.fromkeys((*_KEYS, *_VALUES), "*u8"),
        "position_ptr": "*i32",
        "key_scale_ptr": "*i16",
        "value_scale_ptr": "*i16",
        "heads": "i32",
        "kv_heads": "i32",
        "T": "i32",
        "eps": "fp32",
        "softmax_scale": "fp32",
    }
    constants = {
        "D": head_dim,
        "HP": padded_half(head_dim, "kv"),
        "QK_NORM": qk_norm,
        "ROTATE": rotate_kv,
    }
    return _compile(kv_kernels.rope_kv, types, constants, 1, arch)


@dataclass(frozen=True, slots=True)
class Launcher:
    """Attention as loaded machine code. weigh: or the only kernel of "rows", with no `add`."""

    tiles: Tiles
    weigh: Function
    add: Function | None

    @classmethod
    def build(
        cls,
        tiles: Tiles,
        head_dim: int,
        group: int,
        load: Callable[[Compiled], Function],
        *,
        arch: int = ORIN,
    ) -> Launcher:
        """Compile and load."""
        weigh = load(compile_attention(tiles, head_dim, group, arch=arch))
        if tiles.form == "rows":
            return cls(tiles, weigh, None)
        return cls(tiles, weigh, load(compile_values(tiles, head_dim, group, arch=arch)))

    def launch(
        self,
        q: Tensor,
        positions: Tensor,
        full_from: Tensor,
        cache: LayerCache,
        out: Tensor,
        workspace: Workspace | None = None,
        *,
        stream: int = 0,
    ) -> None:
        """Enqueue what `attention.attention` would, over all tokens of the cache."""
        M, heads, D = q.shape
        kv_heads, T = cache.key_scale.shape
        vectors = M * heads // kv_heads
        rows = [t.data_ptr() for t in (q, positions, full_from)]
        keys = [cache.key_base.data_ptr(), cache.key_refine.data_ptr()]
        values = [cache.value_base.data_ptr(), cache.value_refine.data_ptr()]
        scales = [cache.key_scale.data_ptr(), cache.value_scale.data_ptr()]
        programs = -(-vectors // self.tiles.queries)
        if self.add is None:
            pointers = [*rows, *keys, *values, *scales, out.data_ptr()]
            numbers = [vectors, heads, T, softmax_scale(D)]
            self.weigh.launch((programs, kv_heads), [*pointers, *numbers], stream)
            return
        assert workspace is not None, "up to 16 rows need a workspace"
        numbers = [vectors, heads, T, workspace.max_blocks]
        splits = -(-min(T // KV_BLOCK, workspace.max_blocks) // self.tiles.split)
        scale = softmax_scale(D)
        grid: tuple[int, ...] = (programs * splits, kv_heads)
        if self.tiles.fused:
            between = [workspace.values.data_ptr(), workspace.stats.data_ptr()]
            pointers = [*rows, *keys, *values, *scales, *between]
            self.weigh.launch(grid, [*pointers, *numbers, scale], stream)
            pointers = [*between, rows[1], out.data_ptr()]
            grid = (M * heads, -(-D // 32))
            self.add.launch(grid, [*pointers, heads, workspace.max_blocks], stream)
            return
        between = [workspace.weights.data_ptr(), workspace.stats.data_ptr()]
        self.weigh.launch(grid, [*rows, *keys, *scales, *between, *numbers, scale], stream)
        grid = (value_slices(self.tiles, D), kv_heads, -(-vectors // self.tiles.columns))
        pointers = [*rows[1:], *values, *between, out.data_ptr()]
        self.add.launch(grid, [*pointers, *numbers], stream)
