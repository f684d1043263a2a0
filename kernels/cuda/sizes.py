"""Bytes on the device, before anything is there: what the backend allocates and the planner counts.

Invariant: integers only, no torch. Every piece begins on a line, so sums are of padded sizes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from edge_runtime.kernels.cuda import tiles
from edge_runtime.kernels.layout import (
    CHUNK_ROWS,
    KV_BLOCK,
    MAX_GAMMA,
    kv_half_per_token_bytes,
    kv_stored_per_token_bytes,
    padded,
)

if TYPE_CHECKING:
    from edge_runtime.kernels.ops import Geometry

LINE = 256  # bytes, as cudaMalloc aligns
MULT_ROWS = 16  # rows of multipliers are padded to it
SMALL_ROWS = 16  # rows of a pass whose attention keeps weights between its two kernels
ATTENTION_BLOCKS = 16  # blocks of tokens are padded to it in attention's workspace
LOGIT_ROWS = MAX_GAMMA + 1  # of which logits have a place of their own
DIGIT_GROUPS = 32  # groups of digits of sums are padded to it
SILU_CHUNK = 1024  # numbers of a feed-forward row that have a common peak
REPORT_IDS = 16  # of a cycle's report, as many as a power of two holds
REPORT_HEADER = 4  # numbers before them: tokens, drafted, finite, unused
LARGE_CHUNK_ROWS = 1024  # of a prompt that pass together on GPUs that CHUNK_ROWS would not fill
HALF_CHUNK_ROWS = 1024  # of a prompt that pass through 16-bit weights together
HALF_SPLIT = 128  # tokens of the shortest split of attention over a 16-bit cache
SDPA_BYTES = 16 << 20  # what it takes where it splits the tokens of a prompt: 132 programs' worth
MOST_GRAPHS = 64  # that a cache keeps
# on a GPU with memory of its own: the context of a process (about 620 MiB were seen on an H200),
# then kernels and graphs (20 graphs of 30 layers took 26 MiB)
CONTEXT_BYTES, CODE_BYTES = 640 << 20, 160 << 20


def piece(size_bytes: int) -> int:
    """Round a size up to lines."""
    return padded(size_bytes, LINE)


def chunk_rows(arch: int) -> int:
    """Rows of a prompt that pass together, at most; arch: 87 is compute capability 8.7."""
    return LARGE_CHUNK_ROWS if arch >= 90 else CHUNK_ROWS


def row_tile(arch: int) -> int:
    """Rows that the planes of a linear are padded to."""
    return tiles.ROW_TILES.get(arch, tiles.ROW_TILES[87])


def by_row(arch: int) -> bool:
    """Whether multipliers are there by row too, for the dp4a form of the linear."""
    return any(line.tile.form == "dot4" for line in tiles.TABLES.get(arch, tiles.ORIN))


def linear(N: int, Kp: int, group_size: int, arch: int, *, bias: bool) -> dict[str, int]:
    """Bytes of the tensors of `linear.DeviceLinear`, by name; Kp: inputs with padding."""
    plane, groups = padded(N, row_tile(arch)) * Kp // 2, Kp // group_size
    sizes = {
        "base": plane,
        "refine": plane,
        "mult": groups * padded(N, MULT_ROWS) * 2,
        "scale": 4 * N,
        "bias": 4 * N * bias,
        "mult_rows": 2 * N * groups * by_row(arch),
    }
    return {name: piece(size) for name, size in sizes.items()}


def registers(
    hidden: int, q_size: int, kv_size: int, intermediate: int, group_size: int, rows: int
) -> int:
    """Bytes of the registers of `rows` rows that the programs of a model share: x, qkv, q, att,
    gate_up, and quantised rows of each width with their sums, as digits too."""
    floats = (hidden, q_size + 2 * kv_size, q_size, q_size, 2 * intermediate)
    total = sum(piece(rows * 4 * width) for width in floats)
    padded_widths = {width: padded(width, group_size) for width in (hidden, q_size, intermediate)}
    for Kp in padded_widths.values():
        sums = rows * 4 * Kp // group_size
        total += piece(rows * Kp) + piece(4 * rows) + piece(sums)
    for groups in {Kp // group_size for Kp in padded_widths.values()}:
        total += piece(2 * rows * padded(groups, DIGIT_GROUPS)) + piece(4 * rows)
    return total + piece(rows * 4 * -(-intermediate // SILU_CHUNK))


def logits(rows: int, stride: int) -> int:
    """Bytes of logits fp32 [rows, stride]; their argmax takes a thousandth of it."""
    return 4 * rows * stride


def sampling(vocabulary: int) -> int:
    """Bytes of choosing LOGIT_ROWS tokens with top-k or top-p: scores, as they are and sorted,
    their order and running sums; and what torch sorts in, keys and places twice."""
    return LOGIT_ROWS * vocabulary * (4 * 8 + 2 * 16)


def attention_block(num_heads: int, head_dim: int, arch: int) -> int:
    """Bytes of `attention.Workspace` over a block of tokens: limbs of weights and statistics of
    each query vector, and its values where one kernel makes both."""
    values = 4 * head_dim if arch >= 90 else 0
    return SMALL_ROWS * num_heads * (2 * KV_BLOCK + 4 * 4 + values)


def cache(geometry: Geometry, capacity: int, arch: int) -> int:
    """Bytes of a cache: planes, scales, and attention's workspace."""
    per_token = kv_stored_per_token_bytes(
        geometry.num_layers, geometry.num_kv_heads, geometry.head_dim
    )
    blocks = -(-capacity // KV_BLOCK)
    of_attention = attention_block(geometry.num_heads, geometry.head_dim, arch)
    return blocks * KV_BLOCK * per_token + padded(blocks, ATTENTION_BLOCKS) * of_attention


def half_registers(
    hidden: int, q_size: int, kv_size: int, intermediate: int, vocabulary: int
) -> int:
    """Bytes of the 16-bit registers that the programs of an unquantised model share: x, its norm,
    qkv, q, att, gate_up, their product, and logits."""
    widths = [hidden, q_size + 2 * kv_size, q_size, q_size, 2 * intermediate]
    widths += {hidden, intermediate}
    rows = sum(piece(HALF_CHUNK_ROWS * 2 * width) for width in widths)
    return rows + piece(LOGIT_ROWS * 2 * vocabulary)


def half_prompt(q_size: int, num_heads: int, rows: int) -> int:
    """Bytes that SDPA takes for a chunk of a prompt: its answer, twice, a sum a vector, and splits
    of tokens."""
    return rows * (2 * 2 * q_size + 4 * num_heads) + SDPA_BYTES


def half_attention_block(num_heads: int, head_dim: int) -> int:
    """Bytes of attention's workspace over a block of a 16-bit cache, at most: of each query vector
    half a split's values, maximum and sum."""
    return SMALL_ROWS * num_heads * 4 * (head_dim + 2) * KV_BLOCK // HALF_SPLIT


def half_cache(geometry: Geometry, capacity: int) -> int:
    """Bytes of a 16-bit cache and of attention's workspace."""
    g, blocks = geometry, -(-capacity // KV_BLOCK)
    per_token = kv_half_per_token_bytes(g.num_layers, g.num_kv_heads, g.head_dim)
    of_attention = half_attention_block(g.num_heads, g.head_dim)
    return blocks * KV_BLOCK * per_token + padded(blocks, HALF_SPLIT // KV_BLOCK) * of_attention


def cublas(arch: int) -> int:
    """Bytes that torch gives cuBLAS to work in: once for the stream of launches, once for that of
    captures. Source: c10 of torch 2.4 to 2.9, CUBLAS_WORKSPACE_CONFIG's default."""
    return 2 * (32 << 20 if arch >= 90 else (8 << 20) + (128 << 10))
