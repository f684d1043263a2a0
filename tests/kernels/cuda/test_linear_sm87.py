"""The linear's code for an Orin, run on a GPU through the driver; and sizes past 2^31 bytes."""

from __future__ import annotations

import itertools

import pytest
import torch
from triton_devices import device_of

from edge_runtime.kernels.cuda import launch, linear
from edge_runtime.kernels.cuda.tiles import ROW_TILES
from edge_runtime.kernels.ops import View

N = 100
SIZES = ((128, 1024), (128, 4352), (64, 576), (64, 960), (32, 160))  # G, K
ROWS = (1, 7, 16, 20, 33, 70)
VIEWS: tuple[View, ...] = ("w4", "w8")


@pytest.fixture(autouse=True)
def gpu() -> None:
    device_of("cuda")
    if torch.cuda.get_device_capability() < (8, 7):
        pytest.skip("code for sm_87 needs a GPU of compute capability 8.7 or more")


def blank_calls() -> None:
    """Odd N, bias and residual, without memory."""
    from machine_code import empty

    from edge_runtime.kernels.cuda.record import blank_linear

    for (group, K), view, M in itertools.product(SIZES, VIEWS, ROWS):
        w = blank_linear(N, K, group, row_tile=ROW_TILES[87], bias=True)
        sums = empty(M, K // group, dtype=torch.int32)
        given = linear.digits_of(sums) if linear.takes_digits(M, group) else sums
        codes, out = empty(M, K, dtype=torch.int8), empty(M, N)
        linear.linear(codes, empty(M), given, w, view, out=out, residual=out)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_code_for_an_orin() -> None:
    from machine_code import compiled

    from edge_runtime.kernels.cuda.record import Built
    from edge_runtime.kernels.cuda.timing import linears

    way, wrong = Built(87), []
    way.compiled.update(compiled(blank_calls))
    with launch.using(way):
        for (group, K), view, M in itertools.product(SIZES, VIEWS, ROWS):
            w = linears.weights(N, K, ROW_TILES[87], group, bias=True)
            x = linears.activation(M, K, group)
            added = torch.randn(M, N, device="cuda")
            out = torch.full((M + 1, N), float("nan"), device="cuda")
            linear.linear(*x, w, view, out=out[:M], residual=added)
            want = linears.expected(w, x[0], x[1], view, 0, N) + added
            if not torch.equal(out[:M], want) or not out[M].isnan().all():
                wrong.append((group, K, view, M))
    assert not wrong


@pytest.mark.slow
def test_planes_of_more_than_two_gigabytes() -> None:
    from edge_runtime.kernels.cuda.timing import linears

    if torch.cuda.mem_get_info()[0] < 12 << 30:
        pytest.skip("needs 12 GiB of GPU memory")
    outputs, K = 600_064, 8192
    w, x = linears.weights(outputs, K, 1, 128), linears.activation(2, K, 128)
    assert w.base.nbytes > 2**31
    got = linear.linear(*x, w, "w8")
    linears.check_ends(got, w, x[0], x[1], "w8")
