"""Modes side by side over contexts and drafts: speed, memory, energy, and what they are worth.

Invariant: a row says ok, oom or refused, and never holds a number that was not measured. Contexts
are processes of their own; within one, ways to decode run in turns (`worker.py`).
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any

import msgspec

from edge_runtime.measure import child, state
from edge_runtime.measure.child import Event, Outcome
from edge_runtime.measure.energy import Joules
from edge_runtime.measure.worker import DRAFTING, Job, ModeName, Way

Progress = Callable[[int, int, str], None]
PHASES = ("prefill", "draft", "verify")
NOISY = 0.2  # range of the runs over their median


class Wishes(msgspec.Struct, frozen=True, kw_only=True):
    """What is to be measured."""

    job: Job  # what every child does alike
    modes: tuple[ModeName, ...]
    contexts: tuple[int, ...]  # of prompt tokens
    gammas: tuple[int | None, ...] = (None,)

    def job_of(self, ways: Sequence[Way], prompt_tokens: int) -> Job:
        """Return the job of one child process."""
        return msgspec.structs.replace(self.job, ways=tuple(ways), prompt_tokens=prompt_tokens)

    def groups(self) -> list[list[Way]]:
        """Ways in the order of the table: those that share the nest's engine, then the others."""
        found: dict[str, list[Way]] = {}
        for mode in self.modes:
            for gamma in self.gammas if mode in DRAFTING else (None,):
                way = Way(mode=mode, gamma=gamma)
                found.setdefault(way.group, []).append(way)
        return sorted(found.values(), key=lambda ways: ways[0].group != "nest")


def default_text() -> str:
    """Return the text that comes with the program: prose and chats, as conversion uses it."""
    bundled = resources.files("edge_runtime.convert").joinpath("calibration.jsonl")
    parts: list[str] = []
    for line in bundled.read_text("utf-8").splitlines():
        entry = json.loads(line)
        parts.append(entry.get("text") or "\n".join(m["content"] for m in entry["messages"]))
    return "\n\n".join(parts)


def measure(
    wishes: Wishes,
    *,
    energy: Joules | None = None,
    progress: Progress = lambda done, count, what: None,
) -> dict[str, Any]:
    """Measure everything that was wished for; return `rows`, `state` and `warnings`."""
    before = state.snapshot()
    todo = [(context, ways) for context in wishes.contexts for ways in wishes.groups()]
    count = sum(len(ways) for _, ways in todo) * (wishes.job.repeats + 1)
    shown = _Shown(progress, count)
    rows: list[dict[str, Any]] = []
    crashes: list[str] = []
    for context, ways in todo:
        shown.context = context
        outcome = child.run(
            wishes.job_of(ways, context),
            floor_bytes=wishes.job.reserve_bytes,
            on_event=shown,
            may_fail=ways[0].group != "nest",
        )
        if energy is not None:
            _count_warm_up(outcome, energy)
        if outcome.crash:
            crashes.append(f"{context} tokens: {outcome.crash}")
        rows += [_row(way, context, outcome, energy) for way in ways]
    _compare(rows)
    after = state.snapshot()
    return {
        "rows": rows,
        "crashes": crashes,
        "state": before | {"after": after["board"]},
        "warnings": [*state.warnings(before, after), *_noise(rows)],
    }


@dataclass(slots=True)
class _Shown:
    """Shows the progress of children by their events."""

    progress: Progress
    count: int
    context: int = 0
    done: int = 0

    def __call__(self, event: Event) -> None:
        if event["event"] == "begin":
            what = f"{event['way']} at {self.context} tokens"
            self.progress(self.done, self.count, what)
        self.done += event["event"] == "run"


def window(way: Way, context: int, phase: str) -> str:
    """Name of the energy window of a phase of a row."""
    return f"{way.name} {context} {phase}"


