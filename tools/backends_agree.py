"""Whether two backends give the same bits on a real model: logits of every row, cache, drafts.

    python tools/backends_agree.py DIR --data ../shared/data [--backends reference,cpu]

Each of 20 prompts (gsm8k, humaneval, mt_bench in turn, at most 160 tokens) is read with the w8
view, then 3 single rows with w4 under kv4, then 5 rows with w8 over them. Exit 1: a bit differs.
One backend alone: a SHA-256 of each prompt's bits is printed, to compare machines.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

from edge_runtime.cache.policy import KV4, KV8
from edge_runtime.decode.engine import Engine

LONGEST = 160
CONTEXT = 256


def prompts(data: Path) -> list[str]:
    """Return prompts of three kinds in turn."""

    def rows(name: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (data / name).read_text("utf-8").splitlines()]

    kinds = (
        [row["question"] for row in rows("gsm8k_test.jsonl")],
        [row["prompt"] for row in rows("humaneval.jsonl")],
        [row["turns"][0] for row in rows("mt_bench_question.jsonl")],
    )
    return [text for three in zip(*kinds, strict=False) for text in three]


def play(engine: Engine, ids: list[int]) -> list[np.ndarray[Any, Any]]:
    """Return logits of all passes, then the planes of the cache."""
    forward, n = engine.model.forward, len(ids)
    found = [forward("w8", ids, 0, engine.cache, num_logits=n).numpy()]
    for i in range(3):
        found.append(forward("w4", [ids[i]], n + i, engine.cache, policy=KV4).numpy())
    found.append(forward("w8", ids[:5], n, engine.cache, policy=KV8, num_logits=5).numpy())
    planes = engine.cache.planes(n + 5)
    return found + [np.ascontiguousarray(planes[n]) for n in ("base", "refine", "scale")]


def main() -> int:
    """Parse the command line and compare."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--prompts", type=int, default=20)
    parser.add_argument("--backends", default="reference,cpu")
    args = parser.parse_args()
    engines = [Engine.open(args.model, backend=b, ctx=CONTEXT) for b in args.backends.split(",")]
    differing = numbers = 0
    compared = len(engines) > 1
    for text in prompts(args.data)[: args.prompts]:
        ids = engines[0].encode_chat([{"role": "user", "content": text}])[:LONGEST]
        found = [play(engine, ids) for engine in engines]
        if not compared:
            print(hashlib.sha256(b"".join(a.tobytes() for a in found[0])).hexdigest())
        for a, b in zip(*found, strict=True) if compared else ():
            numbers += a.size
            differing += int((a.view(np.uint8) != b.view(np.uint8)).sum())
    if compared:
        print(
            f"{args.backends}: {args.prompts} prompts, {numbers} numbers: {differing} bytes differ"
        )
    return int(differing > 0)


if __name__ == "__main__":
    sys.exit(main())
