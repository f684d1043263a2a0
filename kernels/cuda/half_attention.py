"""A plain 16-bit KV cache and attention over it: of the unquantised model, and KV16 of the nest.

A few rows (a decode step, the end of a prompt) take the flash-decoding kernel, which reads its
lengths on the device, so that a graph serves every length of a bucket. A chunk of a prompt takes
torch's SDPA over exactly the tokens that there are.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from edge_runtime.kernels.cuda import sizes
from edge_runtime.kernels.cuda.graphs import Graphs
from edge_runtime.kernels.cuda.launch import Kernel, cdiv, power_of_two
from edge_runtime.kernels.cuda.passes import Buckets
from edge_runtime.kernels.layout import KV_BLOCK, padded
from edge_runtime.kernels.ops import Geometry

ATTEND = Kernel("half_attention_kernels", "attend16", plain=(6, 7))
COMBINE = Kernel("half_attention_kernels", "combine16", plain=(4, 5))
ROPE = Kernel("half_kernels", "rope16", plain=(10, 11))
STAGES = 2
ENOUGH_PROGRAMS = 512  # longer splits where there are more than these
MOST_SPLITS = 256


class HalfCache(Buckets):
    """All layers. Invariant: a token is written whole; what lies past a sequence is dead."""

    def __init__(
        self, geometry: Geometry, capacity: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        """Allocate keys and values [L, Hkv, T, D], T in whole blocks, and attention's workspace."""
        g, T = geometry, padded(capacity, KV_BLOCK)
        super().__init__(capacity)
        shape = (g.num_layers, g.num_kv_heads, T, g.head_dim)
        self.key = torch.zeros(shape, dtype=dtype, device=device)
        self.value = torch.zeros_like(self.key)
        vectors = sizes.SMALL_ROWS * g.num_heads
        splits = cdiv(T, sizes.HALF_SPLIT)
        self.part = torch.empty(vectors * splits * g.head_dim, device=device)
        self.stat = torch.empty(vectors * splits * 2, device=device)
        self.graphs = Graphs()

    @property
    def num_bytes(self) -> int:
        """Bytes of keys and values."""
        return self.key.nbytes + self.value.nbytes

    def planes(self, length: int, layer: int | None = None) -> dict[str, npt.NDArray[Any]]:
        """Return a copy of the first `length` tokens: fp32 [L, 2, T, Hkv, D]."""
        L = slice(None) if layer is None else slice(layer, layer + 1)
        both = torch.stack((self.key[L, :, :length], self.value[L, :, :length]), 1)
        return {"kv": np.array(both.transpose(2, 3).float().cpu().numpy())}

    def load(self, planes: dict[str, npt.NDArray[Any]], layer: int | None = None) -> None:
        """Overwrite the first tokens."""
        L = slice(None) if layer is None else slice(layer, layer + 1)
        part = torch.from_numpy(np.array(planes["kv"])).transpose(2, 3)
        length = part.shape[3]
        self.key[L, :, :length], self.value[L, :, :length] = part[:, 0], part[:, 1]


def rope_kv(
    qkv: Tensor,
    positions: Tensor,
    cos: Tensor,
    sin: Tensor,
    cache: HalfCache,
    layer: int,
    out: Tensor,
    *,
    bias: Tensor | None = None,
    head_norms: tuple[Tensor, Tensor] | None = None,
    eps: float = 0.0,
) -> None:
    """Split qkv, normalise heads if norms are given (qwen3), rotate q and k, write k and v.

    qkv: [M, (heads + 2·Hkv)·D], 16 bits or fp32; bias: of as many columns; positions: int32 [M];
    cos, sin: fp32 [tokens, D/2]; out: [M, heads, D] of the cache's dtype.
    """
    M, heads, D = out.shape
    _, kv_heads, T, _ = cache.key.shape
    q_norm, k_norm = head_norms or (cos, cos)
    ROPE[M, heads + 2 * kv_heads](
        qkv, qkv if bias is None else bias, positions, cos, sin, q_norm, k_norm, out,
        cache.key[layer], cache.value[layer], heads, kv_heads, T, eps,
        D=D, HP=power_of_two(D // 2), BIAS=bias is not None, QK_NORM=head_norms is not None,
        num_warps=1,
    )  # fmt: skip


def attention(
    q: Tensor, positions: Tensor, cache: HalfCache, layer: int, out: Tensor, *, bucket: int,
    length: int | None,
) -> None:  # fmt: skip
    """Attention of q over a layer, row i up to its own position.

    q: [M, heads, D] of the cache's dtype; out: [M, heads, D], any; positions: int32 [M] on the
    device, below `bucket`. More than 16 rows are the last ones of a text of `length` tokens.
    """
    if q.shape[0] <= sizes.SMALL_ROWS:
        _decode(q, positions, cache, layer, out, bucket)
    else:
        assert length is not None
        out.copy_(_prompt(q, cache.key[layer, :, :length], cache.value[layer, :, :length]))


def split_of(tokens: int, kv_heads: int) -> int:
    """Tokens of a program: few enough that all of a GPU is busy, more where there are plenty."""
    split = sizes.HALF_SPLIT
    while split < 512 and kv_heads * tokens // (2 * split) >= ENOUGH_PROGRAMS:
        split *= 2
    return max(split, power_of_two(cdiv(tokens, MOST_SPLITS)))


def tile(queries: int) -> tuple[int, int]:
    """Tokens of a step and warps, without spills on an Orin at D = 128."""
    return (64 if queries <= 64 else 32), (4 if queries <= 32 else 8)


def _decode(
    q: Tensor, positions: Tensor, cache: HalfCache, layer: int, out: Tensor, bucket: int
) -> None:
    M, heads, D = q.shape
    _, kv_heads, T, _ = cache.key.shape
    group = heads // kv_heads
    split = split_of(min(bucket, T), kv_heads)
    splits = cdiv(min(bucket, T), split)
    queries = max(16, power_of_two(M * group))
    step, warps = tile(queries)
    same = {"D": D, "SPLIT": split, "MASKED": True}
    ATTEND[splits, kv_heads](
        q, cache.key[layer], cache.value[layer], positions, cache.part, cache.stat, M * group,
        heads, T, math.log2(math.e) / math.sqrt(D), **same, GROUP=group, DP=power_of_two(D),
        BQ=queries, BT=step, STAGES=STAGES, num_warps=warps,
    )  # fmt: skip
    COMBINE[M * heads, cdiv(D, 32)](
        cache.part, cache.stat, positions, out, splits, heads, **same,
        SPLITS=power_of_two(splits), num_warps=4,
    )  # fmt: skip


def _prompt(q: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """SDPA of the last rows [M, heads, D] of a text over [Hkv, T, D] -> [M, heads, D].

    KV heads are the batch and the query heads of each its heads, so that no key is repeated.
    """
    from torch.nn.attention.bias import causal_lower_right

    M, heads, D = q.shape
    kv_heads, T, _ = key.shape
    grouped = q.view(M, kv_heads, heads // kv_heads, D).permute(1, 2, 0, 3)
    shape = (kv_heads, heads // kv_heads, T, D)
    k, v = (x[:, None].expand(shape) for x in (key, value))
    y = torch.nn.functional.scaled_dot_product_attention(
        grouped, k, v, attn_mask=causal_lower_right(M, T)
    )
    return y.permute(2, 0, 1, 3).reshape(M, heads, D)
