"""Attention over the nested cache against attention in fp16, each policy and number of rows.

    python -m edge_runtime.kernels.cuda.timing.attention [--tokens 32768] [--heads 32]
        [--kv-heads 32,8] [--only decode,rows,prefill,slice] [--turns 9] [--json FILE]

decode: one row, every policy. rows: verification (both planes). Both against the fastest of some
tilings of a flash-decoding in fp16 (`half_attention_kernels.py`) and torch's own, all timed in
turns, caches rotated through more than the L2. prefill: a chunk at the end of the tokens, against
torch's. slice: code for sm_87 on as many multiprocessors as an Orin has. What GPU memory gives when
it is only read comes first. Before a call is timed its first and last heads are compared with the
reference bit by bit. The last line of stdout is one JSON document.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from edge_runtime.kernels.cuda import attention as ours
from edge_runtime.kernels.cuda.attention_tiles import Tiles
from edge_runtime.kernels.cuda.cache import LayerCache, NestedCache
from edge_runtime.kernels.cuda.half_attention import ATTEND, COMBINE
from edge_runtime.kernels.cuda.launch import Kernel, power_of_two
from edge_runtime.kernels.cuda.sizes import SMALL_ROWS
from edge_runtime.kernels.cuda.timing import slice as sm_slice
from edge_runtime.kernels.cuda.timing.entry import Entry, Sizes, num_copies
from edge_runtime.kernels.cuda.timing.timer import Timer, spread
from edge_runtime.kernels.layout import full_from, padded
from edge_runtime.kernels.ops import Geometry
from edge_runtime.kernels.reference.ops import attend

READ = Kernel("timing.read_kernels", "read")
POLICIES: dict[str, int | None] = {"kv8": None, "kv4": 0, "recent:1024": 1024}
VERIFIED_ROWS = (1, 5, 8, 16)
TILES16 = tuple(itertools.product((64, 128), (4, 8), (2, 3), (512, 1024)))
CHUNK = 512  # rows of a prompt in a pass
READ_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class Shape:
    """Heads, KV heads, dims of a head, tokens in the cache."""

    heads: int
    kv_heads: int
    head_dim: int
    tokens: int

    def __str__(self) -> str:
        return f"{self.heads}/{self.kv_heads}x{self.head_dim} {self.tokens}"

    def num_bytes(self, recent: int | None) -> int:
        """Bytes of planes and scales that one row at the end reads."""
        full = self.tokens - min(self.tokens, full_from(self.tokens - 1, recent))
        return self.kv_heads * (self.head_dim * (self.tokens + full) + 4 * self.tokens)


def random_cache(shape: Shape, copies: int) -> NestedCache:
    """A layer for each copy: random codes, scales as keys and values of size 1 have them."""
    geometry = Geometry(
        num_layers=copies, hidden_size=8, num_heads=shape.heads, num_kv_heads=shape.kv_heads,
        head_dim=shape.head_dim, num_tokens=1,
    )  # fmt: skip
    cache = NestedCache(geometry, shape.tokens)
    for base, refine in (
        (cache.key_base, cache.key_refine),
        (cache.value_base, cache.value_refine),
    ):
        for layer in range(copies):
            size = base[layer].shape
            low, high = (torch.randint(-7, 8, size, device="cuda") & 15 for _ in range(2))
            base[layer] = low | high << 4
            refine[layer] = torch.randint(0, 256, size, device="cuda")
    cache.scale.uniform_(0.2, 0.6)
    return cache


def expected(
    q: Tensor, positions: Tensor, recent: int | None, layer: LayerCache, kv_head: int
) -> Tensor:
    """The reference's answer for the query heads of one KV head, fp32 [M, group, D]."""
    T = padded(int(positions.max()) + 1, 64)
    group = q.shape[1] // layer.key_scale.shape[0]

    def codes(base: Tensor, refine: Tensor) -> tuple[Tensor, Tensor]:
        base, refine = base.cpu().int(), refine.cpu().int()
        nibbles = torch.cat((base & 15, base >> 4), 1)
        high = 16 * torch.where(nibbles > 7, nibbles - 16, nibbles)
        low = torch.cat((refine & 15, refine >> 4), 1) - 8
        return high[:T, None].float(), low[:T, None].float()

    k_high, k_low = codes(layer.key_base[kv_head], layer.key_refine[kv_head])
    values = (p[kv_head].transpose(1, 2).flatten(0, 1) for p in _value_planes(layer))
    v_high, v_low = codes(*values)
    scales = (
        s[kv_head, :T, None].cpu().float() / 16.0 for s in (layer.key_scale, layer.value_scale)
    )
    k_scale, v_scale = scales
    rows = []
    for i, position in enumerate(positions.tolist()):
        full = (torch.arange(T) >= full_from(position, recent)).float()[:, None, None]
        one = q[i : i + 1, kv_head * group : (kv_head + 1) * group].cpu()
        keys, values_ = (k_high + k_low * full, k_scale), (v_high + v_low * full, v_scale)
        scale = ours.softmax_scale(q.shape[2])
        rows.append(attend(one, torch.tensor([position]), keys, values_, scale))
    return torch.cat(rows)


