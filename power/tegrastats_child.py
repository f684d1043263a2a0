"""tegrastats as a running child whose lines are read as they come.

Invariant: the child is ended by its process id, never with `--stop`, which would end everybody's.
It has a session of its own, so that Ctrl-C in the terminal leaves it alone; if this process dies
without a word, the kernel ends the child. The kernel does so when the thread that started the child
ends, so the thread that reads its lines starts it.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable

from edge_runtime.power.rails import TotalRule, total_rule
from edge_runtime.power.source import Emit, PowerUnavailable, Sample, Source
from edge_runtime.power.tegrastats import MAX_LINE_BYTES, Record, parse_line

MAX_INTERVAL_S = 1.0
MIN_INTERVAL_S = 0.02
PROBE_S = 3.0
PROBE_LINES = 3
_MAX_REASON = 200  # characters of what it says on stderr
# asks for PR_SET_PDEATHSIG, then becomes the program; what it does not do between fork and exec,
# as preexec_fn would, is safe beside other threads
_WRAPPER = """
import ctypes, os, sys
try:
    ctypes.CDLL(None).prctl(1, 9)
except (OSError, AttributeError):
    pass
try:
    os.execv(sys.argv[1], sys.argv[1:])
except OSError as error:
    sys.exit(f"{sys.argv[1]} cannot be run: {error.strerror}")
"""
_Take = Callable[[str], None]
_AtEnd = Callable[[], None]
_PLACES = ("/usr/bin/tegrastats", "/home/nvidia/tegrastats")  # r28 has it in the home folder


def find_program() -> str | None:
    """Return the path of tegrastats, or None."""
    found = shutil.which("tegrastats")
    return found or next((place for place in _PLACES if os.access(place, os.X_OK)), None)


class TegrastatsSource(Source):
    """Power from tegrastats, for which one rule names the total: the one of its first lines."""

    name = "tegrastats"

    def __init__(self, interval_s: float) -> None:
        super().__init__(min(MAX_INTERVAL_S, max(MIN_INTERVAL_S, interval_s)))
        self._child: subprocess.Popen[bytes] | None = None
        self._thread: threading.Thread | None = None
        self._started = threading.Event()
        self._failed: OSError | None = None
        self._stopping = False
        self._rule: TotalRule | None = None

    def probe(self) -> str:
        """Run it until a line has a total."""
        lines: list[str] = []
        enough = threading.Event()

        def look(line: str) -> None:
            lines.append(line)
            record = parse_line(line)
            if (record and record.total_mw is not None) or len(lines) >= PROBE_LINES:
                enough.set()

        try:
            self._launch(look, enough.set)
            enough.wait(PROBE_S)
        finally:
            self.stop()
        return self._judge(lines)

    def _judge(self, lines: list[str]) -> str:
        records = [record for record in map(parse_line, lines) if record is not None]
        if not lines:
            raise PowerUnavailable(self.ended or f"no line within {PROBE_S:.0f} s")
        if not records:
            raise PowerUnavailable(f"printed no line that can be read, but {lines[0][:60]!r}")
        record = next((r for r in records if r.total_mw is not None), records[-1])
        if record.total_rail is None or record.scope is None:
            if not record.rails:
                raise PowerUnavailable("prints no power rails (L4T r35 and older need root for it)")
            raise PowerUnavailable(f"no known total among its rails {', '.join(record.rails)}")
        self._rule = total_rule(record.total_rail.split("+"))
        self.rail, self.scope = record.total_rail, record.scope
        return f"prints {self.rail}"

    def start(self, emit: Emit) -> None:
        """Start the child; its lines are stamped when they arrive."""

        def take(line: str) -> None:
            now = time.monotonic()
            record = parse_line(line)
            if record is not None and (total := self._total(record)) is not None:
                emit(Sample(time_s=now, total_mw=total, rails=record.rails, record=record))

        self._launch(take, lambda: None)

    def _total(self, record: Record) -> int | None:
        return self._rule.total(record.rails) if self._rule is not None else record.total_mw

    def _launch(self, take: _Take, at_end: _AtEnd) -> None:
        program = find_program()
        if program is None:
            raise PowerUnavailable("no tegrastats on PATH")
        self.ended, self._failed, self._stopping = None, None, False
        self._started.clear()
        self._thread = threading.Thread(
            target=self._run, args=(program, take, at_end), name="power-lines", daemon=True
        )
        self._thread.start()
        self._started.wait()
        if self._failed is not None:
            raise PowerUnavailable(f"{program} cannot be run: {self._failed.strerror}")

    def _run(self, program: str, take: _Take, at_end: _AtEnd) -> None:
        wrapper = [sys.executable, "-I", "-S", "-c", _WRAPPER]
        try:
            child = self._child = subprocess.Popen(
                [*wrapper, program, "--interval", str(round(self.interval_s * 1000))],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
            )
        except OSError as error:
            self._failed = error
            return
        finally:
            self._started.set()
        if self._stopping:  # `stop` did not wait for it
            _end(child)
        said: list[str] = []
        errors = threading.Thread(target=_last_line, args=(child, said), daemon=True)
        errors.start()
        assert child.stdout is not None
        with contextlib.suppress(ValueError):  # it was closed while we read
            while chunk := child.stdout.readline(MAX_LINE_BYTES):
                if chunk.endswith(b"\n") and not self._stopping:  # without an end it is torn
                    take(chunk.decode("utf-8", "replace"))
        if not self._stopping:
            manner = _manner(child)
            errors.join(timeout=1.0)
            self.ended = ": ".join([f"tegrastats ended ({manner})", *said])
        at_end()

    def stop(self) -> None:
        """End the child and whatever it started in its own session."""
        self._stopping = True
        if self._thread is not None:
            self._started.wait(timeout=1.0)
        child, self._child = self._child, None
        if child is not None:
            _end(child)
        if self._thread is not None:
            self._thread.join(timeout=1.0)
            self._thread = None
        for stream in (child.stdout, child.stderr) if child is not None else ():
            if stream is not None and not stream.closed:
                with contextlib.suppress(OSError):
                    stream.close()


def _last_line(child: subprocess.Popen[bytes], said: list[str]) -> None:
    """Read stderr to its end; leave its last line in `said`."""
    assert child.stderr is not None
    with contextlib.suppress(ValueError, OSError):  # it was closed while we read
        while chunk := child.stderr.readline(MAX_LINE_BYTES):
            if text := chunk.decode("utf-8", "replace").strip():
                said[:] = [text[:_MAX_REASON]]


def _manner(child: subprocess.Popen[bytes]) -> str:
    try:
        code = child.wait(timeout=1.0)
    except subprocess.TimeoutExpired:
        return "its output was closed"
    return f"signal {-code}" if code < 0 else f"exit code {code}"


def _end(child: subprocess.Popen[bytes]) -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(child.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(timeout=0.5)
            break
    # the child may have left something behind that still holds the pipe
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, signal.SIGKILL)
