"""How good a converted model is, against its unquantised source: agreement and perplexity.

    python tools/quality.py SOURCE DIR [DIR …] --data ../shared/data [--windows 20] [--json FILE]

Agreement: the source answers 24 prompts (gsm8k, mt_bench, humaneval; greedy, up to 110 tokens);
every view is then run over those answers (teacher-forced) and its first choice compared, position
by position. b is plain W8A8 round-to-nearest of the same rotated model, with the embedding and the
KV cache quantised as in the target. The draft is measured twice: over its own cache (all rows W4),
and as it really runs, one W4 row over the target's cache. Perplexity: WikiText-2 raw, windows of
2048 tokens, each from its own start. Intervals: 95 % Wilson.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from pathlib import Path

import numpy as np
import torch

from edge_runtime.cache.policy import KV4, KV8
from edge_runtime.convert.nest import rtn8_linear
from edge_runtime.convert.original import float_model
from edge_runtime.convert.source import Source, open_source
from edge_runtime.decode.draft import DraftChoice
from edge_runtime.decode.engine import Engine
from edge_runtime.kernels.ops import Batch
from edge_runtime.text.tokenizer import Tokenizer

CONTEXT = 2048
CHUNK = 512
ANSWER_TOKENS = 110


def prompts(data: Path) -> list[str]:
    """Read the first 6 gsm8k, 12 mt_bench and 6 humaneval prompts."""

    def rows(name: str) -> list[dict]:
        return [json.loads(line) for line in (data / name).read_text("utf-8").splitlines()]

    return [
        *(r["question"] for r in rows("gsm8k_test.jsonl")[:6]),
        *(r["turns"][0] for r in rows("mt_bench_question.jsonl")[:12]),
        *(f"Complete this Python function:\n{r['prompt']}" for r in rows("humaneval.jsonl")[:6]),
    ]


def original_engine(source: Source) -> Engine:
    """The unquantised source as an engine."""
    return Engine(
        float_model(source, CONTEXT),
        Tokenizer.from_json(source.tokenizer_json, source.text.eos_ids),
        source.text,
        view="fp",
        context=CONTEXT,
        draft=DraftChoice(0, "base", "unquantised"),
    )


def forced(engine: Engine, view: str, policy, ids: list[int], num: int) -> np.ndarray:
    """First choices of the last `num` rows of a teacher-forced pass."""
    positions = np.arange(len(ids))
    batch = Batch(
        ids=np.asarray(ids),
        positions=positions,
        full_from=policy.full_from(positions),
        num_logits=num,
    )
    logits = engine.model.backend.run(engine.model.program(view), batch, engine.cache)
    return np.array(logits.argmax())


def running_draft(engine: Engine, ids: list[int], num: int, policy) -> np.ndarray:
    """Choices of single W4 rows over the target's cache, as drafting does its first step."""
    forced(engine, "w8", KV8, ids, 1)
    chosen = []
    for at in range(len(ids) - num, len(ids)):
        chosen.append(
            engine.model.forward("w4", ids[at : at + 1], at, engine.cache, policy=policy).argmax()[
                0
            ]
        )
        engine.model.forward("w8", ids[at : at + 1], at, engine.cache)  # what verification restores
    return np.array(chosen)


