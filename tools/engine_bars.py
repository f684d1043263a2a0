"""The CUDA engine at the size of a known model, with random weights made on the GPU.

    python tools/engine_bars.py llama-2-7b [--only steps,cycles,latency,prefill,action]
                                [--context 2048] [--policy kv8] [--turns 9] [--slice] [--json FILE]

Random weights accept nothing, so acceptance is declared: a fixed pattern of accepted tokens is
forced on the device, and the result is a curve over tokens per cycle. steps: device time of one
pass, replayed from its graph. cycles: draft 4, verify 5, accept, with the host in between, against
the w8 view and the unquantised model in 16 bits, one token at a time; host: time of the thread that
launches and reads, without waiting. latency: 2,000 cycles, alone and beside a second process that
computes. action: 288 rows of an image prompt and 7 tokens (OpenVLA). --slice: all of it as code of
an Orin (sm_87) on as many multiprocessors as an Orin NX has, where the 16-bit model keeps cuBLAS'
own code for this GPU. Kinds are timed in turns; figures are medians with their range. The last line
of stdout is one JSON document.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from random_models import SEGMENT, Model, open_half, open_model

from edge_runtime.cache.policy import KvPolicy, parse_policy
from edge_runtime.kernels import ops
from edge_runtime.kernels.cuda.timing import slice as sm_slice
from edge_runtime.kernels.sampling import Parameters
from edge_runtime.profiles.load import shape

GAMMA = 4
# tokens accepted, in turns: 1.0, 2.0, 3.0, 4.0, 4.5, 4.8 and 5.0 tokens per cycle
PATTERNS = ((0,), (1,), (2,), (3,), (3, 4), (4, 4, 4, 4, 3), (4,))
LATENCY_CYCLES = 2000
BUSY_CLOCKS = 4_000_000  # about 2 ms, longer than the host takes to launch a pass
ACTION_ROWS, ACTION_TOKENS = 288, 7  # OpenVLA: image and text, an action of seven numbers


def spread(values: list[float]) -> dict[str, float]:
    """Median and range."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def told(what: str, values: dict[str, float], unit: str = "ms", factor: float = 1e3) -> None:
    """Print one line for a person."""
    median, low, high = (values[key] * factor for key in ("median", "min", "max"))
    print(f"{what:<44} {median:9.3f} {unit} ({low:.3f} to {high:.3f})", file=sys.stderr)


# passes


def steps(model: Model, plain: Model, turns: int) -> dict[str, Any]:
    """Device time of single passes at the end of the context."""
    kinds: list[tuple[ops.View, int, int | None]] = [
        ("w4", 1, model.policy.recent), ("w8", 1, None), ("w8", 2, None), ("w8", 5, None),
        ("w8", 8, None), ("fp", 1, None),
    ]  # fmt: skip
    replays = {kind: _pass_replay(plain if kind[0] == "fp" else model, *kind) for kind in kinds}
    found: dict[Any, list[float]] = {kind: [] for kind in kinds}
    for turn in range(turns + 1):
        for kind, replay in replays.items():
            seconds = device_seconds(replay)
            if turn:
                found[kind].append(seconds)
    rows = {f"{view} {rows} rows": spread(found[view, rows, r]) for view, rows, r in kinds}
    for name, values in rows.items():
        told(f"pass {name}", values)
    one = rows["w8 1 rows"]["median"]
    ratios = {name: values["median"] / one for name, values in rows.items()}
    print("  of one w8 row: " + json.dumps(ratios), file=sys.stderr)
    return {"seconds": rows, "of_one_w8_row": ratios}


def _pass_replay(
    model: Model, view: ops.View, rows: int, recent: int | None
) -> Callable[[], object]:
    positions = np.arange(model.context, model.context + rows)
    batch = ops.Batch(
        ids=np.arange(rows),
        positions=positions,
        full_from=KvPolicy(recent).full_from(positions),
        num_logits=rows,
    )
    run = lambda: model.backend.run(model.program(view), batch, model.cache)  # noqa: E731
    for _ in range(3):  # launches, capture, replay
        run()
    return run


def device_seconds(call: Callable[[], object]) -> float:
    """Seconds between events around a call, which is enqueued while the device is busy."""
    if not torch.cuda.is_available():
        started = time.perf_counter()
        call()
        return time.perf_counter() - started
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(BUSY_CLOCKS)
    start.record()
    call()
    stop.record()
    stop.synchronize()
    return float(start.elapsed_time(stop)) * 1e-3


# cycles


