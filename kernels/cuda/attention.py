"""Attention over the nested cache on CUDA: how a call is cut into programs.

Invariant: forms, tiles and splits are a matter of speed alone; the bits are the reference's
(`kernels/ops.py`), for every M and every policy. Nothing here waits for the device: lengths are
read there, and a program whose tokens lie past a row's own leaves at once.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from edge_runtime.kernels.cuda import require_triton
from edge_runtime.kernels.cuda.cache import LayerCache
from edge_runtime.kernels.layout import KV_BLOCK

FEWEST_PROGRAMS = 256  # of one warp: eight for each scheduler of an Orin with 8 SMs
DECODE_ROWS = 16  # more rows go through the form that keeps no partial results


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiles:
    """How one call is cut: speed only.

    form: "words" (dp4a, one query vector), "cols" (tensor cores, query vectors are columns) or
    "rows" (prefill). queries: query vectors of a program; split: blocks of a program.
    """

    form: str
    queries: int
    split: int = 4
    warps: int = 1
    stages: int = 1
    registers: int | None = None  # of a thread, at most
    ahead: bool = False  # whether values are loaded before scores are made: registers for latency
    unroll: int = 128  # blocks whose loads `combine` has in flight


def tiles_for(
    rows: int,
    group: int,
    head_dim: int,
    *,
    blocks: int = 512,
    arch: int = 87,
    fewest_columns: int = 8,
) -> Tiles:
    """Return tiles for `rows` rows of `group` query heads per KV head.

    blocks: of all KV heads together; arch: compute capability, 87 is 8.7; fewest_columns: 16 for
    Triton 3.4, whose int8 dot takes no fewer. Limits on registers are the lowest without spills on
    sm_87. Measured on an H200: splits of 8 blocks are 1 % faster than of 4 where there are
    thousands of programs; 64 query vectors of a prompt take 0.56 of the time of 32, and spill two
    registers on sm_87.
    """
    vectors = rows * group
    if rows > DECODE_ROWS:
        return Tiles(form="rows", queries=64 if arch >= 90 else 32, warps=4)
    split = next(s for s in (8, 4, 2, 1) if s == 1 or blocks >= s * FEWEST_PROGRAMS)
    if vectors == 1 and head_dim % 8 == 0:
        return Tiles(form="words", queries=1, split=split, registers=128)
    registers = 192 if fewest_columns == 8 else None
    return Tiles(form="cols", queries=fewest_columns, split=min(split, 4), registers=registers)


class Workspace:
    """Partial results of up to `rows` rows over `tokens` tokens, made once and used by every layer.

    partial: fp32 [rows·heads, (D + 2)·blocks]: of every block its values, then maxima, then sums.
    """

    def __init__(
        self, rows: int, num_heads: int, head_dim: int, tokens: int, device: torch.device | str
    ) -> None:
        blocks = -(-tokens // KV_BLOCK)
        assert rows * num_heads * (head_dim + 2) * blocks < 2**31, "kernels count in int32"
        self.max_blocks = blocks
        self.partial = torch.empty(rows * num_heads, (head_dim + 2) * blocks, device=device)


def attention(
    q: Tensor,
    positions: Tensor,
    full_from: Tensor,
    cache: LayerCache,
    out: Tensor,
    workspace: Workspace | None = None,
    *,
    max_tokens: int | None = None,
    tiles: Tiles | None = None,
    asm: bool = True,
) -> Tensor:
    """Attention of q over a layer, row i up to its own position. Source: FlashAttention-2, 3.1.

    q, out: fp32 [M, heads, D]; positions, full_from: int32 [M], on the device; max_tokens: more
    than any position, by default all that the workspace or the cache holds. Up to 16 rows need a
    workspace. asm: False for the interpreter.
    """
    require_triton()
    from edge_runtime.kernels.cuda import attention_kernels as kernels
    from edge_runtime.kernels.cuda.combine_kernels import combine

    M, heads, D = q.shape
    kv_heads, T = cache.key_scale.shape
    group = heads // kv_heads
    tokens = min(max_tokens or T, T)
    if tiles is None:
        blocks = kv_heads * -(-tokens // KV_BLOCK)
        tiles = tiles_for(
            M, group, D, blocks=blocks, arch=_arch(q.device), fewest_columns=_fewest_columns()
        )
    if tiles.form == "rows":
        return _attention_rows(q, positions, full_from, cache, out, tiles, asm)
    assert workspace is not None, "up to 16 rows need a workspace"
    max_blocks = workspace.max_blocks
    tokens = min(tokens, max_blocks * KV_BLOCK)
    words = tiles.form == "words"
    planes = _planes(cache, torch.int32 if words else torch.uint8)
    grid = (
        -(-M * group // tiles.queries) * -(-tokens // (tiles.split * KV_BLOCK)),
        kv_heads,
    )
    kernels.attend_split[grid](
        q,
        positions,
        full_from,
        *planes,
        cache.key_scale,
        cache.value_scale,
        workspace.partial,
        M * group,
        heads,
        T,
        max_blocks,
        softmax_scale(D),
        GROUP=group,
        D=D,
        HP=padded_half(D, tiles.form),
        BQ=tiles.queries,
        SPLIT=tiles.split,
        FORM=(kernels.WORDS if words else kernels.COLS).value,
        STAGES=tiles.stages,
        AHEAD=tiles.ahead,
        ASM=asm,
        num_warps=tiles.warps,
        maxnreg=tiles.registers,
        enable_fp_fusion=False,
    )
    combine[M * heads, -(-D // 31)](
        workspace.partial,
        positions,
        out,
        heads,
        max_blocks,
        D=D,
        CHUNK=512,
        UNROLL=tiles.unroll,
        num_warps=1,
        enable_fp_fusion=False,
    )
    return out


def _attention_rows(
    q: Tensor,
    positions: Tensor,
    full_from: Tensor,
    cache: LayerCache,
    out: Tensor,
    tiles: Tiles,
    asm: bool,
) -> Tensor:
    from edge_runtime.kernels.cuda import prefill_attention_kernels as kernels

    M, heads, D = q.shape
    kv_heads, T = cache.key_scale.shape
    group = heads // kv_heads
    kernels.attend_rows[-(-M * group // tiles.queries), kv_heads](
        q,
        positions,
        full_from,
        *_planes(cache, torch.uint8),
        cache.key_scale,
        cache.value_scale,
        out,
        M * group,
        heads,
        T,
        softmax_scale(D),
        GROUP=group,
        D=D,
        HP=padded_half(D, tiles.form),
        BQ=tiles.queries,
        STAGES=tiles.stages,
        ASM=asm,
        num_warps=tiles.warps,
        maxnreg=tiles.registers,
        enable_fp_fusion=False,
    )
    return out


def softmax_scale(head_dim: int) -> float:
    """1/√D as fp32."""
    return float(np.float32(1.0) / np.sqrt(np.float32(head_dim)))


def padded_half(head_dim: int, form: str) -> int:
    """D/2 as the kernels hold it: a power of two, as words of four for "words", and at least the
    32 bytes that an int8 product of a tensor core takes for "cols" and "rows"."""
    if form == "words":
        return max(4, _power_of_two(head_dim // 8))
    return max(32 if form in ("cols", "rows") else 1, _power_of_two(head_dim // 2))


def _planes(cache: LayerCache, dtype: torch.dtype) -> list[Tensor]:
    planes = (cache.key_base, cache.key_refine, cache.value_base, cache.value_refine)
    return [p.view(dtype) for p in planes]


def _power_of_two(n: int) -> int:
    return 1 << math.ceil(math.log2(n)) if n > 1 else 1


@functools.cache
def _arch(device: torch.device) -> int:
    if device.type != "cuda":
        return 87
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


@functools.cache
def _fewest_columns() -> int:
    import triton

    version = tuple(int(x) for x in triton.__version__.split(".")[:2])
    return 8 if version >= (3, 5) else 16
