"""How fast a model runs here, against what this machine's memory allows.

Invariant: the ceiling comes first: read bandwidth measured in the same run, by the same threads,
and the bytes that a token must read. Every figure is a median with its range; what is compared is
measured in turns, since other work on the machine comes and goes.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, runtime_checkable

import numpy as np

from edge_runtime.cache.policy import KV8
from edge_runtime.decode.declared import Declared
from edge_runtime.decode.draft import DraftChoice
from edge_runtime.decode.engine import Engine
from edge_runtime.decode.request import Result
from edge_runtime.errors import UsageError
from edge_runtime.kernels import ops
from edge_runtime.plan import cost, footprint
from edge_runtime.plan.footprint import linear_shapes

READ_BYTES = 256 << 20  # more than any last-level cache this runs on
ROWS = (1, 2, 3, 4, 5, 8)
NO_OTHERS: Mapping[str, Engine] = {}


@runtime_checkable
class ReadsMemory(Protocol):
    """A backend that can say how fast its threads read memory, and leave ops out."""

    def read_seconds(self, data: np.ndarray[Any, Any]) -> float:
        """Return the seconds that one pass over `data` takes."""
        ...

    def run(self, program: ops.Program, batch: ops.Batch, cache: Any, *, skip: int) -> Any:
        """Replay a program without the kinds of ops whose bits are set."""
        ...


@dataclass(slots=True)
class Sample:
    """Repeated measurements of one thing."""

    values: list[float] = field(default_factory=list)

    def document(self) -> dict[str, float]:
        """Return median and range."""
        low, high = min(self.values), max(self.values)
        return {"median": statistics.median(self.values), "min": low, "max": high}


def linear_bytes(outputs: int, inputs: int, group_size: int, view: ops.View) -> int:
    """Bytes that one pass reads of a matrix: planes, group multipliers, row scales."""
    return footprint.linear_bytes(outputs, inputs, group_size, 2 if view == "w8" else 1)


def step_bytes(engine: Engine, view: ops.View, position: int) -> int:
    """Bytes that a pass of one row reads at a position: all weights, and the cache before it."""
    assert view != "fp", "the float model is not measured against memory"
    return cost.step_bytes(engine.model.spec, engine.group_size, view, position)


def bandwidth(engine: Engine, repeats: int) -> Sample | None:
    """Measure GB/s of reading memory with the backend's threads; None if it cannot."""
    backend = engine.model.backend
    if not isinstance(backend, ReadsMemory):
        return None
    data = np.ones(READ_BYTES, np.uint8)
    backend.read_seconds(data)
    return Sample([READ_BYTES / backend.read_seconds(data) / 1e9 for _ in range(repeats)])


def empty_step(engine: Engine, repeats: int = 500) -> Sample | None:
    """Measure the seconds of a step whose kernels are all left out; None if they cannot be."""
    backend = engine.model.backend
    if not isinstance(backend, ReadsMemory):
        return None
    program, batch, found = engine.model.program("w8"), _batch(1, 0), Sample()
    for _ in range(repeats):
        started = time.perf_counter()
        backend.run(program, batch, engine.cache, skip=-1)
        found.values.append(time.perf_counter() - started)
    return found


def steps(engine: Engine, rows: Sequence[int], repeats: int, position: int = 40) -> list[Any]:
    """Time whole steps in turns: one w4 row, and w8 with every number of rows."""
    kinds: list[tuple[ops.View, int]] = [("w4", 1), *(("w8", r) for r in rows)]
    found = {kind: Sample() for kind in kinds}
    for turn in range(repeats + 1):
        for view, count in kinds:
            batch = _batch(count, position, count)
            started = time.perf_counter()
            logits = engine.model.backend.run(engine.model.program(view), batch, engine.cache)
            assert logits is not None
            logits.wait()
            if turn:
                found[view, count].values.append(time.perf_counter() - started)
    one = found["w8", 1].document()["median"]
    return [
        {
            "view": view,
            "rows": count,
            "seconds": sample.document(),
            "of_one_w8_row": sample.document()["median"] / one,
        }
        for (view, count), sample in found.items()
    ]


def _batch(rows: int, start: int, num_logits: int = 1) -> ops.Batch:
    positions = np.arange(start, start + rows, dtype=np.int64)
    ids = np.arange(rows, dtype=np.int64)
    return ops.Batch(
        ids=ids, positions=positions, full_from=KV8.full_from(positions), num_logits=num_logits
    )


