"""What an answer may contain: one set of ids for all of it, or a grammar that follows it.

Invariant: the ids that may come next depend on the answer alone, so drafts change no token; a
rejected draft is undone by asking for another answer (a grammar takes its steps back by itself).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.int64]


class Constraint(Protocol):
    """A rule about the answer."""

    def allowed(self, answer: Sequence[int]) -> Ids | None:
        """Return the ids that may follow `answer`, sorted, at least one; None: all."""
        ...


class AllowedIds:
    """The same ids everywhere."""

    def __init__(self, ids: Sequence[int]) -> None:
        """At least one id; repeated ones count once."""
        self._ids = np.unique(np.asarray(ids, dtype=np.int64))

    def allowed(self, answer: Sequence[int]) -> Ids:
        """Return all of them."""
        return self._ids
