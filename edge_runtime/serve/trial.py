"""Schemas are tried where a limit ends what takes too long or too much.

A schema of a few hundred characters can keep llguidance busy for minutes and take gigabytes, in a
call that nothing interrupts. So each new one is first made in a process of its own, its first mask
too, under limits of CPU time, memory and wall time. A helper process holds the vocabulary, and
forks: the server itself, with its threads, never does. What was found is remembered by hash; what
other programs had a part in (the wall time, memory that the machine lacks) is not.

The matcher itself is made anew for each answer, in less than the CPU time of a trial: copies of
llguidance's share the states of one lexer, which many answers together would use up.

Invariant: whatever a schema does, `run` ends within the wall time and the start of a helper, and
the server's memory does not grow.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import resource
import select
import signal
import subprocess
import sys
import threading
import time
from collections import OrderedDict
from typing import IO, Any

import msgspec

from edge_runtime.errors import BitnestError, UsageError
from edge_runtime.serve import schema
from edge_runtime.serve.schema import Vocabulary

STACK_BYTES = 1 << 20  # less than any thread of the server has
NICE = 5  # answers that are being written go first
START_S = 30.0  # for a helper to be there
MOST_KNOWN = 256
HEAD_BYTES = 4  # of a message: its length
COMMAND = "from edge_runtime.serve.trial import main; main()"
SIMPLER = "make the schema simpler: fewer patterns, multipleOf, allOf and values"


class TrialFailed(BitnestError):
    """No schema can be tried now."""

    http_status = 503


class Limits(msgspec.Struct):
    """Of one schema, in seconds and bytes; memory is what it takes beyond the helper's. CPU time is
    what each answer's matcher may take again of the engine's time."""

    cpu_s: float = 0.5
    wall_s: int = 10
    memory_bytes: int = 32 << 20


class Verdict(msgspec.Struct):
    """Why a schema is refused; nothing: it passed."""

    message: str = ""
    hint: str = ""

    def check(self) -> None:
        """Raise UsageError where it is refused."""
        if self.message:
            raise UsageError(self.message, self.hint)


class Trials:
    """Tries schemas, one at a time. `start` it, `stop` it."""

    def __init__(self, vocabulary: Vocabulary, limits: Limits | None = None) -> None:
        self._limits = limits or Limits()
        self._first = msgspec.msgpack.encode((vocabulary, self._limits))
        self._known: OrderedDict[bytes, Verdict] = OrderedDict()
        self._lock = threading.Lock()  # of what is known
        self._turn = threading.Lock()  # to ask the helper
        self._helper: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the helper and tell it the vocabulary."""
        path = os.pathsep.join(map(os.path.abspath, sys.path))
        self._helper = subprocess.Popen(
            [sys.executable, "-c", COMMAND], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL, cwd="/", env=os.environ | {"PYTHONPATH": path},
            start_new_session=True,
        )  # fmt: skip
        with contextlib.suppress(BrokenPipeError):  # told by who asks it
            _send(self._pipes()[0], self._first)

    def stop(self) -> None:
        """End the helper."""
        if (helper := self._helper) is not None:
            helper.kill()
            for pipe in self._pipes():
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()
            helper.wait()
            self._helper = None

    def known(self, text: str) -> Verdict | None:
        """What was found of a schema, where it was tried."""
        with self._lock:
            if (verdict := self._known.get(key := _hash(text))) is not None:
                self._known.move_to_end(key)
            return verdict

    def run(self, text: str) -> Verdict:
        """Try a schema, unless it was. Raises TrialFailed where that cannot be."""
        with self._turn:
            if (verdict := self.known(text)) is None:
                verdict = self._verdict(text)
                with self._lock:
                    self._known[_hash(text)] = verdict
                    if len(self._known) > MOST_KNOWN:
                        self._known.popitem(last=False)
            return verdict

    def _verdict(self, text: str) -> Verdict:
        for _ in range(2):  # a helper that was ended from outside is started again
            if self._helper is None:
                self.start()
            ask, hear = self._pipes()
            try:
                _send(ask, text.encode())
                said = _read(hear, START_S + self._limits.wall_s)
                verdict = msgspec.msgpack.decode(said, type=Verdict | None)
            except (OSError, EOFError, msgspec.DecodeError):
                self.stop()
                continue
            if verdict is None:
                break
            return verdict
        raise TrialFailed("the schema cannot be tried now", "try again later")

    def _pipes(self) -> tuple[IO[bytes], IO[bytes]]:
        helper = self._helper
        assert helper is not None
        assert helper.stdin is not None
        assert helper.stdout is not None
        return helper.stdin, helper.stdout


