"""Decoding and prefill next to llama.cpp, in turns in one run, on the same model and threads.

    pip install llama-cpp-python
    python tools/compare_llama.py DIR SOURCE.gguf --data ../shared/data [--threads 2] [--json FILE]

F16, Q8_0 and Q4_0 are made from SOURCE once, by llama.cpp, into --cache. Its C API is called with
greedy argmax: no Python sampler. Each turn is one prompt: w8, w4, nest, F16, Q8_0, Q4_0 decode
`--new-tokens` tokens each; ratios are taken within a turn, and printed with their spread.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np

from edge_runtime.decode.draft import DraftChoice
from edge_runtime.decode.engine import Engine

CONTEXT = 1024
PREFILL = 512
FORMATS = {
    "f16": llama_cpp.LLAMA_FTYPE_MOSTLY_F16,
    "q8_0": llama_cpp.LLAMA_FTYPE_MOSTLY_Q8_0,
    "q4_0": llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_0,
}
RATIOS = (
    *(("w8", "q8_0"), ("w4", "q4_0"), ("nest", "w8"), ("nest", "q8_0"), ("nest", "q4_0")),
    *(("w8 prefill", "q8_0 prefill"), ("nest", "f16")),
)


@llama_cpp.llama_log_callback
def _silent(level: int, text: bytes, data: ctypes.c_void_p) -> None:
    """Drop llama.cpp's own lines."""


class Llama:
    """One GGUF file behind llama.cpp's C API."""

    def __init__(self, path: Path, threads: int) -> None:
        self._model = llama_cpp.llama_model_load_from_file(
            str(path).encode(), llama_cpp.llama_model_default_params()
        )
        params = llama_cpp.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch = CONTEXT, PREFILL, PREFILL
        params.n_threads = params.n_threads_batch = threads
        self._context = llama_cpp.llama_init_from_model(self._model, params)
        vocab = llama_cpp.llama_model_get_vocab(self._model)
        self._num_tokens = llama_cpp.llama_vocab_n_tokens(vocab)

    def _run(self, ids: list[int]) -> int:
        tokens = (llama_cpp.llama_token * len(ids))(*ids)  # the batch only points to it
        batch = llama_cpp.llama_batch_get_one(tokens, len(ids))
        assert llama_cpp.llama_decode(self._context, batch) == 0
        logits = llama_cpp.llama_get_logits_ith(self._context, -1)
        return int(np.ctypeslib.as_array(logits, shape=(self._num_tokens,)).argmax())

    def _clear(self) -> None:
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self._context), True)

    def decode(self, ids: list[int], new_tokens: int) -> float:
        """Return tok/s after the prompt."""
        self._clear()
        token = self._run(ids)
        started = time.perf_counter()
        for _ in range(new_tokens - 1):
            token = self._run([token])
        return (new_tokens - 1) / (time.perf_counter() - started)

    def prefill(self, ids: list[int]) -> float:
        """Return tok/s of one batch."""
        self._clear()
        started = time.perf_counter()
        self._run(ids)
        return len(ids) / (time.perf_counter() - started)


def make_formats(source: Path, cache: Path) -> dict[str, Path]:
    """Quantise SOURCE into every format that is not there yet."""
    cache.mkdir(parents=True, exist_ok=True)
    found = {}
    for name, kind in FORMATS.items():
        path = found[name] = cache / f"{source.stem}.{name}.gguf"
        if path.exists():
            continue
        params = llama_cpp.llama_model_quantize_default_params()
        params.ftype, params.allow_requantize = kind, True
        partial = path.with_suffix(".partial")
        failed = llama_cpp.llama_model_quantize(
            str(source).encode(), str(partial).encode(), ctypes.byref(params)
        )
        if failed:
            sys.exit(f"llama.cpp could not make {name} of {source}")
        partial.rename(path)
    return found


