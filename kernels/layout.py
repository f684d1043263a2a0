"""Geometry of weight planes and of the KV cache, and its bytes: integers only.

Invariant: planner, cache and backends take their sizes from here, so they cannot disagree.
"""

from __future__ import annotations

KV_BLOCK = 64  # tokens per attention block, at absolute positions
LANES = 32  # strided lanes of every floating-point sum
MAX_GAMMA = 7  # draft tokens per cycle: eight rows are verified in one pass
GROUP_SIZES = (128, 64, 32)


def padded(size: int, multiple: int) -> int:
    """Round `size` up to a multiple."""
    return -(-size // multiple) * multiple


def kv_stored_per_token_bytes(num_layers: int, num_kv_heads: int, head_dim: int) -> int:
    """Bytes one token occupies in the nested cache: K and V, two planes and an fp16 scale each."""
    return num_layers * 2 * num_kv_heads * (head_dim + 2)


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
