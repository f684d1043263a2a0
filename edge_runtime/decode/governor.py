"""The governor: how many tokens to draft in this cycle, and from where (DESIGN 6).

Invariant: it changes speed, never a token. It maximises expected tokens per second,

    E(γ) / (γ · t_draft + t_verify(γ + 1)),    E(γ) = 1 + α + … + α^γ,

from the acceptance α of each source (counts that fade, over a prior) and from medians of measured
step times. Where drafting does not pay it stops, and looks again after 16, 32, … cycles, so that a
hostile text costs a few draft steps and a friendly one is found again.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from edge_runtime.decode.draft import BaseDraft, NgramDraft
from edge_runtime.kernels.layout import MAX_GAMMA

KEPT_TIMES = 21  # of a kind of step: the median follows a change of clocks within as many cycles
FADE = 0.96  # of the counts, a cycle: half of what is known is from the last 17 cycles
PRIOR = {"base": (6.0, 8.0), "ngram": (1.0, 2.0)}  # (accepted, tried) before anything is known
FIRST_LOOK, LAST_LOOK = 16, 64  # cycles without a draft before one is tried again
ROW_COST = 0.04  # of a step, for one more row, until it is measured
MARGIN = 1.01  # a draft must promise this much more than none


class StepTimes:
    """Medians of step times in seconds, by kind of step: ("w4", 1), ("w8", rows)."""

    def __init__(self, base_share: float) -> None:
        """base_share: of a target step's bytes that a draft step reads, the guess before any."""
        self._base_share = base_share
        self._known: dict[int, float] | None = None  # what `_rising` says, until a time is added
        self._times: dict[tuple[str, int], deque[float]] = {}

    def add(self, view: str, rows: int, seconds: float) -> None:
        """Note one step."""
        self._times.setdefault((view, rows), deque(maxlen=KEPT_TIMES)).append(seconds)
        self._known = None

    def known(self, view: str, rows: int) -> bool:
        """Whether such a step was measured."""
        return (view, rows) in self._times

    @property
    def measured(self) -> bool:
        """Whether any step was measured: before, `verify` has no unit."""
        return bool(self._times)

    def draft(self) -> float:
        """Seconds of a draft step."""
        if self.known("w4", 1):
            return self._median("w4", 1)
        return self._base_share * self.verify(1)

    def verify(self, rows: int) -> float:
        """Seconds of a target step: measured, or on a line through what is.

        A step is never slower than one of more rows, whatever a few slow measurements say.
        """
        if self._known is None:
            self._known = self._rising()
        return self._estimate(rows, self._known)

    def _rising(self) -> dict[int, float]:
        """Medians by rows, each at most that of more rows."""
        found: dict[int, float] = {}
        least = math.inf
        for rows in sorted((r for view, r in self._times if view == "w8"), reverse=True):
            found[rows] = least = min(least, self._median("w8", rows))
        return found

    @staticmethod
    def _estimate(rows: int, known: dict[int, float]) -> float:
        if rows in known:
            return known[rows]
        if not known:
            return 1.0 + ROW_COST * (rows - 1)
        below = max((r for r in known if r < rows), default=None)
        above = min((r for r in known if r > rows), default=None)
        if below is not None and above is not None:
            share = (rows - below) / (above - below)
            return known[below] + share * (known[above] - known[below])
        first, *others = sorted(known, key=lambda r: (abs(r - rows), r))
        slope = ROW_COST * known[first] / (1.0 + ROW_COST * (first - 1))
        if others:
            slope = (known[others[0]] - known[first]) / (others[0] - first)
        return max(known[first] + slope * (rows - first), 0.1 * known[first])

    def _median(self, view: str, rows: int) -> float:
        return statistics.median(self._times[view, rows])


@dataclass(slots=True)
class Acceptance:
    """Fading counts of drafted tokens that were judged, and of those accepted."""

    accepted: float
    tried: float

    @property
    def rate(self) -> float:
        """The estimate."""
        return self.accepted / self.tried

    def add(self, drafted: int, accepted: int, prior: tuple[float, float]) -> None:
        """Count a cycle: tokens after the first refused one were not judged."""
        self.accepted = prior[0] + FADE * (self.accepted - prior[0]) + accepted
        judged = accepted + (accepted < drafted)
        self.tried = prior[1] + FADE * (self.tried - prior[1]) + judged


def expected_tokens(rate: float, gamma: int) -> float:
    """Return 1 + rate + … + rate^gamma."""
    return sum(rate**i for i in range(gamma + 1))


