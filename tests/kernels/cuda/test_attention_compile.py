"""Attention and the KV write compiled for Orin without a GPU: registers, spills, the mix."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

SHARED_PER_PROGRAM = 48 * 1024  # three programs and more share an SM

SCRIPT = """
import json, sys
from edge_runtime.kernels.cuda import attention_binary as binary
from edge_runtime.kernels.cuda.attention import Tiles, tiles_for
from edge_runtime.kernels.cuda.compile import inspect
what, arguments = json.loads(sys.argv[1])
if what == "attention":
    rows, group, D = arguments
    compiled = binary.compile_attention(tiles_for(rows, group, D), D, group)
elif what == "combine":
    compiled = binary.compile_combine(tiles_for(1, 1, 128), *arguments)
else:
    compiled = binary.compile_rope_kv(arguments[0], qk_norm=arguments[1], rotate_kv=arguments[2])
report = inspect(compiled)
print(json.dumps({
    "arch": compiled.arch, "registers": report.registers, "stack": report.stack_bytes,
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
    assert report["shared"] <= SHARED_PER_PROGRAM, report
    assert report["bytes"] == 0 or what == "rope_kv", report
    return report


@pytest.mark.slow
@pytest.mark.parametrize(("group", "D"), [(1, 128), (1, 64), (1, 96)])
def test_one_row(group: int, D: int) -> None:
    """dp4a: one query vector per KV head."""
    report = compiled("attention", 1, group, D)
    assert report["IDP"] > 0
    assert report["wide"] >= 12
    assert report["registers"] <= 168  # twelve programs on an SM


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rows", "group", "D"),
    [(5, 1, 128), (8, 1, 64), (1, 4, 128), (4, 4, 128), (8, 4, 128), (5, 3, 96), (1, 7, 128)],
)
def test_verification(rows: int, group: int, D: int) -> None:
    report = compiled("attention", rows, group, D)
    assert report["IMMA"] > 0
    assert report["wide"] > 0


@pytest.mark.slow
@pytest.mark.parametrize(("group", "D"), [(1, 128), (4, 128), (3, 64)])
def test_prefill(group: int, D: int) -> None:
    report = compiled("attention", 256, group, D)
    assert report["IMMA"] > 0
    assert report["wide"] > 0


@pytest.mark.slow
def test_combine_and_rope() -> None:
    assert compiled("combine", 128)["registers"] <= 128
    for norm, rotate in ((False, False), (True, True)):
        assert compiled("rope_kv", 128, norm, rotate)["registers"] <= 128
