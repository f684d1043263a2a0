"""RoPE with the KV write, and attention, as machine code: what to compile for a shape.

Invariant: each function compiles what `kv.rope_kv` or `attention.attention` launches with the same
tiles on that chip. Arguments of a launch go in the order of the kernel's parameters.
"""

from __future__ import annotations

from edge_runtime.kernels.cuda.attention import Tiles, padded_half
from edge_runtime.kernels.cuda.compile import ORIN, Compiled, compile_kernel

_PLANES = ("key_base_ptr", "key_refine_ptr", "value_base_ptr", "value_refine_ptr")
_NUMBERS = ("heads", "num_queries", "max_blocks", "kv_heads")  # nothing is known about them
_ATTEND = {
    "q_ptr": "*fp32",
    "position_ptr": "*i32",
    "full_from_ptr": "*i32",
    "key_scale_ptr": "*fp16",
    "value_scale_ptr": "*fp16",
    "num_queries": "i32",
    "heads": "i32",
    "T": "i32",
    "softmax_scale": "fp32",
}


def compile_attention(tiles: Tiles, head_dim: int, group: int, *, arch: int = ORIN) -> Compiled:
    """Compile the kernel that walks the cache, in the form of `tiles`."""
    from edge_runtime.kernels.cuda import attention_kernels, prefill_attention_kernels

    words = tiles.form == "words"
    types = _ATTEND | dict.fromkeys(_PLANES, "*i32" if words else "*u8")
    constants = {
        "GROUP": group,
        "D": head_dim,
        "HP": padded_half(head_dim, tiles.form),
        "BQ": tiles.queries,
        "STAGES": tiles.stages,
        "ASM": True,
    }
    if tiles.form == "rows":
        kernel = prefill_attention_kernels.attend_rows
        types |= {"y_ptr": "*fp32"}
    else:
        kernel = attention_kernels.attend_split
        types |= {"partial_ptr": "*fp32", "max_blocks": "i32"}
        form = attention_kernels.WORDS if words else attention_kernels.COLS
        constants |= {"SPLIT": tiles.split, "FORM": form.value, "AHEAD": tiles.ahead}
    return compile_kernel(
        kernel,
        types,
        constants,
        num_warps=tiles.warps,
        max_registers=tiles.registers,
        arch=arch,
        unaligned=tuple(n for n in _NUMBERS if n in types),
    )


def compile_combine(tiles: Tiles, head_dim: int, *, arch: int = ORIN) -> Compiled:
    """Compile the kernel that adds partial results."""
    from edge_runtime.kernels.cuda import combine_kernels

    types = {
        "partial_ptr": "*fp32",
        "position_ptr": "*i32",
        "y_ptr": "*fp32",
        "heads": "i32",
        "max_blocks": "i32",
    }
    constants = {
        "D": head_dim,
        "CHUNK": 512,
        "UNROLL": tiles.unroll,
    }
    return compile_kernel(
        combine_kernels.combine,
        types,
        constants,
        num_warps=1,
        arch=arch,
        unaligned=("heads", "max_blocks"),
    )


def compile_rope_kv(head_dim: int, *, qk_norm: bool, rotate_kv: bool, arch: int = ORIN) -> Compiled:
    """Compile the kernel that rotates and writes."""
    from edge_runtime.kernels.cuda import kv_kernels

    floats = ("qkv_ptr", "cos_ptr", "sin_ptr", "q_norm_ptr", "k_norm_ptr", "q_ptr")
    types = {
        **dict.fromkeys(floats, "*fp32"),
        **dict.fromkeys(_PLANES, "*u8"),
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
    return compile_kernel(
        kv_kernels.rope_kv,
        types,
        constants,
        num_warps=1,
        arch=arch,
        unaligned=("heads", "kv_heads"),
    )
