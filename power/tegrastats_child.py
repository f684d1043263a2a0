"""tegrastats as a running child whose lines are read as they come.

Invariant: the child is ended by its process id, never with `--stop`, which would end everybody's.
It has a session of its own, so that Ctrl-C in the terminal leaves it alone; if this process dies
without a word, the child's next line meets a closed pipe and ends it too. Hence its interval is at
most a second.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
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

        self._launch(look, enough.set)
        try:
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
        self.ended = None
        self._stopping = False
        try:
            self._child = subprocess.Popen(
                [program, "--interval", str(round(self.interval_s * 1000))],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        except OSError as error:
            raise PowerUnavailable(f"{program} cannot be run: {error.strerror}") from None
        self._thread = threading.Thread(
            target=self._read, args=(self._child, take, at_end), name="power-lines", daemon=True
        )
        self._thread.start()

    def _read(self, child: subprocess.Popen[bytes], take: _Take, at_end: _AtEnd) -> None:
        assert child.stdout is not None
        while chunk := child.stdout.readline(MAX_LINE_BYTES):
            if chunk.endswith(b"\n") and not self._stopping:  # without an end it is torn
                take(chunk.decode("utf-8", "replace"))
        if not self._stopping:
            self.ended = f"tegrastats ended ({_manner(child)})"
        at_end()

    def stop(self) -> None:
        """End the child and whatever it started in its own session."""
        self._stopping = True
        child, self._child = self._child, None
        if child is not None:
            _end(child)
        if self._thread is not None:
            self._thread.join(timeout=1.0)
            self._thread = None
        if child is not None and child.stdout is not None and not child.stdout.closed:
            with contextlib.suppress(OSError):
                child.stdout.close()


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