def kernel_programs(engine: Engine, view: ops.View) -> dict[str, tuple[ops.Program, int]]:
    """One program per linear of a layer, over all layers, and the bytes it reads.

    Its input comes once from the embedding (for `down`, through the first layer's gate_up).
    """
    spec = engine.model.spec
    shapes = linear_shapes(spec)
    start: ops.Program = (ops.Embed("x"), ops.NormQuantise("x", "a", spec.rms_norm_eps))
    wide: ops.Program = (
        *start,
        ops.Linear("a", "layers.0.gate_up", "gu", view),
        ops.SiluMulQuantise("gu", "b"),
    )
    heads: ops.Program = (
        *start,
        ops.Linear("a", "layers.0.qkv", "qkv", view),
        ops.RopeKv("qkv", "q", 0, spec.rms_norm_eps, spec.qk_norm),
        ops.Quantise("q", "b"),
    )
    ways = {"qkv": (start, "a"), "o": (heads, "b"), "gate_up": (start, "a"), "down": (wide, "b")}
    found: dict[str, tuple[ops.Program, int]] = {}
    for role, (before, register) in ways.items():
        names = [f"layers.{i}.{role}" for i in range(spec.num_layers)]
        linears = tuple(ops.Linear(register, name, "y", view) for name in names)
        size = sum(linear_bytes(*shapes[name], engine.group_size, view) for name in names)
        found[role] = ((*before, *linears, ops.SelectRows("x", "z")), size)
    found["head"] = (
        (*start, ops.Linear("a", "head", "logits", view)),
        linear_bytes(*shapes["head"], engine.group_size, view),
    )
    return found


def kernels(
    engine: Engine,
    *,
    rows: Sequence[int] = ROWS,
    repeats: int = 9,
    progress: Callable[[int, int, str], None] = lambda done, count, what: None,
) -> dict[str, Any]:
    """Time every linear for every view and number of rows; return the document."""
    views: tuple[ops.View, ...] = ("w4", "w8")
    programs = {view: kernel_programs(engine, view) for view in views}
    todo = [  # all linears between two looks at one: what a last-level cache kept of it is gone
        (view, role, program, size, M)
        for view in views
        for M in rows
        for role, (program, size) in programs[view].items()
    ]
    seconds: list[Sample] = [Sample() for _ in todo]
    read = Sample()
    for turn in range(repeats + 1):
        progress(turn, repeats + 1, f"turn {turn} of {repeats}")
        now = bandwidth(engine, 1)
        for (_, _, program, _, M), sample in zip(todo, seconds, strict=True):
            batch = _batch(M, 0, M)
            started = time.perf_counter()
            engine.model.backend.run(program, batch, engine.cache)
            if turn:  # the first one warms up
                sample.values.append(time.perf_counter() - started)
        if turn and now is not None:
            read.values.extend(now.values)
    engine.reuse([0])  # the cache was written over
    ceiling = statistics.median(read.values) if read.values else None
    found = [
        _kernel_row(view, role, M, size, sample, ceiling)
        for (view, role, _, size, M), sample in zip(todo, seconds, strict=True)
    ]
    empty = empty_step(engine)
    return _head(engine, read) | {
        "empty_step_s": None if empty is None else empty.document(),
        "steps": steps(engine, sorted({1, *rows}), 3 * repeats),
        "rows": found,
    }


def _kernel_row(
    view: str, role: str, rows: int, size: int, sample: Sample, ceiling: float | None
) -> dict[str, Any]:
    gb_s = size / statistics.median(sample.values) / 1e9
    return {
        "linear": role,
        "view": view,
        "rows": rows,
        "bytes": size,
        "seconds": sample.document(),
        "gb_s": gb_s,
        "share_of_read": None if ceiling is None else gb_s / ceiling,
    }


