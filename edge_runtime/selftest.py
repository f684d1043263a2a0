"""Exactness on this model and this machine: drafting, sampling and chunking must change nothing.

Invariant: every case is compared token for token with the target decoding one token at a time on
the same engine (`--view w8`). One engine serves all cases of a prompt, so the prompt is prefilled
once: only `engine.draft`, `engine.policy` and, where a case is about it, `engine.chunk` vary.
It does not prove that the target itself is right: tests against the definition do that.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

from edge_runtime.cache.policy import parse_policy
from edge_runtime.decode.draft import DraftChoice, DraftSource, SourceName
from edge_runtime.decode.engine import Engine
from edge_runtime.decode.request import Result
from edge_runtime.decode.sampling import Sampling
from edge_runtime.errors import BitnestError
from edge_runtime.text.stream import TextStream
from edge_runtime.text.tokenizer import Tokenizer

Source = Literal["base", "ngram", "both", "random", "spoiled"]
GAMMAS = (1, 2, 4, 7)
POLICIES = ("kv8", "kv4", "recent:64")
CHUNKS = (1, 7, 64, 512)
SPOILED_SHARE = 0.25


class SelftestFailed(BitnestError):
    """Tokens that differ where the contract says they are equal."""

    exit_code = 5
    http_status = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One way to decode. `random` drafts noise; `spoiled` drafts the answer with errors put in."""

    gamma: int = 0
    source: Source = "base"
    policy: str = "kv8"
    sampled: bool = False
    chunk: int | None = None  # prefill the prompt anew in pieces of this size

    def __str__(self) -> str:
        """Return a name for reports."""
        if self.chunk is not None:
            return f"prompt in chunks of {self.chunk}"
        sampled = ", sampled" if self.sampled else ""
        return f"draft {self.gamma} {self.source}, {self.policy}{sampled}"


@dataclass(frozen=True, slots=True)
class Difference:
    """The first place where a case differs; position counts from the start of the prompt."""

    case: str
    prompt: int
    position: int
    expected: int | None  # None: that answer had ended
    got: int | None


