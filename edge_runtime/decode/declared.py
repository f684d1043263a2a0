"""Declared acceptance: how many drafted tokens each cycle takes, whatever the target chose.

Invariant: for timing alone. A cycle takes as long whatever is accepted, so random weights, which
accept nothing, show the speed of a model that accepts this much; what comes out is no text.

How: acceptance is accepted / (γ · cycles), so a rate r stands for 1 + r · γ tokens a cycle. Its
pattern is the shortest with exactly that mean whose cycles differ by one token at most, spread
evenly: 0.95 with γ = 4 is 3, 4, 4, 4, 4.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise

from edge_runtime.decode.arguments import digits, shown
from edge_runtime.errors import UsageError
from edge_runtime.kernels.layout import MAX_GAMMA, MOST_FORCED

MAX_DECIMALS, MAX_CYCLES = 3, 64  # of a rate; of a list
assert max(10**MAX_DECIMALS, MAX_CYCLES) <= MOST_FORCED


@dataclass(frozen=True, slots=True)
class Declared:
    """A rate in 0…1, or tokens accepted per cycle, in turns."""

    text: str  # as written
    rate: Fraction | None = None
    tokens: tuple[int, ...] = ()

    def pattern(self, gamma: int) -> tuple[int, ...]:
        """Return the tokens accepted per cycle of γ drafted ones, in turns. Raises UsageError."""
        if self.rate is None:
            if max(self.tokens) > gamma:
                raise UsageError(
                    f"accept {self.text}: expected at most the {gamma} tokens that are drafted a "
                    f"cycle, got {max(self.tokens)}"
                )
            return self.tokens
        mean = self.rate * gamma
        ends = [i * mean // 1 for i in range(mean.denominator + 1)]
        return tuple(int(b - a) for a, b in pairwise(ends))


def parse_declared(text: str) -> Declared:
    """Parse `0.95`, a rate, or `4,4,3`, tokens in turns: what has a point is a rate. Raises
    UsageError."""
    whole, point, decimals = text.partition(".")
    if point:
        plain = (whole + decimals).isascii() and (whole + decimals).isdigit()
        if plain and 1 <= len(decimals) <= MAX_DECIMALS and len(whole) == 1:
            rate = Fraction(text)
            if rate <= 1:
                return Declared(text, rate=rate)
        raise UsageError(
            f"accept: expected a rate from 0.0 to 1.0 with up to {MAX_DECIMALS} decimals, got "
            + shown(text)
        )
    numbers = [digits(part.strip()) for part in text.split(",")]
    tokens = tuple(n for n in numbers if n is not None and n <= MAX_GAMMA)
    if len(tokens) != len(numbers) or len(tokens) > MAX_CYCLES:
        raise UsageError(
            f"accept: expected a rate such as 0.95, or up to {MAX_CYCLES} numbers from 0 to "
            f"{MAX_GAMMA} such as 4,4,3, got {shown(text)}"
        )
    return Declared(text, tokens=tokens)
