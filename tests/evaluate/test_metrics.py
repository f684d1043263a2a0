"""Scores of given answers."""

from __future__ import annotations

import hypothesis
import pytest
from hypothesis import strategies as st

from edge_runtime.evaluate import metrics


@pytest.mark.parametrize(
    ("answer", "strict", "flexible"),
    [
        (" 16 - 3 = 13.\n#### 18", 1, 1),
        (" #### 18\n\n", 1, 1),
        ("#### 18.", 1, 1),
        ("#### 1,8", 1, 1),  # separators of thousands are dropped wherever they are
        ("####18", 0, 1),  # the strict form has a space
        ("#### $18", 0, 1),
        ("The answer is 18.", 0, 1),
        ("She makes $18 a day", 0, 1),
        ("18 eggs at 2 dollars", 0, 0),
        ("#### 18 and then 5", 1, 0),
        ("#### -18", 0, 0),
        ("#### 180", 0, 0),
        ("", 0, 0),
        ("no number", 0, 0),
        ("#### .", 0, 0),
        ("...", 0, 0),
    ],
)
def test_gsm8k(answer: str, strict: int, flexible: int) -> None:
    reference = "She sells 9 * 2 = $<<9*2=18>>18.\n#### 18"
    assert metrics.gsm8k_scores(answer, reference) == {"strict": strict, "flexible": flexible}


def test_gsm8k_thousands() -> None:
    assert metrics.gsm8k_scores("#### 70000", "#### 70,000") == {"strict": 1, "flexible": 1}
    assert metrics.gsm8k_number("#### -1,234.5") == "-1234.5"
    assert metrics.last_number("it costs $2,000.") == "2000"


@pytest.mark.parametrize(
    ("answer", "references", "exact", "f1"),
    [
        ("The Eiffel Tower!", ["eiffel tower"], 1, 1.0),
        ("in the Eiffel tower", ["Paris", "Eiffel Tower"], 0, 0.8),
        ("red red blue", ["red green"], 0, 0.4),  # counted: one red in common
        ("", [""], 1, 1.0),
        ("", ["x"], 0, 0.0),
        ("x", ["y"], 0, 0.0),
    ],
)
def test_exact_and_f1(answer: str, references: list[str], exact: int, f1: float) -> None:
    assert metrics.exact(answer, references) == exact
    assert metrics.f1(answer, references) == pytest.approx(f1)


def test_rouge_l() -> None:
    # Lin 2004, 3.1: "police killed the gunman" and two candidates
    reference = ["police killed the gunman"]
    assert metrics.rouge_l("police kill the gunman", reference) == pytest.approx(3 / 4)
    assert metrics.rouge_l("the gunman kill police", reference) == pytest.approx(2 / 4)
    assert metrics.rouge_l("Police, killed", reference) == pytest.approx(2 * 1 * 0.5 / 1.5)
    assert metrics.rouge_l("", reference) == 0
    assert metrics.rouge_l("ein Fluss", ["x", "der Fluss"]) == pytest.approx(0.5)


@hypothesis.given(st.text("abc", max_size=9), st.text("abc", max_size=9))
def test_common_subsequence(a: str, b: str) -> None:
    def longest(i: int, j: int) -> int:
        """The definition, by cases."""
        if not i or not j:
            return 0
        if a[i - 1] == b[j - 1]:
            return 1 + longest(i - 1, j - 1)
        return max(longest(i - 1, j), longest(i, j - 1))

    if len(a) + len(b) <= 12:
        assert metrics.common_subsequence(a, b) == longest(len(a), len(b))
    assert metrics.common_subsequence(a, b) == metrics.common_subsequence(b, a)


def test_accuracy() -> None:
    classes = ["Food", "Fast food", "Number"]
    assert metrics.accuracy("\nFood\nNumber", ["Food"], classes) == 1
    assert metrics.accuracy("Food or Number", ["Food"], classes) == 0.5
    assert metrics.accuracy("Number", ["Food"], classes) == 0
    assert metrics.accuracy("Some Fast food", ["Fast food"], ["food", "Fast food"]) == 1
    assert metrics.accuracy("Yes, it is.", ["yes"]) == 1
    assert metrics.accuracy("Yesterday", ["yes"]) == 0
    assert metrics.accuracy("", ["yes"]) == 0
