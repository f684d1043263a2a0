"""Plant outliers in the keys of a converted model, for measuring how KV4 bears them.

    python tools/plant_outliers.py DIR -o OUT [--factor 16] [--pairs 2]

In every layer and KV head the keys of a few RoPE pairs grow by --factor, a power of two, and the
queries that meet them shrink by it: scales of rows of `qkv`, so that no code changes and q · k is
what it was. What is left is what a quantiser of K makes of it (KVQuant, Hooper et al. 2024, arXiv
2401.18079, has the outlier channels of real models: 10 to 30 times their neighbours).
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from edge_runtime.errors import BitnestError, UsageError
from edge_runtime.format.manifest import Manifest
from edge_runtime.format.reader import Checkpoint
from edge_runtime.format.writer import CheckpointWriter

MOST = 1024  # times its neighbours


def row_factors(manifest: Manifest, factor: float, pairs: int, layer: int) -> npt.NDArray[Any]:
    """Return what every row of a layer's qkv is multiplied by, fp32 [N]. Pairs are (i, i + D/2)."""
    s = manifest.spec
    rng = np.random.default_rng(layer)
    by = np.ones((s.num_heads + 2 * s.num_kv_heads, s.head_dim), np.float32)
    for kv_head in range(s.num_kv_heads):
        chosen = rng.choice(s.head_dim // 2, pairs, replace=False)
        dims = np.concatenate([chosen, chosen + s.head_dim // 2])
        by[s.num_heads + kv_head, dims] = factor
        by[kv_head * s.group : (kv_head + 1) * s.group, dims] = 1 / factor
    return by.ravel()


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("-o", "--out", type=Path, required=True)
    parser.add_argument("--factor", type=float, default=16)
    parser.add_argument("--pairs", type=int, default=2)
    args = parser.parse_args()
    try:
        plant(args)
    except BitnestError as error:
        sys.exit(f"error: {error}")


def plant(args: argparse.Namespace) -> None:
    """Write the model with outliers. Raises UsageError, CheckpointError."""
    if np.frexp(args.factor)[0] != 0.5 or not 1 <= args.factor <= MOST:
        raise UsageError(f"--factor: expected a power of two, 1 to {MOST}, got {args.factor:g}")
    checkpoint = Checkpoint(args.model)
    manifest = checkpoint.manifest
    if manifest.spec.qk_norm:
        raise UsageError("expected a model without norms of heads: they would take the factor back")
    if not 1 <= args.pairs <= (most := manifest.spec.head_dim // 2):
        raise UsageError(f"--pairs: expected 1 to {most}, got {args.pairs}")
    writer = CheckpointWriter(args.out, f"outliers {args.factor} {args.pairs} {args.model}")
    shards: dict[str, dict[str, npt.NDArray[Any]]] = {}
    for name, plane in manifest.planes.items():
        shards.setdefault(plane.file.removesuffix(".safetensors"), {})[name] = checkpoint.plane(
            name
        )
    for i in range(manifest.spec.num_layers):
        planes = next(p for p in shards.values() if f"layers.{i}.qkv.scale" in p)
        by = row_factors(manifest, args.factor, args.pairs, i)
        for part in ("scale", "bias"):
            if (name := f"layers.{i}.qkv.{part}") in planes:
                planes[name] = planes[name] * by
    for shard, planes in shards.items():
        writer.shard(shard, planes, None)
    new = msgspec.structs.replace(manifest, planes=writer.planes(list(shards)), agreement=None)
    writer.finish(new, checkpoint.tokenizer_json())


if __name__ == "__main__":
    main()