@dataclass(slots=True)
class Row:
    """Counts of one case over prompts. rejections: drafted tokens that verification refused."""

    case: str
    prompts: int = 0
    tokens: int = 0
    cycles: int = 0
    drafted: int = 0
    accepted: int = 0
    rejections: int = 0
    differing: int = 0
    seconds: float = 0.0
    first: Difference | None = field(default=None)

    @property
    def acceptance(self) -> float:
        """Share of drafted tokens that were accepted."""
        return round(self.accepted / self.drafted, 4) if self.drafted else 0.0

    def add(self, other: Row) -> None:
        """Count another row in."""
        for name in ("prompts", "tokens", "cycles", "drafted", "accepted", "rejections"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.differing += other.differing
        self.seconds += other.seconds
        self.first = self.first or other.first


QUICK = (
    Case(gamma=1, source="base", policy="kv4"),
    Case(gamma=4, source="base", policy="kv8"),
    Case(gamma=7, source="base", policy="recent:64"),
    Case(gamma=2, source="ngram"),
    Case(gamma=7, source="both", policy="kv4"),
    Case(gamma=7, source="random"),
    Case(gamma=4, source="spoiled"),
    Case(gamma=4, source="base", sampled=True),
)
FULL = (
    *(
        Case(gamma=g, source=s, policy=p)
        for s in ("base", "ngram")
        for p in POLICIES
        for g in GAMMAS
    ),
    *(Case(gamma=g, source="both", policy="kv4") for g in GAMMAS),
    *(Case(gamma=g, source="random") for g in GAMMAS),
    *(Case(gamma=g, source="spoiled") for g in GAMMAS),
    *(Case(gamma=g, source="base", sampled=True) for g in GAMMAS),
    *(Case(gamma=g, source="ngram", sampled=True) for g in GAMMAS),
)
CHUNKED = tuple(Case(chunk=size) for size in CHUNKS)


class RandomDraft:
    """Adversary: tokens at random."""

    def __init__(self, num_tokens: int, seed: int) -> None:
        self._num_tokens, self._random = num_tokens, random.Random(seed)

    def propose(self, tokens: Sequence[int], start: int, gamma: int) -> list[int]:
        """Return `gamma` random ids."""
        return [self._random.randrange(self._num_tokens) for _ in range(gamma)]


class SpoiledDraft(RandomDraft):
    """Adversary: the right answer with wrong tokens in it, so that drafts are accepted in part."""

    def __init__(self, answer: Sequence[int], prompt: int, num_tokens: int, seed: int) -> None:
        super().__init__(num_tokens, seed)
        self._answer, self._prompt = answer, prompt

    def propose(self, tokens: Sequence[int], start: int, gamma: int) -> list[int]:
        """Return the next tokens of the answer, each spoiled with some probability."""
        at = start + 1 - self._prompt
        right = list(self._answer[at : at + gamma])
        wrong = super().propose(tokens, start, len(right))
        spoil = [self._random.random() < SPOILED_SHARE for _ in right]
        return [w if s else r for r, w, s in zip(right, wrong, spoil, strict=True)]


def run_grid(
    engine: Engine,
    prompts: Iterable[Sequence[int]],
    cases: Sequence[Case],
    *,
    new_tokens: int,
    seed: int = 1,
) -> Iterator[Row]:
    """Yield one row per prompt and case, in that order. `engine` must have the nest view.

    prompts: token ids, each with room for `new_tokens` left in the context. The engine's own
    draft, policy and chunk are put back at the end.
    """
    assert engine.view == "nest", engine.view
    kept = engine.draft, engine.policy, engine.chunk
    try:
        for number, ids in enumerate(prompts):
            expected: dict[bool, list[int]] = {}
            for case in cases:
                sampling = Sampling(
                    temperature=1.0 if case.sampled else 0.0,
                    top_p=0.95 if case.sampled else 1.0,
                    seed=seed + number,
                )
                if case.sampled not in expected:
                    plain = Case(sampled=case.sampled)
                    result = _decode(engine, plain, ids, [], new_tokens, sampling)
                    expected[case.sampled] = result.token_ids
                started = time.perf_counter()
                right = expected[case.sampled]
                result = _decode(engine, case, ids, right, new_tokens, sampling)
                yield _row(case, number, len(ids), right, result, time.perf_counter() - started)
    finally:
        engine.draft, engine.policy, engine.chunk = kept


def _decode(
    engine: Engine,
    case: Case,
    ids: Sequence[int],
    right: Sequence[int],
    new_tokens: int,
    sampling: Sampling,
) -> Result:
    own: SourceName = case.source if case.source in get_args(SourceName) else "base"  # type: ignore[assignment]
    engine.draft = DraftChoice(case.gamma, own, "selftest")
    engine.policy = parse_policy(case.policy)
    if case.chunk is not None:
        engine.reuse([0])  # forget the prompt
        engine.chunk = case.chunk
    draft: DraftSource | None = None
    if case.source == "random":
        draft = RandomDraft(engine.text.num_tokens, sampling.seed)
    elif case.source == "spoiled":
        draft = SpoiledDraft(right, len(ids), engine.text.num_tokens, sampling.seed)
    return engine.generate(
        list(ids),
        max_new_tokens=new_tokens,
        sampling=sampling,
        ignore_eos=True,
        draft_source=draft,
    ).complete()


def _row(
    case: Case, number: int, prompt: int, right: list[int], result: Result, seconds: float
) -> Row:
    drafted, accepted = int(result.draft["drafted"]), int(result.draft["accepted"])
    first = first_difference(str(case), number, prompt, right, result.token_ids)
    return Row(
        case=str(case),
        prompts=1,
        tokens=len(result.token_ids),
        cycles=int(result.draft["cycles"]),
        drafted=drafted,
        accepted=accepted,
        rejections=drafted - accepted,
        differing=int(first is not None),
        seconds=seconds,
        first=first,
    )


def first_difference(
    case: str, number: int, prompt: int, expected: Sequence[int], got: Sequence[int]
) -> Difference | None:
    """Compare two answers to a prompt of `prompt` tokens."""
    for at in range(max(len(expected), len(got))):
        a = expected[at] if at < len(expected) else None
        b = got[at] if at < len(got) else None
        if a != b:
            return Difference(case, number, prompt + at, a, b)
    return None


def summarise(rows: Iterable[Row], on_row: Callable[[Row], None] = lambda row: None) -> list[Row]:
    """Add up the rows of each case, in order of appearance; `on_row` sees each as it comes."""
    totals: dict[str, Row] = {}
    for row in rows:
        on_row(row)
        totals.setdefault(row.case, Row(row.case)).add(row)
    return list(totals.values())


def round_trip_failures(tokenizer: Tokenizer, texts: Iterable[str]) -> list[str]:
    """Return the texts that do not come back from their ids, all at once or streamed."""
    failed = []
    for text in texts:
        ids = tokenizer.encode(text, allow_special=False)
        stream = TextStream(tokenizer)
        streamed = "".join(stream.push(i).text for i in ids) + stream.flush().text
        if tokenizer.decode(ids) != text or streamed != text:
            failed.append(text)
    return failed
