"""Tiles of attention by device: which form a call takes and how it is cut into programs.

Invariant: tiles change time only, never a bit (`attention.py`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from edge_runtime.kernels.cuda.sizes import SMALL_ROWS
from edge_runtime.kernels.layout import KV_BLOCK

# of one warp, by compute capability: eight for each scheduler of an Orin with 8 SMs, two of an H200
FEWEST_PROGRAMS = {87: 256, 90: 1056}
FEWEST_WARPS = 64  # of the values: two for each scheduler of an Orin with 8 SMs

FORMS = {"words": 0, "cols": 1, "rows": 2}  # as constants of the kernels
COMBINE_WIDTH, COMBINE_STAGES = 64, 3  # blocks of a step, steps in flight


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiles:
    """How one call is cut: speed only.

    form: of the keys: "words" (dp4a, one query vector), "cols" (tensor cores, query vectors are
    columns) or "rows" (prefill, keys and values in one kernel). queries: query vectors of a
    program; split: blocks of a program. fused: a program reads its blocks' values too, and what
    they make is added up later (`Workspace.values`); otherwise a program of the values takes
    `columns` query vectors, `value_rows` rows of bytes (twice as many dims) and `width` blocks a
    step, a warp each.
    """

    form: str
    queries: int
    split: int = 4
    warps: int = 1
    stages: int = 1
    registers: int | None = None  # of a thread, at most
    fused: bool = False
    columns: int = 8
    width: int = 4
    value_rows: int = 16
    value_stages: int = 3
    value_registers: int | None = None


def tiles_for(
    rows: int,
    group: int,
    head_dim: int,
    *,
    kv_heads: int = 8,
    tokens: int = 4096,
    arch: int = 87,
    fewest_columns: int = 8,
) -> Tiles:
    """Return tiles for `rows` rows of `group` query heads per KV head.

    arch: compute capability, 87 is 8.7; fewest_columns: 16 for Triton 3.4, whose int8 dot takes no
    fewer. 64 query vectors of a prompt take 0.56 of the time of 32 on an H200, and spill two
    registers on sm_87.
    """
    vectors = rows * group
    if rows > SMALL_ROWS:
        return Tiles(form="rows", queries=64 if arch >= 90 else 32, warps=4)
    blocks = kv_heads * -(-tokens // KV_BLOCK)
    fewest = FEWEST_PROGRAMS[90 if arch >= 90 else 87]
    split = next(s for s in (8, 4, 2, 1) if s == 1 or blocks >= s * fewest)
    words = vectors == 1 and head_dim % 8 == 0
    first = Tiles(
        form="words" if words else "cols",
        queries=1 if words else fewest_columns,
        split=split if words or arch < 90 else min(split, 4),
    )
    if arch >= 90:
        return _large_tiles(first, vectors, kv_heads * head_dim, fewest_columns)
    return _orin_tiles(first, vectors, kv_heads, head_dim, fewest_columns)


def _large_tiles(first: Tiles, vectors: int, dims: int, fewest_columns: int) -> Tiles:
    """Measured on an H200, 32K tokens, both planes, microseconds. 32 KV heads: 1 row fused 66 + 9,
    apart 37 + 66; 5 rows fused 124 + 15, apart 54 + 68. 8 KV heads of 4 heads: 1 row fused 32 + 8,
    apart 18 + 64; 5 rows fused 84 + 14, apart 34 + 105. 32 KV heads, 2,112 tokens, a block a
    program (four: 13.0 and 21.5): 1 row fused 9.7; 5 rows apart 16.5, and fused 14.2, but a whole
    pass of 5 rows takes 4.03 ms with fused ones and 3.60 with those apart."""
    words = first.form == "words"
    if words or (dims < 2048 and fewest_columns == 8):  # with 16 columns it spills
        return replace(first, fused=True, registers=112 if words else 192)
    columns = max(fewest_columns, min(16, _power_of_two(vectors)))
    return replace(first, stages=2, columns=columns, width=4, value_stages=4)


def _orin_tiles(
    first: Tiles, vectors: int, kv_heads: int, head_dim: int, fewest_columns: int
) -> Tiles:
    """Code for sm_87 on 8 SMs of an H200, 32K tokens, both planes, microseconds. Keys, 5 rows of 32
    KV heads: 128 registers 510, no cap 566. Values of 32 KV heads: 32 rows of bytes one block a
    step 367, two 411, 16 rows 631; 64 rows 357, but an Orin's shared memory holds three of those.
    Of 8 KV heads: 32 rows four blocks a step 129, 16 rows 170."""
    if first.form == "cols":
        registers = 128 if fewest_columns == 8 else None
        first = replace(first, stages=2, registers=registers)
    value_rows = 32 if head_dim % 64 == 0 else 16
    programs = kv_heads * -(-head_dim // (2 * value_rows))
    width = next(w for w in (1, 2, 4) if w == 4 or programs * w >= FEWEST_WARPS)
    columns = max(fewest_columns, min(16, _power_of_two(vectors)))
    # Triton 3.4 stops at 128 by itself, and spills
    registers = 168 if value_rows == 16 and columns > 8 else None
    return replace(
        first, columns=columns, width=width, value_rows=value_rows, value_registers=registers
    )


def padded_half(head_dim: int, form: str) -> int:
    """D/2 as the kernels hold it: a power of two, as words of four for "words", and at least the
    32 bytes that an int8 product of a tensor core takes for "cols" and "rows"."""
    if form == "words":
        return max(4, _power_of_two(head_dim // 8))
    return max(32 if form in ("cols", "rows") else 1, _power_of_two(head_dim // 2))


def value_slices(tiles: Tiles, head_dim: int) -> int:
    """Programs that share the dims of a head."""
    return -(-head_dim // (2 * tiles.value_rows))


def _power_of_two(n: int) -> int:
    return 1 << math.ceil(math.log2(n)) if n > 1 else 1
