"""The linear: random planes, the bits to expect, and what is timed beside it.

Peers get what they are made for: cuBLAS a 16-bit matrix, torch's int4 product (tinygemm) and
gemlite 4-bit weights with 16-bit activations. They compute other numbers than the linear does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from edge_runtime.kernels.cuda import launch, linear, sizes
from edge_runtime.kernels.cuda.timing import peers
from edge_runtime.kernels.cuda.timing.entry import Entry, Sizes, num_copies
from edge_runtime.kernels.layout import padded
from edge_runtime.kernels.ops import View

VIEWS: tuple[View, ...] = ("w4", "w8")
CHECKED_OUTPUTS = 1024  # at both ends of a matrix


def weights(
    N: int, K: int, row_tile: int, group: int, bias: bool = False, device: str = "cuda"
) -> linear.DeviceLinear:
    """Random planes, multipliers and scales; K is padded to whole groups."""
    groups = -(-K // group)
    shape = (-(-N // row_tile), groups, row_tile, group // 2)
    planes = [torch.randint(0, 256, shape, dtype=torch.uint8, device=device) for _ in range(2)]
    width = padded(N, linear.MULT_PAD)
    mult = torch.randint(-32768, 32768, (groups, width), dtype=torch.int16, device=device)
    return linear.DeviceLinear(
        base=planes[0],
        refine=planes[1],
        mult=mult,
        group_size=group,
        scale=torch.rand(N, device=device) / 1e6,
        bias=torch.randn(N, device=device) if bias else None,
        mult_rows=mult[:, :N].t().contiguous() if row_tile == 1 else None,
    )


def activation(
    M: int, K: int, group: int, device: str = "cuda"
) -> tuple[Tensor, Tensor, Tensor | linear.Digits]:
    """Random codes, their scales and their sums, as a pass of M rows has them."""
    codes = torch.randint(-127, 128, (M, padded(K, group)), dtype=torch.int8, device=device)
    sums = linear.group_sums(codes, group)
    given = linear.digits_of(sums) if linear.takes_digits(M, group) else sums
    return codes, torch.rand(M, device=device), given


def expected(
    w: linear.DeviceLinear, codes: Tensor, x_scale: Tensor, view: View, start: int, stop: int
) -> Tensor:
    """Outputs start to stop by the formula in fp64, in which every sum of these sizes is exact.

    start: a multiple of the row tile.
    """
    tiles = slice(start // w.row_tile, -(-stop // w.row_tile))
    planes = [p[tiles].transpose(1, 2).flatten(0, 1) for p in (w.base, w.refine)]
    base, refine = (torch.cat([p & 15, p >> 4], 2)[: stop - start].double() for p in planes)
    code = 16 * torch.where(base > 7, base - 16, base) + (refine - 8 if view == "w8" else 0)
    code *= w.mult[:, start:stop].t().double()[:, :, None]
    acc = codes.double() @ code.flatten(1).t()
    y = (acc.float() * x_scale[:, None]) * w.scale[start:stop]
    return y if w.bias is None else y + w.bias[start:stop]


def check_ends(
    out: Tensor, w: linear.DeviceLinear, codes: Tensor, x_scale: Tensor, view: View
) -> None:
    """Compare the first and the last outputs with the formula."""
    N = w.num_outputs
    last = max(0, N - CHECKED_OUTPUTS) // w.row_tile * w.row_tile
    for start, stop in ((0, min(N, CHECKED_OUTPUTS)), (last, N)):
        want = expected(w, codes, x_scale, view, start, stop)
        assert torch.equal(out[:, start:stop], want), f"{view} {N}x{w.num_inputs}: bits differ"


def num_bytes(N: int, K: int, group: int, view: View) -> int:
    """Bytes that a pass reads of a matrix: planes, group multipliers, row scales."""
    groups = -(-K // group)
    return N * (groups * group // 2 * (2 if view == "w8" else 1) + 2 * groups + 4)


def entries(s: Sizes) -> Iterator[Entry]:
    """Every linear of the model in both views, and its peers."""
    for name, (N, K) in s.linears.items():
        n = num_copies(num_bytes(N, K, s.group_size, "w4"), s.device)
        row_tile = native_row_tile(s.device)
        ws = [weights(N, K, row_tile, s.group_size, device=s.device) for _ in range(n)]
        others = peers.Peers(N, K, s.group_size, s.device)
        for M in s.rows:
            x = activation(M, K, s.group_size, s.device)
            for view in VIEWS:
                yield native_entry(name, ws, x, view)
            yield from others.entries(name, M)


def native_entry(
    name: str,
    ws: list[linear.DeviceLinear],
    x: tuple[Tensor, Tensor, Tensor | linear.Digits],
    view: View,
    run: Callable[[Callable[[], object]], object] = lambda call: call(),
) -> Entry:
    """Check the bits of the linear on the first matrix; return what is timed. run: does a call to
    its end, where the current stream is not torch's."""
    w, M = ws[0], x[0].shape[0]
    N, K = w.num_outputs, w.num_inputs
    out = torch.full((M, N), float("nan"), device=w.scale.device)

    def call(i: int) -> object:
        return linear.linear(*x, ws[i], view, out=out)

    run(lambda: call(0))
    check_ends(out, w, x[0], x[1], view)
    size = num_bytes(N, K, w.group_size, view)
    return Entry(name, M, call, len(ws), size, f"{N}x{K}", view)


def native_row_tile(device: str = "cuda") -> int:
    """Rows of a tile of planes as this GPU's kernels read them."""
    return 1 if device == "cpu" else sizes.row_tile(launch.arch(torch.device(device)))
