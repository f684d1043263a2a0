"""Embedding rows: a gather of int8 rows with one scale each; rows of the caller's own pass through.

Invariant: ids stay on the device. An id outside the table (and a negative one where no rows are
given) yields a row of NaN, which the logits report.
"""

from __future__ import annotations

import torch
from torch import Tensor

from edge_runtime.kernels.cuda.launch import EXACT, Kernel, cdiv

embed_kernel = Kernel("embedding_kernels", "embed_kernel", pdl=True)

BLOCK = 1024


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
    embed_kernel[(M, cdiv(H, BLOCK))](
        ids, table, scale, out if rows is None else rows, out, V, H,
        HAS_ROWS=rows is not None, BLOCK=BLOCK, num_warps=2, **EXACT,
    )  # fmt: skip
    return out
