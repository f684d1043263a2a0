"""Energy of named windows, each a number of intervals of a record of power readings.

Windows of many intervals shorter than the sensor's lag (the draft and verify steps of a decoder)
cannot be told apart in time: they get the mean power of the run they are part of, times their
duration, and say so.

Invariant: energy is an interval before it is a number, and a window too short for the sensor has
the interval alone. Nothing is counted for a time that no reading covers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from edge_runtime.power.curve import Curve, Energy, merged

IDLE = "idle"
SHORTEST_S = 1.5  # below this a window has only its interval
SHORTEST_TAUS = 3.0
SHORTEST_SAMPLES = 3
WIDEST_SHARE = 0.25  # half the interval over the energy; beyond it digits mean nothing
TOGETHER_S = 1.0  # short intervals at most this far apart are one run
_Z95 = 1.96

Span = tuple[float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowEnergy:
    """Energy of all intervals of one name, in J; None is unknown, and `note` says why.

    `net_j` is gross less the measured idle power over the same time; `low_j` and `high_j` are the
    95 % interval of gross. `covered_s` is the part of the duration that readings cover.
    """

    name: str
    duration_s: float
    covered_s: float = 0.0
    gross_j: float | None = None
    net_j: float | None = None
    low_j: float | None = None
    high_j: float | None = None
    idle_mw: float | None = None
    samples: int = 0
    note: str = ""


def covered(curve: Curve, spans: Sequence[Span]) -> list[Span]:
    """Return the parts of spans that readings cover, two sampling intervals at the ends included.

    Power is taken as steady for that long; beyond it nothing is known.
    """
    first = float(curve.times[0]) - 2 * curve.interval_s
    last = float(curve.times[-1]) + 2 * curve.interval_s
    cut = ((max(begin, first), min(end, last)) for begin, end in spans)
    return [(begin, end) for begin, end in cut if end > begin]


def idle_mw(curve: Curve, spans: Sequence[Span]) -> float | None:
    """Return the mean power of the idle spans in mW; None without them."""
    known = covered(curve, spans)
    seconds = sum(end - begin for begin, end in known)
    if seconds < 2 * curve.interval_s:
        return None
    return sum(_value(curve, curve.between(*span)) for span in known) / seconds


def measure(curve: Curve, name: str, spans: Sequence[Span], idle: float | None) -> WindowEnergy:
    """Return the energy of a window. `idle` is the idle power in mW, or None."""
    duration = sum(end - begin for begin, end in spans)
    known = covered(curve, spans)
    seconds = sum(end - begin for begin, end in known)
    if not known or seconds <= 0:
        note = "no interval" if not spans else "no reading during it"
        return WindowEnergy(name=name, duration_s=duration, idle_mw=idle, note=note)
    notes = []
    by_time = len(known) > 1 and seconds / len(known) < max(
        2 * curve.interval_s, curve.lag.tau_s, 0.01
    )
    runs = merged(known, TOGETHER_S) if by_time else known
    energy = Energy()
    for run, share in zip(runs, _shares(runs, known), strict=True):
        energy.add(curve.between(*run), share)
    if len(runs) < len(known):
        notes.append("attributed by time")
    samples = sum(int(((curve.times >= a) & (curve.times <= b)).sum()) for a, b in runs)
    gross = _value(curve, energy) / 1000
    half = _half(curve, energy) / 1000
    if duration - seconds > max(2 * curve.interval_s, 0.05):
        notes.append(f"counted up to the last reading, {seconds:.2f} of {duration:.2f} s")
    if hole := sum(curve.hole_s(*run) for run in runs):
        notes.append(f"no readings for {hole:.1f} s of it")
    why = _too_short(curve, runs, samples, gross, half)
    net = gross - idle * seconds / 1000 if idle is not None else None
    return WindowEnergy(
        name=name,
        duration_s=duration,
        covered_s=min(seconds, duration),
        gross_j=None if why else gross,
        net_j=None if why else net,
        low_j=gross - half,
        high_j=gross + half,
        idle_mw=idle,
        samples=samples,
        note="; ".join([why, *notes] if why else notes),
    )


def _shares(runs: Sequence[Span], spans: Sequence[Span]) -> list[float]:
    """Return the share of each run that the spans in it fill; both are in order."""
    shares, k = [], 0
    for begin, end in runs:
        inside = 0.0
        while k < len(spans) and spans[k][0] < end:
            inside += spans[k][1] - spans[k][0]
            k += 1
        shares.append(inside / (end - begin))
    return shares


def _value(curve: Curve, energy: Energy) -> float:
    return energy.area + curve.lag.tau_s * energy.per_tau


def _half(curve: Curve, energy: Energy) -> float:
    """Return half the 95 % interval in mW·s."""
    lag = curve.lag
    of_tau = abs(energy.per_tau) * (lag.high_s - lag.low_s) / 2
    rest = _Z95**2 * (energy.variance + energy.systematic**2)
    return float((of_tau**2 + rest) ** 0.5)


def _too_short(curve: Curve, runs: Sequence[Span], samples: int, gross: float, half: float) -> str:
    """Return why a window has no digits, or nothing."""
    seconds = sum(end - begin for begin, end in runs)
    needed = max(0.0 if curve.counts_itself else SHORTEST_S, SHORTEST_TAUS * curve.lag.high_s)
    if seconds < needed:
        return f"too short for the sensor: {seconds:.2f} s, {needed:.1f} s needed"
    if samples < SHORTEST_SAMPLES:
        return f"too short: {samples} readings, {SHORTEST_SAMPLES} needed"
    if half > WIDEST_SHARE * abs(gross):
        return f"known only within ±{half:.2g} J"
    return ""
