"""The longest context that a device's plan promises, really run on this GPU within that memory.

    python tools/memory_bars.py llama-2-7b-32k [--device orin-nx-16gb] [--group 128] [--json FILE]

The plan of the device says how many tokens fit beside the nest. Random weights of the shape are
made on this GPU, torch is held to the device's budget, a cache of so many tokens is allocated and
filled by a whole prompt, and some cycles are decoded at its end. Compared are the bytes that the
account of this GPU plans and those that torch and the CUDA context took at most.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from random_models import open_model

from edge_runtime.cache.policy import KV4
from edge_runtime.kernels import ops
from edge_runtime.kernels.cuda import sizes
from edge_runtime.kernels.cuda.memory import pool
from edge_runtime.kernels.layout import CHUNK_ROWS
from edge_runtime.kernels.sampling import Parameters
from edge_runtime.plan import footprint
from edge_runtime.plan.planner import Subject, device_pool, plan
from edge_runtime.profiles.load import device as device_profile
from edge_runtime.profiles.load import shape

LEFT = 64  # tokens of the context that are decoded
GAMMA, FORCED = 4, (4, 4, 3)


def run(name: str, device: str, group: int) -> dict[str, Any]:
    """Run it; the document."""
    spec, profile = shape(name).spec, device_profile(device)
    promised = plan(Subject(name=name, spec=spec, group_size=group), profile, device_pool(profile))
    context = promised.context
    sizes.LARGE_CHUNK_ROWS = CHUNK_ROWS  # of a prompt together: as there
    here = pool()
    account = footprint.footprint(
        spec, backend="cuda", group_size=group, arch=here.arch, discrete=here.discrete
    )
    planned = account.total_bytes(context)
    if torch.cuda.is_available():
        assert here.total_bytes is not None
        budget = promised.budget_bytes - sizes.CONTEXT_BYTES
        torch.cuda.set_per_process_memory_fraction(budget / here.total_bytes)
    started = time.perf_counter()
    model = open_model(spec, group, context - LEFT, KV4, context)
    opened = time.perf_counter()
    prefill(model)
    filled = time.perf_counter()
    tokens = decode(model)
    done = time.perf_counter()
    peak = sum(
        model.backend.device_memory().get(k, 0) for k in ("device_peak_bytes", "context_bytes")
    )
    return {
        "shape": name, "device": device, "context": context, "budget_bytes": promised.budget_bytes,
        "planned_there_bytes": promised.total_bytes, "planned_here_bytes": planned,
        "peak_bytes": peak, "peak_of_planned": peak / planned, "open_s": opened - started,
        "prefill_s": filled - opened, "prefill_tok_s": (context - LEFT) / (filled - opened),
        "decoded": tokens, "decode_tok_s": tokens / (done - filled),
    }  # fmt: skip


def prefill(model: Any) -> None:
    """Fill the cache with a prompt."""
    logits: Any = None
    chunk = model.backend.chunk_rows
    for first in range(0, model.context, chunk):
        positions = np.arange(first, min(first + chunk, model.context))
        batch = ops.Batch(
            ids=positions % model.spec.vocab_size,
            positions=positions,
            full_from=np.zeros(len(positions), np.int64),
        )
        logits = model.backend.run(model.program("w8"), batch, model.cache)
        if first % 4096 == 0:
            print(f"  {first} of {model.context} tokens", file=sys.stderr)
    logits.argmax()


def decode(model: Any) -> int:
    """Decode to the end of the context; return the tokens."""
    cycles = model.cycles()
    cycles.begin([1] * model.context, Parameters(), FORCED)
    known = model.context
    while known + GAMMA < model.cache.capacity:
        cycles.launch(GAMMA, 0, known)
        known += len(cycles.read().tokens)
    return int(known - model.context)


def main() -> None:
    """Command line."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("shape")
    parser.add_argument("--device", default="orin-nx-16gb")
    parser.add_argument("--group", type=int, default=128)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    document = run(options.shape, options.device, options.group)
    for key, value in document.items():
        print(f"{key:<20} {value}", file=sys.stderr)
    text = json.dumps(document)
    if options.json:
        options.json.write_text(text + "\n", encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
