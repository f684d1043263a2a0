"""Attention and the KV write compiled for Orin without a GPU: registers, spills, the mix."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from machine_code import empty, reports

from edge_runtime.kernels.cuda.attention import Workspace, attention
from edge_runtime.kernels.cuda.attention_tiles import tiles_for
from edge_runtime.kernels.cuda.cache import NestedCache
from edge_runtime.kernels.cuda.compile import Report
from edge_runtime.kernels.cuda.kv import rope_kv
from edge_runtime.kernels.cuda.launch import triton_columns
from edge_runtime.kernels.cuda.record import META
from edge_runtime.kernels.ops import Geometry

SHARED_PER_WARP = 18 * 1024  # nine warps and more share an SM
TOKENS = 4096
KEYS = ("weigh_blocks", "attend_split", "attend_rows")


def cache(group: int, D: int) -> NestedCache:
    geometry = Geometry(
        num_layers=1, hidden_size=8, num_heads=32, num_kv_heads=32 // group, head_dim=D,
        num_tokens=1,
    )  # fmt: skip
    return NestedCache(geometry, TOKENS, META)


def kernels(
    rows: int, group: int, D: int, columns: int = 8, tiles_of: int = 87
) -> tuple[Report, list[Report]]:
    """The walk over keys, and what comes after it; of a larger GPU's tiles as code for an Orin."""
    heads = 32 // group * group
    tiles = tiles_for(
        rows, group, D, kv_heads=32 // group, arch=tiles_of,
        fewest_columns=max(columns, triton_columns()),
    )  # fmt: skip

    def launch() -> None:
        q, positions = empty(rows, heads, D), empty(rows, dtype=torch.int32)
        space = Workspace(rows, heads, D, TOKENS, META, fused_rows=rows)
        attention(
            q, positions, positions, cache(group, D).layer(0), empty(rows, heads, D), space,
            tiles=tiles,
        )  # fmt: skip

    found = reports(launch, columns)
    for signature, report in found.items():
        assert report.shared_bytes <= SHARED_PER_WARP * signature.num_warps, signature
        assert not any(
            n for o, n in report.mix.items() if o.startswith("LDG") and ("U8" in o or "S8" in o)
        ), signature
    first = [r for s, r in found.items() if s.kernel.endswith(KEYS)]
    assert len(first) == 1
    return first[0], [r for s, r in found.items() if not s.kernel.endswith(KEYS)]


@pytest.mark.slow
@pytest.mark.parametrize(("group", "D"), [(1, 128), (1, 64), (1, 96)])
def test_one_row(group: int, D: int) -> None:
    """dp4a: one query vector per KV head."""
    keys, (values,) = kernels(1, group, D)
    assert keys.count("IDP") > 0
    assert keys.registers <= 128  # sixteen programs on an SM
    assert keys.wide_loads >= 6
    assert values.count("IMMA") > 0
    assert values.wide_loads >= 6


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rows", "group", "D"),
    [(5, 1, 128), (8, 1, 64), (1, 4, 128), (8, 4, 128), (5, 3, 96), (1, 7, 128)],
)
def test_verification(rows: int, group: int, D: int) -> None:
    keys, (values,) = kernels(rows, group, D)
    for report in (keys, values):
        assert report.count("IMMA") > 0
        assert report.wide_loads > 0


@pytest.mark.slow
@pytest.mark.parametrize(("rows", "group", "D"), [(1, 1, 128), (8, 1, 128), (4, 4, 64), (5, 3, 96)])
def test_sixteen_columns(rows: int, group: int, D: int) -> None:
    """What Triton 3.4 takes at least; with whatever Triton is installed."""
    keys, (values,) = kernels(rows, group, D, 16)
    for report in (keys, values):
        assert report.wide_loads > 0


@pytest.mark.slow
@pytest.mark.parametrize("group", [1, 4])
def test_larger_gpus(group: int) -> None:
    """Their tiles, one row: the code of an Orin does not spill with them either."""
    keys, others = kernels(1, group, 128, tiles_of=90)
    for report in (keys, *others):
        assert report.wide_loads > 0


@pytest.mark.slow
@pytest.mark.parametrize(("group", "D"), [(1, 128), (4, 128), (3, 64)])
def test_prefill(group: int, D: int) -> None:
    report, others = kernels(256, group, D)
    assert not others
    assert report.count("IMMA") > 0
    assert report.wide_loads > 0


@pytest.mark.slow
@pytest.mark.parametrize("more", [False, True])
def test_rope(more: bool) -> None:
    """Without and with head norms and R3."""
    rows, D = 3, 128
    tables = empty(TOKENS, D // 2)

    def launch() -> None:
        rope_kv(
            empty(rows, 96 * D), empty(rows, dtype=torch.int32), tables, tables,
            cache(1, D).layer(0), empty(rows, 32, D), rotate_kv=more,
            head_norms=(empty(D), empty(D)) if more else None,
        )  # fmt: skip

    (report,) = reports(launch).values()
    assert report.registers <= 128
