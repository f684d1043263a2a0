"""Each CUDA op alone on this GPU: time, GB/s and share of the copy bandwidth, which comes first.

    python tools/bench_cuda.py [--hidden 4096] [--inner 11008] [--vocabulary 128256] [--rows 1,8]
                               [--only NAME,…] [--turns 20] [--json FILE]

An op is a function in `ENTRIES` that returns `Entry` objects: a call with the number of the copy of
its inputs to use (all copies together outgrow the L2), and the bytes it must move. Calls are
captured in a graph, a copy each, and replayed: Python's launch gaps are not in the times. Under a
few microseconds a launch is what is measured; `us` says more than GB/s there.
The last line of stdout is one JSON document.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

WARM_UP_SECONDS = 1.5
CACHE_TIMES = 3  # inputs are rotated through so many times the L2


@dataclass(frozen=True, slots=True)
class Sizes:
    """What is measured: hidden, feed-forward and vocabulary size, rows."""

    hidden: int
    inner: int
    vocabulary: int
    rows: tuple[int, ...]
    group_size: int = 128


@dataclass(frozen=True, slots=True)
class Entry:
    """call(i) runs the op on copy i of its inputs, of `num_copies`; num_bytes: read and written."""

    name: str
    rows: int
    call: Callable[[int], object]
    num_copies: int
    num_bytes: int


ENTRIES: list[Callable[[Sizes], Iterator[Entry]]] = []


def entry(make: Callable[[Sizes], Iterator[Entry]]) -> Callable[[Sizes], Iterator[Entry]]:
    """Register an op."""
    ENTRIES.append(make)
    return make


def num_copies(num_bytes: int) -> int:
    """Copies of inputs of this size that outgrow the L2, 64 at most."""
    l2 = torch.cuda.get_device_properties(0).L2_cache_size
    return max(2, min(64, -(-CACHE_TIMES * l2 // num_bytes)))


@entry
def norms(s: Sizes) -> Iterator[Entry]:
    """RMSNorm + quantise, quantise."""
    from edge_runtime.kernels.cuda import activations

    for M in s.rows:
        size = M * s.hidden * 5
        n = num_copies(size)
        x = torch.randn(n, M, s.hidden, device="cuda")
        out = [activations.new_activation(M, s.hidden, s.group_size, "cuda") for _ in range(n)]

        def norm(i: int, x: torch.Tensor = x, out: list[activations.Activation] = out) -> None:
            activations.norm_quantise(x[i], 1e-5, s.group_size, out[i])

        def plain(i: int, x: torch.Tensor = x, out: list[activations.Activation] = out) -> None:
            activations.quantise(x[i], s.group_size, out[i])

        yield Entry("norm_quantise", M, norm, n, size)
        yield Entry("quantise", M, plain, n, size)


@entry
def silu(s: Sizes) -> Iterator[Entry]:
    """silu·mul + quantise."""
    from edge_runtime.kernels.cuda import activations

    for M in s.rows:
        size = M * s.inner * 9
        n = num_copies(size)
        x = torch.randn(n, M, 2 * s.inner, device="cuda")
        out = activations.new_activation(M, s.inner, s.group_size, "cuda")
        room = activations.new_silu_room(x[0])

        def call(
            i: int,
            x: torch.Tensor = x,
            out: activations.Activation = out,
            room: activations.SiluRoom = room,
        ) -> None:
            activations.silu_mul_quantise(x[i], s.group_size, out, room)

        yield Entry("silu_mul_quantise", M, call, n, size)


@entry
def embeddings(s: Sizes) -> Iterator[Entry]:
    """Gather of embedding rows."""
    from edge_runtime.kernels.cuda import embedding

    table = torch.randint(-127, 128, (s.vocabulary, s.hidden), dtype=torch.int8, device="cuda")
    scale = torch.rand(s.vocabulary, device="cuda")
    for M in s.rows:
        ids = torch.randint(0, s.vocabulary, (64, M), device="cuda")
        out = torch.empty(M, s.hidden, device="cuda")

        def call(i: int, ids: torch.Tensor = ids, out: torch.Tensor = out) -> None:
            embedding.embed(ids[i], table, scale, out=out)

        yield Entry("embed", M, call, 64, M * s.hidden * 5)


@entry
def choices(s: Sizes) -> Iterator[Entry]:
    """Argmax and sampling."""
    from edge_runtime.kernels.cuda import head, sampling
    from edge_runtime.kernels.sampling import Parameters

    kinds = {
        "sample": Parameters(temperature=0.8, min_p=0.05, seed=7),
        "sample_top_k": Parameters(temperature=0.8, top_k=40, seed=7),
        "sample_top_p": Parameters(temperature=0.8, top_p=0.95, seed=7),
    }
    for M in s.rows:
        size = M * s.vocabulary * 4
        n = num_copies(size)
        x = torch.randn(n, M, s.vocabulary, device="cuda") * 3
        choice = head.new_choice(M, s.vocabulary, "cuda")

        def best(i: int, x: torch.Tensor = x, choice: head.Choice = choice) -> None:
            head.argmax(x[i], s.vocabulary, out=choice)

        yield Entry("argmax", M, best, n, size)
        for name, p in kinds.items():
            cut = bool(p.top_k or p.top_p < 1)
            room = sampling.new_room(M, s.vocabulary, "cuda", truncate=cut)
            settings = sampling.Settings.of([p] * M, list(range(M)), "cuda")

            def draw(
                i: int,
                x: torch.Tensor = x,
                cut: bool = cut,
                room: sampling.Room = room,
                settings: sampling.Settings = settings,
            ) -> None:
                sampling.sample(x[i], s.vocabulary, settings, truncate=cut, out=room)

            yield Entry(name, M, draw, n, size)


@entry
def look_ups(s: Sizes) -> Iterator[Entry]:
    """N-gram look-up in 32,768 tokens."""
    from edge_runtime.kernels.cuda import ngram

    n, length = 8, 32768
    tokens = torch.randint(0, s.vocabulary, (n, length), dtype=torch.int32, device="cuda")
    sizes = torch.tensor([length, 0], dtype=torch.int32, device="cuda")
    drafted = torch.zeros(8, dtype=torch.int32, device="cuda")
    out = ngram.new_draft(length, "cuda")

    def call(i: int) -> None:
        ngram.look_up(tokens[i], sizes[:1], drafted, sizes[1:], 7, out)

    yield Entry("ngram_32k", 1, call, n, length * 4)


def seconds(one: Entry, turns: int) -> list[float]:
    """Seconds of one call, per turn: a graph of a call on every copy, replayed."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for i in range(one.num_copies):
            one.call(i)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(one.num_copies):
            one.call(i)
    times = []
    for turn in range(turns + 2):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        stop.record()
        torch.cuda.synchronize()
        if turn >= 2:
            times.append(start.elapsed_time(stop) * 1e-3 / one.num_copies)
    return times


