"""The CUDA linear on a GPU: bits first, then time, native and as the code an Orin would run.

    python tools/bench_cuda_linear.py [--only check,slice,prefill,whole] [--json FILE]

slice: code compiled for sm_87, loaded as PTX through the driver, on 8 multiprocessors (a green
context, as many as an Orin NX has), in bytes per clock and multiprocessor; the clock is read on the
same multiprocessors. whole: native code on all of them against cuBLAS fp16. prefill: both, against
the best of some fp16 tensor-core tiles compiled for sm_87, and cuBLAS. Weights are rotated through
more than the L2 and replayed from a graph. The last line of stdout is one JSON document.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import ctypes
import itertools
import json
import multiprocessing
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from edge_runtime.kernels.cuda import driver, linear
from edge_runtime.kernels.cuda.compile import Compiled, compile_kernel
from edge_runtime.kernels.cuda.linear_binary import compile_linear, launch_linear
from edge_runtime.kernels.cuda.tiles import ROW_TILES, Tile, choose

SLICE = 8  # multiprocessors
G = 128
SPIN = """.version 7.0
.target sm_80
.address_size 64
.visible .entry spin(.param .u64 out) {
.reg .b64 a, t0, t1, c0, c1; .reg .pred p;
ld.param.u64 a, [out]; mov.u64 t0, %globaltimer; mov.u64 c0, %clock64;
again: mov.u64 c1, %clock64; sub.u64 c1, c1, c0; setp.lt.u64 p, c1, 4000000; @p bra again;
mov.u64 t1, %globaltimer; sub.u64 t1, t1, t0;
st.global.u64 [a], c1; st.global.u64 [a+8], t1; ret;
}
"""


@triton.jit
def gemm16(x_ptr, w_ptr, y_ptr, M, N, K, BM: tl.constexpr, BN: tl.constexpr, STAGES: tl.constexpr):
    """y = x · wᵀ in fp16 with fp32 sums: the yardstick on the slice."""
    num_m = tl.cdiv(M, BM)
    pid = tl.program_id(0)
    rm = pid % num_m * BM + tl.arange(0, BM)
    rn = pid // num_m * BN + tl.arange(0, BN)
    k = tl.arange(0, 32)
    x = x_ptr + tl.minimum(rm, M - 1)[:, None] * K + k[None, :]
    w = w_ptr + rn[None, :] * K + k[:, None]
    acc = tl.zeros((BM, BN), tl.float32)
    for i in tl.range(0, K // 32, num_stages=STAGES):
        acc = tl.dot(tl.load(x + i * 32), tl.load(w + i * 32), acc)
    tl.store(y_ptr + rm[:, None] * N + rn[None, :], acc.to(tl.float16), mask=(rm < M)[:, None])


GEMM16_TILES = ((128, 128, 4, 3), (64, 256, 4, 3), (64, 128, 4, 4), (128, 128, 8, 3))


class Stream:
    """A driver stream of the current context, and graphs on it."""

    def __init__(self) -> None:
        self.handle = ctypes.c_void_p()
        driver._call("cuStreamCreate", ctypes.byref(self.handle), 1)

    def wait(self) -> None:
        """Wait for all that was enqueued."""
        driver._call("cuStreamSynchronize", self.handle)

    def seconds(self, calls: Sequence[Callable[[int], None]], turns: int = 5) -> float:
        """Median time of one of the calls, which are captured together."""
        graph, run = ctypes.c_void_p(), ctypes.c_void_p()
        driver._call("cuStreamBeginCapture_v2", self.handle, 2)
        for call in calls:
            call(self.handle.value or 0)
        driver._call("cuStreamEndCapture", self.handle, ctypes.byref(graph))
        driver._call("cuGraphInstantiateWithFlags", ctypes.byref(run), graph, ctypes.c_uint64(0))
        start, end = ctypes.c_void_p(), ctypes.c_void_p()
        for event in (start, end):
            driver._call("cuEventCreate", ctypes.byref(event), 0)
        times = []
        for _ in range(turns + 1):
            driver._call("cuEventRecord", start, self.handle)
            driver._call("cuGraphLaunch", run, self.handle)
            driver._call("cuEventRecord", end, self.handle)
            self.wait()
            ms = ctypes.c_float()
            driver._call("cuEventElapsedTime", ctypes.byref(ms), start, end)
            times.append(ms.value * 1e-3 / len(calls))
        return statistics.median(times[1:])

    def clock(self) -> float:
        """Hz of the multiprocessors, while they run."""
        facts = {"name": "spin", "arch": 80, "num_warps": 1, "shared_bytes": 0}
        spin = Compiled(**facts, parameters=("u64",), ptx=SPIN, cubin=b"")
        out = torch.zeros(2, dtype=torch.int64, device="cuda")
        torch.cuda.synchronize()
        driver.load(spin, ptx=True).launch((SLICE,), [out.data_ptr()], self.handle.value or 0)
        self.wait()
        clocks, nanoseconds = out.tolist()
        return float(clocks / nanoseconds * 1e9)


def weights(
    N: int, K: int, row_tile: int, group: int = G, bias: bool = False
) -> linear.DeviceLinear:
    """Random planes, multipliers and scales."""
    rows = -(-N // row_tile)
    shape = (rows, K // group, row_tile, group // 2)
    planes = [torch.randint(0, 256, shape, dtype=torch.uint8, device="cuda") for _ in range(2)]
    mult = torch.randint(-32768, 32768, (K // group, -(-N // 16) * 16), device="cuda").short()
    return linear.DeviceLinear(
        base=planes[0], refine=planes[1], mult=mult, group_size=group,
        scale=torch.rand(N, device="cuda") / 1e6,
        bias=torch.randn(N, device="cuda") if bias else None,
        mult_rows=mult[:, :N].t().contiguous(),
    )  # fmt: skip


def activation(M: int, K: int, group: int = G) -> tuple[Tensor, Tensor, Tensor]:
    """Random codes, their scales and their sums."""
    codes = torch.randint(-127, 128, (M, K), dtype=torch.int8, device="cuda")
    return codes, torch.rand(M, device="cuda"), linear.group_sums(codes, group)


def expected(w: linear.DeviceLinear, codes: Tensor, x_scale: Tensor, view: str) -> Tensor:
    """The formula in fp64, in which every sum of these sizes is exact."""
    N, group = w.num_outputs, w.group_size
    planes = [p.transpose(1, 2).flatten(0, 1)[:N, :, None] for p in (w.base, w.refine)]
    base, refine = (torch.cat([p & 15, p >> 4], 2).double() for p in planes)
    code = 16 * torch.where(base > 7, base - 16, base) + (refine - 8 if view == "w8" else 0)
    code = code.view(N, -1, group) * w.mult[:, :N].t().double()[:, :, None]
    y = ((codes.double() @ code.view(N, -1).t()).float() * x_scale[:, None]) * w.scale
    return y if w.bias is None else y + w.bias


CHECKED = ((128, 1024), (128, 4352), (64, 576), (64, 960), (32, 160))  # G, K
CHECKED_ROWS = (1, 7, 16, 20, 33, 70)


def checked(group: int, K: int, view: str, M: int) -> Compiled:
    """The sm_87 kernel of a checked case: odd N, bias and residual."""
    return compile_linear(
        choose(87, view, M, 100, group), view, group, groups=K // group, row_tile=ROW_TILES[87],
        even=False, bias=True, residual=True,
    )  # fmt: skip


def check(stream: Stream) -> dict[str, Any]:
    """Native and sm_87 code against fp64, poisoned outputs; offsets past 2^31; 100 repeats."""
    cases = list(itertools.product(CHECKED, ("w4", "w8"), CHECKED_ROWS))
    spawn = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(mp_context=spawn) as pool:
        built = list(pool.map(checked, *zip(*((*c[0], *c[1:]) for c in cases), strict=True)))
    wrong = []
    for ((group, K), view, M), kernel in zip(cases, built, strict=True):
        w, x = weights(100, K, ROW_TILES[87], group, bias=True), activation(M, K, group)
        added = torch.randn(M, 100, device="cuda")
        out = torch.full((M + 1, 100), float("nan"), device="cuda")
        torch.cuda.synchronize()
        launch_linear(
            driver.load(kernel, ptx=True), choose(87, view, M, 100, group), *x, w, out[:M], added,
            stream.handle.value or 0,
        )  # fmt: skip
        stream.wait()
        if not torch.equal(out[:M], expected(w, x[0], x[1], view) + added):
            wrong.append(["sm_87", group, K, view, M])
        if not out[M].isnan().all():
            wrong.append(["guard", group, K, view, M])
        if M in (1, 7, 33):
            plain = weights(100, K, 1, group)
            if not torch.equal(linear.linear(*x, plain, view), expected(plain, x[0], x[1], view)):
                wrong.append(["native", group, K, view, M])
    big, x = weights(600_064, 8192, 1), activation(2, 8192)
    last = slice(-64, None)
    tail = linear.DeviceLinear(
        base=big.base[last], refine=big.refine[last], mult=big.mult[:, last].contiguous(),
        scale=big.scale[last], bias=None, group_size=G,
    )  # fmt: skip
    offsets = torch.equal(linear.linear(*x, big, "w8")[:, last], expected(tail, x[0], x[1], "w8"))
    w, x = weights(4096, 4096, 1), activation(8, 4096)
    first = linear.linear(*x, w, "w8")
    same = all(torch.equal(linear.linear(*x, w, "w8"), first) for _ in range(100))
    return {"cases": len(cases), "wrong": wrong, "past_2^31": offsets, "100_repeats": same}


def best(stream: Stream, function: driver.Function, tile: Tile, M: int, ws: list[Any]) -> float:
    """Seconds of a loaded kernel over rotating weights, its bits checked on the first."""
    view = function_views[id(function)]
    x = activation(M, ws[0].num_inputs)
    if M > linear.MAX_SMALL_ROWS:
        x = (*x[:2], linear.by_column(x[2]))
    out = torch.full((M, ws[0].num_outputs), float("nan"), device="cuda")
    want = expected(ws[0], x[0], x[1], view)
    torch.cuda.synchronize()
    launch_linear(function, tile, *x, ws[0], out, stream=stream.handle.value or 0)
    stream.wait()
    assert torch.equal(out, want), (tile, view, M)
    return stream.seconds(
        [lambda s, w=w: launch_linear(function, tile, *x, w, out, stream=s) for w in ws]
    )


function_views: dict[int, str] = {}
_kept: list[driver.Function] = []


def loaded(tile: Tile, view: Any, arch: int, K: int) -> driver.Function:
    """Compile one kernel; sm_87 goes through PTX, as on a GPU that is newer than it."""
    built = compile_linear(tile, view, G, groups=K // G, row_tile=ROW_TILES[arch], arch=arch)
    function = driver.load(built, ptx=arch == 87)
    _kept.append(function)
    function_views[id(function)] = view
    return function


def plane_bytes(N: int, K: int, view: str) -> int:
    """Planes and multipliers."""
    return N * K // 2 * (2 if view == "w8" else 1) + N * K // G * 2


def measure_slice(stream: Stream) -> list[dict[str, Any]]:
    """The table's sm_87 tiles in bytes per clock; the stream is of the slice."""
    rows = []
    for N, K, copies in ((22016, 4096, 4), (4096, 4096, 20)):
        ws = [weights(N, K, ROW_TILES[87]) for _ in range(copies)]
        for view in ("w4", "w8"):
            for M in (1, 5, 8, 16):
                tile = choose(87, view, M, N)
                clock = stream.clock()
                seconds = best(stream, loaded(tile, view, 87, K), tile, M, ws)
                clock = max(clock, stream.clock())
                figure = plane_bytes(N, K, view) / seconds / SLICE / clock
                rows.append({"N": N, "K": K, "view": view, "M": M, "us": seconds * 1e6,
                             "mhz": clock / 1e6, "bytes_per_clock": figure})  # fmt: skip
                print(f"slice {N}x{K} {view} M={M}: {figure:.1f} B/clk/SM", file=sys.stderr)
    return rows


