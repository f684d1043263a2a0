"""Decoding while another process burns one core, against one thread on a quiet machine.

    python tools/noisy_neighbour.py DIR [--threads 2] [--turns 5] [--unpinned]

Turns of three: one thread alone, all threads alone, all threads beside the burner (pinned to core 0
unless --unpinned). Prints tok/s of each and their ratio to one thread alone.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time

from edge_runtime.decode.engine import Engine

BURN = "while True: pass"


def main() -> None:
    """Parse the command line and measure."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--view", default="w8")
    parser.add_argument("--unpinned", action="store_true")
    args = parser.parse_args()
    engines = {
        n: Engine.open(args.model, view=args.view, backend="cpu", threads=n, ctx=512)
        for n in (1, args.threads)
    }
    cores = sorted(os.sched_getaffinity(0))

    def speed(threads: int) -> float:
        run = engines[threads].generate(
            "Tell a story.", max_new_tokens=args.new_tokens, ignore_eos=True
        )
        return run.complete().decode_tok_s

    found: dict[str, list[float]] = {"one thread": [], "all threads": [], "beside a burner": []}
    for _ in range(args.turns):
        found["one thread"].append(speed(1))
        found["all threads"].append(speed(args.threads))
        burner = subprocess.Popen([sys.executable, "-c", BURN])
        try:
            if not args.unpinned:
                os.sched_setaffinity(burner.pid, {cores[0]})
            time.sleep(0.5)
            found["beside a burner"].append(speed(args.threads))
        finally:
            burner.kill()
            burner.wait()
    for name, values in found.items():
        ratios = [v / one for v, one in zip(values, found["one thread"], strict=True)]
        print(
            f"{name:<16} {statistics.median(values):7.1f} tok/s ({min(values):.1f} to "
            f"{max(values):.1f}), {statistics.median(ratios):.2f} of one thread alone "
            f"({min(ratios):.2f} to {max(ratios):.2f})"
        )


if __name__ == "__main__":
    main()
