"""Acceptance: how much of what is drafted the target keeps, by workload, length and KV policy.

Invariant: every way to draft gives the tokens of the target decoding alone; how many answers did
not is reported (it must be none). A way is a length γ, a source (`base`; `both`: base and look-up;
`ngram`: look-up alone) and a policy; or `auto`, what the engine does by itself: its governor goes
by measured times, so its counts differ a little from run to run. Definitions, as the papers have
them:

    acceptance        accepted / drafted tokens; what comes behind a refused token counts as drafted
    tokens a cycle    tokens emitted / verifications
    slot i            of the cycles that drafted an i-th token, the share that kept it; and the same
                      of those that kept the one before it

The last cycle of an answer drafts no more than the answer may still hold.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from edge_runtime.cache.policy import KV8, KvPolicy
from edge_runtime.decode.draft import (
    BaseDraft,
    BothDraft,
    DraftChoice,
    DraftSource,
    NgramDraft,
    SourceName,
)
from edge_runtime.decode.engine import Engine
from edge_runtime.decode.request import Result
from edge_runtime.decode.sampling import Sampling
from edge_runtime.evaluate import report, stats
from edge_runtime.evaluate.items import Item, seeded
from edge_runtime.evaluate.resume import Record
from edge_runtime.evaluate.views import Views
from edge_runtime.kernels.ops import Logits

AUTO = 0


@dataclass(frozen=True, slots=True)
class Way:
    """One way to draft. gamma 0: what the engine does by itself."""

    gamma: int
    source: SourceName = "both"
    policy: KvPolicy = KV8

    def __str__(self) -> str:
        """Return its name in records and documents."""
        if self.gamma == AUTO:
            return "auto"
        return f"{self.gamma} {self.source} {self.policy}"

    @property
    def fields(self) -> dict[str, Any]:
        """What a row says of it."""
        if self.gamma == AUTO:
            return {"gamma": "auto", "source": "auto", "kv_policy": str(self.policy)}
        return {"gamma": self.gamma, "source": self.source, "kv_policy": str(self.policy)}


def ways(
    gammas: Sequence[int], sources: Sequence[SourceName], policies: Sequence[KvPolicy]
) -> list[Way]:
    """Return every combination once; look-up alone reads no cache and has the first policy."""
    found = [
        Way(g, s, p)
        for s in sources
        for p in (policies[:1] if s == "ngram" else policies)
        for g in gammas
        if g != AUTO
    ]
    return found + [Way(AUTO)] * (AUTO in gammas)


class SlotCounter:
    """A draft source that counts, slot by slot, what the target kept of what another drafted."""

    def __init__(self, source: DraftSource, gamma: int) -> None:
        self._source = source
        self.drafted, self.accepted = [0] * gamma, [0] * gamma
        self.reached = [0] * gamma  # drafted, and everything before it kept
        self._known = 0  # tokens when the last draft was asked for
        self._length = 0  # of the last draft, of which it is not known yet what was kept

    def propose(self, tokens: Sequence[int], start: int, gamma: int) -> list[int]:
        """Return the other's draft."""
        self._settle(len(tokens) - self._known - 1)
        draft = self._source.propose(tokens, start, gamma)[:gamma]
        for slot in range(len(draft)):
            self.drafted[slot] += 1
        self._known, self._length = len(tokens), len(draft)
        return draft

    def finish(self, accepted: int) -> None:
        """Count the last draft, from how many tokens were accepted in all."""
        self._settle(accepted - sum(self.accepted))

    def _settle(self, kept: int) -> None:
        for slot in range(min(self._length, kept + 1)):
            self.reached[slot] += 1
            self.accepted[slot] += slot < kept
        self._length = 0


def draft_source(engine: Engine, way: Way, ids: Sequence[int], sampling: Sampling) -> DraftSource:
    """Return what drafts in a way, as the engine's own source would."""

    def pick(logits: Logits, position: int, drafted: list[int]) -> int:
        if sampling.plain_greedy:
            return logits.argmax()[0]
        return logits.sample(0, position, ids, drafted, sampling)

    ngram = NgramDraft()
    base = BaseDraft(engine.model, engine.cache, way.policy, pick, lambda seconds: None)
    if way.source == "ngram":
        return ngram
    return base if way.source == "base" else BothDraft(base, ngram)


