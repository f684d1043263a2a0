"""One large linear alone, over copies that no cache holds: GB/s against the read bandwidth.

    python tools/bench_linear.py [--shape 4096x11008] [--threads 2] [--total-mb 256] [--turns 15]

Random planes, group size 64; each turn measures reading, then every view and number of rows.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import defaultdict

import numpy as np

from edge_runtime.kernels import ops
from edge_runtime.kernels.cpu import library
from edge_runtime.kernels.cpu.backend import CpuBackend

GROUP = 64
READ_BYTES = 256 << 20
VIEWS: tuple[ops.View, ...] = ("w4", "w8")


def make(outputs: int, inputs: int, copies: int, threads: int) -> CpuBackend:
    """Build a backend that holds the same random matrix several times."""
    rng = np.random.default_rng(0)
    linear = ops.LinearWeights(
        base=rng.integers(0, 256, (outputs, inputs // 2), np.uint8),
        refine=rng.integers(0, 256, (outputs, inputs // 2), np.uint8),
        mult=rng.integers(-32768, 32768, (outputs, inputs // GROUP), np.int16),
        scale=rng.random(outputs, np.float32),
        bias=None,
        num_inputs=inputs,
        group_size=GROUP,
    )
    weights = ops.ModelWeights(
        linears={f"copy{i}": linear for i in range(copies)},
        embedding=rng.integers(-127, 128, (16, inputs), np.int8),
        embedding_scale=np.ones(16, np.float32),
        cos=np.ones((64, 16), np.float32),
        sin=np.zeros((64, 16), np.float32),
    )
    shape = ops.Geometry(
        num_layers=1, hidden_size=inputs, num_heads=1, num_kv_heads=1, head_dim=32, num_tokens=16
    )
    return CpuBackend(weights, shape, threads, library.choose_isa())


def main() -> None:
    """Parse the command line and measure."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", default="4096x11008")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--total-mb", type=int, default=256)
    parser.add_argument("--turns", type=int, default=15)
    args = parser.parse_args()
    outputs, inputs = map(int, args.shape.split("x"))
    size = {view: outputs * inputs * (1 if view == "w8" else 0.5) for view in VIEWS}
    size = {view: n + outputs * inputs // GROUP * 2 for view, n in size.items()}
    copies = -(-(args.total_mb << 20) // int(size["w4"]))
    backend = make(outputs, inputs, copies, args.threads)
    cache, data = backend.new_cache(64), np.ones(READ_BYTES, np.uint8)
    programs: dict[str, ops.Program] = {
        view: (
            ops.Embed("x"),
            ops.NormQuantise("x", "a", 1e-5),
            *(ops.Linear("a", f"copy{i}", "y", view) for i in range(copies)),
            ops.SelectRows("x", "z"),
        )
        for view in VIEWS
    }
    speeds: dict[str, list[float]] = defaultdict(list)
    for _ in range(args.turns + 1):
        speeds["read"].append(READ_BYTES / backend.read_seconds(data) / 1e9)
        for view in VIEWS:
            for rows in (1, 2, 4, 8):
                at = np.arange(rows)
                batch = ops.Batch(ids=at, positions=at, full_from=0 * at)
                started = time.perf_counter()
                backend.run(programs[view], batch, cache)
                seconds = time.perf_counter() - started
                speeds[f"{view}, {rows} rows"].append(copies * size[view] / seconds / 1e9)
    read = statistics.median(speeds["read"][1:])
    for name, values in speeds.items():
        middle = statistics.median(values[1:])
        low, high = min(values[1:]), max(values[1:])
        print(
            f"{name:<12} {middle:6.1f} GB/s ({low:.1f} to {high:.1f}), {middle / read:.2f} of read"
        )


if __name__ == "__main__":
    main()
