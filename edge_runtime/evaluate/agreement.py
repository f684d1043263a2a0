"""Agreement with the original: equal first choices, KL and JS divergence, teacher-forced.

Invariant: all views see the original's tokens, block by block in step, so that a position is
compared in pairs and no more than a block of logits is held of each view. Two kinds of items: the
original's own greedy answer to a prompt, over every position of it; and windows of a text, over the
positions whose next token `ppl` would count. Divergences are KL(original ‖ view) in nats.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any

from edge_runtime.decode.sampling import Sampling
from edge_runtime.errors import UsageError
from edge_runtime.evaluate import report, stats
from edge_runtime.evaluate.distributions import Divergence, compare
from edge_runtime.evaluate.items import Item
from edge_runtime.evaluate.resume import Record
from edge_runtime.evaluate.views import Views, ViewSpec

ORIGINAL, TARGET = ViewSpec("fp"), ViewSpec("nest")
METRICS = {"top1": 0, "kl": 1, "js": 2}  # places in a record


class Agreement:
    """The task `agreement`."""

    name = "agreement"

    def __init__(
        self, items: list[Item], views: Sequence[ViewSpec], *, new_tokens: int, prompts: set[str]
    ) -> None:
        """views: what is compared with the original. prompts: workloads whose items are prompts
        that the original answers; the others' are windows."""
        self.items = items
        self._views = [v for v in views if v != ORIGINAL]
        if not self._views:
            raise UsageError("--task agreement compares views with fp; --views has fp alone")
        self._new_tokens, self._prompts = new_tokens, prompts

    @property
    def context(self) -> int:
        """Tokens of the longest prompt with its answer, or of the longest window."""
        return max(
            len(i.ids) + (self._new_tokens if i.workload in self._prompts else 0)
            for i in self.items
        )

    def run(self, item: Item, views: Views) -> Record:
        """Compare every view with the original, and drafts with the target, over one item."""
        ids, first = item.ids[:-1], item.first
        if item.workload in self._prompts:
            answer = views.get(ORIGINAL).answer(
                item.ids, new_tokens=self._new_tokens, sampling=Sampling()
            )
            tokens = answer.token_ids
            ids, first = item.ids + tokens[:-1], len(item.ids) - 1
            if not tokens:  # it ended at once: nothing was said
                ids = item.ids[:first]
        specs = [ORIGINAL, *self._views]
        pairs = [(str(ORIGINAL), str(v)) for v in self._views]
        pairs += [(str(TARGET), str(v)) for v in self._drafts]
        totals = {pair: Divergence() for pair in pairs}
        for blocks in zip(*(views.get(v).blocks(ids, first) for v in specs), strict=True):
            named = {str(v): logits for v, logits in zip(specs, blocks, strict=True)}
            for pair, found in compare(named, pairs).items():
                totals[pair].add(found)
        against = {str(ORIGINAL): "original", str(TARGET): "target"}
        record: Record = {"n": len(ids) - first, "original": {}, "target": {}}
        for (p, q), total in totals.items():
            record[against[p]][q] = [total.same, total.kl, total.js]
        return record

    @property
    def _drafts(self) -> list[ViewSpec]:
        """Views that are compared with the target, if that is there."""
        if TARGET not in self._views:
            return []
        return [v for v in self._views if v.name in ("w4", "draft")]

    def rows(self, records: Mapping[str, Sequence[Record]]) -> dict[str, Any]:
        """Agreement and divergences by workload and view, and differences between views."""
        rows: list[dict[str, Any]] = []
        pairs: list[dict[str, Any]] = []
        for workload, found in report.with_total(records).items():
            counts = [r["n"] for r in found]
            for against in ("original", "target"):
                for metric, place in METRICS.items():
                    sums = {
                        name: [r[against][name][place] for r in found]
                        for name in (found[0][against] if found else {})
                    }
                    self._add_rows(rows, pairs, workload, (metric, against), sums, counts)
        return {"rows": rows, "pairs": pairs}

    def _add_rows(
        self,
        rows: list[dict[str, Any]],
        pairs: list[dict[str, Any]],
        workload: str,
        what: tuple[str, str],
        sums: Mapping[str, Sequence[float]],
        counts: Sequence[int],
    ) -> None:
        metric, against = what
        estimate = stats.share if metric == "top1" else stats.ratio
        for name, values in sums.items():
            found = estimate(values, counts)
            rows.append(report.row(self.name, workload, name, metric, found, against=against))
        for a, b in combinations(sums, 2):
            found = stats.difference(sums[b], counts, sums[a], counts)
            pairs.append(
                report.row(self.name, workload, b, metric, found, against=against, minus=a)
            )