@dataclass
class Run:
    """Cycles in a row. each, brought: seconds and tokens of every one; device, host: seconds of
    graphs, of the host's work."""

    each: list[float] = field(default_factory=list)
    brought: list[int] = field(default_factory=list)
    device: float = 0.0
    host: float = 0.0

    @property
    def seconds(self) -> float:
        """Of all."""
        return sum(self.each)

    @property
    def tokens(self) -> int:
        """Of all."""
        return sum(self.brought)


def run_cycles(cycles: ops.Cycles, model: Model, base: int, forced: Any, count: int) -> Run:
    """Run `count` cycles, one launched ahead of the other; every SEGMENT of them begins anew at the
    same place in the context, and that beginning is not timed."""
    run = Run()
    for done in range(0, count, SEGMENT):
        cycles.begin([1] * model.context, Parameters(), forced)
        known = model.context
        last = time.perf_counter()
        cycles.launch(base, 0, known)
        for left in reversed(range(min(SEGMENT, count - done))):
            own = time.thread_time()  # a wait sleeps
            if left:
                cycles.launch(base, 0, known + base + 1)
            cycle = cycles.read()
            run.host += time.thread_time() - own
            now = time.perf_counter()
            run.each.append(now - last)
            last = now
            known += len(cycle.tokens)
            run.brought.append(len(cycle.tokens))
            run.device += cycle.seconds
    return run


def measure_cycles(model: Model, plain: Model, turns: int, count: int = 40) -> dict[str, Any]:
    """The curve: nest at every pattern, w8 and fp16 one token at a time, in turns."""
    nest, alone, plain16 = model.cycles(), model.cycles(), plain.cycles()
    kinds: list[tuple[str, ops.Cycles, int, Any]] = [
        *((f"nest {1 + sum(p) / len(p):.1f} tokens a cycle", nest, GAMMA, p) for p in PATTERNS),
        ("w8", alone, 0, ()),
        ("fp16", plain16, 0, ()),
    ]
    speeds: dict[str, list[float]] = {name: [] for name, *_ in kinds}
    facts: dict[str, Run] = {}
    for turn in range(turns + 1):
        for name, cycles, base, forced in kinds:
            run = run_cycles(cycles, model, base, forced, count)  # fp16 has the same context
            if turn:
                speeds[name].append(run.tokens / run.seconds)
                facts[name] = run
    rows = {}
    one, sixteen = (statistics.median(speeds[name]) for name in ("w8", "fp16"))
    for name, values in speeds.items():
        run, median = facts[name], statistics.median(values)
        rows[name] = {
            "tok_s": spread(values),
            "of_w8": median / one,
            "of_fp16": median / sixteen,
            "cycle_s": run.seconds / len(run.each),
            "device_busy": run.device / run.seconds,
            "host_s": run.host / len(run.each),
        }
        told(
            f"{name} ({median / one:.2f} x w8, {median / sixteen:.2f} x fp16)",
            rows[name]["tok_s"],
            "tok/s",
            1,
        )
        print(
            f"  a cycle {rows[name]['cycle_s'] * 1e3:.3f} ms, graphs busy "
            f"{rows[name]['device_busy']:.3f}, host {rows[name]['host_s'] * 1e6:.0f} us",
            file=sys.stderr,
        )
    return rows


def latency(model: Model) -> dict[str, Any]:
    """Percentiles of a cycle's time and of a token's, alone and beside another process."""
    cycles, pattern = model.cycles(), PATTERNS[-2]
    run_cycles(cycles, model, GAMMA, pattern, 20)
    found = {"alone": run_cycles(cycles, model, GAMMA, pattern, LATENCY_CYCLES)}
    with other_process():
        found["beside another process"] = run_cycles(cycles, model, GAMMA, pattern, LATENCY_CYCLES)
    rows: dict[str, Any] = {}
    for name, run in found.items():
        brought = np.array(run.brought)
        # the tokens of a cycle come together: each takes its share of the cycle
        tokens = np.repeat(np.array(run.each) / brought, brought)
        rows[name] = {"cycle": percentiles(run.each), "token": percentiles(tokens)}
        for what, values in rows[name].items():
            text = " ".join(f"{key[:-2]} {value * 1e3:.2f}" for key, value in values.items())
            print(f"{what} {name}: {text} ms", file=sys.stderr)
        rows[name]["cycles"] = len(run.each)
    return rows


