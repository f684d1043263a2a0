"""Tasks that are answered and scored: gsm8k with examples, and JSON lines with answers.

Invariant: answers are greedy unless asked otherwise; `nest` drafts and gives the tokens of `w8`, so
its score is the target's. A record keeps the answer's text and ids: what a score came from can be
read in the file of --resume.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import combinations
from typing import Any

from edge_runtime.decode.sampling import Sampling
from edge_runtime.evaluate import report, stats
from edge_runtime.evaluate.items import Item, seeded
from edge_runtime.evaluate.resume import Record
from edge_runtime.evaluate.views import Views, ViewSpec

Score = Callable[[str, Item], dict[str, float]]
GSM8K_STOP = ("Question:",)  # the next example: the answer is over


class Answers:
    """The tasks `gsm8k` and `jsonl`."""

    def __init__(
        self,
        name: str,
        items: list[Item],
        views: Sequence[ViewSpec],
        score: Score,
        *,
        new_tokens: int,
        sampling: Sampling,
        stop: Sequence[str],
        ignore_eos: bool = False,
    ) -> None:
        """score: the metrics of an answer's text, each 0 to 1."""
        self.name, self.items, self._views, self._score = name, items, views, score
        self._new_tokens, self._sampling = new_tokens, sampling
        self._stop, self._ignore_eos = tuple(stop), ignore_eos

    @property
    def context(self) -> int:
        """Tokens of the longest prompt with its answer."""
        return max(len(item.ids) for item in self.items) + self._new_tokens

    def run(self, item: Item, views: Views) -> Record:
        """Answer and score one row with every view."""
        sampling = seeded(self._sampling, item)
        found: Record = {}
        for spec in self._views:
            result = views.get(spec).answer(
                item.ids,
                new_tokens=self._new_tokens,
                sampling=sampling,
                stop=self._stop,
                ignore_eos=self._ignore_eos,
            )
            found[str(spec)] = {
                "scores": self._score(result.text, item),
                "tokens": result.new_tokens,
                "finish": result.finish_reason,
                "text": result.text,
                "ids": result.token_ids,
            }
        return found

    def rows(self, records: Mapping[str, Sequence[Record]]) -> dict[str, Any]:
        """Mean scores by file and view, differences, and how many answers are the same tokens."""
        rows: list[dict[str, Any]] = []
        pairs: list[dict[str, Any]] = []
        names = [str(spec) for spec in self._views]
        for workload, found in report.with_total(records).items():
            ones = [1] * len(found)
            for metric in found[0][names[0]]["scores"]:
                scores = {n: [r[n]["scores"][metric] for r in found] for n in names}
                for name, values in scores.items():
                    whole = all(v in (0.0, 1.0) for v in values)
                    estimate = (stats.share if whole else stats.ratio)(values, ones)
                    cut = sum(r[name]["finish"] == "length" for r in found)
                    rows.append(
                        report.row(self.name, workload, name, metric, estimate, cut_short=cut)
                    )
                for a, b in combinations(names, 2):
                    estimate = stats.difference(scores[b], ones, scores[a], ones)
                    pairs.append(report.row(self.name, workload, b, metric, estimate, minus=a))
            for a, b in combinations(names, 2):
                same = [float(r[a]["ids"] == r[b]["ids"]) for r in found]
                estimate = stats.share(same, ones)
                pairs.append(report.row(self.name, workload, b, "same tokens", estimate, against=a))
        return {"rows": rows, "pairs": pairs}
