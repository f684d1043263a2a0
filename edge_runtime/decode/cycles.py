"""Cycles that a backend runs by itself: how long they are, and one launched ahead of the other.

Invariant: the tokens of `generation.Generation._cycle`. A cycle is launched before the one before
it is read, so that the device never waits for the host; where the one before may bring all that is
wanted, the host waits instead. A cycle too many writes only behind what is kept.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from edge_runtime.decode.draft import DraftChoice
    from edge_runtime.decode.governor import Governor
    from edge_runtime.kernels.ops import Cycle, Cycles

Lengths = tuple[int, int]  # tokens drafted by the base plane, tokens looked up at most


class DeviceCycles:
    """The cycles of one generation. known: tokens of the text, the last not in the cache."""

    def __init__(
        self,
        cycles: Cycles,
        choice: DraftChoice,
        governor: Governor,
        *,
        known: int,
        context: int,
        draft_share: float,
    ) -> None:
        """draft_share: of a target step's time that a draft step takes."""
        self._cycles, self._choice, self._governor = cycles, choice, governor
        self._known, self._context, self._share = known, context, draft_share
        self._waiting: deque[Lengths] = deque()
        self.draft_part = 0.0  # of the time of the last cycle, by what its steps read

    def next(self, left: int, gamma: int) -> tuple[list[int], int]:
        """Return the tokens of the next cycle and how many of them were drafted; `left` tokens are
        wanted at most, and more may come. gamma: the longest draft from now on."""
        if not self._waiting:
            self._launch(left, gamma)
        ahead = sum(1 + sum(lengths) for lengths in self._waiting)  # tokens it may bring
        if left > ahead:  # else this one may end the text
            self._launch(left - ahead, gamma)
        lengths = self._waiting.popleft()
        cycle = self._cycles.read()
        self._known += len(cycle.tokens)
        self._learn(lengths, cycle)
        return cycle.tokens, cycle.drafted

    def _launch(self, left: int, gamma: int) -> None:
        most_known = self._known + sum(1 + sum(lengths) for lengths in self._waiting)
        most = min(left - 1, self._context - most_known, gamma)
        base, look_up = self._lengths(max(0, most))
        self._cycles.launch(base, look_up, most_known)
        self._waiting.append((base, look_up))

    def _lengths(self, most: int) -> Lengths:
        """Divide at most `most` drafted tokens between the sources."""
        choice, governor = self._choice, self._governor
        if choice.governed:
            base = governor.base_gamma(most)
            return base, governor.ngram_gamma(most - base, base)
        if choice.source == "both":
            base = (most + 1) // 2
            return base, most - base
        return (0, most) if choice.source == "ngram" else (most, 0)

    def _learn(self, lengths: Lengths, cycle: Cycle) -> None:
        base, look_up = lengths
        step = cycle.seconds / (1 + base * self._share)
        self.draft_part = 1 - 1 / (1 + base * self._share)
        self._governor.times.add("w8", 1 + base + look_up, step)
        if base:
            self._governor.times.add("w4", 1, step * self._share)
        if self._choice.governed:
            self._governor.judged(base, cycle.drafted - base, len(cycle.tokens) - 1)
