"""How a token is chosen, as the user asks for it. What the numbers do: `kernels/sampling.py`."""

from __future__ import annotations

from dataclasses import dataclass, fields

from edge_runtime.decode.arguments import as_float, is_number, is_whole, shown
from edge_runtime.errors import UsageError
from edge_runtime.kernels.sampling import Parameters


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling(Parameters):
    """How a token is chosen, checked: the fields and meanings of `kernels.sampling.Parameters`."""

    def __post_init__(self) -> None:
        """Refuse impossible values; numbers become Python's own. Raises UsageError."""
        for field in fields(self):
            value, whole = getattr(self, field.name), field.name in ("top_k", "seed")
            if not (is_whole(value) if whole else is_number(value)):
                kind = "a whole number" if whole else "a number"
                raise UsageError(f"{field.name}: expected {kind}, got {shown(value)}")
            object.__setattr__(self, field.name, int(value) if whole else as_float(value))
        checks = (
            ("temperature", 0 <= self.temperature < float("inf"), "a number >= 0"),
            ("top_k", self.top_k >= 0, "a whole number >= 0"),
            ("top_p", 0 < self.top_p <= 1, "a number above 0, at most 1"),
            ("min_p", 0 <= self.min_p <= 1, "a number from 0 to 1"),
            (
                "repetition_penalty",
                0.01 <= self.repetition_penalty <= 100,
                "a number from 0.01 to 100",
            ),
            ("presence_penalty", abs(self.presence_penalty) <= 1000, "a number from -1000 to 1000"),
            ("seed", 0 <= self.seed < 2**64, "a whole number from 0 to 2^64 - 1"),
        )
        for name, ok, expected in checks:
            if not ok:
                raise UsageError(f"{name}: expected {expected}, got {shown(getattr(self, name))}")

    @property
    def plain_greedy(self) -> bool:
        """Whether the choice is the argmax of the unchanged logits."""
        return self.temperature == 0 and self.repetition_penalty == 1 and self.presence_penalty == 0