def measure_whole(stream: Stream) -> list[dict[str, Any]]:
    """The table's native tiles against cuBLAS fp16."""
    rows = []
    for N, K, copies in ((22016, 4096, 6), (4096, 4096, 30)):
        ws = [weights(N, K, ROW_TILES[90]) for _ in range(copies)]
        for M in (1, 5, 8, 16):
            half = cublas(M, N, K, max(2, copies // 2))
            for view in ("w4", "w8"):
                tile = choose(90, view, M, N)
                seconds = best(stream, loaded(tile, view, 90, K), tile, M, ws)
                rows.append({"N": N, "K": K, "view": view, "M": M, "us": seconds * 1e6,
                             "cublas_us": half * 1e6, "ratio": half / seconds})  # fmt: skip
                print(f"whole {N}x{K} {view} M={M}: {seconds * 1e6:.1f} us, {half / seconds:.2f} x"
                      " cuBLAS fp16", file=sys.stderr)  # fmt: skip
    return rows


def measure_prefill(stream: Stream, arch: int) -> list[dict[str, Any]]:
    """The w8 view at 288 and 1024 rows against fp16."""
    N, K, rows = 11008, 4096, []
    ws = [weights(N, K, ROW_TILES[arch]) for _ in range(3)]
    for M in (288, 1024):
        half = tensor_core16(stream, M, N, K) if arch == 87 else cublas(M, N, K, 3)
        tile = choose(arch, "w8", M, N)
        seconds = best(stream, loaded(tile, "w8", arch, K), tile, M, ws)
        rows.append({"arch": arch, "M": M, "us": seconds * 1e6, "fp16_us": half * 1e6,
                     "ratio": half / seconds})  # fmt: skip
        print(f"prefill sm_{arch} M={M}: {seconds * 1e6:.0f} us, fp16 {half * 1e6:.0f} us,"
              f" {half / seconds:.2f} x", file=sys.stderr)  # fmt: skip
    return rows


def tensor_core16(stream: Stream, M: int, N: int, K: int) -> float:
    """Seconds of the fastest fp16 tile, compiled for sm_87."""
    w = torch.randn(3, N, K, device="cuda", dtype=torch.float16)
    x = torch.randn(M, K, device="cuda", dtype=torch.float16)
    y = torch.empty(M, N, device="cuda", dtype=torch.float16)
    types = {"x_ptr": "*fp16", "w_ptr": "*fp16", "y_ptr": "*fp16", "M": "i32", "N": "i32"}
    torch.cuda.synchronize()
    times = []
    for BM, BN, warps, stages in GEMM16_TILES:
        built = compile_kernel(
            gemm16, {**types, "K": "i32"}, {"BM": BM, "BN": BN, "STAGES": stages},
            num_warps=warps, unaligned=("M",),
        )  # fmt: skip
        function = driver.load(built, ptx=True)
        grid = (-(-M // BM) * (N // BN),)
        numbers = [M, N, K]
        times.append(stream.seconds([
            lambda s, i=i: function.launch(  # noqa: B023 (used up in this turn)
                grid, [x.data_ptr(), w[i].data_ptr(), y.data_ptr(), *numbers], s  # noqa: B023
            )
            for i in range(3)
        ]))  # fmt: skip
    return min(times)


def cublas(M: int, N: int, K: int, copies: int) -> float:
    """Seconds of one fp16 product."""
    w = torch.randn(copies, N, K, device="cuda", dtype=torch.float16)
    x = torch.randn(M, K, device="cuda", dtype=torch.float16)
    torch.mm(x, w[0].t())
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for one in w:
            torch.mm(x, one.t())
    times = []
    for _ in range(9):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1e-3 / copies)
    return statistics.median(times[1:])


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--only", default="check,slice,prefill,whole")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    only = options.only.split(",")
    torch.zeros(1, device="cuda")
    report: dict[str, Any] = {"gpu": torch.cuda.get_device_name(), "triton": triton.__version__}
    if "check" in only:
        report["check"] = check(Stream())
        print(report["check"], file=sys.stderr)
    if {"slice", "prefill"} & set(only):
        from torch.cuda.green_contexts import GreenContext

        context = GreenContext.create(SLICE)
        context.set_context()
        if "slice" in only:
            report["slice"] = measure_slice(Stream())
        if "prefill" in only:
            report["prefill"] = measure_prefill(Stream(), 87)
        context.pop_context()
    if "prefill" in only:
        report["prefill"] += measure_prefill(Stream(), 90)
    if "whole" in only:
        report["whole"] = measure_whole(Stream())
    document = json.dumps(report)
    if options.json:
        options.json.write_text(document + "\n", encoding="utf-8")
    print(document)


if __name__ == "__main__":
    main()
