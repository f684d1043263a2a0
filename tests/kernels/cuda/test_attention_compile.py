"""Attention and the KV write compiled for Orin without a GPU: registers, spills, the mix."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

SHARED_PER_WARP = 18 * 1024  # nine warps and more share an SM

SCRIPT = """
import json, sys
from edge_runtime.kernels.cuda import attention_binary as binary
from edge_runtime.kernels.cuda.launch import triton_columns
from edge_runtime.kernels.cuda.attention_tiles import tiles_for
from edge_runtime.kernels.cuda.compile import inspect
what, arguments = json.loads(sys.argv[1])
if what == "rope_kv":
    compiled = binary.compile_rope_kv(arguments[0], qk_norm=arguments[1], rotate_kv=arguments[2])
else:
    rows, group, D, columns, tiles_of = arguments
    tiles = tiles_for(
        rows, group, D, kv_heads=32 // group, arch=tiles_of,
        fewest_columns=max(columns, triton_columns()),
    )
    build = {"keys": binary.compile_attention, "values": binary.compile_values}[what]
    compiled = build(tiles, D, group)
report = inspect(compiled)
print(json.dumps({
    "arch": compiled.arch, "warps": compiled.num_warps, "registers": report.registers, "stack": report.stack_bytes,
    "spills": report.spills, "shared": report.shared_bytes, "wide": report.wide_loads,
    "bytes": sum(n for o, n in report.mix.items() if o.startswith("LDG") and ("U8" in o or "S8" in o)),
    "IMMA": report.count("IMMA"), "IDP": report.count("IDP"), "FFMA": report.count("FFMA"),
    "total": sum(report.mix.values()),
}))
"""  # noqa: E501


def compiled(what: str, *arguments: Any) -> dict[str, int]:
    """In a process of its own: in this one the interpreter may have taken the kernels' place."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, json.dumps([what, arguments])],
        capture_output=True, text=True, check=False, env=environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    report: dict[str, int] = json.loads(done.stdout)
    assert report["arch"] == 87
    assert report["stack"] == report["spills"] == 0, report
    assert report["shared"] <= SHARED_PER_WARP * report["warps"], report
    assert report["bytes"] == 0 or what == "rope_kv", report
    return report


def kernels(
    rows: int, group: int, D: int, columns: int = 8, tiles_of: int = 87
) -> list[dict[str, int]]:
    """Both kernels of a call; those of a larger GPU's tiles too are compiled for Orin."""
    return [compiled(what, rows, group, D, columns, tiles_of) for what in ("keys", "values")]


@pytest.mark.slow
@pytest.mark.parametrize(("group", "D"), [(1, 128), (1, 64), (1, 96)])
def test_one_row(group: int, D: int) -> None:
    """dp4a: one query vector per KV head."""
    keys, values = kernels(1, group, D)
    assert keys["IDP"] > 0
    assert keys["registers"] <= 128  # sixteen programs on an SM
    assert keys["wide"] >= 6
    assert values["IMMA"] > 0
    assert values["wide"] >= 6


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rows", "group", "D"),
    [(5, 1, 128), (8, 1, 64), (1, 4, 128), (8, 4, 128), (5, 3, 96), (1, 7, 128)],
)
def test_verification(rows: int, group: int, D: int) -> None:
    for report in kernels(rows, group, D):
        assert report["IMMA"] > 0
        assert report["wide"] > 0


@pytest.mark.slow
@pytest.mark.parametrize(("rows", "group", "D"), [(1, 1, 128), (8, 1, 128), (4, 4, 64), (5, 3, 96)])
def test_sixteen_columns(rows: int, group: int, D: int) -> None:
    """What Triton 3.4 takes at least; with whatever Triton is installed."""
    for report in kernels(rows, group, D, 16):
        assert report["wide"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("group", [1, 4])
def test_larger_gpus(group: int) -> None:
    """Their tiles, one row: the code of an Orin does not spill with them either."""
    for report in kernels(1, group, 128, tiles_of=90):
        assert report["wide"] > 0


@pytest.mark.slow
@pytest.mark.parametrize(("group", "D"), [(1, 128), (4, 128), (3, 64)])
def test_prefill(group: int, D: int) -> None:
    report = compiled("keys", 256, group, D, 8, 87)
    assert report["IMMA"] > 0
    assert report["wide"] > 0


@pytest.mark.slow
def test_rope() -> None:
    for norm, rotate in ((False, False), (True, True)):
        assert compiled("rope_kv", 128, norm, rotate)["registers"] <= 128
