"""Embedding rows: a gather of int8 rows with one scale each; rows of the caller's own pass through.

Invariant: ids stay on the device. An id outside the table (and a negative one where no rows are
given) yields a row of NaN, which the logits report.
"""

from __future__ import annotations

import torch
from torch import Tensor

from edge_runtime.kernels.cuda import require_triton

require_triton()

import triton  # noqa: E402 (the line above says what to install)
import triton.language as tl  # noqa: E402

from edge_runtime.kernels.cuda.numeric import EXACT, NOT_A_NUMBER  # noqa: E402

BLOCK = 1024


@triton.jit
def embed_kernel(
    ids_ptr, table_ptr, scale_ptr, rows_ptr, out_ptr, V, H, HAS_ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """One program for BLOCK numbers of a row."""
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


def embed(
    ids: Tensor, table: Tensor, scale: Tensor, rows: Tensor | None = None, out: Tensor | None = None
) -> Tensor:
    """x[m] = table[ids[m]] · scale[ids[m]], or rows[m] where ids[m] < 0.

    ids: int32 or int64 [M]; table: int8 [V, H]; scale: fp32 [V]; rows: fp32 [M, H] or None.
    """
    M, (V, H) = ids.shape[0], table.shape
    assert table.is_contiguous()
    assert rows is None or (rows.is_contiguous() and rows.shape == (M, H))
    if out is None:
        out = torch.empty(M, H, dtype=torch.float32, device=table.device)
    embed_kernel[(M, triton.cdiv(H, BLOCK))](
        ids, table, scale, out if rows is None else rows, out, V, H,
        HAS_ROWS=rows is not None, BLOCK=BLOCK, num_warps=2, **EXACT,
    )  # fmt: skip
    return out