def _value_planes(layer: LayerCache) -> tuple[Tensor, Tensor]:
    return layer.value_base, layer.value_refine


def rows_at_end(shape: Shape, M: int, recent: int | None) -> tuple[Tensor, Tensor, Tensor]:
    """Random q fp32 [M, heads, D], positions and full_from of the last M tokens."""
    last = range(shape.tokens - M, shape.tokens)
    q = torch.randn(M, shape.heads, shape.head_dim, device="cuda")
    return (
        q,
        torch.tensor(list(last), dtype=torch.int32, device="cuda"),
        torch.tensor([full_from(p, recent) for p in last], dtype=torch.int32, device="cuda"),
    )


def nested(
    shape: Shape,
    cache: NestedCache,
    M: int,
    policy: str,
    timer: Timer,
    tiles: Tiles | None = None,
) -> Entry:
    """Attention of the last M rows, its bits checked on the first copy."""
    recent, copies = POLICIES[policy], cache.scale.shape[0]
    x = rows_at_end(shape, M, recent)
    layers = [cache.layer(i) for i in range(copies)]
    out = torch.full_like(x[0], float("nan"))
    space = None
    if M <= SMALL_ROWS:
        space = ours.Workspace(M, shape.heads, shape.head_dim, shape.tokens, "cuda", fused_rows=M)
        space.stats.fill_(float("nan"))
        space.values.fill_(float("nan"))

    def call(i: int) -> None:
        ours.attention(*x, layers[i], out, space, tiles=tiles)

    timer.run(lambda: call(0))
    group = shape.heads // shape.kv_heads
    for kv_head in {0, shape.kv_heads - 1}:
        want = expected(x[0], x[1], recent, layers[0], kv_head)
        got = out[:, kv_head * group : (kv_head + 1) * group].cpu()
        assert torch.equal(got, want), f"{shape} {policy} M={M}: bits differ"
    return Entry("attention", M, call, copies, shape.num_bytes(recent), str(shape), policy)


