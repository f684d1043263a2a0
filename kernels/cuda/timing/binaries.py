"""A folder of machine code for a model's sizes, for a board that has neither Triton nor a compiler.

    save(sizes, folder)                     on any machine with Triton, without a GPU
    load(Compiled.read(folder, stem))       on the board: `driver`, no torch, no Triton

index.json lists what each file is for: op, view, sizes, the largest number of rows, and what a
launch needs to know of its tile (`linear_binary.launch_linear`, `attention_binary.Launcher`).
Linears, RoPE with the KV write, and attention; the quantisers and the head are not here yet.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from edge_runtime.kernels.cuda.attention_binary import (
    compile_attention,
    compile_rope_kv,
    compile_values,
)
from edge_runtime.kernels.cuda.attention_tiles import tiles_for
from edge_runtime.kernels.cuda.compile import ORIN, Compiled
from edge_runtime.kernels.cuda.linear_binary import compile_linear
from edge_runtime.kernels.cuda.tiles import ROW_TILES, choose
from edge_runtime.kernels.cuda.timing.entry import Sizes
from edge_runtime.kernels.ops import View

INDEX = "index.json"
MAX_ROWS = (8, 16, 256)  # verified drafts, a full tile of tokens, a chunk of a prompt
ATTENTION_ROWS = (1, 8, 16, 256)
VIEWS: tuple[View, ...] = ("w4", "w8")
ADDED_TO = ("o", "down")  # linears whose output is added to the residual stream


def save(sizes: Sizes, folder: Path, arch: int = ORIN) -> list[dict[str, Any]]:
    """Compile for sm_`arch`, write the files and their index, and return it."""
    index: dict[str, dict[str, Any]] = {}
    for stem, facts, compiled in itertools.chain(
        _linears(sizes, arch), _rope(sizes, arch), _attention(sizes, arch)
    ):
        compiled.save(folder, stem)
        index[stem] = facts
    rows = [{"file": stem, **facts} for stem, facts in index.items()]
    (folder / INDEX).write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    return rows


def _linears(s: Sizes, arch: int) -> Iterator[tuple[str, dict[str, Any], Compiled]]:
    from edge_runtime.kernels.cuda.launch import triton_columns

    row_tile = ROW_TILES.get(arch, ROW_TILES[ORIN])
    for name, (N, K) in s.linears.items():
        for view in VIEWS:
            for most in MAX_ROWS:
                tile = choose(arch, view, most, N, s.group_size, triton_columns())
                groups = -(-K // s.group_size)
                flags = {"bias": name == "qkv" and s.qkv_bias, "residual": name in ADDED_TO}
                compiled = compile_linear(
                    tile, view, s.group_size, groups=groups, row_tile=row_tile,
                    even=N % tile.rows == 0, arch=arch, **flags,
                )  # fmt: skip
                facts = {
                    "op": "linear", "linear": name, "view": view, "max_rows": most, "outputs": N,
                    "inputs": K, "group_size": s.group_size, "row_tile": row_tile, **flags,
                    "form": tile.form, "tile_rows": tile.rows, "tile_columns": tile.columns,
                }  # fmt: skip
                yield f"{name}-{view}-{most}", facts, compiled


def _rope(s: Sizes, arch: int) -> Iterator[tuple[str, dict[str, Any], Compiled]]:
    """RoPE with the KV write, without and with R3, which takes a power of two."""
    D = s.head_dim
    for rotate in (False, True)[: 1 if D & (D - 1) else 2]:
        compiled = compile_rope_kv(D, qk_norm=s.qk_norm, rotate_kv=rotate, arch=arch)
        facts = {"op": "rope_kv", "head_dim": D, "qk_norm": s.qk_norm, "rotate_kv": rotate}
        yield "rope_kv-r3" if rotate else "rope_kv", facts, compiled


def _attention(s: Sizes, arch: int) -> Iterator[tuple[str, dict[str, Any], Compiled]]:
    """The walk over keys, and over values where that is a kernel of its own."""
    from edge_runtime.kernels.cuda.launch import triton_columns

    group, D = s.heads // s.kv_heads, s.head_dim
    for most in ATTENTION_ROWS:
        tiles = tiles_for(
            most, group, D, kv_heads=s.kv_heads, tokens=s.tokens, arch=arch,
            fewest_columns=triton_columns(),
        )  # fmt: skip
        facts = {"group": group, "head_dim": D, "max_rows": most, "tiles": asdict(tiles)}
        first = compile_attention(tiles, D, group, arch=arch)
        yield f"attention-{most}", {"op": "attention", "part": "weigh", **facts}, first
        if tiles.form != "rows":
            second = compile_values(tiles, D, group, arch=arch)
            yield f"attention-{most}-add", {"op": "attention", "part": "add", **facts}, second
