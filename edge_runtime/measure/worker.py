"""What the child process of a measurement does with its engine: rows, each many times, in turns.

Invariant: what is compared runs in turns in one process (other work on a machine comes and goes);
the first turn warms up and is not counted. Every finished run is reported at once, so that a child
that is killed loses only the run it was in.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import msgspec

from edge_runtime import machine
from edge_runtime.decode.draft import DraftChoice, choose_draft
from edge_runtime.decode.engine import Engine
from edge_runtime.decode.memory import account_here
from edge_runtime.plan.footprint import Layout

ModeName = Literal["fp16", "w8-kv16", "two-copy", "w8", "w4", "nest"]
LAYOUTS: dict[str, Layout] = {
    "w8-kv16": "w8",
    "two-copy": "two_copies",
}  # engines of their own
DRAFTING: tuple[ModeName, ...] = ("nest", "two-copy")
CHARACTERS = 8  # of text a token, more than any tokenizer needs on average
Emit = Callable[[dict[str, Any]], None]


class Way(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One way to decode: a mode and, where it drafts, the tokens drafted each cycle."""

    mode: ModeName
    gamma: int | None = None  # None: the governor's choice

    @property
    def name(self) -> str:
        """As a table shows it."""
        return self.mode if self.gamma is None else f"{self.mode} γ={self.gamma}"

    @property
    def group(self) -> str:
        """Ways of the same group share an engine: the nest's, or one of their own."""
        return self.mode if self.mode == "fp16" or self.mode in LAYOUTS else "nest"


class Job(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a child process is asked to do."""

    model: str
    ways: tuple[Way, ...] = ()
    prompt_tokens: int = 1
    new_tokens: int
    repeats: int = 3
    warm_up: bool = True
    text: str  # the prompt is its beginning, repeated if it is short
    # how the engine is opened, as the command line says it
    backend: str = "auto"
    kv_policy: str = "auto"
    draft_source: str = "auto"
    ctx: int = 0  # 0: what prompt and answer need
    budget_bytes: int | None = None
    reserve_bytes: int = 0
    threads: int | None = None
    original: str | None = None

    @property
    def context(self) -> int:
        """Tokens of context to allocate."""
        return self.ctx or self.prompt_tokens + self.new_tokens


def prompt_of(ids: Sequence[int], length: int) -> list[int]:
    """Return exactly `length` ids: the beginning of a text, repeated if it is short."""
    return [ids[i % len(ids)] for i in range(length)]


def run(engine: Engine, job: Job, emit: Emit) -> None:
    """Run every way of a job in turns and report each run."""
    text = job.text[: CHARACTERS * job.prompt_tokens]  # encoding takes memory too
    prompt = prompt_of(engine.encode_text(text), job.prompt_tokens)
    account = account_here(
        engine.model.spec,
        engine.backend_name,
        view=engine.view,
        layout=engine.layout,
        group_size=engine.group_size or None,
        threads=job.threads,
    )
    emit(
        {
            "event": "open",
            "backend": engine.backend_name,
            "backend_why": engine.backend_why,
            "policy": "kv16"
            if engine.view == "fp" or engine.layout == "w8"
            else str(engine.policy),
            "planned_bytes": account.total_bytes(engine.context),
            "block_bytes": account.block_bytes,
            "context": engine.context,
        }
    )
    for turn in range(job.repeats + job.warm_up):
        for way in job.ways:
            counted = turn >= job.warm_up
            emit({"event": "begin", "way": way.name, "turn": turn, "counted": counted})
            report = _once(engine, job, way, prompt)
            emit({"event": "run", "way": way.name, "counted": counted} | report)


def _once(engine: Engine, job: Job, way: Way, prompt: list[int]) -> dict[str, Any]:
    _set_way(engine, job, way)
    engine.reuse([0])
    resettable = machine.reset_peak() and "device_bytes" not in engine.memory()
    engine.phases = []
    result = engine.generate(prompt, max_new_tokens=job.new_tokens, ignore_eos=True).complete()
    draft = result.draft
    return {
        "prefill_tok_s": result.prefill_tok_s,
        "decode_tok_s": result.decode_tok_s,
        "ttft_s": result.ttft_s,
        "new_tokens": result.new_tokens,
        "drafted": draft["drafted"],
        "accepted": draft["accepted"],
        "cycles": draft["cycles"],
        "draft_why": result.draft_why,
        "peak_bytes": machine.peak_bytes() if resettable else result.memory["peak_bytes"],
        "peak_of_this_run": resettable,
        "memory": result.memory,
        "phases": engine.phases,
    }


def _set_way(engine: Engine, job: Job, way: Way) -> None:
    if way.mode == "fp16":
        return  # an engine of its own
    engine.target_view = "w4" if way.mode == "w4" else "w8"
    if way.mode in DRAFTING:
        wanted = "auto" if way.gamma is None else str(way.gamma)
        engine.draft = choose_draft(wanted, job.draft_source, "nest", engine.backend_name)
        engine.governor.use_base = engine.draft.source != "ngram"
        engine.governor.use_ngram = engine.draft.source != "base"
    else:
        engine.draft = DraftChoice(0, "base", way.mode)
