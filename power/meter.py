"""A meter: one source of power readings, and named windows over its record.

Invariant: an explicit source that does not work is an error with its reason; `auto` takes the first
that can be read and keeps why the others were not taken. Opening and closing a window costs two
looks at the clock; all arithmetic is done when an energy is asked for.

    with open_meter("auto") as meter:
        meter.measure_idle(3.0)
        with meter.window("decode"):
            ...
    print(meter.energy("decode"))
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from array import array
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

import numpy as np

from edge_runtime.errors import UsageError, cut
from edge_runtime.power.curve import Curve, merged
from edge_runtime.power.energy import IDLE, Span, WindowEnergy, idle_mw, measure
from edge_runtime.power.ina3221 import Ina3221Source
from edge_runtime.power.jtop import JtopSource
from edge_runtime.power.lag import Lag
from edge_runtime.power.nvml import NvmlSource
from edge_runtime.power.replay import ReplaySource
from edge_runtime.power.source import PowerUnavailable, Sample, Source
from edge_runtime.power.tegrastats_child import TegrastatsSource

log = logging.getLogger(__name__)

AUTO = ("ina3221", "tegrastats", "jtop", "nvml")  # files first: they need no child and no root
WORDS = "auto, tegrastats, ina3221, jtop, nvml, replay:FILE or none"
TAIL_S = 1.6  # readings after the last window: what the sensor still holds
FIRST_SAMPLE_S = 3.0
# 40 uV over the shunt, times the voltage: 5 mOhm at 5 V on Orin NX and Nano, 2 mOhm on AGX Orin,
# whose first two rails hang on about 20 V
USUAL_STEP_MW = 40.0
STEPS_MW = {"VDD_GPU_SOC": 400.0, "VDD_CPU_CV": 400.0, "VIN_SYS_5V0": 100.0}
_ENOUGH_VALUES = 5  # different ones, to see the step in them
_SAME_S = 0.0005  # intervals of a window nearer than this are one
_MOST_VALUES = 512


class Window:
    """Intervals of one name; a context manager that may be entered again, but not inside itself."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._begins = array("d")
        self._ends = array("d")
        self._open: float | None = None
        self.version = 0  # goes up when intervals change
        self._kept: tuple[int, list[Span]] = (0, [])

    def __enter__(self) -> Window:
        """Begin an interval."""
        if self._open is not None:
            raise ValueError(f"window {self.name!r} is open already")
        self._open = time.monotonic()
        return self

    def __exit__(self, *_: object) -> None:
        """End the interval."""
        assert self._open is not None
        self.add(self._open, time.monotonic())
        self._open = None

    def add(self, begin_s: float, end_s: float) -> None:
        """Add an interval of the monotonic clock; overlapping time counts once."""
        if end_s < begin_s:
            raise ValueError(f"window {self.name!r}: an interval ends before it begins")
        self.version += 1
        if self._ends and self._begins[-1] <= begin_s <= self._ends[-1] + _SAME_S:
            self._ends[-1] = max(self._ends[-1], end_s)
        else:
            self._begins.append(begin_s)
            self._ends.append(end_s)

    def spans(self) -> list[Span]:
        """Return the intervals in order; one that is open counts up to now."""
        if self._kept[0] != self.version:
            found = list(zip(self._begins, self._ends, strict=True))
            self._kept = self.version, merged(found, _SAME_S)
        if (begin := self._open) is not None:
            return merged([*self._kept[1], (begin, time.monotonic())], _SAME_S)
        return self._kept[1]

    @property
    def is_open(self) -> bool:
        """Say whether an interval has begun and not ended."""
        return self._open is not None