def percentiles(seconds: Any) -> dict[str, float]:
    """Return p50_s, p95_s, p99_s and worst_s."""
    names = ("p50_s", "p95_s", "p99_s", "worst_s")
    return dict(zip(names, np.percentile(seconds, (50, 95, 99, 100)).tolist(), strict=True))


@contextlib.contextmanager
def other_process() -> Iterator[None]:
    """A process that multiplies matrices on the same device all the while."""
    process = multiprocessing.get_context("spawn").Process(target=_multiply, daemon=True)
    process.start()
    time.sleep(8 if torch.cuda.is_available() else 0)  # torch, a context and the first product
    try:
        yield
    finally:
        process.kill()
        process.join()


def _multiply() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    x = torch.randn(2048, 2048, device=device)
    while True:
        for _ in range(16):
            x = torch.nn.functional.normalize(x @ x)
        if device == "cuda":
            torch.cuda.synchronize()


# prompts


def prompt(model: Model, rows: int, turns: int, *, embedded: bool = False) -> dict[str, float]:
    """Seconds until the first token of a prompt of `rows`, ids or embedding rows, is known."""
    chunk, values = model.backend.chunk_rows, []
    for turn in range(turns + 1):
        started = time.perf_counter()
        logits: Any = None
        for first in range(0, rows, chunk):
            n = min(chunk, rows - first)
            positions = np.arange(first, first + n)
            own = np.ones((n, model.spec.hidden_size), np.float32) if embedded else None
            batch = ops.Batch(
                ids=None if embedded else np.arange(n) % model.spec.vocab_size,
                rows=own,
                positions=positions,
                full_from=np.zeros(n, np.int64),
            )
            logits = model.backend.run(model.program(model.target), batch, model.cache)
        logits.argmax()
        if turn:
            values.append(time.perf_counter() - started)
    return spread(values)


def action(model: Model, plain: Model, turns: int) -> dict[str, Any]:
    """An action: a prompt of embedding rows, then the other six tokens, drafted and not."""
    rows: dict[str, Any] = {}
    for name, of, base, forced, count in (
        ("w8", model, 0, (), ACTION_TOKENS - 1),
        ("nest, all accepted", model, 5, (5,), 1),
        ("nest, 2 of 3 accepted", model, 3, (2,), 2),
        ("fp16", plain, 0, (), ACTION_TOKENS - 1),
    ):
        first = prompt(of, ACTION_ROWS, turns, embedded=True)
        small = Model(of.spec, of.backend, of.cache, of.policy, ACTION_ROWS)
        cycles = small.cycles()
        values = [run_cycles(cycles, small, base, forced, count).seconds for _ in range(turns + 2)]
        rest = spread(values[2:])
        whole = first["median"] + rest["median"]
        rows[name] = {"prompt_s": first, "rest_s": rest, "whole_s": whole}
        told(f"action, {name}: prompt", first)
        told(f"action, {name}: 6 tokens", rest)
    return rows


def main() -> None:
    """Command line."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("shape")
    parser.add_argument("--only", default="steps,cycles,latency,prefill,action")
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--policy", default="kv8", help="what a draft reads of the cache")
    parser.add_argument("--group", type=int, default=128)
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--slice", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with sm_slice.open_slice() if options.slice else contextlib.nullcontext():
        document = measured(options)
    text = json.dumps(document)
    if options.json:
        options.json.write_text(text + "\n", encoding="utf-8")
    print(text)


def measured(options: argparse.Namespace) -> dict[str, Any]:
    """Run what is asked for."""
    only, turns = options.only.split(","), options.turns
    policy = parse_policy(options.policy)
    spec = shape(options.shape).spec
    model = open_model(spec, options.group, options.context, policy)
    plain = open_half(spec, options.context)
    document: dict[str, Any] = {
        "shape": options.shape, "context": options.context, "policy": str(policy),
        "slice": options.slice, "weights": "random", "weights_bytes": model.backend.weights_bytes,
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "interpreter",
    }  # fmt: skip
    if "steps" in only:
        document["steps"] = steps(model, plain, turns)
    if "cycles" in only:
        document["cycles"] = measure_cycles(model, plain, turns)
    if "latency" in only:
        document["latency"] = latency(model)
    if "prefill" in only:
        both = {"w8": model, "fp16": plain}
        found = {name: prompt(of, options.context, turns) for name, of in both.items()}
        document["prefill"] = found
        for name, values in found.items():
            told(f"prompt of {options.context} tokens, {name}", values)
    if "action" in only:
        document["action"] = action(model, plain, turns)
    return document


if __name__ == "__main__":
    main()
