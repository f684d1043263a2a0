"""Perplexity: exp of the mean negative log-likelihood of the tokens of a text, in windows.

Invariant: every view sees the same windows, so that views are compared in pairs; log-softmax is
exact, in fp64, from the fp32 logits. What counts: in the first window every token but the first
(all, where the model begins its texts with BOS); in the others the last `stride` tokens that have
one before them. With a stride as long as the window, windows stand apart, each from its own start,
as most published figures have it; a shorter stride gives every token a longer past.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from edge_runtime.evaluate import report, stats
from edge_runtime.evaluate.distributions import negative_log_likelihood
from edge_runtime.evaluate.items import Item
from edge_runtime.evaluate.resume import Record
from edge_runtime.evaluate.views import RunningView, Views, ViewSpec


class Perplexity:
    """The task `ppl`."""

    name = "ppl"

    def __init__(self, items: list[Item], views: Sequence[ViewSpec]) -> None:
        self.items, self._views = items, views

    @property
    def context(self) -> int:
        """Tokens of the longest window."""
        return max(len(item.ids) for item in self.items)

    def run(self, item: Item, views: Views) -> Record:
        """Sum -log p over the counted tokens of a window, for each view."""
        sums = {str(spec): _sum(views.get(spec), item) for spec in self._views}
        return {"n": len(item.ids) - 1 - item.first, "nll": sums}

    def rows(self, records: Mapping[str, Sequence[Record]]) -> dict[str, Any]:
        """Perplexities by text and view, and their ratios to the first view's."""
        rows, pairs = [], []
        names = [str(spec) for spec in self._views]
        for workload, found in report.with_total(records).items():
            counts = [r["n"] for r in found]
            sums = {name: [r["nll"][name] for r in found] for name in names}
            for name in names:
                estimate = stats.ratio(sums[name], counts).exp()
                rows.append(report.row(self.name, workload, name, "perplexity", estimate))
            for name in names[1:]:
                ratio = stats.difference(sums[name], counts, sums[names[0]], counts).exp()
                pairs.append(
                    report.row(self.name, workload, name, "perplexity ratio", ratio, over=names[0])
                )
        return {"rows": rows, "pairs": pairs}


def _sum(view: RunningView, item: Item) -> float:
    total, at = 0.0, item.first
    for logits in view.blocks(item.ids[:-1], item.first):
        targets = np.asarray(item.ids[at + 1 : at + 1 + len(logits)])
        total += negative_log_likelihood(logits, targets)
        at += len(logits)
    return total
