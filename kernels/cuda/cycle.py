"""Whole draft-verify cycles on the device: the next one is launched before the last one is read.

Invariant: a cycle is one graph (draft steps, look-up, verification, choice, acceptance), captured
once for each kind: numbers of drafted tokens, bucket of lengths, way of choosing. Tokens and their
number stay on the device, which writes a report of a few numbers into the host's memory; the host
sleeps until its event has come. The tokens are those of `decode.generation`: a draft changes none.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from edge_runtime.kernels import ops
from edge_runtime.kernels.cuda import ngram, sampling
from edge_runtime.kernels.cuda.graphs import Graphs
from edge_runtime.kernels.cuda.launch import Kernel
from edge_runtime.kernels.cuda.memory import PASS_HINT, asking_for
from edge_runtime.kernels.cuda.passes import CudaCache, Pass
from edge_runtime.kernels.cuda.sizes import REPORT_HEADER, REPORT_IDS
from edge_runtime.kernels.layout import KV_BLOCK, MAX_GAMMA, MOST_FORCED
from edge_runtime.kernels.sampling import Parameters

if TYPE_CHECKING:
    from edge_runtime.kernels.cuda.backend import CudaBackend
    from edge_runtime.kernels.cuda.logits import Room

draft_row = Kernel("cycle_kernels", "draft_row", plain=(8, 9), pdl=True)
verify_rows = Kernel("cycle_kernels", "verify_rows", plain=(8, 9), pdl=True)
accept = Kernel("cycle_kernels", "accept", plain=(8, 9))

WIDTH, HEADER = REPORT_IDS, REPORT_HEADER
ROWS = MAX_GAMMA + 1
# of a cycle's time: slept through (a sleep ends late by itself), and between two looks
SLEEP_PART, LOOK_PART = 1.0, 0.02
Kind = tuple[int, int, int, str, bool]  # base tokens, looked-up ones, bucket, choice, forced


class CudaCycles:
    """Cycles over one cache. `launch` may run ahead of `read` by one."""

    def __init__(
        self,
        backend: CudaBackend,
        target: ops.Program,
        draft: ops.Program,
        cache: CudaCache,
        recent: int | None,
    ) -> None:
        """recent: of `layout.full_from`, what a draft reads of the cache."""
        self._backend, self._cache = backend, cache
        self._target, self._draft = target, draft
        self._recent = -1 if recent is None else recent
        device = backend.device

        def new(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self._tokens = new(cache.capacity + WIDTH)
        self._state = new(2)
        self._drafted = new(WIDTH)
        self._inputs = new(3, ROWS)  # ids, positions, first full tokens
        self._counts = torch.arange(ROWS, dtype=torch.int32, device=device)
        self._forced = new(MOST_FORCED + 1)  # a number of entries, then those
        self._looked = ngram.new_draft(cache.capacity + WIDTH, device)
        self._settings = sampling.Settings(
            new(ROWS, 3, dtype=torch.int64), new(ROWS, 5, dtype=torch.float64)
        )
        self._rooms: dict[bool, sampling.Room] = {}  # by whether top-k or top-p cut
        self._choice = "greedy"
        self._is_forced = False
        gpu = device.type == "cuda"
        self._report = torch.zeros(2, HEADER + WIDTH, dtype=torch.int32, pin_memory=gpu)
        self._reported = self._report.numpy()  # the same memory
        self._marks = _Marks(gpu)
        self._seconds: dict[Kind, float] = {}  # that one of a kind took the last time
        self._ended = 0.0  # when the last one ended, about
        self._graphs = Graphs()
        self._room: Room
        self._waiting: deque[_Launched] = deque()  # and not read
        self._count = 0

    def begin(
        self, tokens: Sequence[int], parameters: Parameters, forced: Sequence[int] = ()
    ) -> None:
        """Start a text. tokens: ids by position (-1 where an embedding row was), the last of which
        is not in the cache. forced: for timing alone, how many drafted tokens to accept, in turns,
        whatever the target chose. What was launched before is dropped."""
        assert parameters.repetition_penalty == 1
        assert parameters.presence_penalty == 0
        device = self._tokens.device
        self._waiting.clear()
        self._marks.use_current_stream()
        self._tokens[: len(tokens)] = torch.tensor(tokens, dtype=torch.int32).to(device)
        self._state.copy_(torch.tensor([len(tokens), 0], dtype=torch.int32))
        self._count = 0
        self._choice = "greedy"
        if parameters.temperature > 0:
            truncate = parameters.top_k > 0 or parameters.top_p < 1
            self._choice = "truncated" if truncate else "sampled"
            made = sampling.Settings.of([parameters] * ROWS, [0] * ROWS, device)
            self._settings.ints.copy_(made.ints)
            self._settings.floats.copy_(made.floats)
        assert len(forced) <= MOST_FORCED
        self._is_forced = bool(forced)
        if forced:
            values = torch.tensor([len(forced), *forced], dtype=torch.int32)
            self._forced[: len(values)] = values.to(device)

    def launch(self, base: int, look_up: int, most_tokens: int) -> None:
        """Enqueue a cycle of `base` draft steps and up to `look_up` tokens by look-up.

        most_tokens: that the text may have by then, as far as the caller knows.
        """
        assert base + look_up <= MAX_GAMMA
        assert len(self._waiting) < 2, "a report would be overwritten"
        rows = 1 + base + look_up
        assert most_tokens - 1 + rows <= self._cache.capacity, "rows beyond the cache"
        kind = (
            base, look_up, self._cache.bucket(most_tokens - 1 + rows), self._choice,
            self._is_forced,
        )  # fmt: skip
        graph = self._graphs.captured(kind, self._backend.passes.registers)
        if graph is not None:
            self._backend.free_room()
            begin = self._marks.begin(self._count, follows=bool(self._waiting))
            graph.replay()
        else:
            what, num_bytes = f"a cycle of {rows} rows", self._backend.workspace_bytes
            with asking_for(what, num_bytes, self._tokens.device, PASS_HINT):
                self._prepare()
                begin = self._marks.begin(self._count)
                self._replay(kind)
        self._marks.end(self._count)
        at = None if graph is None else time.perf_counter()
        self._waiting.append(_Launched(self._count, kind, begin, at))
        self._count += 1

    def read(self) -> ops.Cycle:
        """Wait for the oldest cycle and return what it made. Raises NumericError."""
        number, kind, begin, at = self._waiting.popleft()
        begun = max(at or 0.0, self._ended)
        self._marks.wait(number, begun, None if at is None else self._seconds.get(kind))
        seconds, self._ended = self._marks.seconds(begin, number), time.perf_counter()
        if at is not None:
            self._seconds[kind] = seconds
            self._ended = min(self._ended, begun + seconds)  # it may have been seen late
        count, drafted, finite, _, *tokens = self._reported[number % 2].tolist()
        if not finite:
            raise ops.not_finite()
        return ops.Cycle(tokens[:count], drafted, seconds)

    # a cycle

    def release(self) -> None:
        """Give graphs and the sampler's room back; the next cycle makes them anew."""
        self._graphs.clear()
        self._rooms.clear()

    def _prepare(self) -> None:
        """Have the registers of both programs and the logits' room: they may have been given back
        since, or lent to logits that someone holds."""
        for program in (self._target, self._draft):
            self._backend.prepare(program)
        self._room = self._backend.free_room()

    def _replay(self, kind: Kind) -> None:
        launch = partial(self._launch, kind)
        if self._tokens.device.type == "cuda":
            self._graphs.run(kind, launch, self._backend.passes.registers)
        else:
            launch()

    def _launch(self, kind: Kind) -> None:
        base, look_up, bucket, _, forced = kind
        for step in range(base):
            self._draft_row(step)
            self._run(self._draft, 1, bucket)
        if base:
            self._draft_row(base)  # notes what the last step chose
        if look_up:
            counts = self._counts[base : base + 1]
            ngram.look_up(
                self._tokens, self._state[:1], self._drafted, counts, look_up, self._looked
            )
        rows = 1 + base + look_up
        self._verify(base, rows, bucket, looked=look_up > 0, forced=forced)

    def _draft_row(self, step: int) -> None:
        draft_row[(1,)](
            self._state,
            self._tokens,
            self._chosen(1)[0],
            self._drafted,
            *self._inputs,
            self._settings.ints,
            step,
            self._recent,
            FIRST=step == 0,
            BLOCK=KV_BLOCK,
            SAMPLED=self._choice != "greedy",
            num_warps=1,
        )

    def _verify(self, base: int, rows: int, bucket: int, *, looked: bool, forced: bool) -> None:
        verify_rows[(1,)](
            self._state,
            self._tokens,
            self._drafted,
            self._looked.ids,
            *self._inputs,
            self._settings.ints,
            base,
            rows,
            SAMPLED=self._choice != "greedy",
            WIDTH=WIDTH,
            num_warps=1,
        )
        self._run(self._target, rows, bucket)
        accept[(1,)](
            self._state,
            self._tokens,
            self._inputs[0],
            *self._chosen(rows),
            self._looked.count,
            self._forced,
            self._report,
            base,
            rows,
            LOOKED=looked,
            FORCED=forced,
            WIDTH=WIDTH,
            num_warps=1,
        )

    def _run(self, program: ops.Program, rows: int, bucket: int) -> None:
        """One pass, and the choice of its rows."""
        ids, positions, full_from = self._inputs[:, :rows]
        values, choice = self._room.part(slice(rows))
        one = Pass(
            num_rows=rows,
            num_logits=rows,
            positions=positions,
            full_from=full_from,
            ids=ids,
            rows=None,
            cache=self._cache,
            tokens=bucket,
            logits=(values, choice),
        )
        self._backend.passes.launch(program, one)
        if self._choice == "greedy":
            return
        truncate = self._choice == "truncated"
        sampling.sample(
            values,
            self._backend.geometry.num_tokens,
            sampling.Settings(self._settings.ints[:rows], self._settings.floats[:rows]),
            truncate=truncate,
            out=self._sampling_room(rows, truncate=truncate),
        )

    def _sampling_room(self, rows: int, *, truncate: bool) -> sampling.Room:
        if truncate not in self._rooms:
            self._rooms[truncate] = sampling.new_room(
                ROWS, self._backend.geometry.num_tokens, self._tokens.device, truncate=truncate
            )
        return self._rooms[truncate].part(rows)

    def _chosen(self, rows: int) -> tuple[Tensor, Tensor]:
        """Where the choice of a pass lies: ids and whether its rows are finite."""
        if self._choice == "greedy":
            return self._room.found[0], self._room.found[1]
        room = self._sampling_room(rows, truncate=self._choice == "truncated")
        return room.index, room.finite


