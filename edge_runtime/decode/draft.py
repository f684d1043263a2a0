"""Where draft tokens come from. A draft is a guess: no source can change what is emitted.

Invariant: a source sees the tokens so far and returns at most `gamma` ids; the base source also
writes cache slots past the committed length, all of which verification overwrites.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from edge_runtime.cache.policy import KvPolicy
from edge_runtime.decode import arguments
from edge_runtime.errors import UsageError
from edge_runtime.kernels.layout import MAX_GAMMA
from edge_runtime.kernels.ops import Cache, Logits
from edge_runtime.model.runner import Model

SourceName = Literal["base", "ngram", "both"]
NGRAM_SIZES = (4, 3, 2)  # the longest match is tried first


class DraftSource(Protocol):
    """Proposes the next tokens."""

    def propose(self, tokens: Sequence[int], start: int, gamma: int) -> list[int]:
        """Return up to `gamma` ids after `tokens`, whose last is at absolute position `start`."""
        ...


Pick = Callable[[Logits, int, list[int]], int]
"""(logits of one row, position of the token, tokens drafted before it) -> id."""
OnStep = Callable[[float], None]
"""Told the seconds of every draft step."""


class BaseDraft:
    """Decode with the base plane, one token a pass, reading the cache as the policy says."""

    def __init__(
        self, model: Model, cache: Cache, policy: KvPolicy, pick: Pick, on_step: OnStep
    ) -> None:
        self._model, self._cache, self._policy, self._pick = model, cache, policy, pick
        self._on_step = on_step

    def propose(self, tokens: Sequence[int], start: int, gamma: int) -> list[int]:
        """Return `gamma` ids."""
        drafted: list[int] = []
        last = tokens[-1]
        for i in range(gamma):
            started = time.perf_counter()
            at, policy = start + i, self._policy
            # no name holds the logits: the next pass may write where they are
            last = self._pick(
                self._model.forward("w4", [last], at, self._cache, policy=policy), at + 1, drafted
            )
            drafted.append(last)
            self._on_step(time.perf_counter() - started)
        return drafted


class NgramDraft:
    """Continue the way the last few tokens continued before, in the prompt or in the answer."""

    def __init__(self) -> None:
        self._next: dict[tuple[int, ...], int] = {}
        self._indexed = 0

    def propose(self, tokens: Sequence[int], start: int, gamma: int) -> list[int]:
        """Return up to `gamma` ids; none without a match."""
        self._index(tokens)
        return self.extend(tokens, [], gamma)

    def extend(self, tokens: Sequence[int], drafted: list[int], gamma: int) -> list[int]:
        """Return up to `gamma` ids that continue tokens + drafted."""
        tail = [*tokens[-max(NGRAM_SIZES) :], *drafted][-max(NGRAM_SIZES) :]
        for n in NGRAM_SIZES:
            at = self._next.get(tuple(tail[-n:])) if len(tail) >= n else None
            if at is not None:
                found = list(tokens[at : at + gamma])
                rows = [i for i, token in enumerate(found) if token < 0]  # embedding rows: no ids
                return found[: rows[0]] if rows else found
        return []

    def _index(self, tokens: Sequence[int]) -> None:
        """Note, for every n-gram that ends before the last token, where it was continued."""
        if self._indexed > len(tokens):  # another sequence
            self._next.clear()
            self._indexed = 0
        for end in range(max(self._indexed, 1), len(tokens)):
            for n in NGRAM_SIZES:
                if end >= n:
                    self._next[tuple(tokens[end - n : end])] = end
        self._indexed = len(tokens)


class BothDraft:
    """Base tokens first, then what an n-gram match adds for nothing, up to the longest cycle."""

    def __init__(self, base: BaseDraft, ngram: NgramDraft) -> None:
        self._base, self._ngram = base, ngram

    def propose(self, tokens: Sequence[int], start: int, gamma: int) -> list[int]:
        """Return up to `gamma` ids, of which at most half come from the base plane."""
        head = self._base.propose(tokens, start, (gamma + 1) // 2)
        self._ngram.propose(tokens, start, 0)
        return head + self._ngram.extend(tokens, head, gamma - len(head))


@dataclass(frozen=True, slots=True)
class DraftChoice:
    """How many tokens are drafted a cycle (0: none), from where, and why.

    governed: `gamma` is the most there may be; a governor chooses in each cycle.
    """

    gamma: int
    source: SourceName
    why: str
    governed: bool = False

    def __str__(self) -> str:
        """Return it for a line about what runs."""
        if self.gamma == 0:
            return "no drafting"
        sources = "base + look-up" if self.source == "both" else self.source
        return f"draft {f'up to {self.gamma}' if self.governed else self.gamma} {sources}"


def parse_gamma(text: str) -> int | None:
    """Parse auto (None), off (0) or a number of tokens up to MAX_GAMMA. Raises UsageError."""
    if text == "auto":
        return None
    if text == "off":
        return 0
    number = arguments.digits(text)
    if number is None or number > MAX_GAMMA:
        raise UsageError(f"draft: expected auto, off or 0…{MAX_GAMMA}, got {arguments.shown(text)}")
    return number


def choose_draft(gamma: str, source: str, view: str, backend: str) -> DraftChoice:
    """Resolve --draft auto|off|N and --draft-source auto|base|ngram|both. Raises UsageError."""
    if source not in ("auto", "base", "ngram", "both"):
        raise UsageError(
            f"draft source: expected auto, base, ngram or both, got {arguments.shown(source)}"
        )
    wanted = parse_gamma(gamma)
    if view != "nest":
        return DraftChoice(0, "base", f"view {view} decodes one token at a time")
    if wanted == 0:
        return DraftChoice(0, "base", "drafting is off")
    if wanted is not None:
        chosen: SourceName = "base" if source == "auto" else source  # type: ignore[assignment]
        return DraftChoice(wanted, chosen, "as asked")
    if source == "auto" and backend == "reference":
        why = "on this backend a base step costs as much as a target step; look-up is free"
        return DraftChoice(MAX_GAMMA, "ngram", why, governed=True)
    sources: SourceName = "both" if source == "auto" else source  # type: ignore[assignment]
    return DraftChoice(MAX_GAMMA, sources, "chosen in each cycle as measured", governed=True)
