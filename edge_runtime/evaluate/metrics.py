"""Scores of an answer's text against the answers of a data set: 0 to 1.

Sources: exact and f1 as SQuAD 1.1 defines them (Rajpurkar et al. 2016) and LongBench uses them;
ROUGE-L as Lin 2004 defines it, with equal weights (its F measure, as LongBench reports it);
accuracy as LongBench scores classification; gsm8k as the harness of EleutherAI does, strict and
flexible. Words are runs of letters and digits of any script; nothing is stemmed.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Callable, Sequence

_STRICT = re.compile(r"#### (-?[0-9.,]+)")
_FLEXIBLE = re.compile(r"-?[$0-9.,]{2,}|-?[0-9]+")
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalised(text: str) -> str:
    """Lower case, without punctuation, articles and extra space (SQuAD)."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def exact(answer: str, references: Sequence[str], _: Sequence[str] = ()) -> float:
    """1 if the answer is one of the references, both normalised."""
    return float(any(normalised(answer) == normalised(r) for r in references))


def f1(answer: str, references: Sequence[str], _: Sequence[str] = ()) -> float:
    """F1 of the words in common, counted, with the best of the references."""
    return max(_f1(normalised(answer).split(), normalised(r).split()) for r in references)


def _f1(answer: list[str], reference: list[str]) -> float:
    if not answer or not reference:
        return float(answer == reference)
    common = sum((Counter(answer) & Counter(reference)).values())
    return _f_measure(common, len(answer), len(reference))


def rouge_l(answer: str, references: Sequence[str], _: Sequence[str] = ()) -> float:
    """F measure of the longest common subsequence of words, with the best of the references."""
    words = _words(answer)
    return max(_rouge_l(words, _words(r)) for r in references)


def _words(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())


def _rouge_l(answer: list[str], reference: list[str]) -> float:
    if not answer or not reference:
        return float(answer == reference)
    return _f_measure(common_subsequence(answer, reference), len(answer), len(reference))


def common_subsequence(a: Sequence[str], b: Sequence[str]) -> int:
    """Length of the longest common subsequence."""
    row = [0] * (len(b) + 1)
    for x in a:
        before = 0  # the row above, one to the left
        for j, y in enumerate(b, 1):
            before, row[j] = row[j], before + 1 if x == y else max(row[j], row[j - 1])
    return row[-1]


def _f_measure(common: int, answered: int, expected: int) -> float:
    if not common:
        return 0.0
    precision, recall = common / answered, common / expected
    return 2 * precision * recall / (precision + recall)


def accuracy(answer: str, references: Sequence[str], classes: Sequence[str] = ()) -> float:
    """Right or not, by the first line that is not empty.

    With classes: 1 / (classes named in it) if the right one is; a class that is part of a right
    one's name does not count as named. Without: 1 if it begins with a reference, both normalised.
    """
    line = next((part for part in answer.splitlines() if part.strip()), "")
    if not classes:
        said = f"{normalised(line)} "
        return float(any(said.startswith(f"{normalised(r)} ") for r in references))
    best = 0.0
    for right in references:
        named = [c for c in classes if c in line and (c == right or c not in right)]
        if right in named:
            best = max(best, 1 / len(named))
    return best


Metric = Callable[[str, Sequence[str], Sequence[str]], float]
METRICS: dict[str, Metric] = {
    "exact": exact,
    "f1": f1,
    "rouge_l": rouge_l,
    "accuracy": accuracy,
}


def gsm8k_number(text: str) -> str | None:
    """The number behind "####", without separators; None if there is none."""
    match = _STRICT.search(text)
    return None if match is None else plain_number(match[1])


def last_number(text: str) -> str | None:
    """The last number of a text, without separators and currency; None if there is none."""
    found = [plain_number(n) for n in _FLEXIBLE.findall(text)]
    return next((n for n in reversed(found) if n), None)


def plain_number(text: str) -> str:
    """Drop separators of thousands, currency and a final full stop: "$1,234." is 1234."""
    return text.replace(",", "").replace("$", "").removesuffix(".")


def gsm8k_scores(answer: str, reference: str) -> dict[str, float]:
    """strict: the number behind "####" is that of the reference; flexible: the last number is."""
    right = gsm8k_number(reference)
    return {
        "strict": float(right is not None and gsm8k_number(answer) == right),
        "flexible": float(right is not None and last_number(answer) == right),
    }