def _head(engine: Engine, read: Sample | None) -> dict[str, Any]:
    return {
        "backend": engine.backend_name,
        "backend_why": engine.backend_why,
        "synthetic": engine.synthetic,
        "threads": getattr(engine.model.backend, "threads", None),
        "read_gb_s": read.document() if read is not None and read.values else None,
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """One way to decode, of an engine. accept, forced: of nest, where acceptance is declared."""

    mode: str
    engine: Engine
    draft: DraftChoice
    target: ops.View
    accept: str | None = None
    forced: tuple[int, ...] = ()

    @property
    def name(self) -> str:
        """As a table shows it; @ marks what is declared."""
        return self.mode if self.accept is None else f"{self.mode} @{self.accept}"

    def run(self, ids: list[int], new_tokens: int) -> Result:
        """Decode a prompt, whatever ends the answer, and forget it."""
        engine = self.engine
        kept = engine.draft, engine.target_view
        engine.draft, engine.target_view = self.draft, self.target
        engine.forced = self.forced
        engine.reuse([])
        try:
            run = engine.generate(ids, max_new_tokens=new_tokens, ignore_eos=True)
            return run.complete()
        finally:
            (engine.draft, engine.target_view), engine.forced = kept, ()
            engine.reuse([])


def ways(
    engine: Engine, accept: Sequence[Declared] = (), others: Mapping[str, Engine] = NO_OTHERS
) -> list[Way]:
    """Return what is compared: w8, w4, nest, other engines as they are opened.

    What drafts runs once with what its target really accepts, then as declared; of random weights
    only as declared. Raises UsageError where acceptance is declared and not a fixed number of
    tokens is drafted, by the base plane.
    """
    found = [
        Way(mode="w8", engine=engine, draft=DraftChoice(0, "base", "w8"), target="w8"),
        Way(mode="w4", engine=engine, draft=DraftChoice(0, "base", "w4"), target="w4"),
    ]
    for mode, one in {"nest": engine, **others}.items():
        found.append(Way(mode=mode, engine=one, draft=one.draft, target=one.target_view))
    if not accept:
        return found
    draft = engine.draft
    if draft.governed or not draft.gamma or draft.source != "base":
        raise UsageError(
            f"declared acceptance needs a fixed draft of the base plane, got {draft}",
            "say how long it is: --draft 4",
        )
    forced = [one.pattern(draft.gamma) for one in accept]
    drafting = [way for way in found if way.draft.gamma]
    declared = [
        replace(way, accept=a.text, forced=pattern)
        for way in drafting
        for a, pattern in zip(accept, forced, strict=True)
    ]
    return [way for way in found if not (engine.synthetic and way in drafting)] + declared


def decode(
    engine: Engine,
    prompts: Iterable[Sequence[int]],
    *,
    new_tokens: int = 128,
    accept: Sequence[Declared] = (),
    others: Mapping[str, Engine] = NO_OTHERS,
    progress: Callable[[int, int, str], None] = lambda done, count, what: None,
) -> dict[str, Any]:
    """Decode every prompt as w8, w4 and nest, and by other engines, in turns; return the document.

    engine: opened as nest; its draft is that of the nest mode. accept, others: of `ways`. Answers
    run to `new_tokens`, whatever ends them; the first prompt is run once more before, and not
    counted. `differing` counts the prompts where the answer of nest is not that of w8; None:
    there is no answer of nest that was not declared.
    """
    assert engine.view == "nest", engine.view
    asked = [list(ids) for ids in prompts]
    todo = ways(engine, accept, others)
    results: dict[str, list[Result]] = {way.name: [] for way in todo}
    read, done, count = Sample(), 0, (len(asked) + 1) * len(todo)
    for number, ids in enumerate([asked[0], *asked]):
        if number and (now := bandwidth(engine, 1)):
            read.values.extend(now.values)
        for way in todo:
            what = f"prompt {number} of {len(asked)}" if number else "warming up"
            progress(done, count, f"{what}, {way.name}")
            result = way.run(ids, new_tokens)
            if number:
                results[way.name].append(result)
            done += 1
    middle = round(statistics.mean(map(len, asked))) + new_tokens // 2
    ceiling = statistics.median(read.values) * 1e9 if read.values else None
    rows = [_decode_row(engine, way, results, middle, ceiling) for way in todo]
    differing = None
    if "nest" in results:
        pairs = zip(results["nest"], results["w8"], strict=True)
        differing = sum(a.token_ids != b.token_ids for a, b in pairs)
    return _head(engine, read) | {
        "prompts": len(asked),
        "prompt_tokens": statistics.median(map(len, asked)),
        "new_tokens": new_tokens,
        "kv_policy": str(engine.policy),
        "differing": differing,
        "draft_why": engine.governor.why if engine.draft.governed else engine.draft.why,
        "rows": rows,
    }


def _decode_row(
    engine: Engine,
    way: Way,
    results: dict[str, list[Result]],
    middle: int,
    ceiling: float | None,
) -> dict[str, Any]:
    found = results[way.name]
    speeds = [r.decode_tok_s for r in found]
    size = None
    if way.mode in ("w8", "w4"):
        size = step_bytes(engine, "w4" if way.mode == "w4" else "w8", middle)
    most = None if ceiling is None or size is None else ceiling / size
    drafted = sum(r.draft["drafted"] for r in found)
    return {
        "mode": way.mode,
        "backend": way.engine.backend_name,
        "accept": way.accept,
        "forced": any(r.forced for r in found),
        "declared_tokens_per_cycle": 1 + statistics.mean(way.forced) if way.forced else None,
        "decode_tok_s": Sample(speeds).document() | {"mean": statistics.mean(speeds)},
        "ratio_to_w8": _ratios(speeds, results["w8"]),
        "ratio_to_fp16": _ratios(speeds, results["fp16"]) if "fp16" in results else None,
        "prefill_tok_s": Sample([r.prefill_tok_s for r in found]).document(),
        "memory": found[-1].memory,
        "ttft_s": Sample([r.ttft_s for r in found]).document(),
        "bytes_per_token": size,
        "ceiling_tok_s": most,
        "share_of_ceiling": None if most is None else statistics.median(speeds) / most,
        "acceptance": sum(r.draft["accepted"] for r in found) / drafted if drafted else None,
        "tokens_per_cycle": (
            sum(r.new_tokens - 1 for r in found) / max(1, sum(r.draft["cycles"] for r in found))
        ),
    }


def _ratios(speeds: Sequence[float], others: Sequence[Result]) -> dict[str, float]:
    """Of one speed to another on the same prompt, in the same turn."""
    ratios = [speed / r.decode_tok_s for speed, r in zip(speeds, others, strict=True)]
    return Sample(ratios).document() | {"mean": statistics.mean(ratios)}