class Half:
    """Keys and values in fp16, and what is timed with them."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self.num_bytes = 4 * shape.kv_heads * shape.tokens * shape.head_dim
        self.copies = num_copies(self.num_bytes)
        size = (self.copies, shape.kv_heads, shape.tokens, shape.head_dim)
        self.k, self.v = (torch.empty(size, device="cuda", dtype=torch.float16) for _ in range(2))
        for tensor in (self.k, self.v):
            for one in tensor:
                one.normal_()

    def entries(
        self,
        M: int,
        timer: Timer,
        *,
        causal: bool = False,
        tilings: Sequence[tuple[int, int, int, int]] = TILES16,
    ) -> Iterator[Entry]:
        """Every tiling of the flash-decoding that fits, and torch's own attention."""
        s = self.shape
        q = torch.randn(M, s.heads, s.head_dim, device="cuda", dtype=torch.float16)
        want = self._torch(q, causal)(0)
        name = partial(Entry, "attention", M, num_copies=self.copies, num_bytes=self.num_bytes,
                       shape=str(s), peer=True)  # fmt: skip
        for BT, warps, stages, split in () if causal else tilings:
            if s.tokens % split:
                continue
            y = torch.full_like(q, float("nan"))
            call = self._flash(q, y, BT, warps, stages, split)
            timer.run(partial(call, 0))
            error = (y.float() - want.float()).norm() / want.float().norm()
            assert error < 2e-3, f"fp16 {BT}x{warps}x{stages}x{split}: {error}"
            yield name(call=call, kind=f"fp16 {BT}x{warps}x{stages}x{split}")
        yield name(call=self._torch(q, causal), kind="torch")

    def _torch(self, q: Tensor, causal: bool) -> Callable[[int], Tensor]:
        queries = q.transpose(0, 1)[None]  # [1, heads, M, D]
        mask: dict[str, Any] = {"enable_gqa": self.shape.kv_heads < self.shape.heads}
        if causal:
            from torch.nn.attention.bias import causal_lower_right

            mask["attn_mask"] = causal_lower_right(q.shape[0], self.shape.tokens)

        def call(i: int) -> Tensor:
            k, v = self.k[i][None], self.v[i][None]
            y = torch.nn.functional.scaled_dot_product_attention(queries, k, v, **mask)
            return y[0].transpose(0, 1)

        return call

    def _flash(
        self, q: Tensor, y: Tensor, BT: int, warps: int, stages: int, split: int
    ) -> Callable[[int], object]:
        s, M = self.shape, q.shape[0]
        group, splits = s.heads // s.kv_heads, s.tokens // split
        part = torch.empty(M * s.heads, splits, s.head_dim, device="cuda")
        stat = torch.empty(M * s.heads, splits, 2, device="cuda")
        BQ = max(16, power_of_two(M * group))
        positions = torch.full((M,), s.tokens - 1, dtype=torch.int32, device="cuda")
        same = {"D": s.head_dim, "SPLIT": split, "MASKED": False}
        own = {"GROUP": group, "DP": s.head_dim, "BQ": BQ, "BT": BT, "STAGES": stages}

        def call(i: int) -> None:
            ATTEND[splits, s.kv_heads](
                q, self.k[i], self.v[i], positions, part, stat, M * group, s.heads, s.tokens,
                math.log2(math.e) / math.sqrt(s.head_dim), **same, **own, num_warps=warps,
            )  # fmt: skip
            COMBINE[M * s.heads, s.head_dim // 32](
                part, stat, positions, y, splits, s.heads, **same,
                SPLITS=power_of_two(splits), num_warps=4,
            )  # fmt: skip

        return call