def share(a: np.ndarray, b: np.ndarray) -> dict[str, float | int]:
    """Agreement with its 95 % Wilson interval."""
    n, p, z = len(a), float((a == b).mean()), 1.96
    middle = (p + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    low, high = middle - half, middle + half
    return {"value": round(p, 4), "low": round(low, 4), "high": round(high, 4), "n": n}


def perplexity(engine: Engine, view: str, tokens: list[int], windows: int) -> float:
    """exp of the mean negative log-likelihood of tokens 1…2047 of each window."""
    total, count = 0.0, 0
    for w in range(windows):
        ids = tokens[w * CONTEXT : (w + 1) * CONTEXT]
        for a in range(0, CONTEXT, CHUNK):
            part = ids[a : a + CHUNK]
            logits = engine.model.forward(view, part, a, engine.cache, num_logits=len(part))
            rows = torch.from_numpy(logits.numpy()).double().log_softmax(-1)
            targets = torch.tensor(ids[a + 1 : a + CHUNK + 1])
            rows = rows[: len(targets)]
            total -= float(rows.gather(1, targets[:, None]).sum())
            count += len(targets)
        print(f"  window {w + 1}/{windows}: {math.exp(total / count):.4f}", file=sys.stderr)
    return math.exp(total / count)


def answers(engine: Engine, data: Path) -> list[tuple[list[int], list[int]]]:
    """(prompt ids, answer ids) of the source."""
    found = []
    for text in prompts(data):
        ids = engine.encode_chat([{"role": "user", "content": text}])
        found.append((ids, engine.generate(ids, max_new_tokens=ANSWER_TOKENS).complete().token_ids))
    return found


def measure(args: argparse.Namespace) -> dict:
    """Measure everything and return the document."""
    source = open_source(args.source)
    original = original_engine(source)
    text = (args.data / "wikitext2_test.raw.txt").read_text("utf-8")
    tokens = original.tokenizer.encode(text[: args.windows * CONTEXT * 8], allow_special=False)
    pairs = answers(original, args.data)
    truth = np.concatenate([a for _, a in pairs])
    document: dict = {"positions": len(truth), "source": args.source.name, "models": {}}
    if args.windows:
        document["original_perplexity"] = perplexity(original, "fp", tokens, args.windows)
    original.close()
    del original

    def over(engine: Engine, run) -> np.ndarray:
        return np.concatenate([run(engine, p + a[:-1], len(a)) for p, a in pairs])

    for folder in args.models:
        started = time.time()
        row: dict = {}
        with Engine.open(folder, view="w8", ctx=CONTEXT) as engine:
            target = over(engine, lambda e, i, n: forced(e, "w8", KV8, i, n))
            draft = over(engine, lambda e, i, n: forced(e, "w4", KV8, i, n))
            row["target_original"] = share(target, truth)
            row["draft_target_own_cache"] = share(draft, target)
            row["draft_original"] = share(draft, truth)
            if not args.fast:
                for name, policy in (("kv8", KV8), ("kv4", KV4)):
                    running = over(engine, lambda e, i, n, p=policy: running_draft(e, i, n, p))
                    row[f"draft_target_running_{name}"] = share(running, target)
            if args.windows:
                row["perplexity"] = perplexity(engine, "w8", tokens, args.windows)
                row["perplexity_ratio"] = row["perplexity"] / document["original_perplexity"]
            if "b" not in document:
                document["b"] = share(over(with_rtn8(engine, source), run_w8), truth)
        row["seconds"] = round(time.time() - started)
        document["models"][folder.name] = row
        print(json.dumps({folder.name: row, "b": document["b"]}), file=sys.stderr)
    return document


def run_w8(engine: Engine, ids: list[int], num: int) -> np.ndarray:
    """One pass of the w8 view."""
    return forced(engine, "w8", KV8, ids, num)


def with_rtn8(engine: Engine, source: Source) -> Engine:
    """Replace the engine's w8 view by plain W8 round-to-nearest of the same rotated weights."""
    rotated = float_model(source, CONTEXT, rotate_seed=0)
    G = next(iter(engine.model.backend.weights.linears.values())).group_size
    for name, W in rotated.backend.weights.matrices.items():
        bias = rotated.backend.weights.biases.get(name)
        engine.model.backend.set_linear(name, "w8", rtn8_linear(W, bias, G, name))
    return engine


def main() -> None:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("source", type=Path)
    parser.add_argument("models", type=Path, nargs="+")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--windows", type=int, default=20)
    parser.add_argument("--fast", action="store_true", help="no running draft")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    document = measure(args)
    if args.json:
        args.json.write_text(json.dumps(document, indent=1) + "\n")
    print(json.dumps(document))


if __name__ == "__main__":
    main()
