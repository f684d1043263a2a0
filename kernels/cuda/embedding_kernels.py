"""The gather of embedding rows as a Triton kernel; launched by `embedding.py`."""

from __future__ import annotations

import triton
import triton.language as tl

from edge_runtime.kernels.cuda.numeric import NOT_A_NUMBER
from edge_runtime.kernels.cuda.overlap_kernels import start_next_launch, wait_for_launch


@triton.jit
def embed_kernel(
    ids_ptr, table_ptr, scale_ptr, rows_ptr, out_ptr, V, H, HAS_ROWS: tl.constexpr,
    BLOCK: tl.constexpr, PDL: tl.constexpr = False,
):  # fmt: skip
    """One program for BLOCK numbers of a row."""
    start_next_launch(PDL)
    wait_for_launch(PDL)
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    token = tl.load(ids_ptr + row).to(tl.int64)
    at = tl.maximum(tl.minimum(token, V - 1), 0)
    # as a block: Triton's interpreter broadcasts no scalar comparison as a mask
    block = token + 0 * i
    known = (block >= 0) & (block < V)
    code = tl.load(table_ptr + at * H + i, mask=i < H, other=0)
    x = code.to(tl.float32) * tl.load(scale_ptr + at)
    nan = tl.full((), NOT_A_NUMBER, tl.int32).to(tl.float32, bitcast=True)
    x = tl.where(known, x, nan)
    if HAS_ROWS:
        own = tl.load(rows_ptr + row * H + i, mask=(i < H) & (block < 0), other=0.0)
        x = tl.where(block < 0, own, x)
    tl.store(out_ptr + row * H + i, x, mask=i < H)
