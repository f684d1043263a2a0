"""Geometry of weight planes and of the KV cache, and its bytes: integers only.

Invariant: planner, cache and backends take their sizes from here, so they cannot disagree.
"""

from __future__ import annotations

from collections.abc import Iterable

KV_BLOCK = 64  # tokens per attention block, at absolute positions
LANES = 32  # strided lanes of every floating-point sum
MAX_GAMMA = 7  # draft tokens per cycle: eight rows are verified in one pass
MOST_FORCED = 1000  # cycles of a declared pattern of acceptance
GROUP_SIZES = (128, 64, 32)
ROW_TILE = 32  # a matrix is held in memory with its rows padded to this
CHUNK_ROWS = 256  # rows of a prompt that pass through the model together
KV_PADS = {"cpu": (8, 16)}  # backends that pad a head of K and of V in memory, to multiples


def padded(size: int, multiple: int) -> int:
    """Round `size` up to a multiple."""
    return -(-size // multiple) * multiple


def group_size_for(sizes: Iterable[int]) -> int:
    """Return the largest of 128, 64, 32 that divides every size; 32 (and zero padding) if none."""
    known = tuple(sizes)
    return next((G for G in GROUP_SIZES if all(K % G == 0 for K in known)), GROUP_SIZES[-1])


def kv_stored_per_token_bytes(
    num_layers: int, num_kv_heads: int, head_dim: int, backend: str = ""
) -> int:
    """Bytes one token occupies in the nested cache: K and V, two planes and an fp16 scale each.

    backend: by its name, whose padding is counted; none without one.
    """
    width = sum(padded(head_dim, to) for to in KV_PADS.get(backend, (1, 1)))
    return num_layers * num_kv_heads * (width + 4)


def kv_base_per_token_bytes(num_layers: int, num_kv_heads: int, head_dim: int) -> int:
    """Bytes one token's base plane and scales have: what kv4 reads of it."""
    return num_layers * 2 * num_kv_heads * (head_dim // 2 + 2)


def kv_half_per_token_bytes(num_layers: int, num_kv_heads: int, head_dim: int) -> int:
    """Bytes one token occupies in a cache of 16-bit numbers (KV16)."""
    return num_layers * 2 * num_kv_heads * head_dim * 2


def kv_plain_per_token_bytes(num_layers: int, num_kv_heads: int, head_dim: int) -> int:
    """Bytes one token occupies in the fp32 cache of the unquantised model."""
    return num_layers * 2 * num_kv_heads * head_dim * 4


def full_from(position: int, recent: int | None) -> int:
    """Return the first token that a draft row at `position` reads with both planes.

    `recent` None: kv8, everything. 0: kv4, nothing. N: at least the last N tokens, rounded out to
    an absolute block, so that the answer depends on the position alone.
    """
    if recent is None:
        return 0
    if recent == 0:
        return NEVER
    return max(0, position + 1 - recent) // KV_BLOCK * KV_BLOCK


NEVER = 2**31 - 1