def read_bandwidth(timer: Timer, turns: int) -> list[float]:
    """Bytes a second of a kernel that reads 1 GiB and writes next to nothing."""
    x = torch.randint(0, 2**31 - 1, (READ_BYTES // 4,), dtype=torch.int32, device="cuda")
    best: list[float] = []
    for steps, block, warps in ((8, 1024, 4), (4, 2048, 8), (16, 512, 4)):
        y = torch.empty(x.numel() // (steps * block), dtype=torch.int32, device="cuda")

        def call(y: Tensor = y, steps: int = steps, block: int = block, w: int = warps) -> object:
            grid = (y.numel(),)
            return READ[grid](x, y, STEPS=steps, BLOCK=block, num_warps=w)

        sample = timer.measure([[call] * 4], turns)[0]
        speeds = [READ_BYTES / t for t in sample.seconds]
        best = max(best, speeds, key=lambda s: statistics.median(s) if s else 0.0)
    return best


def entries(s: Sizes) -> Iterator[Entry]:
    """For `bench kernels`: every number of rows with both planes, one row with other policies."""
    shape = Shape(s.heads, s.kv_heads, s.head_dim, padded(s.tokens, 64))
    cache = random_cache(shape, num_copies(shape.num_bytes(0)))
    half, timer = Half(shape), Timer()
    for M in s.rows:
        for policy in POLICIES if M == 1 else ("kv8",):
            yield nested(shape, cache, M, policy, timer)
        yield from half.entries(M, timer, tilings=())


def measure(
    timer: Timer, some: Sequence[Entry], turns: int, section: str, *, clocks: bool = False
) -> list[dict[str, Any]]:
    """Time entries in turns; ratios to the fastest flash-decoding, and to torch's attention."""
    calls = [[partial(e.call, i) for i in range(e.num_copies)] for e in some]
    samples = timer.measure(calls, turns, clocks=clocks)
    half = [x.median for e, x in zip(some, samples, strict=True) if e.kind.startswith("fp16")]
    torchs = [x.median for e, x in zip(some, samples, strict=True) if e.kind == "torch"]
    rows = []
    for e, x in zip(some, samples, strict=True):
        if e.kind.startswith("fp16") and x.median > min(half):
            continue
        row: dict[str, Any] = {
            "section": section, "shape": e.shape, "kind": e.kind, "rows": e.rows,
            "bytes": e.num_bytes, "seconds": spread(x.seconds),
            "gb_s": e.num_bytes / x.median / 1e9,
        }  # fmt: skip
        if not e.peer and half:
            row["x_fp16"] = min(half) / x.median
        if not e.peer and torchs:
            row["x_torch"] = min(torchs) / x.median
        if clocks:
            row["hz"] = spread(x.hz)
            row["bytes_per_clock"] = e.num_bytes / statistics.median(x.clocks) / timer.num_sms
        rows.append(row)
        rate = f"{row['bytes_per_clock']:6.1f} B/clk/SM" if clocks else f"{row['gb_s']:7.0f} GB/s"
        ratios = "".join(f"  {row[n]:.2f} {n}" for n in ("x_fp16", "x_torch") if n in row)
        print(f"{section:<8}{e.shape:<16} M={e.rows:<3} {e.kind:<20}{x.median * 1e6:9.1f} us "
              f"({min(x.seconds) * 1e6:.1f} to {max(x.seconds) * 1e6:.1f}) {rate}{ratios}",
              file=sys.stderr, flush=True)  # fmt: skip
    return rows


def measure_whole(
    timer: Timer, shape: Shape, only: Sequence[str], turns: int
) -> list[dict[str, Any]]:
    """Native code on the whole GPU."""
    found: list[dict[str, Any]] = []
    cache = random_cache(shape, num_copies(shape.num_bytes(0)))
    half = Half(shape)
    if "decode" in only:
        some = [nested(shape, cache, 1, p, timer) for p in POLICIES]
        found += measure(timer, [*some, *half.entries(1, timer)], turns, "decode")
    for M in VERIFIED_ROWS if "rows" in only else ():
        some = [nested(shape, cache, M, "kv8", timer), *half.entries(M, timer)]
        found += measure(timer, some, turns, "rows")
    if "prefill" in only:
        some = [nested(shape, cache, CHUNK, "kv8", timer)]
        found += measure(timer, [*some, *half.entries(CHUNK, timer, causal=True)], turns, "prefill")
    return found


def measure_slice(shape: Shape, turns: int) -> list[dict[str, Any]]:
    """Code for sm_87 on a slice of the GPU."""
    with sm_slice.open_slice() as timer:
        cache, some = random_cache(shape, 2), []
        for M, policy in [(1, p) for p in POLICIES] + [(M, "kv8") for M in VERIFIED_ROWS[1:]]:
            some.append(nested(shape, cache, M, policy, timer))
        return measure(timer, some, turns, "slice", clocks=True)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tokens", default="32768")
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", default="32,8")
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--only", default="decode,rows,prefill,slice")
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    only = args.only.split(",")
    torch.zeros(1, device="cuda")  # makes the context that the driver's calls need
    timer = Timer()
    speeds = spread([b / 1e9 for b in read_bandwidth(timer, args.turns)])
    print(f"{torch.cuda.get_device_name()}: read {speeds['median']:.0f} GB/s", file=sys.stderr)
    rows = []
    for kv_heads, tokens in itertools.product(args.kv_heads.split(","), args.tokens.split(",")):
        shape = Shape(args.heads, int(kv_heads), args.head_dim, int(tokens))
        if set(only) - {"slice"}:
            rows += measure_whole(timer, shape, only, args.turns)
        if "slice" in only:
            rows += measure_slice(shape, args.turns)
    document = json.dumps({
        "gpu": torch.cuda.get_device_name(), "torch": torch.__version__,
        "triton": version("triton"), "read_gb_s": speeds, "rows": rows,
    })  # fmt: skip
    if args.json:
        args.json.write_text(document + "\n", encoding="utf-8")
    print(document)


if __name__ == "__main__":
    main()
