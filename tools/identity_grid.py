"""Exactness on a real model over 40 prompts: every draft length, source, policy and adversary.

    python tools/identity_grid.py DIR --data ../shared/data --out FILE [--workers 2] [--backend cpu]

The cases are those of `bitnest-edge selftest --full`; the prompts are 4 of more than 2,000 tokens,
10 of gsm8k, 10 of humaneval, 10 of mt_bench and 6 conversations. 64 new tokens each, the end token
ignored, the chunk sizes on at most 600 tokens of each prompt. One row per prompt and case goes to
--out as it is done; what is there already is not run again. Exit 1: an answer differed.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

NEW_TOKENS = 64
CONTEXT = 4096
CHUNKED_TOKENS, CHUNKED_NEW = 600, 8
LONG_CHARACTERS = (10000, 11000, 13000, 15000)
CORE = 24  # of selftest.FULL: gamma, base and n-gram, policy
PIECE = 12  # cases that one task runs after reading its prompt


def prompts(data: Path) -> list[str]:
    """Return the 40 prompts: user text of one turn each."""

    def rows(name: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (data / name).read_text("utf-8").splitlines()]

    talks = [
        [turn["value"] for turn in row["conversations"] if turn["from"] in ("human", "gpt")]
        for row in rows("conversations.jsonl")
    ]
    joined = "\n\n".join(text for talk in talks[100:] for text in talk)
    starts = [sum(LONG_CHARACTERS[:i]) for i in range(len(LONG_CHARACTERS))]
    long = [joined[a : a + n] for a, n in zip(starts, LONG_CHARACTERS, strict=True)]
    return [
        *(f"{text}\n\nSum this up." for text in long),
        *(row["question"] for row in rows("gsm8k_test.jsonl")[20:30]),
        *(row["prompt"] for row in rows("humaneval.jsonl")[20:30]),
        *(row["turns"][0] for row in rows("mt_bench_question.jsonl")[20:30]),
        *(talk[0] for talk in talks[20:26]),
    ]


_engine: Any = None


def _open(model: str, backend: str) -> None:
    global _engine
    from edge_runtime.decode.engine import Engine

    _engine = Engine.open(model, backend=backend, threads=1, ctx=CONTEXT)


def _run(task: tuple[int, str, list[int], bool]) -> list[dict[str, Any]]:
    from edge_runtime import selftest

    number, text, picked, chunked = task
    ids = _engine.encode_chat([{"role": "user", "content": text}])
    if chunked:
        ids = ids[:CHUNKED_TOKENS]
    every = selftest.CHUNKED if chunked else selftest.FULL
    rows = selftest.run_grid(
        _engine,
        [ids],
        [every[i] for i in picked],
        new_tokens=CHUNKED_NEW if chunked else NEW_TOKENS,
        seed=1 + number,
    )
    return [asdict(row) | {"prompt": number, "length": len(ids)} for row in rows]


def tasks(
    texts: list[str], done: set[tuple[int, str]]
) -> Iterator[tuple[int, str, list[int], bool]]:
    """Yield the work that is left, the core of the grid first and long prompts ahead of short."""
    from edge_runtime import selftest

    full = range(len(selftest.FULL))
    groups = [(full[i : min(i + PIECE, CORE)], False) for i in range(0, CORE, PIECE)]
    groups += [(full[i : i + PIECE], False) for i in range(CORE, len(full), PIECE)]
    groups += [(range(len(selftest.CHUNKED)), True)]
    for group, chunked in groups:
        every = selftest.CHUNKED if chunked else selftest.FULL
        for number, text in enumerate(texts):
            left = [i for i in group if (number, str(every[i])) not in done]
            if left:
                yield number, text, left, chunked


def summary(rows: list[dict[str, Any]]) -> list[str]:
    """Return a line per case, and the total."""
    totals: dict[str, dict[str, int]] = {}
    for row in rows:
        for case in (row["case"], "total"):
            total = totals.setdefault(case, dict.fromkeys(COUNTS, 0))
            for name in COUNTS:
                total[name] += row[name]
    totals["total"] = totals.pop("total")
    return [
        f"{case:<32}" + "  ".join(f"{name} {total[name]}" for name in COUNTS)
        for case, total in totals.items()
    ]


COUNTS = ("prompts", "tokens", "cycles", "drafted", "accepted", "rejections", "differing")


def main() -> int:
    """Parse the command line and run what is left."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--backend", default="auto")
    args = parser.parse_args()
    lines = args.out.read_text().splitlines() if args.out.exists() else []
    rows = [json.loads(line) for line in lines]
    todo = list(tasks(prompts(args.data), {(row["prompt"], row["case"]) for row in rows}))
    context = multiprocessing.get_context("spawn")
    with (
        context.Pool(args.workers, _open, (args.model, args.backend)) as pool,
        args.out.open("a") as out,
    ):
        for number, found in enumerate(pool.imap_unordered(_run, todo), 1):
            rows += found
            out.writelines(json.dumps(row) + "\n" for row in found)
            out.flush()
            differing = sum(row["differing"] for row in rows)
            print(f"{number}/{len(todo)} tasks, {differing} differing", file=sys.stderr)
    print("\n".join(summary(rows)))
    return int(any(row["differing"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
