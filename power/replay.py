"""A tegrastats log replayed as if it were live.

Invariant: the log's own interval is kept (1 s unless its dates say otherwise); after its end it
starts over, which the meter's notes say. What it measures is the log, not this machine.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from pathlib import Path

from edge_runtime.power.logfile import (
    DEFAULT_INTERVAL_S,
    HINT,
    LogSummary,
    PowerLogError,
    open_log,
    read_records,
)
from edge_runtime.power.rails import TotalRule, total_rule
from edge_runtime.power.source import PolledSource, PowerUnavailable, Sample
from edge_runtime.power.tegrastats import Record

_LOOKED_AT = 2000  # lines, for the interval and the total
MIN_INTERVAL_S = 0.02
_MOST_SKIPPED = 1000  # lines at a time, after a long pause


class ReplaySource(PolledSource):
    """Power from a log."""

    name = "replay"
    live = False

    def __init__(self, path: Path) -> None:
        super().__init__(DEFAULT_INTERVAL_S)
        self._path = path
        self._rule: TotalRule | None = None
        self._records: Iterator[Record] = iter(())
        self._begin_s: float | None = None
        self._given = 0
        self._rounds = 0

    def probe(self) -> str:
        """Read the log's beginning. Raises PowerLogError if it has no line with a total."""
        summary = LogSummary()
        with open_log(self._path) as stream:
            for record in itertools.islice(read_records(stream, str(self._path)), _LOOKED_AT):
                summary.add(record)
                if self._rule is None and record.total_rail is not None:
                    self._rule = total_rule(record.total_rail.split("+"))
        if self._rule is None:
            what = "line with a known total" if summary.lines else "line of tegrastats"
            raise PowerLogError(f"{self._path} has no {what}", HINT)
        step = summary.usual_step_s()
        self.interval_s = max(MIN_INTERVAL_S, step or DEFAULT_INTERVAL_S)
        self.rail, self.scope = self._rule.name, self._rule.scope
        how = "its dates" if step else "assumed"
        return f"replays {self._path}, a line every {self.interval_s:.3g} s ({how})"

    def read(self) -> Sample:
        """Return the line that is due, also when the reader was held up."""
        now = time.monotonic()
        if self._begin_s is None:
            self._begin_s = now
        due = int((now - self._begin_s) / self.interval_s + 0.5) + 1
        record = None
        for _ in range(min(max(1, due - self._given), _MOST_SKIPPED)):
            record = next(self._records, None) or self._start_over()
        assert record is not None
        assert self._rule is not None
        for _ in range(0 if self._given else _LOOKED_AT):  # begin with a reading
            if self._rule.total(record.rails) is not None:
                break
            record = next(self._records, None) or self._start_over()
        self._given = due
        total = self._rule.total(record.rails)
        if total is None:
            raise PowerUnavailable(f"this line of {self._path} has no {self.rail}")
        return Sample(time_s=now, total_mw=total, rails=record.rails, record=record)

    def _start_over(self) -> Record:
        self._rounds += 1
        if self._rounds == 2:
            self.notes.append(f"{self._path} ended and was started over")
        self._records = self._stream()
        if (record := next(self._records, None)) is None:
            raise PowerUnavailable(f"{self._path} has no line left")
        return record

    def _stream(self) -> Iterator[Record]:
        with open_log(self._path) as stream:
            yield from read_records(stream, str(self._path))
