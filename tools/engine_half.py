"""The CUDA engine's nest against a 16-bit model of the same shape, in turns in one process.

    python tools/engine_half.py llama-2-7b [--only steps,cycles,prefill,action] [--context 2048]
                                [--policy kv8] [--turns 9] [--json FILE]

Weights are random and made on the GPU; acceptance is declared (`engine_bars.py`), so that the
result is a curve over tokens per cycle. fp16: the unquantised model in 16 bits, one token a cycle,
prompts in chunks of 1024 rows; w8-kv16: the nest's target over a 16-bit cache. Figures are medians
with their range, ratios are of medians. The last line of stdout is one JSON document.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import engine_bars as bars
import numpy as np
import torch
from engine_bars import ACTION_ROWS, ACTION_TOKENS, GAMMA, PATTERNS, Model, Run

from edge_runtime.cache.policy import KV8, KvPolicy, parse_policy
from edge_runtime.format.spec import ModelSpec
from edge_runtime.kernels import ops
from edge_runtime.kernels.cuda import sizes
from edge_runtime.kernels.cuda.half import HalfModel, random_weights
from edge_runtime.kernels.cuda.half_backend import HalfBackend, Kv16Backend
from edge_runtime.kernels.cuda.memory import usual_device
from edge_runtime.kernels.layout import CHUNK_ROWS
from edge_runtime.model.rope import rope_tables
from edge_runtime.model.transformer import geometry
from edge_runtime.plan.footprint import half_shapes
from edge_runtime.profiles.load import shape

Ways = dict[str, tuple[Model, ops.View, int]]  # with rows of a prompt that pass together
VIEWS: dict[str, ops.View] = {"fp16": "fp", "w8-kv16": "w8"}
ACTIONS = {"nest, all accepted": (5, (5,), 1), "nest, 2 of 3 accepted": (3, (2,), 2)}


def open_ways(spec: ModelSpec, group: int, context: int, policy: KvPolicy) -> Ways:
    """Open the nest, its target over a 16-bit cache and the unquantised model. Both nested ones
    have the same weights in memory."""
    nest = bars.open_model(spec, group, context, policy)
    device, room = usual_device(), nest.cache.capacity
    shape_of = geometry(spec, spec.vocab_size)
    cos, sin = rope_tables(spec, room)
    model = HalfModel(
        architecture=spec.architecture,
        shapes=half_shapes(spec),
        rows=lambda _: (),
        cos=cos,
        sin=sin,
    )
    backends = {
        "w8-kv16": Kv16Backend(nest.backend.passes.weights, shape_of, device),
        "fp16": HalfBackend(random_weights(model, device, model.dtype), shape_of, device),
    }
    ways: Ways = {"nest": (nest, "w8", CHUNK_ROWS)}
    for name, backend in backends.items():
        cache = backend.new_cache(room)
        cache.key.normal_()
        cache.value.normal_()
        rows = sizes.HALF_CHUNK_ROWS if name == "fp16" else CHUNK_ROWS
        ways[name] = Model(spec, backend, cache, KV8, context), VIEWS[name], rows
    return ways


def in_turns(
    kinds: dict[str, Callable[[], float]], turns: int, unit: str, factor: float
) -> dict[str, dict[str, float]]:
    """Run all kinds `turns` times after a first one that warms up; tell and return their spread."""
    values: dict[str, list[float]] = {name: [] for name in kinds}
    for turn, (name, run) in itertools.product(range(turns + 1), kinds.items()):
        value = run()
        if turn:
            values[name].append(value)
    rows = {name: bars.spread(found) for name, found in values.items()}
    for name, row in rows.items():
        bars.told(name, row, unit, factor)
    return rows


def ratios(rows: dict[str, dict[str, float]], base: str, *, speed: bool) -> dict[str, float]:
    """Return how much faster than `base` each kind is."""
    one = rows[base]["median"]
    found = {
        name: row["median"] / one if speed else one / row["median"] for name, row in rows.items()
    }
    print(f"  x {base}: " + json.dumps({n: round(r, 3) for n, r in found.items()}), file=sys.stderr)
    return found


def steps(ways: Ways, turns: int) -> dict[str, Any]:
    """Device time of single passes at the end of the context, replayed from their graphs."""
    nest = ways["nest"][0]
    wanted: dict[str, tuple[Model, ops.View, int, int | None]] = {
        "w4": (nest, "w4", 1, nest.policy.recent),
        "w8": (nest, "w8", 1, None),
        "w8 5 rows": (nest, "w8", 5, None),
        **{name: (*ways[name][:2], 1, None) for name in VIEWS},
    }
    kinds = {name: _pass(*what) for name, what in wanted.items()}
    rows = in_turns(kinds, turns, "ms", 1e3)
    return {"seconds": rows, "x_fp16": ratios(rows, "fp16", speed=False)}


def _pass(model: Model, view: ops.View, rows: int, recent: int | None) -> Callable[[], float]:
    positions = np.arange(model.context, model.context + rows)
    batch = ops.Batch(
        ids=np.arange(rows),
        positions=positions,
        full_from=KvPolicy(recent).full_from(positions),
        num_logits=rows,
    )

    def run() -> None:
        model.backend.run(model.program(view), batch, model.cache)

    for _ in range(3):  # launches, capture, replay
        run()
    return lambda: bars.device_seconds(run)


def cycles(ways: Ways, turns: int, count: int = 40) -> dict[str, Any]:
    """Tokens a second: the nest at every pattern of acceptance, and one token a cycle."""
    nest, last = ways["nest"][0], dict[str, Run]()
    drafting, alone = nest.cycles("w8"), nest.cycles("w8")

    def kind(name: str, made: ops.Cycles, model: Model, base: int, forced: Any) -> Any:
        def run() -> float:
            last[name] = bars.run_cycles(made, model, base, forced, count)
            return last[name].tokens / last[name].seconds

        return run

    kinds: dict[str, Callable[[], float]] = {}
    for pattern in PATTERNS:
        name = f"nest {1 + statistics.mean(pattern):.1f} tokens a cycle"
        kinds[name] = kind(name, drafting, nest, GAMMA, pattern)
    kinds["w8"] = kind("w8", alone, nest, 0, ())
    for name in VIEWS:
        model, view, _ = ways[name]
        kinds[name] = kind(name, model.cycles(view), model, 0, ())
    rows = in_turns(kinds, turns, "tok/s", 1)
    busy = {name: run.device / run.seconds for name, run in last.items()}
    host = {name: run.host / len(run.each) for name, run in last.items()}
    return {
        "tok_s": rows,
        "x_fp16": ratios(rows, "fp16", speed=True),
        "x_w8": ratios(rows, "w8", speed=True),
        "device_busy": busy,
        "host_s": host,
    }


def prefill(ways: Ways, tokens: int, turns: int, *, embedded: bool = False) -> dict[str, Any]:
    """Seconds until the first token of a prompt, ids or embedding rows, is known."""
    kinds = {
        f"{name}, prompt of {tokens}": _prompt(*way, tokens, embedded) for name, way in ways.items()
    }
    rows = in_turns(kinds, turns, "ms", 1e3)
    return {"seconds": rows, "x_fp16": ratios(rows, f"fp16, prompt of {tokens}", speed=False)}


def _prompt(
    model: Model, view: ops.View, chunk: int, tokens: int, embedded: bool
) -> Callable[[], float]:
    def run() -> None:
        logits: Any = None
        for first in range(0, tokens, chunk):
            n = min(chunk, tokens - first)
            rows = np.ones((n, model.spec.hidden_size), np.float32) if embedded else None
            batch = ops.Batch(
                ids=None if embedded else np.arange(n) % model.spec.vocab_size,
                rows=rows,
                positions=np.arange(first, first + n),
                full_from=np.zeros(n, np.int64),
            )
            logits = model.backend.run(model.program(view), batch, model.cache)
        logits.argmax()

    def timed() -> float:
        started = time.perf_counter()
        run()
        return time.perf_counter() - started

    return timed


def action(ways: Ways, turns: int) -> dict[str, Any]:
    """A whole action: a prompt of embedding rows, then the other tokens, drafted and not."""
    kinds: dict[str, Callable[[], float]] = {}
    for name, (model, view, chunk) in ways.items():
        small = Model(model.spec, model.backend, model.cache, model.policy, ACTION_ROWS)
        made, first = small.cycles(view), _prompt(small, view, chunk, ACTION_ROWS, True)
        patterns = ACTIONS if name == "nest" else {name: (0, (), ACTION_TOKENS - 1)}
        for kind, (base, forced, count) in patterns.items():
            kinds[kind] = _action(first, made, small, base, forced, count)
    rows = in_turns(kinds, turns, "ms", 1e3)
    return {"seconds": rows, "x_fp16": ratios(rows, "fp16", speed=False)}


def _action(
    first: Callable[[], float], made: ops.Cycles, model: Model, base: int, forced: Any, count: int
) -> Callable[[], float]:
    return lambda: first() + bars.run_cycles(made, model, base, forced, count).seconds


def main() -> None:
    """Command line."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("shape")
    parser.add_argument("--only", default="steps,cycles,prefill,action")
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--policy", default="kv8", help="what a draft reads of the cache")
    parser.add_argument("--group", type=int, default=128)
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    only, turns, spec = options.only.split(","), options.turns, shape(options.shape).spec
    ways = open_ways(spec, options.group, options.context, parse_policy(options.policy))
    document: dict[str, Any] = {
        "shape": options.shape, "context": options.context, "policy": options.policy,
        "weights": "random", "torch": torch.__version__,
        "weights_bytes": {name: way[0].backend.weights_bytes for name, way in ways.items()},
        "kv_bytes": {name: way[0].cache.num_bytes for name, way in ways.items()},
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "interpreter",
    }  # fmt: skip
    if "steps" in only:
        document["steps"] = steps(ways, turns)
    if "cycles" in only:
        document["cycles"] = cycles(ways, turns)
    if "prefill" in only:
        document["prefill"] = prefill(ways, options.context, turns)
    if "action" in only:
        document["action"] = action(ways, turns)
    text = json.dumps(document)
    if options.json:
        options.json.write_text(text + "\n", encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
