"""How late a sensor follows the power: the time constant of its first-order curve.

On Jetson the rails follow a step as 1 - exp(-t/τ); one Orin Nano log shows τ of 0.36 s. Where a
record holds a clean step (work began or ended and nothing else changed for a second) τ is fitted to
it, work that ended before work that began, because idle is steadier. Else it is the prior.

The shape alone is fitted, with start and end free, so a constant delay does not bend it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

PRIOR_S = (0.2, 0.6)
MAX_TAIL_S = 2.4
MIN_TAIL_S = 1.0
_GRID = np.geomspace(0.04, 2.0, 160)
_MIN_SAMPLES = 6
_MIN_STEPS = 8  # a step is used if it is this many quantisation steps high
_LOG_WIDTH = 0.3  # how fast the prior falls outside its range
_LEAST_ERROR = 0.03  # no fit is believed more exactly than this share of τ


@dataclass(frozen=True, slots=True)
class Lag:
    """τ in s with its 95 % range, and where it is from."""

    tau_s: float
    low_s: float
    high_s: float
    how: str


NO_LAG = Lag(0.0, 0.0, 0.0, "the source counts energy itself")
ASSUMED = Lag(sum(PRIOR_S) / 2, *PRIOR_S, "assumed")


@dataclass(frozen=True, slots=True)
class Settling:
    """A curve that settles after an edge: y = level + height * exp(-(t - edge)/τ), by τ."""

    rss: Array
    level_mw: Array
    height_mw: Array
    samples: int

    def best(self) -> int:
        """Return the place of the best τ on the grid."""
        return int(np.argmin(self.rss))

    def at(self, tau_s: float) -> tuple[float, float]:
        """Return (level in mW, rms error in mW) at the grid's τ nearest to this one."""
        k = int(np.argmin(np.abs(_GRID - tau_s)))
        return float(self.level_mw[k]), float(np.sqrt(self.rss[k] / self.samples))


def settling(times: Array, mw: Array, edge_s: float) -> Settling | None:
    """Fit the samples after an edge for every τ; None if they are too few."""
    if len(times) < _MIN_SAMPLES:
        return None
    x = np.exp(-(times - edge_s)[None, :] / _GRID[:, None])
    mean_x, mean_y = x.mean(axis=1), float(mw.mean())
    dx, dy = x - mean_x[:, None], mw - mean_y
    sxx = np.maximum((dx * dx).sum(axis=1), 1e-30)
    height = (dx @ dy) / sxx
    rss = np.maximum((dy * dy).sum() - height * (dx @ dy), 0.0)
    return Settling(rss, mean_y - height * mean_x, height, len(times))


def estimate(ends: list[Edge], begins: list[Edge], step_mw: float) -> Lag:
    """Return τ from the steps where work ended, else from those where it began, else the prior."""
    if clear := [edge for edge in ends if edge.is_clear(step_mw)]:
        return _combine(clear, "end", step_mw)
    if clear := [edge for edge in begins if edge.is_clear(step_mw)]:
        # work that began need not be steady, which bends the curve: the prior's doubt stays
        lag = _combine(clear, "start", step_mw)
        low, high = min(lag.low_s, PRIOR_S[0]), max(lag.high_s, PRIOR_S[1])
        return Lag(lag.tau_s, low, high, lag.how)
    return ASSUMED


@dataclass(frozen=True, slots=True)
class Edge:
    """What follows an edge, the power before it, and the samples' interval."""

    curve: Settling
    before_mw: float
    interval_s: float

    def is_clear(self, step_mw: float) -> bool:
        """Say whether this is one step that settles, high enough to be read."""
        k = self.curve.best()
        height = abs(self.before_mw - float(self.curve.level_mw[k]))
        error = float(np.sqrt(self.curve.rss[k] / self.curve.samples))
        settles = _GRID[k] <= MAX_TAIL_S / 2
        high = height >= _MIN_STEPS * step_mw
        return bool(settles and high and error <= max(step_mw, 0.02 * height))

    def is_instant(self) -> bool:
        """Say whether the step was over before the first sample after it."""
        k = self.curve.best()
        height = abs(self.before_mw - float(self.curve.level_mw[k]))
        return abs(float(self.curve.height_mw[k])) < 0.5 * height


def _combine(edges: list[Edge], what: str, step_mw: float) -> Lag:
    how = f"from the {what} of {len(edges)} run{'s' if len(edges) > 1 else ''}"
    instant = sum(edge.is_instant() for edge in edges)
    if 2 * instant > len(edges):
        interval = max(edge.interval_s for edge in edges)
        return Lag(interval / 4, 0.0, interval / 2, how + ", faster than the sampling")
    outside = np.maximum(np.log(PRIOR_S[0] / _GRID), np.log(_GRID / PRIOR_S[1]))
    score = -0.5 * (np.maximum(outside, 0.0) / _LOG_WIDTH) ** 2
    for edge in edges:
        if not edge.is_instant():
            curve = edge.curve
            floor = step_mw**2 / 12 + (0.003 * abs(edge.before_mw - curve.level_mw)) ** 2
            score -= curve.samples / 4 * np.log(curve.rss / curve.samples + floor)
    chance = np.exp(score - score.max()) * _GRID  # the grid is logarithmic
    below = np.cumsum(chance) / chance.sum()
    tau = float((chance * _GRID).sum() / chance.sum())
    low, high = (float(np.interp(p, below, _GRID)) for p in (0.025, 0.975))
    return Lag(tau, min(low, tau * (1 - _LEAST_ERROR)), max(high, tau * (1 + _LEAST_ERROR)), how)
