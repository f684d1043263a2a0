"""The one way to time: calls captured in a graph of the driver, replayed in turns.

Invariant: what stands between two events is nothing but the calls: no launch by Python, no
allocation. A `Timer` belongs to the CUDA context that was current when it was made, so the same
code times a whole GPU and a slice of it. Where clocks are asked for, every multiprocessor writes
its own clock and the time down before the first call and after the last one, in the same graph.
"""

from __future__ import annotations

import contextlib
import ctypes
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch

from edge_runtime.kernels.cuda import driver
from edge_runtime.kernels.cuda.compile import Compiled

WARM_UP_SECONDS = 1.5  # clocks rise first
COPY_BYTES = 1 << 30
MIN_CALLS = 16  # of a graph: what its launch costs is shared by them
MAX_SM_ID = 1024
MARK = """.version 7.0
.target sm_80
.address_size 64
.visible .entry mark(.param .u64 out) {
.reg .b64 a, o, t, c; .reg .b32 s, x; .reg .pred p;
mov.u32 x, %tid.x; setp.ne.u32 p, x, 0; @p ret;
ld.param.u64 a, [out]; mov.u32 s, %smid; mul.wide.u32 o, s, 16; add.u64 a, a, o;
mov.u64 c, %clock64; mov.u64 t, %globaltimer;
st.global.u64 [a], c; st.global.u64 [a+8], t; ret;
}
"""


@dataclass(frozen=True, slots=True)
class Sample:
    """Seconds of one call, a turn each; of multiprocessors, their clocks in one call and Hz."""

    seconds: list[float] = field(default_factory=list)
    clocks: list[float] = field(default_factory=list)
    hz: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        """Seconds in the middle."""
        return statistics.median(self.seconds)


def spread(values: Sequence[float]) -> dict[str, float]:
    """Return median and range."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


class Timer:
    """A stream of the current context. num_sms: of a slice of the GPU, which streams that torch
    made before would leave."""

    def __init__(self, num_sms: int | None = None) -> None:
        torch.zeros(1, device="cuda")  # makes a context where there is none yet
        stream = ctypes.c_void_p()
        driver.call("cuStreamCreate", ctypes.byref(stream), 1)  # beside the default stream
        self._stream = stream
        self.whole = num_sms is None
        self.num_sms = (
            num_sms
            or torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count
        )

    @property
    def handle(self) -> int:
        """CUstream, as an address."""
        return self._stream.value or 0

    def current(self) -> contextlib.AbstractContextManager[object]:
        """Make the stream torch's, so that all launch on it."""
        return torch.cuda.stream(torch.cuda.ExternalStream(self.handle))

    def wait(self) -> None:
        """Wait for all that was enqueued."""
        driver.call("cuStreamSynchronize", self._stream)

    def run(self, call: Callable[[], object]) -> None:
        """Run one call to its end, what was enqueued elsewhere before it."""
        torch.cuda.synchronize()
        with self.current():
            call()
        self.wait()

    def measure(
        self, calls: Sequence[Sequence[Callable[[], object]]], turns: int, *, clocks: bool = False
    ) -> list[Sample]:
        """Time each list of calls as a graph of its own, all lists in turns; per call. Short lists
        are repeated within their graph."""
        for some in calls:
            for call in some:
                self.run(call)  # compiles, and makes what is made once
        calls = [[*some] * -(-MIN_CALLS // len(some)) for some in calls]
        marks = _Marks(self.num_sms) if clocks else None
        samples = [Sample() for _ in calls]
        with contextlib.ExitStack() as stack:
            graphs = [stack.enter_context(self._graph(some, marks)) for some in calls]
            start, stop = (stack.enter_context(_event()) for _ in range(2))
            for turn in range(turns + 2):
                for graph, some, sample in zip(graphs, calls, samples, strict=True):
                    driver.call("cuEventRecord", start, self._stream)
                    driver.call("cuGraphLaunch", graph, self._stream)
                    driver.call("cuEventRecord", stop, self._stream)
                    self.wait()
                    if turn < 2:
                        continue
                    ms = ctypes.c_float()
                    driver.call("cuEventElapsedTime", ctypes.byref(ms), start, stop)
                    sample.seconds.append(ms.value * 1e-3 / len(some))
                    if marks is not None:
                        ticks, hz = marks.read()
                        sample.clocks.append(ticks / len(some))
                        sample.hz.append(hz)
        return samples

    @contextlib.contextmanager
    def _graph(
        self, calls: Sequence[Callable[[], object]], marks: _Marks | None
    ) -> Iterator[ctypes.c_void_p]:
        graph, run = ctypes.c_void_p(), ctypes.c_void_p()
        with self.current():
            driver.call("cuStreamBeginCapture_v2", self._stream, 2)  # other threads may allocate
            try:
                if marks is not None:
                    marks.write(0, self.handle)
                for call in calls:
                    call()
                if marks is not None:
                    marks.write(1, self.handle)
            finally:
                driver.call("cuStreamEndCapture", self._stream, ctypes.byref(graph))
        driver.call("cuGraphInstantiateWithFlags", ctypes.byref(run), graph, ctypes.c_uint64(0))
        try:
            yield run
        finally:
            driver.call("cuGraphExecDestroy", run)
            driver.call("cuGraphDestroy", graph)


@contextlib.contextmanager
def _event() -> Iterator[ctypes.c_void_p]:
    event = ctypes.c_void_p()
    driver.call("cuEventCreate", ctypes.byref(event), 0)
    try:
        yield event
    finally:
        driver.call("cuEventDestroy_v2", event)


class _Marks:
    """Clock and time of every multiprocessor, before and after."""

    def __init__(self, num_sms: int) -> None:
        facts = {"name": "mark", "arch": 80, "num_warps": 32, "shared_bytes": 0}
        self._mark = driver.load(
            Compiled(**facts, parameters=("u64",), ptx=MARK, cubin=b""),  # type: ignore[arg-type]
            ptx=True,
        )
        self._out = torch.zeros(2, MAX_SM_ID, 2, dtype=torch.int64, device="cuda")
        self._grid = (2 * num_sms,)  # of 1024 threads: each multiprocessor gets one or two
        torch.cuda.synchronize()

    def write(self, which: int, stream: int) -> None:
        """Enqueue."""
        self._mark.launch(self._grid, [self._out[which].data_ptr()], stream)

    def read(self) -> tuple[float, float]:
        """Return clocks from mark to mark (median of the multiprocessors), and Hz."""
        marks = self._out.cpu()
        seen = marks[:, :, 1].bool().all(0)
        assert bool(seen.any()), "no multiprocessor wrote both marks"
        ticks, nanoseconds = (marks[1] - marks[0])[seen].double().unbind(1)
        return float(ticks.median()), float((ticks / nanoseconds).median() * 1e9)


def copy_bandwidth(timer: Timer, turns: int) -> list[float]:
    """Bytes a second that a copy of 1 GiB (or an eighth of what is free) reads and writes."""
    size = min(COPY_BYTES, torch.cuda.mem_get_info()[0] // 8)
    source = torch.randint(0, 255, (size,), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    until = time.perf_counter() + WARM_UP_SECONDS
    while time.perf_counter() < until:
        timer.run(lambda: target.copy_(source))
    times = []
    for _ in range(turns):  # not from a graph: there a copy may run on a slower copy engine
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(4):
            target.copy_(source)
        stop.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(stop) * 1e-3 / 4)
    return [2 * source.nbytes / t for t in times]
