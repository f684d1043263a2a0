"""A tegrastats log: read in bounded memory, summed up without keeping its lines.

Invariant: a line that was cut does not change what the total is of. A line whose total is unknown
counts as a line and as time, not as 0 mW: the mean is over the lines that say it. The duration is
that of the dates when every line has one: their span less its holes (a logger that was stopped, a
clock that was set), each taken for one usual step. Without dates it is lines times the interval
that tegrastats was told, 1 s unless said otherwise.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import IO

from edge_runtime.errors import BitnestError
from edge_runtime.power.tegrastats import Record, parse_line, read_lines

DEFAULT_INTERVAL_S = 1.0
HINT = "expected a log of tegrastats, e.g. of: tegrastats --interval 1000 --logfile FILE"
_LONGEST_STEP_S = 3600  # beyond it dates are no intervals: lines of several logs, say
_HOLE_S = 10  # at least this long, and
_HOLE_STEPS = 10  # this many usual steps


class PowerLogError(BitnestError):
    """A power log that cannot be read or holds no line of tegrastats."""

    exit_code = 5


def open_log(path: Path) -> IO[bytes]:
    """Open a log. Raises PowerLogError if it is missing, a folder or not readable."""
    try:
        return path.open("rb")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise PowerLogError(f"cannot read the power log {path}: {reason}", HINT) from None


def read_records(stream: IO[bytes], name: str) -> Iterator[Record]:
    """Yield what a log's lines say; other lines are passed over.

    Raises PowerLogError if reading fails.
    """
    try:
        yield from _with_sure_totals(filter(None, map(parse_line, read_lines(stream))))
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise PowerLogError(f"cannot read the power log {name}: {reason}", HINT) from None


def _with_sure_totals(records: Iterator[Record]) -> Iterator[Record]:
    """Yield records; the total of a line that was cut before the rail of its total is unknown.

    Of a Thor's line cut before VIN, the sum of the module is left. Such a line has only some of the
    rails of the lines around it, and another total than they.
    """
    before: Record | None = None
    held: Record | None = None
    for record in itertools.chain(records, [None]):
        if held is not None:
            around = [r for r in (before, record) if r is not None and r.total_mw is not None]
            if around and all(_is_cut(held, whole) for whole in around):
                held = replace(held, total_mw=None, total_rail=None, scope=None)
            elif held.total_mw is not None:
                before = held
            yield held
        held = record


def _is_cut(record: Record, whole: Record) -> bool:
    return record.rails.keys() < whole.rails.keys() and record.total_rail != whole.total_rail


@dataclass(frozen=True, slots=True)
class LogTotals:
    """A log in figures; None is unknown. `how` says where the duration is from."""

    lines: int
    lines_with_total: int
    rails: tuple[str, ...]  # the names of the totals, one unless the log mixes boards
    duration_s: float | None
    mean_mw: float | None
    energy_j: float | None
    how: str


class LogSummary:
    """Add records in order, then ask for the totals."""

    def __init__(self) -> None:
        self.lines = 0
        self._known = 0
        self._sum_mw = 0
        self._rails: dict[str, None] = {}
        self._dated = 0
        self._last: datetime | None = None
        self._steps: Counter[int] = Counter()

    def add(self, record: Record) -> None:
        """Count one line."""
        self.lines += 1
        if record.total_mw is not None and record.total_rail is not None:
            self._known += 1
            self._sum_mw += record.total_mw
            self._rails[record.total_rail] = None
        if record.date is not None:
            self._dated += 1
            if self._last is not None:
                self._steps[round((record.date - self._last).total_seconds())] += 1
            self._last = record.date

    def totals(self, interval_s: float | None = None) -> LogTotals:
        """Return the figures; `interval_s` given by the user goes before the dates."""
        duration, how = self._duration(interval_s)
        mean = self._sum_mw / self._known if self._known else None
        energy = mean * duration / 1000 if mean is not None and duration is not None else None
        return LogTotals(
            lines=self.lines,
            lines_with_total=self._known,
            rails=tuple(self._rails),
            duration_s=duration,
            mean_mw=mean,
            energy_j=energy,
            how=how,
        )

    def _duration(self, interval_s: float | None) -> tuple[float | None, str]:
        if interval_s is not None:
            return self.lines * interval_s, f"{self.lines} lines of {interval_s:g} s"
        if self._dated == self.lines > 1:
            if set(self._steps) == {0}:
                return None, "all dates are the same second; say --interval"
            if (usual := self.usual_step_s()) is not None:
                return self._dated_duration(usual)
        if self._dated == self.lines > 1:
            how = "the dates make no sense"
        elif 0 < self._dated < self.lines:
            how = f"only {self._dated} of {self.lines} lines have a date"
        else:
            how = "no dates" if self.lines > 1 else "a single line"
        seconds = self.lines * DEFAULT_INTERVAL_S
        return seconds, f"{how}: {self.lines} lines of {DEFAULT_INTERVAL_S:g} s assumed"

    def _dated_duration(self, usual: float) -> tuple[float, str]:
        limit = max(_HOLE_S, _HOLE_STEPS * usual)
        holes = sum(n for step, n in self._steps.items() if step < 0 or step > limit)
        kept = sum(step * n for step, n in self._steps.items() if 0 <= step <= limit)
        how = "from the dates"
        if holes:
            how += f", {holes} hole{'s' if holes > 1 else ''} left out"
        return kept + holes * usual, how

    def usual_step_s(self) -> float | None:
        """Return the mean step between dates in s, holes left out; None without dates.

        Dates have whole seconds, so the median would be 0 or 1 whatever the interval.
        """
        steps = {step: n for step, n in self._steps.items() if step >= 0}
        if self._dated < 2 or not steps or set(steps) == {0}:
            return None
        middle = _median(steps)
        limit = max(_HOLE_S, _HOLE_STEPS * middle)
        near = {step: n for step, n in steps.items() if step <= limit} or steps
        mean = sum(step * n for step, n in near.items()) / sum(near.values())
        return mean if 0 < mean <= _LONGEST_STEP_S else None


def _median(counts: dict[int, int]) -> int:
    left = sum(counts.values()) // 2
    for value in sorted(counts):
        left -= counts[value]
        if left < 0:
            return value
    return 0
