"""A record of lagging, quantised power readings, and the energy of any stretch of it.

For a first-order sensor y with time constant τ the true energy between two times is exactly
∫ y dt + τ·(y(end) - y(start)): the integral of the readings plus what the lag still holds. Where
nothing else ran for a while before a stretch or after it, its border is moved into that quiet time
and the quiet power is taken off again, so that neither τ nor a delay of the readings matters there.

Invariant: what is not exact is carried along as an error: τ's range, quantisation, sampling, holes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from edge_runtime.power import lag as lag_
from edge_runtime.power.lag import Array, Edge, Lag

_BUSY_GAP_S = 0.2  # work that pauses for less than this does not pause
_SAME_EDGE_S = 0.01
_QUIET_S = 0.6
_NEIGHBOUR_S = 0.3
_HOLE_S = 1.0
_HOLE_STEPS = 5
_JITTER_S = 0.01  # of a reading's time against the work's
_COUNTER_LATE_S = 0.05  # an H200's counter moves every 0.1 s and is about this late
_QUIET_JITTER_S = 0.003  # the same where a constant delay does not matter
_UNIFORM = 3**0.5  # half a width over the deviation


@dataclass(slots=True)
class Energy:
    """Energy in mW·s without the lag's share, that share by τ in s, and the errors of the rest.

    `variance` is of errors that average out, `systematic` of one that adds up, both in mW·s.
    """

    area: float = 0.0
    per_tau: float = 0.0
    variance: float = 0.0
    systematic: float = 0.0

    def add(self, other: Energy, share: float = 1.0) -> None:
        """Add a share of another energy."""
        self.area += share * other.area
        self.per_tau += share * other.per_tau
        self.variance += share**2 * other.variance
        self.systematic += share * other.systematic


def merged(spans: Sequence[tuple[float, float]], gap_s: float) -> list[tuple[float, float]]:
    """Return the spans in order, those at most `gap_s` apart as one."""
    out: list[tuple[float, float]] = []
    for begin, end in sorted(spans):
        if out and begin - out[-1][1] <= gap_s:
            out[-1] = (out[-1][0], max(out[-1][1], end))
        else:
            out.append((begin, end))
    return out


class Curve:
    """At least two readings (times in s, mW), and the spans in which work ran.

    `counted_mj` are the readings of a source that counts energy itself, which has no lag.
    """

    def __init__(
        self,
        times: Array,
        mw: Array,
        busy: Sequence[tuple[float, float]],
        step_mw: float,
        counted_mj: Array | None = None,
    ) -> None:
        assert len(times) >= 2
        joined = merged(busy, _BUSY_GAP_S)
        self._begins = np.array([begin for begin, _ in joined])
        self._ends = np.array([end for _, end in joined])
        self.counts_itself = counted_mj is not None
        if counted_mj is not None:
            # a counter that is read more often than it moves says something only where it moved
            moved = np.flatnonzero(np.diff(counted_mj)) + 1
            if len(moved) >= 2:
                times, counted_mj = times[moved], counted_mj[moved]
            self._area = counted_mj - counted_mj[0]
            powers = np.diff(self._area) / np.diff(times)
            mw = np.concatenate((powers[:1], powers))
            step_mw = 0.0
        else:
            areas = np.diff(times) * (mw[1:] + mw[:-1]) / 2
            self._area = np.concatenate(([0.0], np.cumsum(areas)))
        self.times, self.mw, self.step_mw = times, mw, step_mw
        self._widths = np.diff(times)
        self.interval_s = float(np.median(self._widths))
        self.lag = lag_.NO_LAG if self.counts_itself else self._estimate_lag()

    # ---- edges of work

    def _estimate_lag(self) -> Lag:
        ends = [self._edge(float(end), self._quiet_after(float(end))) for end in self._ends]
        begins = [
            self._edge(float(begin), float(end - begin))
            for begin, end in zip(self._begins, self._ends, strict=True)
        ]
        ended, began = ([e for e in edges if e is not None] for edges in (ends, begins))
        return lag_.estimate(ended, began, self.step_mw)

    def _quiet_after(self, end: float) -> float:
        k = int(np.searchsorted(self._begins, end, "right"))
        following = float(self._begins[k]) if k < len(self._begins) else float("inf")
        return min(following, float(self.times[-1])) - end

    def _quiet_before(self, begin: float) -> float:
        k = int(np.searchsorted(self._ends, begin - _SAME_EDGE_S, "right")) - 1
        previous = float(self._ends[k]) if k >= 0 else float("-inf")
        return begin - max(previous, float(self.times[0]))

    def _is_edge(self, edges: Array, at: float) -> bool:
        return bool(len(edges)) and float(np.abs(edges - at).min()) <= _SAME_EDGE_S

    def _edge(self, at: float, length_s: float) -> Edge | None:
        """Return what settles after an edge of work, if enough of it is known."""
        if length_s < lag_.MIN_TAIL_S:
            return None
        # the first reading after an edge may still be one from before it
        i = int(np.searchsorted(self.times, at + self.interval_s, "right"))
        j = int(np.searchsorted(self.times, at + min(length_s, lag_.MAX_TAIL_S), "right"))
        k = int(np.searchsorted(self.times, at))
        settling = lag_.settling(self.times[i:j], self.mw[i:j], at)
        if settling is None or k == 0:
            return None
        return Edge(settling, float(self.mw[max(0, k - 2) : k].mean()), self.interval_s)

    # ---- energy up to a time

    def between(self, begin: float, end: float) -> Energy:
        """Return the energy of a span that readings cover."""
        first, last = self._to_begin(begin), self._to_end(end)
        out = Energy(
            last.area - first.area, last.per_tau - first.per_tau, first.variance + last.variance
        )
        out.variance += (self.lag.tau_s * self.step_mw) ** 2 / 6
        out.systematic = (
            first.systematic + last.systematic + self.step_mw * (end - begin) / _UNIFORM
        )
        if hole := self.hole_s(begin, end):
            out.systematic += hole * float(np.ptp(self.mw)) / (2 * _UNIFORM)
        return out

    def hole_s(self, begin: float, end: float) -> float:
        """Return the time inside a span in which readings are missing."""
        limit = max(_HOLE_S, _HOLE_STEPS * self.interval_s)
        holes = np.flatnonzero(self._widths > limit)
        left = np.maximum(self.times[holes], begin)
        right = np.minimum(self.times[holes + 1], end)
        return float(np.maximum(right - left, 0.0).sum())

    def _up_to(self, at: float) -> Energy:
        """Energy from the first reading to a time between, or just outside, the readings.

        Power may step there, so the interval it falls into is divided by the powers on both sides
        rather than evenly.
        """
        t = self.times
        last = len(t) - 1
        reach = max(1, round(_NEIGHBOUR_S / self.interval_s))
        k = int(np.clip(np.searchsorted(t, at, "right") - 1, 0, last - 1))
        before = (max(0, k - reach), k) if k else (0, 1)
        after = (k + 1, min(last, k + 1 + reach)) if k + 1 < last else (k, last)
        if at >= t[last]:
            k, before = last, (max(0, last - reach), last)
        s, w = at - float(t[k]), float(t[k + 1] - t[k]) if k < last else 0.0
        values, jumps = [], []
        for v in (self._area, self.mw):
            pb, pa = (float(v[j] - v[i]) / float(t[j] - t[i]) for i, j in (before, after))
            value = float(v[k]) + pb * s
            if w > 0 and s > 0:
                value += (float(v[k + 1] - v[k]) - pb * s - pa * (w - s)) * s / w
            values.append(value)
            jumps.append(pa - pb)
        jump = abs(jumps[0] + self.lag.tau_s * jumps[1])
        late = _COUNTER_LATE_S if self.counts_itself else _JITTER_S
        error = jump * (self._sampling_s(max(w, self.interval_s)) + late)
        return Energy(values[0], values[1], error**2)

    def _sampling_s(self, width_s: float) -> float:
        """Error of a step's energy that comes with seeing it at intervals, over its height."""
        return float(min(width_s**2 / (12 * max(self.lag.tau_s, 1e-3)), width_s / 4))

    def _to_begin(self, at: float) -> Energy:
        """Energy up to where a span begins, by the quiet before it where there is some."""
        j = int(np.searchsorted(self.times, at - 1.5 * self.interval_s, "right")) - 1
        i = int(np.searchsorted(self.times, at - _QUIET_S - self.interval_s))
        if (
            j - i < 3
            or not self._is_edge(self._begins, at)
            or self._quiet_before(at) < _QUIET_S
            or not self._steady(self.mw[i : j + 1])
        ):
            return self._up_to(at)
        rms = float(self.mw[i : j + 1].std())
        left_out = at - float(self.times[j])
        power = float(self._area[j] - self._area[i]) / float(self.times[j] - self.times[i])
        k = min(len(self.mw) - 1, j + 2 + round(1.0 / self.interval_s))
        error = self._quiet_error(abs(float(self.mw[k]) - power), rms, left_out)
        return Energy(float(self._area[j]) + power * left_out, float(self.mw[j]), error**2)

    def _quiet_error(self, height_mw: float, rms_mw: float, left_out_s: float) -> float:
        """Error of moving a border into a quiet stretch whose readings vary by `rms_mw`."""
        tau = self.lag.tau_s
        varies = max(rms_mw, self.step_mw / (2 * _UNIFORM))
        quiet = varies * ((3 * tau * left_out_s) ** 0.5 + tau)
        step = height_mw * (self._sampling_s(self.interval_s) + _QUIET_JITTER_S)
        return float((quiet**2 + step**2) ** 0.5)

    def _steady(self, mw: Array) -> bool:
        share = 0.05 if self.counts_itself else 0.01
        return float(mw.std()) <= max(self.step_mw, share * abs(float(mw.mean())))

    def _to_end(self, at: float) -> Energy:
        """Energy up to where a span ends, by the quiet after it where there is some."""
        if not self._is_edge(self._ends, at):
            return self._up_to(at)
        quiet = self._quiet_after(at)
        if self.counts_itself:
            return self._to_counted_end(at, quiet)
        edge = self._edge(at, quiet)
        if edge is None:
            return self._up_to(at)
        level, rms = edge.curve.at(self.lag.tau_s)
        height = abs(edge.before_mw - level)
        if rms > max(self.step_mw, 0.02 * height):
            return self._up_to(at)
        j = int(np.searchsorted(self.times, at + min(quiet, lag_.MAX_TAIL_S), "right")) - 1
        left_out = float(self.times[j]) - at
        error = self._quiet_error(height, rms, left_out)
        return Energy(float(self._area[j]) - level * left_out, float(self.mw[j]), error**2)

    def _to_counted_end(self, at: float, quiet_s: float) -> Energy:
        """The same for a counter, which is late but does not settle."""
        j = int(np.searchsorted(self.times, at + min(quiet_s, lag_.MAX_TAIL_S), "right")) - 1
        i = int(np.searchsorted(self.times, at + 3 * self.interval_s))
        if j - i < 4 or not self._steady(self.mw[i + 1 : j + 1]):
            return self._up_to(at)
        left_out = float(self.times[j]) - at
        level = float(self._area[j] - self._area[i]) / float(self.times[j] - self.times[i])
        height = abs(float(self.mw[max(0, i - 5)]) - level)
        rms = float(self.mw[i + 1 : j + 1].std())
        error = self._quiet_error(height, rms, left_out) + rms * left_out / (j - i) ** 0.5
        return Energy(float(self._area[j]) - level * left_out, float(self.mw[j]), error**2)