class _Launched(NamedTuple):
    """number: of the cycle; begin: its mark; at: when its graph was (`time.perf_counter`), None
    where it was not there yet and what the host did counts."""

    number: int
    kind: Kind
    begin: int
    at: float | None


class _Marks:
    """Marks in the stream of the device: the ends of three cycles, and their beginnings where no
    end is one. What costs here is the host: a mark takes 10 us of a core (H200) that has slept."""

    def __init__(self, gpu: bool) -> None:
        self._times = [0.0] * 6
        self._events: list[torch.cuda.Event] = []
        if gpu:
            self._events = [torch.cuda.Event(enable_timing=True, blocking=True) for _ in range(6)]

    def use_current_stream(self) -> None:
        """Take the current stream from now on: to look it up costs as much as a mark."""
        if self._events:
            self._stream = torch.cuda.current_stream()

    def begin(self, number: int, *, follows: bool = False) -> int:
        """Return the mark that a cycle begins with. follows: at once on the end of the last one."""
        if follows:
            return (number - 1) % 3
        self._put(3 + number % 3)
        return 3 + number % 3

    def end(self, number: int) -> None:
        """Put the mark that a cycle ends with."""
        self._put(number % 3)

    def _put(self, mark: int) -> None:
        if self._events:
            self._events[mark].record(self._stream)
        else:
            self._times[mark] = time.perf_counter()

    def wait(self, number: int, begun: float, expected: float | None) -> None:
        """Sleep until the end of a cycle. begun: when it began (`time.perf_counter`), about;
        expected: seconds from then on, where known. An event's own wait takes a third of a
        millisecond of a core (H200), a sleep and a look 10 us."""
        if not self._events:
            return
        end = self._events[number % 3]
        if expected is None:
            end.synchronize()
            return
        time.sleep(max(0.0, begun + SLEEP_PART * expected - time.perf_counter()))
        while not end.query():
            time.sleep(LOOK_PART * expected)

    def seconds(self, begin: int, number: int) -> float:
        """Return the time from a mark to the end of a cycle, after `wait`."""
        if not self._events:
            return self._times[number % 3] - self._times[begin]
        return float(self._events[begin].elapsed_time(self._events[number % 3])) * 1e-3