@dataclass(slots=True)
class Governor:
    """Chooses for one engine; what it learnt stays from one request to the next."""

    times: StepTimes
    use_base: bool = True
    use_ngram: bool = True
    acceptance: dict[str, Acceptance] = field(
        default_factory=lambda: {name: Acceptance(*prior) for name, prior in PRIOR.items()}
    )
    idle: int = 0  # cycles since the last base draft
    look: int = FIRST_LOOK
    why: str = ""  # of the last cycle

    def base_gamma(self, most: int, found: int = 0) -> int:
        """Return how many tokens to draft with the base plane, 0…most.

        found: tokens that a look-up offers instead, which then set the mark to beat.
        """
        most = min(most, MAX_GAMMA)
        if not self.use_base or most < 1:
            self.why = f"look-up only: acceptance {self.acceptance['ngram'].rate:.2f}"
            return 0
        alone = 1.0 / self.times.verify(1)
        rate = self.acceptance["base"].rate

        def speed(gamma: int) -> float:
            cost = gamma * self.times.draft() + self.times.verify(gamma + 1)
            return expected_tokens(rate, gamma) / cost

        best = max(range(1, most + 1), key=speed)
        looked = self.ngram_gamma(found, 0)
        if looked:
            expected = expected_tokens(self.acceptance["ngram"].rate, looked)
            if expected / self.times.verify(looked + 1) >= speed(best):
                self.why = f"look-up {looked}: acceptance {self.acceptance['ngram'].rate:.2f}"
                return 0
        gain = speed(best) / alone
        self.why = f"base {best}: acceptance {rate:.2f} promises {gain:.2f}x"
        if gain >= MARGIN:
            self.idle, self.look = 0, FIRST_LOOK
            return best
        self.idle += 1
        if self.idle >= self.look:
            self.idle, self.look = 0, min(2 * self.look, LAST_LOOK)
            return 1
        self.why = f"no base draft: acceptance {rate:.2f} promises {gain:.2f}x at best"
        return 0

    def ngram_gamma(self, found: int, base_gamma: int) -> int:
        """Return how many of `found` looked-up tokens to verify behind `base_gamma` others."""
        if not self.use_ngram:
            return 0
        found = min(found, MAX_GAMMA - base_gamma)
        reached = self.acceptance["base"].rate ** base_gamma
        rate = self.acceptance["ngram"].rate
        before = self.times.verify(base_gamma + 1)
        spent = base_gamma * self.times.draft() + before
        speed = expected_tokens(self.acceptance["base"].rate, base_gamma) / spent
        best, most = 0, 0.0
        for extra in range(1, found + 1):
            gained = reached * (expected_tokens(rate, extra) - 1.0)
            cost = self.times.verify(base_gamma + extra + 1) - before
            if gained - cost * speed > most:
                best, most = extra, gained - cost * speed
        return best

    def judged(self, base: int, ngram: int, accepted: int) -> None:
        """Learn from a cycle: `base` then `ngram` tokens were verified, `accepted` in all held."""
        if base:
            self.acceptance["base"].add(base, min(accepted, base), PRIOR["base"])
            if accepted >= base:
                self.idle = self.look  # the text may be friendly again: look at once
        if ngram and accepted >= base:
            self.acceptance["ngram"].add(ngram, accepted - base, PRIOR["ngram"])


class GovernedDraft:
    """A draft source that asks the governor each cycle."""

    def __init__(self, governor: Governor, base: BaseDraft, ngram: NgramDraft) -> None:
        self._governor, self._base, self._ngram = governor, base, ngram
        self._drafted = (0, 0)

    def propose(self, tokens: Sequence[int], start: int, gamma: int) -> list[int]:
        """Return up to `gamma` ids: of the base plane, then of a look-up."""
        g = self._governor
        found = len(self._ngram.propose(tokens, start, gamma)) if g.use_ngram else 0
        wanted = g.base_gamma(gamma, found)
        drafted = self._base.propose(tokens, start, wanted) if wanted else []
        more = self._ngram.extend(tokens, drafted, gamma - wanted) if g.use_ngram else []
        more = more[: g.ngram_gamma(len(more), wanted)]
        self._drafted = (wanted, len(more))
        return drafted + more

    def judged(self, accepted: int) -> None:
        """Learn how many of the last proposal were accepted."""
        self._governor.judged(*self._drafted, accepted)