def _row(way: Way, context: int, outcome: Outcome, energy: Joules | None) -> dict[str, Any]:
    runs = outcome.runs(way.name)
    opened = outcome.opened
    status = "ok" if runs else outcome.status
    row: dict[str, Any] = {
        "mode": way.mode,
        "context": context,
        "gamma": way.gamma,
        "status": status,
        "reason": "" if runs else outcome.reason,
        "backend": opened.get("backend"),
        "kv_policy": opened.get("policy"),
        "planned_bytes": opened.get("planned_bytes"),
        "system_least_available_bytes": outcome.least_available_bytes,
        "runs": len(runs),
        "energy": None,
        "j_per_token": None,
        "speedup_vs_fp16": None,
        "speedup_vs_w8": None,
    }
    for name in ("prefill_tok_s", "decode_tok_s", "ttft_s"):
        values = [r[name] for r in runs]
        row[name] = statistics.median(values) if values else None
        row[f"{name}_range"] = [min(values), max(values)] if values else None
    drafted = sum(r["drafted"] for r in runs)
    cycles = sum(r["cycles"] for r in runs)
    row["drafted"] = drafted
    row["acceptance"] = sum(r["accepted"] for r in runs) / drafted if drafted else None
    emitted = sum(max(0, r["new_tokens"] - 1) for r in runs)
    row["tokens_per_cycle"] = emitted / cycles if cycles else None
    row["draft_why"] = runs[-1]["draft_why"] if runs else ""
    row["peak_bytes"] = max((r["peak_bytes"] or 0 for r in runs), default=0) or None
    row["memory"] = runs[-1]["memory"] if runs else None
    row["system_peak_bytes"] = _system_peak(outcome)
    if energy is not None and runs:
        _count_energy(row, way, context, runs, energy)
    return row


def _system_peak(outcome: Outcome) -> int | None:
    from edge_runtime import machine

    total = machine.total_bytes()
    least = outcome.least_available_bytes
    return None if total is None or least is None else total - least


def _count_energy(
    row: dict[str, Any], way: Way, context: int, runs: Iterable[Event], energy: Joules
) -> None:
    """Hand a row's phases to the meter; figures come from it when it has been closed."""
    tokens = prompt = 0
    for run in runs:
        tokens += run["new_tokens"] - 1
        prompt += context
        decode = [p for p in run["phases"] if p[0] != "prefill"]
        for phase, started, ended in run["phases"]:
            energy.add(window(way, context, phase), started, ended)
        if decode:
            energy.add(window(way, context, "decode"), decode[0][1], decode[-1][2])
    row["energy"] = {"new_tokens": tokens, "prompt_tokens": prompt}


def _count_warm_up(outcome: Outcome, energy: Joules) -> None:
    """Tell the meter of work that no row counts, so that it is not taken for quiet."""
    for event in outcome.events:
        if event["event"] == "run" and not event["counted"]:
            phases = event["phases"]
            energy.add("warm-up", phases[0][1], phases[-1][2])


def add_energy(rows: Iterable[dict[str, Any]], energy: Joules) -> list[str]:
    """Fill in the energy of rows, once the meter has sampled past the last of them; return why
    rows have no joules."""
    notes = []
    for row in rows:
        if row["energy"] is None:
            continue
        way = Way(mode=row["mode"], gamma=row["gamma"])
        for phase in ("decode", *PHASES):
            row["energy"][phase] = energy.document(window(way, row["context"], phase))
        decode = row["energy"]["decode"]
        if decode is not None and decode["gross_j"] is None:
            notes.append(f"{way.name} at {row['context']} tokens: {decode['note']}")
        if decode is not None and decode["gross_j"] is not None:
            tokens = row["energy"]["new_tokens"]
            row["j_per_token"] = decode["gross_j"] / tokens
            if decode["net_j"] is not None:
                row["energy"]["net_j_per_token"] = decode["net_j"] / tokens
            row["energy"]["j_per_token_interval"] = [
                decode["low_j"] / tokens,
                decode["high_j"] / tokens,
            ]
    return notes


def _compare(rows: Sequence[dict[str, Any]]) -> None:
    """Fill in speed against fp16 and w8 at the same context."""
    for row in rows:
        for mode in ("fp16", "w8"):
            base = next(
                (r for r in rows if r["mode"] == mode and r["context"] == row["context"]), None
            )
            if base is not None and base["decode_tok_s"] and row["decode_tok_s"]:
                row[f"speedup_vs_{mode}"] = row["decode_tok_s"] / base["decode_tok_s"]


def _noise(rows: Iterable[dict[str, Any]]) -> list[str]:
    found = []
    for row in rows:
        if row["decode_tok_s"] is None:
            continue
        low, high = row["decode_tok_s_range"]
        if (high - low) / row["decode_tok_s"] > NOISY:
            found.append(
                f"{row['mode']} at {row['context']} tokens: runs differ by "
                f"{(high - low) / row['decode_tok_s']:.0%} of their median"
            )
    return found
