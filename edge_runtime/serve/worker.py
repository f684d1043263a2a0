"""The thread that owns the engine, and the queue before it.

Invariant: jobs run one at a time in the order they came; what a job emits goes to its own callback:
`Begun`, tokens, and a `Result` or an error at the end, exactly one of those unless it was cancelled
before it began. A job that fails leaves the engine usable.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from edge_runtime.decode.engine import Engine
from edge_runtime.decode.generation import Generation
from edge_runtime.decode.request import Result, Token
from edge_runtime.errors import BitnestError, InternalError

log = logging.getLogger(__name__)


class Begun:
    """A job's turn has come."""


Event = Begun | Token | Result | BitnestError
USUAL_S = 5.0  # of a request, until one was seen
ANSWERED = ("eos", "stop", "length", "deadline")  # not cancelled, nor failed
WEIGHT = 0.2  # of the last request in the running mean of their times


class QueueFull(BitnestError):
    """No place in the queue; `retry_after_s` says when there may be one."""

    http_status = 429

    def __init__(self, message: str, retry_after_s: int) -> None:
        super().__init__(message, f"try again in {retry_after_s} s")
        self.retry_after_s = retry_after_s


class Stopping(BitnestError):
    """The server ends; what was admitted is still answered, for a time."""

    http_status = 503
    retry_after_s = 30  # to end, and to be there again


@dataclass(slots=True)
class Job:
    """A prompt with the options of `Engine.generate`, made when its turn comes."""

    make: Callable[[Engine], Generation]
    emit: Callable[[Event], None]  # called from the worker's thread
    queued_s: float = field(default_factory=time.monotonic)
    emitted: int = 0  # tokens so far
    _generation: Generation | None = None
    _cancelled: threading.Event = field(default_factory=threading.Event)

    def cancel(self) -> None:
        """Stop within one cycle, or never begin; from any thread."""
        self._cancelled.set()
        if (running := self._generation) is not None:
            running.cancel()

    @property
    def cancelled(self) -> bool:
        """Whether it was."""
        return self._cancelled.is_set()

    def run(self, engine: Engine) -> Result | None:
        """Run it to its end; the result, if it came to one."""
        if self.cancelled:
            return None
        self.emit(Begun())
        generation = self._generation = self.make(engine)
        if self.cancelled:  # between the two lines above
            generation.cancel()
        for token in generation:
            self.emitted += 1
            self.emit(token)
        self.emit(generation.result)
        return generation.result


@dataclass(slots=True)
class Totals:
    """Counts since the start, of ended requests."""

    requests: dict[str, int] = field(default_factory=dict)  # by how they ended
    prompt_tokens: int = 0
    cached_tokens: int = 0
    new_tokens: int = 0
    cycles: int = 0
    drafted: int = 0
    accepted: int = 0
    busy_s: float = 0.0
    decode_s: float = 0.0

    def add(self, how: str, result: Result | None, seconds: float) -> None:
        """Count a request that has ended."""
        self.requests[how] = self.requests.get(how, 0) + 1
        self.busy_s += seconds
        if result is not None:
            self.prompt_tokens += result.prompt_tokens
            self.cached_tokens += result.cached_tokens
            self.new_tokens += result.new_tokens
            self.decode_s += result.decode_s
            for name in ("cycles", "drafted", "accepted"):
                value = int(result.draft.get(name, 0))
                setattr(self, name, getattr(self, name) + value)


class Worker:
    """Runs jobs on an engine. `start` it, `submit` jobs, `stop` it."""

    def __init__(self, engine: Engine, max_queue: int) -> None:
        self.engine, self.totals = engine, Totals()
        self.last: Result | None = None
        self._max_queue = max_queue
        self._queue: deque[Job] = deque()
        self._changed = threading.Condition()
        self._stopping = False
        self._running: Job | None = None
        self._emitted = 0  # by jobs that have ended
        self._mean_s = USUAL_S
        self._thread = threading.Thread(target=self._work, name="engine", daemon=True)

    def start(self) -> None:
        """Begin to work."""
        self._thread.start()

    def submit(self, job: Job) -> None:
        """Queue a job. Raises QueueFull, Stopping."""
        with self._changed:
            if self._stopping:
                raise Stopping("the server is shutting down")
            self._queue = deque(queued for queued in self._queue if not queued.cancelled)
            waiting = len(self._queue)
            if waiting >= self._max_queue and (waiting or self.busy):
                wait = max(1, round(self._mean_s * (waiting + 1)))
                raise QueueFull(
                    f"{waiting} requests are waiting, which is all there is room for", wait
                )
            self._queue.append(job)
            self._changed.notify()

    @property
    def waiting(self) -> int:
        """Jobs in the queue."""
        return sum(not job.cancelled for job in list(self._queue))

    @property
    def busy(self) -> bool:
        """Whether a job runs."""
        return self._running is not None

    @property
    def emitted(self) -> int:
        """Tokens of all answers, of the one that runs so far; never fewer than before."""
        with self._changed:
            return self._emitted + (0 if self._running is None else self._running.emitted)

    @property
    def alive(self) -> bool:
        """Whether jobs are run."""
        return self._thread.is_alive()

    def give_up(self) -> None:
        """End what was admitted and is not answered yet, with an error."""
        with self._changed:
            self._stopping = True
            for job in [*self._queue, *([self._running] if self._running else [])]:
                job.emit(Stopping("the server shut down before the answer was whole"))
                job.cancel()

    def stop(self, *, drain: bool = True, timeout_s: float | None = None) -> bool:
        """Take no more jobs; let those that are there end, or cancel them. Whether all ended."""
        with self._changed:
            self._stopping = True
            if not drain:
                for job in [*self._queue, *([self._running] if self._running else [])]:
                    job.cancel()
            self._changed.notify()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue or self._stopping)
                if not self._queue:
                    return
                job = self._running = self._queue.popleft()
            try:
                self._run(job)
            finally:
                with self._changed:
                    self._emitted += job.emitted
                    self._running = None

    def _run(self, job: Job) -> None:
        started, result = time.monotonic(), None
        how = "cancelled"
        try:
            result = job.run(self.engine)
            if result is not None:
                how, self.last = result.finish_reason, result
        except BitnestError as error:
            how = "error"
            job.emit(error)
        except BaseException as error:  # not even a panic may end the thread that all need
            log.exception("a request failed")
            how = "error"
            job.emit(InternalError(f"internal error: {type(error).__name__}"))
        seconds = time.monotonic() - started
        if how in ANSWERED:
            self._mean_s += WEIGHT * (seconds - self._mean_s)
        self.totals.add(how, result, seconds)
