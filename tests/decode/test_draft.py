"""Draft sources: what is looked up, how two are joined, and how one is chosen."""

from __future__ import annotations

from collections.abc import Sequence

import hypothesis
import pytest
from hypothesis import strategies as st

from edge_runtime.cache.policy import KV4, KV8, KvPolicy, parse_policy
from edge_runtime.decode.draft import NGRAM_SIZES, BothDraft, NgramDraft, choose_draft
from edge_runtime.errors import UsageError
from edge_runtime.kernels.layout import NEVER, full_from


def look_up(tokens: Sequence[int], gamma: int) -> list[int]:
    """The most recent earlier place where the longest known ending stood, and what came after."""
    for n in NGRAM_SIZES:
        tail = list(tokens[-n:])
        if len(tail) < n:
            continue
        for end in range(len(tokens) - 1, n - 1, -1):
            if list(tokens[end - n : end]) == tail:
                found = list(tokens[end : end + gamma])
                return found[: found.index(-1)] if -1 in found else found
    return []


def test_ngram_continues_what_came_before() -> None:
    draft = NgramDraft()
    assert draft.propose([1, 2, 3, 4, 5, 1, 2, 3], 7, 7) == [4, 5, 1, 2, 3]
    assert draft.propose([1, 2, 3, 4, 5, 1, 2, 3, 9], 8, 7) == []
    assert draft.propose([1, 2, 3, 4, 5, 1, 2, 3, 9, 4, 5], 10, 2) == [1, 2]


def test_the_longest_match_and_the_latest_place_win() -> None:
    tokens = [8, 1, 2, 50, 9, 1, 2, 60, 7, 1, 2, 70, 8, 1, 2]
    assert NgramDraft().propose(tokens, 0, 1) == [50]  # 8 1 2
    assert NgramDraft().propose(tokens[1:], 0, 1) == [70]  # 1 2, the latest


@hypothesis.given(
    st.lists(st.integers(-1, 3), min_size=1, max_size=40), st.integers(0, 7), st.data()
)
def test_ngram_grown_step_by_step(tokens: list[int], gamma: int, data: st.DataObject) -> None:
    draft = NgramDraft()
    at = 1
    while at <= len(tokens):
        assert draft.propose(tokens[:at], at - 1, gamma) == look_up(tokens[:at], gamma)
        at += data.draw(st.integers(1, 5))


def test_a_shorter_sequence_is_another_one() -> None:
    draft = NgramDraft()
    draft.propose([1, 2, 3, 4, 1, 2], 5, 4)
    assert draft.propose([1, 2], 1, 4) == []
    assert draft.propose([1, 2, 7, 1, 2], 4, 4) == [7, 1, 2]


class Scripted:
    """A base draft that counts what it is asked."""

    def __init__(self, ids: list[int]) -> None:
        self.ids, self.asked = ids, []

    def propose(self, tokens: Sequence[int], start: int, gamma: int) -> list[int]:
        self.asked.append(gamma)
        return self.ids[:gamma]


@pytest.mark.parametrize("gamma", range(1, 8))
def test_both_is_half_base_then_lookup(gamma: int) -> None:
    base = Scripted([4, 5, 6, 7])
    tokens = [1, 4, 5, 6, 7, 8, 9, 2, 3, 1]
    got = BothDraft(base, NgramDraft()).propose(tokens, 9, gamma)  # type: ignore[arg-type]
    assert base.asked == [(gamma + 1) // 2]
    assert got == [4, 5, 6, 7, 8, 9, 2][:gamma] if gamma > 1 else [4]
    assert len(got) <= gamma


def test_both_without_a_match_is_the_base() -> None:
    base = Scripted([11, 12, 13, 14])
    assert BothDraft(base, NgramDraft()).propose([1, 2, 3], 2, 7) == [11, 12, 13, 14]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("gamma", "source", "view", "backend", "want"),
    [
        ("auto", "auto", "nest", "reference", (7, "ngram")),
        ("auto", "auto", "nest", "cpu", (7, "both")),
        ("auto", "base", "nest", "reference", (7, "base")),
        ("auto", "both", "nest", "cpu", (7, "both")),
        ("auto", "ngram", "nest", "cpu", (7, "ngram")),
        ("3", "auto", "nest", "reference", (3, "base")),
        ("7", "both", "nest", "reference", (7, "both")),
        ("0", "ngram", "nest", "cpu", (0, "base")),
        ("off", "auto", "nest", "cpu", (0, "base")),
        ("7", "auto", "nest", "cpu", (7, "base")),
        ("4", "base", "w8", "cpu", (0, "base")),
        ("auto", "auto", "w4", "cpu", (0, "base")),
        ("auto", "auto", "fp", "cpu", (0, "base")),
    ],
)
def test_choice(gamma: str, source: str, view: str, backend: str, want: tuple[int, str]) -> None:
    choice = choose_draft(gamma, source, view, backend)
    assert (choice.gamma, choice.source) == want
    assert choice.why
    assert choice.governed == (gamma == "auto" and view == "nest")


@pytest.mark.parametrize(
    ("gamma", "source"),
    [
        ("8", "auto"),
        ("-1", "auto"),
        ("on", "auto"),
        ("", "base"),
        ("4.0", "base"),
        ("2", "tree"),
        ("²", "auto"),
        ("٤", "auto"),
    ],
)
def test_choices_that_are_refused(gamma: str, source: str) -> None:
    with pytest.raises(UsageError, match="expected"):
        choose_draft(gamma, source, "nest", "reference")


# ---- policies


def test_full_from() -> None:
    assert [full_from(p, None) for p in (0, 500)] == [0, 0]
    assert full_from(500, 0) == NEVER
    assert [full_from(p, 64) for p in (0, 62, 63, 64, 126, 127, 128, 500)] == [
        0, 0, 0, 0, 0, 64, 64, 384,
    ]  # fmt: skip
    for recent in (1, 63, 64, 65, 200):
        for position in range(400):
            first = full_from(position, recent)
            assert first % 64 == 0
            assert first <= max(0, position + 1 - recent) < first + 64 + max(0, first - position)


def test_policy_spelling() -> None:
    for text, policy in (("kv8", KV8), ("kv4", KV4), ("recent:100", KvPolicy(100))):
        assert parse_policy(text) == policy
        assert str(policy) == text
    assert parse_policy("auto") == KV8
    for text in ("", "kv2", "recent:0", "recent:-1", "recent:", "recent", "recent:1e3", "KV8"):
        with pytest.raises(UsageError, match="expected auto, kv8, kv4 or recent:N"):
            parse_policy(text)