def prompts(data: Path) -> list[str]:
    """Return 7 prompts of gsm8k, 6 of humaneval and 7 of mt_bench."""

    def rows(name: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (data / name).read_text("utf-8").splitlines()]

    return [
        *(row["question"] for row in rows("gsm8k_test.jsonl")[:7]),
        *(row["prompt"] for row in rows("humaneval.jsonl")[:6]),
        *(row["turns"][0] for row in rows("mt_bench_question.jsonl")[:7]),
    ]


def own(engine: Engine, mode: str, ids: list[int], new_tokens: int, nest: DraftChoice) -> Any:
    """Decode with one of our modes and return the result."""
    engine.draft = nest if mode == "nest" else DraftChoice(0, "base", mode)
    engine.target_view = "w4" if mode == "w4" else "w8"
    engine.reuse([0])
    return engine.generate(ids, max_new_tokens=new_tokens, ignore_eos=True).complete()


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Run all turns."""
    llama_cpp.llama_backend_init()
    llama_cpp.llama_log_set(_silent, ctypes.c_void_p(0))
    peers = {n: Llama(p, args.threads) for n, p in make_formats(args.source, args.cache).items()}
    speeds: dict[str, list[float]] = {}
    differing = drafted = accepted = 0
    with Engine.open(args.model, backend="cpu", threads=args.threads, ctx=CONTEXT) as engine:
        nest = engine.draft
        texts = prompts(args.data)[: args.limit]
        wide = engine.encode_text("\n".join(texts))[:PREFILL]
        for number, text in enumerate(texts, 1):
            ids = engine.encode_chat([{"role": "user", "content": text}])
            turn: dict[str, float] = {}
            results = {m: own(engine, m, ids, args.new_tokens, nest) for m in ("w8", "w4", "nest")}
            differing += results["nest"].token_ids != results["w8"].token_ids
            drafted += int(results["nest"].draft["drafted"])
            accepted += int(results["nest"].draft["accepted"])
            turn |= {mode: result.decode_tok_s for mode, result in results.items()}
            turn["w8 prefill"] = own(engine, "w8", wide, 2, nest).prefill_tok_s
            for name, peer in peers.items():
                turn[name] = peer.decode(ids, args.new_tokens)
                turn[f"{name} prefill"] = peer.prefill(wide)
            for name, speed in turn.items():
                speeds.setdefault(name, []).append(speed)
            shown = {name: round(speed) for name, speed in turn.items()}
            print(f"{number}/{len(texts)} {shown}", file=sys.stderr, flush=True)
    return document(args, speeds, differing, accepted / max(1, drafted))


def document(
    args: argparse.Namespace, speeds: dict[str, list[float]], differing: int, acceptance: float
) -> dict[str, Any]:
    """Return speeds and ratios with their spread."""

    def spread(values: list[float]) -> dict[str, float]:
        return {
            "mean": statistics.mean(values),
            "median": statistics.median(values),
            "min": min(values),
            "max": max(values),
        }

    ratios = {
        f"{a} / {b}": spread([x / y for x, y in zip(speeds[a], speeds[b], strict=True)])
        for a, b in RATIOS
    }
    return {
        "llama_cpp_python": llama_cpp.__version__,
        "threads": args.threads,
        "new_tokens": args.new_tokens,
        "prompts": len(speeds["w8"]),
        "differing": differing,
        "acceptance": acceptance,
        "tok_s": {name: spread(values) for name, values in speeds.items()},
        "ratios": ratios,
    }


def main() -> None:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("source", type=Path)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--limit", type=int, default=None)
    parser.add_argument("--cache", type=Path, default=Path.home() / ".cache/bitnest-edge/llama.cpp")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    found = measure(args)
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n")
    for name, s in (found["tok_s"] | found["ratios"]).items():
        print(
            f"{name:<28} mean {s['mean']:8.2f}  median {s['median']:8.2f}  "
            f"{s['min']:.2f} to {s['max']:.2f}"
        )
    print(f"answers that differ: {found['differing']}, acceptance {found['acceptance']:.3f}")


if __name__ == "__main__":
    main()