class Meter:
    """Readings of one source and windows over them; made by `open_meter`.

    `source` is its name, `rail` that of the total, `scope` what it covers, `why` what was taken
    and why the others were not.
    """

    def __init__(self, source: Source | None, why: list[str]) -> None:
        self._source = source
        self.source = source.name if source is not None else "none"
        self.rail = source.rail if source is not None else ""
        self.scope = source.scope if source is not None else ""
        self.why = why
        self._windows: dict[str, Window] = {}
        self._lock = threading.Lock()
        self._times, self._mw, self._energy = array("d"), array("d"), array("d")
        self._values: dict[str, set[int]] = {name: set() for name in self.rail.split("+")}
        self._latest: Sample | None = None
        self._arrived = threading.Event()
        self._curve: tuple[object, Curve] | None = None
        self._running = False

    # ---- running

    def __enter__(self) -> Meter:
        """Start."""
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, _: BaseException | None, __: TracebackType | None
    ) -> None:
        """Stop; after an error or Ctrl-C at once, without the tail."""
        self.stop(tail=kind is None)

    def start(self) -> None:
        """Start reading and wait for the first reading. Raises PowerUnavailable without one."""
        if self._source is None or self._running:
            return
        self._running = True
        self._arrived.clear()
        try:
            self._source.start(self._take)
            if not self._arrived.wait(FIRST_SAMPLE_S + self._source.interval_s):
                reason = self._source.ended or "no reading came"
                raise PowerUnavailable(f"power source {self.source}: {reason}")
        except BaseException:
            self.stop(tail=False)
            raise

    def stop(self, tail: bool = True) -> None:
        """Stop reading; with `tail` not before the last window's lag is over. Safe to repeat."""
        if self._source is None or not self._running:
            return
        try:
            if tail and self._source.live:
                last = max((w.spans()[-1][1] for w in self._work() if w.spans()), default=None)
                while last is not None and self._source.ended is None:
                    if (left := last + TAIL_S - time.monotonic()) <= 0:
                        break
                    time.sleep(min(left, 0.1))
        finally:
            self._running = False
            self._source.stop()

    close = stop

    def _take(self, sample: Sample) -> None:
        with self._lock:
            if self._times and sample.time_s <= self._times[-1]:
                return
            self._times.append(sample.time_s)
            self._mw.append(sample.total_mw)
            if sample.energy_mj is not None:
                self._energy.append(sample.energy_mj)
            for name, values in self._values.items():
                if name in sample.rails and len(values) < _MOST_VALUES:
                    values.add(sample.rails[name])
            self._latest = sample
        self._arrived.set()

    # ---- what is known

    @property
    def notes(self) -> list[str]:
        """What happened on the way: a source that ended, a log that started over."""
        if self._source is None:
            return []
        return self._source.notes + ([self._source.ended] if self._source.ended else [])

    @property
    def interval_s(self) -> float:
        """Return the interval that was asked of the source in s; 0 without a source."""
        return self._source.interval_s if self._source is not None else 0.0

    @property
    def ended(self) -> bool:
        """Say whether the source ended by itself."""
        return self._source is not None and self._source.ended is not None

    def latest(self) -> Sample | None:
        """Return the last reading."""
        return self._latest

    def lag(self) -> Lag | None:
        """Return the sensor's lag as the record shows it; None without readings."""
        curve = self._analysed()
        return curve.lag if curve is not None else None

    def idle_mw(self) -> float | None:
        """Return the measured idle power in mW; None before `measure_idle`."""
        curve, window = self._analysed(), self._windows.get(IDLE)
        if curve is None or window is None:
            return None
        return idle_mw(curve, window.spans())

    # ---- windows

    def window(self, name: str) -> Window:
        """Return the window of a name, to be used with `with`, as often as there are intervals."""
        window = self._windows.get(name)
        if window is None:
            window = self._windows[name] = Window(name)
        return window

    def measure_idle(self, seconds: float) -> None:
        """Do nothing for a while and take its mean power for idle; net energies are less it."""
        if self._source is None:
            return
        with self.window(IDLE):
            time.sleep(seconds)

    def energy(self, name: str) -> WindowEnergy:
        """Return the energy of a window. Raises KeyError for one that never was."""
        spans = self._windows[name].spans()
        curve = self._analysed()
        if curve is None:
            none = self._source is None
            note = "no power source" if none else "; ".join(["no readings", *self.notes])
            duration = sum(end - begin for begin, end in spans)
            return WindowEnergy(name=name, duration_s=duration, note=note)
        idle = None if name == IDLE else self.idle_mw()
        return measure(curve, name, spans, idle)

    def _work(self) -> list[Window]:
        return [window for name, window in self._windows.items() if name != IDLE]

    def _analysed(self) -> Curve | None:
        """Return the record's curve, made anew only when there is something new in it."""
        work = self._work()
        key = (len(self._times), *(window.version for window in work))
        if self._curve is not None and self._curve[0] == key and not any(w.is_open for w in work):
            return self._curve[1]
        with self._lock:
            count = len(self._times)
            times, mw, energy = (np.array(a) for a in (self._times, self._mw, self._energy))
            values = {name: sorted(found) for name, found in self._values.items()}
        if count < 2:
            return None
        busy = [span for window in work for span in window.spans()]
        counted = energy if len(energy) == count else None
        self._curve = (count, *key[1:]), Curve(times, mw, busy, _step_mw(values), counted)
        return self._curve[1]