def copy_bandwidth(turns: int) -> float:
    """Bytes a second that a copy of 1 GiB reads and writes, best of the turns."""
    source = torch.randint(0, 255, (1 << 30,), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    until = time.perf_counter() + WARM_UP_SECONDS  # clocks rise first
    while time.perf_counter() < until:
        target.copy_(source)
        torch.cuda.synchronize()
    times = []
    for _ in range(turns):  # not from a graph: there a copy may run on a slower copy engine
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(4):
            target.copy_(source)
        stop.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(stop) * 1e-3 / 4)
    return 2 * source.nbytes / min(times)


def main() -> None:
    """Parse the command line and measure."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--inner", type=int, default=11008)
    parser.add_argument("--vocabulary", type=int, default=128256)
    parser.add_argument("--rows", default="1,8")
    parser.add_argument("--only", default="")
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--json", default="")
    args = parser.parse_args()
    rows = tuple(int(n) for n in args.rows.split(","))
    sizes = Sizes(args.hidden, args.inner, args.vocabulary, rows)
    only = [name for name in args.only.split(",") if name]
    device = torch.cuda.get_device_properties(0)
    copied = copy_bandwidth(args.turns)
    print(f"{device.name}: copy {copied / 1e9:.0f} GB/s", file=sys.stderr)
    results = []
    for make in ENTRIES:
        for one in make(sizes):
            if only and one.name not in only:
                continue
            times = seconds(one, args.turns)
            middle = statistics.median(times)
            speed = one.num_bytes / middle
            results.append(
                {
                    "op": one.name,
                    "rows": one.rows,
                    "bytes": one.num_bytes,
                    "us": middle * 1e6,
                    "us_best": min(times) * 1e6,
                    "gb_s": speed / 1e9,
                    "share_of_copy": speed / copied,
                }
            )
            print(
                f"{one.name:<20} M={one.rows:<5} {middle * 1e6:9.2f} us {speed / 1e9:8.1f} GB/s "
                f"{speed / copied:6.3f} of copy",
                file=sys.stderr,
            )
    document = {
        "device": device.name,
        "num_sms": device.multi_processor_count,
        "torch": torch.__version__,
        "copy_gb_s": copied / 1e9,
        "hidden": sizes.hidden,
        "inner": sizes.inner,
        "vocabulary": sizes.vocabulary,
        "turns": args.turns,
        "results": results,
    }
    if args.json:
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump(document, file, indent=1)
    print(json.dumps(document))


if __name__ == "__main__":
    main()
