"""Attention over the nested cache on CUDA: how a call is cut into programs.

Invariant: forms, tiles and splits are a matter of speed alone; the bits are the reference's
(`kernels/ops.py`), for every M and every policy. Nothing here waits for the device: lengths are
read there, and a program whose tokens lie past a row's own leaves at once.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from edge_runtime.kernels.cuda import launch
from edge_runtime.kernels.cuda.attention_tiles import (
    COMBINE_STAGES,
    COMBINE_WIDTH,
    FORMS,
    Tiles,
    padded_half,
    tiles_for,
    value_slices,
)
from edge_runtime.kernels.cuda.cache import LayerCache
from edge_runtime.kernels.cuda.launch import Kernel
from edge_runtime.kernels.layout import KV_BLOCK, padded

weigh_blocks = Kernel("attention_kernels", "weigh_blocks", plain=(9, 10))
add_values = Kernel("attention_values_kernels", "add_values", plain=(7, 8))
attend_split = Kernel("attention_split_kernels", "attend_split", plain=(11, 12), pdl=True)
# not early: its programs would take the place of those that it waits for (2 % of a draft step)
combine = Kernel("combine_kernels", "combine", plain=(4,))
attend_rows = Kernel("prefill_attention_kernels", "attend_rows", plain=(10, 11))


class Workspace:
    """What lies between the kernels of one call, for up to `rows` rows over `tokens` tokens; made
    once and used by every layer.

    weights: int8 [rows·heads, blocks, 2, 64], limbs of -i; stats: fp32 [rows·heads, 4, blocks];
    together 144 bytes a block of a query vector. values: fp32 [fused_rows·heads, blocks, D], for
    fused tiles; by default of as many rows as take them on this device.
    """

    def __init__(
        self,
        rows: int,
        num_heads: int,
        head_dim: int,
        tokens: int,
        device: torch.device | str,
        *,
        fused_rows: int | None = None,
    ) -> None:
        blocks = padded(-(-tokens // KV_BLOCK), 16)
        vectors = rows * num_heads
        assert vectors * blocks * 2 * KV_BLOCK < 2**31, "kernels count in int32"
        if fused_rows is None:
            fused_rows = rows if launch.arch(torch.device(device)) >= 90 else 0
        size = (fused_rows * num_heads, blocks, head_dim)
        assert math.prod(size) < 2**31, "kernels count in int32"
        self.max_blocks = blocks
        self.weights = torch.empty(vectors, blocks, 2, KV_BLOCK, dtype=torch.int8, device=device)
        self.stats = torch.empty(vectors, 4, blocks, device=device)
        self.values = torch.empty(size, device=device)

    @property
    def num_bytes(self) -> int:
        """Bytes of all."""
        return self.weights.nbytes + self.stats.nbytes + self.values.nbytes


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
    asm: bool | None = None,
) -> Tensor:
    """Attention of q over a layer, row i up to its own position. Source: FlashAttention-2, 3.1.

    q, out: fp32 [M, heads, D]; positions, full_from: int32 [M], on the device; max_tokens: more
    than any position, by default all that the workspace or the cache holds. Up to 16 rows need a
    workspace. asm: inline assembly, by default as kernels are launched.
    """
    asm = launch.way().assembly if asm is None else asm
    M, heads, D = q.shape
    kv_heads, T = cache.key_scale.shape
    group = heads // kv_heads
    tokens = min(max_tokens or T, T)
    if tiles is None:
        tiles = tiles_for(
            M, group, D, kv_heads=kv_heads, tokens=tokens, arch=launch.arch(q.device),
            fewest_columns=launch.way().fewest_columns,
        )  # fmt: skip
    if tiles.form == "rows":
        return _attention_rows(q, positions, full_from, cache, out, tiles, asm)
    assert workspace is not None, "up to 16 rows need a workspace"
    tokens = min(tokens, workspace.max_blocks * KV_BLOCK)
    if tiles.fused:
        _attend_split(q, positions, full_from, cache, out, workspace, tokens, tiles, asm)
    else:
        _weigh_blocks(q, positions, full_from, cache, workspace, tokens, tiles, asm)
        _add_values(positions, full_from, cache, out, workspace, tiles, asm)
    return out


def _attend_split(
    q: Tensor,
    positions: Tensor,
    full_from: Tensor,
    cache: LayerCache,
    out: Tensor,
    workspace: Workspace,
    tokens: int,
    tiles: Tiles,
    asm: bool,
) -> None:
    M, heads, D = q.shape
    kv_heads, T = cache.key_scale.shape
    group = heads // kv_heads
    assert workspace.values.shape[0] >= M * heads, "the workspace is not made for fused tiles"
    words = tiles.form == "words"
    splits = -(-tokens // (tiles.split * KV_BLOCK))
    attend_split[-(-M * group // tiles.queries) * splits, kv_heads](
        q,
        positions,
        full_from,
        *(p.view(torch.int32 if words else torch.uint8) for p in _planes(cache)),
        cache.key_scale,
        cache.value_scale,
        workspace.values,
        workspace.stats,
        M * group,
        heads,
        T,
        workspace.max_blocks,
        softmax_scale(D),
        GROUP=group,
        D=D,
        HP=padded_half(D, tiles.form),
        BQ=tiles.queries,
        SPLIT=tiles.split,
        FORM=FORMS[tiles.form],
        STAGES=tiles.stages,
        ASM=asm,
        num_warps=tiles.warps,
        maxnreg=tiles.registers,
        enable_fp_fusion=False,
    )
    combine[M * heads, -(-D // 32)](
        workspace.values,
        workspace.stats,
        positions,
        out,
        heads,
        workspace.max_blocks,
        D=D,
        CHUNK=512,
        WIDTH=COMBINE_WIDTH,
        STAGES=COMBINE_STAGES,
        num_warps=1,
        enable_fp_fusion=False,
    )


def _weigh_blocks(
    q: Tensor,
    positions: Tensor,
    full_from: Tensor,
    cache: LayerCache,
    workspace: Workspace,
    tokens: int,
    tiles: Tiles,
    asm: bool,
) -> None:
    M, heads, D = q.shape
    kv_heads, T = cache.key_scale.shape
    group = heads // kv_heads
    words = tiles.form == "words"
    keys = [p.view(torch.int32 if words else torch.uint8) for p in _planes(cache)[:2]]
    splits = -(-tokens // (tiles.split * KV_BLOCK))
    weigh_blocks[-(-M * group // tiles.queries) * splits, kv_heads](
        q,
        positions,
        full_from,
        *keys,
        cache.key_scale,
        cache.value_scale,
        workspace.weights.view(torch.int32) if words else workspace.weights,
        workspace.stats,
        M * group,
        heads,
        T,
        workspace.max_blocks,
        softmax_scale(D),
        GROUP=group,
        D=D,
        HP=padded_half(D, tiles.form),
        BQ=tiles.queries,
        SPLIT=tiles.split,
        FORM=FORMS[tiles.form],
        STAGES=tiles.stages,
        ASM=asm,
        num_warps=tiles.warps,
        maxnreg=tiles.registers,
        enable_fp_fusion=False,
    )


def _add_values(
    positions: Tensor,
    full_from: Tensor,
    cache: LayerCache,
    out: Tensor,
    workspace: Workspace,
    tiles: Tiles,
    asm: bool,
) -> None:
    M, heads, D = out.shape
    kv_heads, T = cache.key_scale.shape
    group = heads // kv_heads
    add_values[value_slices(tiles, D), kv_heads, -(-M * group // tiles.columns)](
        positions,
        full_from,
        *_planes(cache)[2:],
        workspace.weights,
        workspace.stats,
        out,
        M * group,
        heads,
        T,
        workspace.max_blocks,
        GROUP=group,
        D=D,
        R=tiles.value_rows,
        BQ=tiles.columns,
        WIDTH=tiles.width,
        CHUNK=64 * tiles.width,
        STAGES=tiles.value_stages,
        ASM=asm,
        num_warps=tiles.width,
        maxnreg=tiles.value_registers,
        enable_fp_fusion=False,
    )


def _attention_rows(
    q: Tensor,
    positions: Tensor,
    full_from: Tensor,
    cache: LayerCache,
    out: Tensor,
    tiles: Tiles,
    asm: bool,
) -> Tensor:
    M, heads, D = q.shape
    kv_heads, T = cache.key_scale.shape
    group = heads // kv_heads
    attend_rows[-(-M * group // tiles.queries), kv_heads](
        q,
        positions,
        full_from,
        *_planes(cache),
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


def _planes(cache: LayerCache) -> tuple[Tensor, ...]:
    return cache.key_base, cache.key_refine, cache.value_base, cache.value_refine