def _step_mw(values: dict[str, list[int]]) -> float:
    """Return the quantisation step of a sum of rails: their steps add like independent errors."""
    total = 0.0
    for name, found in values.items():
        seen = min((b - a for a, b in itertools.pairwise(found)), default=float("inf"))
        usual = STEPS_MW.get(name, USUAL_STEP_MW)
        total += (seen if len(found) >= _ENOUGH_VALUES else min(seen, usual)) ** 2
    return float(total**0.5)


def open_meter(source: str = "auto", *, root: Path = Path("/"), interval_s: float = 0.1) -> Meter:
    """Open a meter over `open_source`, and raise what that raises."""
    return Meter(*open_source(source, root=root, interval_s=interval_s))


def open_source(
    source: str = "auto", *, root: Path = Path("/"), interval_s: float = 0.1
) -> tuple[Source | None, list[str]]:
    """Open a source of power readings by reading it once; return it, None for `none`, and why.

    `source` is auto, tegrastats, ina3221, jtop, nvml, replay:FILE or none; `root` stands in for /
    where files under /sys are read. Raises UsageError for another word, PowerUnavailable with the
    reason of every source that was tried, PowerLogError for a file that cannot be replayed.
    """
    kind, _, file = source.partition(":")
    if source == "none":
        return None, ["none: asked for"]
    if kind == "replay" and file:
        replay = ReplaySource(Path(file))
        return replay, [f"replay: {replay.probe()}"]
    makers: dict[str, Callable[[], Source]] = {
        "ina3221": lambda: Ina3221Source(interval_s, root),
        "tegrastats": lambda: TegrastatsSource(interval_s),
        "jtop": lambda: JtopSource(interval_s),
        "nvml": lambda: NvmlSource(interval_s),
    }
    if source != "auto" and source not in makers:
        raise UsageError(f"unknown power source {cut(source)!r}", f"expected {WORDS}")
    why = []
    names = AUTO if source == "auto" else (source,)
    for place, name in enumerate(names):
        made = makers[name]()
        try:
            why.append(f"{name}: {made.probe()}")
        except PowerUnavailable as error:
            why.append(f"{name}: {error.message}")
            continue
        why += [f"{other}: not tried" for other in names[place + 1 :]]
        log.debug("power source: %s", "; ".join(why))
        return made, why
    what = "no source of power readings" if source == "auto" else "this power source cannot be used"
    raise PowerUnavailable(
        f"{what}: {'; '.join(why)}",
        "on a board, is this a container without /sys or tegrastats? replay:FILE replays a log",
    )
