"""What a prompt's cache in a file saves: first token with and without it, in turns.

    python tools/prompt_cache_times.py DIR [--tokens 512,2048] [--runs 7]

The prompt is the calibration text's beginning and one more token. Reported are seconds to the first
token, medians and ranges: of reading the prompt, and of proving the file and loading it in its
place; then the file's size and how long saving took. Exit 1: a first token differs.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path

from edge_runtime.decode import prefix
from edge_runtime.decode.engine import Engine
from edge_runtime.measure.profile import default_text


def spread(seconds: list[float]) -> str:
    """Return a median with its range."""
    return f"{statistics.median(seconds):.3f} ({min(seconds):.3f} to {max(seconds):.3f})"


def first_token(engine: Engine, ids: list[int]) -> tuple[int, float]:
    """Return the first token of an answer and the seconds that it took."""
    started = time.perf_counter()
    result = engine.generate(ids, max_new_tokens=1, ignore_eos=True).complete()
    return result.token_ids[0], time.perf_counter() - started


def measure(engine: Engine, ids: list[int], runs: int, file: Path) -> bool:
    """Print one row; return whether all first tokens are the same."""
    begun = time.perf_counter()
    prefix.begin(engine, file, ids[:-1])
    engine.prefix = None
    made = time.perf_counter() - begun
    first_token(engine, ids)  # warms up
    plain, kept, tokens = [], [], set()
    for _ in range(runs):
        engine.reuse([])
        token, seconds = first_token(engine, ids)
        tokens.add(token)
        plain.append(seconds)
        engine.reuse([])
        started = time.perf_counter()
        prefix.load(engine, file)
        token, _ = first_token(engine, ids)
        kept.append(time.perf_counter() - started)
        tokens.add(token)
        engine.prefix = None
    ratio = statistics.median(a / b for a, b in zip(plain, kept, strict=True))
    size = file.stat().st_size / 2**20
    print(f"{len(ids) - 1} tokens: read {spread(plain)} s, from the file {spread(kept)} s, "
          f"{ratio:.1f} x; {size:.1f} MiB; read and saved in {made:.2f} s")  # fmt: skip
    return len(tokens) == 1


def main() -> int:
    """Parse the command line and measure."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--tokens", default="512,2048")
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--backend", default="auto")
    args = parser.parse_args()
    lengths = [int(part) for part in args.tokens.split(",")]
    same = True
    with Engine.open(args.model, backend=args.backend, ctx=max(lengths) + 8) as engine:
        text = default_text()
        ids = engine.encode_text(text * (1 + 8 * max(lengths) // len(text)))
        with tempfile.TemporaryDirectory() as folder:
            for length in lengths:
                file = Path(folder) / str(length)
                same = measure(engine, ids[: length + 1], args.runs, file) and same
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