def _hash(text: str) -> bytes:
    return hashlib.blake2b(text.encode(), digest_size=16).digest()


def _send(pipe: IO[bytes], data: bytes) -> None:
    pipe.write(len(data).to_bytes(HEAD_BYTES, "little") + data)
    pipe.flush()


def _read(pipe: IO[bytes], seconds: float | None = None) -> bytes:
    """Return a message. Raises EOFError, TimeoutError."""
    end = None if seconds is None else time.monotonic() + seconds

    def some(size: int) -> bytes:
        data = b""
        while len(data) < size:
            if end is not None:
                left = end - time.monotonic()
                if left <= 0 or not select.select([pipe], [], [], left)[0]:
                    raise TimeoutError
            part = os.read(pipe.fileno(), size - len(data))
            if not part:
                raise EOFError
            data += part
        return data

    return some(int.from_bytes(some(HEAD_BYTES), "little"))


# the helper


def main() -> None:
    """Read the vocabulary, then schemas; write a verdict on each. Ends with its input."""
    for number in (signal.SIGINT, signal.SIGTERM):  # of the server, which drains meanwhile
        signal.signal(number, signal.SIG_IGN)
    hear, say = sys.stdin.buffer, sys.stdout.buffer
    vocabulary, limits = msgspec.msgpack.decode(_read(hear), type=tuple[Vocabulary, Limits])
    told = vocabulary.told()
    with contextlib.suppress(EOFError, BrokenPipeError):
        while True:
            _send(say, msgspec.msgpack.encode(_apart(told, _read(hear).decode(), limits)))


def _apart(told: Any, text: str, limits: Limits) -> Verdict | None:
    """Try it in a fork; None: the machine had no time or no memory for it."""
    ours, theirs = os.pipe()
    child = os.fork()
    if not child:
        _hold(limits)
        os.write(theirs, msgspec.msgpack.encode(_try(told, text)))
        os._exit(0)
    os.close(theirs)
    with open(ours, "rb") as pipe:
        said = pipe.read()
    status = os.waitpid(child, 0)[1]
    if said:
        return msgspec.msgpack.decode(said, type=Verdict)
    ended_by = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
    if ended_by in (signal.SIGALRM, signal.SIGKILL):
        return None
    if ended_by == signal.SIGPROF:
        return _beyond(f"{limits.cpu_s:g} s of CPU time")
    return _beyond(f"{limits.memory_bytes >> 20} MiB of memory")


def _beyond(limit: str) -> Verdict:
    return Verdict(f"response_format: a grammar of this schema takes more than {limit}", SIMPLER)


def _hold(limits: Limits) -> None:
    """Set the limits of this process."""
    with open("/proc/self/statm") as file:
        now = int(file.read().split()[0]) * resource.getpagesize()
    for what, most in (
        (resource.RLIMIT_AS, now + limits.memory_bytes),
        (resource.RLIMIT_STACK, STACK_BYTES),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(what, (most, most))
    with open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")  # it is ended before the server
    signal.setitimer(signal.ITIMER_PROF, limits.cpu_s)  # SIGPROF
    signal.alarm(limits.wall_s)
    os.nice(NICE)


def _try(told: Any, text: str) -> Verdict:
    try:
        schema.mask(schema.matcher(told, text))
    except UsageError as error:
        return Verdict(error.message, error.hint)
    except BaseException as error:  # a panic, or no memory for one
        return Verdict(f"response_format: the schema cannot be followed: {type(error).__name__}")
    return Verdict()