class Acceptance:
    """The task `acceptance`."""

    name = "acceptance"

    def __init__(
        self,
        items: list[Item],
        grid: Sequence[Way],
        *,
        new_tokens: int,
        sampling: Sampling,
        ignore_eos: bool = False,
    ) -> None:
        self.items, self._grid = items, grid
        self._new_tokens, self._sampling, self._ignore_eos = new_tokens, sampling, ignore_eos

    @property
    def context(self) -> int:
        """Tokens of the longest prompt with its answer."""
        return max(len(item.ids) for item in self.items) + self._new_tokens

    def run(self, item: Item, views: Views) -> Record:
        """Decode one prompt in every way, and by the target alone."""
        engine = views.engine("nest")
        own, sampling = engine.draft, seeded(self._sampling, item)
        try:
            right = self._decode(engine, item, DraftChoice(0, "base", "eval"), None, sampling)
            found: Record = {}
            for way in self._grid:
                counter = None
                if way.gamma != AUTO:
                    counter = SlotCounter(draft_source(engine, way, item.ids, sampling), way.gamma)
                choice = own if counter is None else DraftChoice(way.gamma, "base", "eval")
                result = self._decode(engine, item, choice, counter, sampling)
                found[str(way)] = _cell(result, counter)
                found[str(way)]["differs"] = int(result.token_ids != right.token_ids)
        finally:
            engine.draft = own
        return found | {"prompt_tokens": len(item.ids), "new_tokens": right.new_tokens}

    def _decode(
        self,
        engine: Engine,
        item: Item,
        choice: DraftChoice,
        source: DraftSource | None,
        sampling: Sampling,
    ) -> Result:
        engine.draft = choice
        return engine.generate(
            item.ids,
            max_new_tokens=self._new_tokens,
            sampling=sampling,
            ignore_eos=self._ignore_eos,
            draft_source=source,
        ).complete()

    def rows(self, records: Mapping[str, Sequence[Record]]) -> dict[str, Any]:
        """Acceptance and tokens a cycle by workload and way; what each policy loses."""
        rows: list[dict[str, Any]] = []
        pairs: list[dict[str, Any]] = []
        for workload, found in report.with_total(records).items():
            for way in self._grid:
                rows += self._way_rows(workload, way, [r[str(way)] for r in found])
            pairs += self._policy_pairs(workload, found)
        differing = sum(
            r[str(way)]["differs"]
            for found in records.values()
            for r in found
            for way in self._grid
        )
        notes = {"answers that differ from the target alone": differing}
        return {"rows": rows, "pairs": pairs, "differing": differing, "notes": notes}

    def _way_rows(self, workload: str, way: Way, cells: Sequence[Record]) -> list[dict[str, Any]]:
        drafted = [sum(c["drafted"]) for c in cells]
        accepted = [sum(c["accepted"]) for c in cells]
        cycles, emitted = [c["cycles"] for c in cells], [c["emitted"] for c in cells]
        per_cycle = stats.ratio(emitted, cycles)
        return [
            report.row(
                self.name, workload, str(way), "acceptance", stats.share(accepted, drafted),
                **way.fields, slots=_slots(cells) if way.gamma != AUTO else [],
            ),
            report.row(
                self.name, workload, str(way), "tokens per cycle", per_cycle, **way.fields
            ),
        ]  # fmt: skip

    def _policy_pairs(self, workload: str, found: Sequence[Record]) -> list[dict[str, Any]]:
        """Differences between ways that differ in their policy alone."""
        pairs = []
        for i, a in enumerate(self._grid):
            for b in self._grid[:i]:
                if (a.gamma, a.source) != (b.gamma, b.source):
                    continue
                columns = [
                    [sum(r[str(way)][what]) for r in found]
                    for way in (a, b)
                    for what in ("accepted", "drafted")
                ]
                estimate = stats.difference(*columns)
                pairs.append(
                    report.row(self.name, workload, str(a), "acceptance", estimate, minus=str(b))
                )
        return pairs


def _cell(result: Result, counter: SlotCounter | None) -> Record:
    """Counts of one answer; without a counter all slots are one."""
    drafted, accepted = int(result.draft["drafted"]), int(result.draft["accepted"])
    slots = [drafted], [accepted], [drafted]
    if counter is not None:
        counter.finish(accepted)
        slots = counter.drafted, counter.accepted, counter.reached
    return {
        **dict(zip(("drafted", "accepted", "reached"), slots, strict=True)),
        "cycles": int(result.draft["cycles"]),
        "emitted": max(0, result.new_tokens - (result.finish_reason != "eos")),
    }


def _slots(cells: Sequence[Record]) -> list[dict[str, Any]]:
    """Counts and shares of each draft slot, over prompts."""
    found = []
    for slot in range(len(cells[0]["drafted"]) if cells else 0):
        drafted, accepted, reached = (
            sum(c[what][slot] for c in cells) for what in ("drafted", "accepted", "reached")
        )
        found.append(
            {
                "slot": slot + 1,
                "drafted": drafted,
                "accepted": accepted,
                "acceptance": report.rounded(accepted / drafted) if drafted else None,
                "given_previous": report.rounded(accepted / reached) if reached else None,
            }
        )
    return found
