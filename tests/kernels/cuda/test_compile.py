"""The linear's machine code for Orin (sm_87), made without a GPU: registers, spills, loads, mix.

The compiler wants functions that are not the interpreter's: it runs in a process of its own.
"""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from edge_runtime.errors import BackendUnavailable
from edge_runtime.kernels.cuda import driver
from edge_runtime.kernels.cuda.compile import SHARED_PER_SM, Compiled, ptx_parameters

pytest.importorskip("triton")

COMPILE = """
import json, pathlib, sys
from edge_runtime.kernels.cuda.compile import inspect
from edge_runtime.kernels.cuda.linear_binary import compile_linear
from edge_runtime.kernels.cuda.launch import triton_columns
from edge_runtime.kernels.cuda.tiles import HOPPER, ORIN, ROW_TILES

folder = pathlib.Path(sys.argv[1])
lines = ORIN + tuple(line for line in HOPPER if line.tile.form == "dot4")
rows = []
for view, tile, least in dict.fromkeys((ln.view, ln.tile, ln.min_group) for ln in lines):
    if tile.form == "mma" and tile.columns < triton_columns():
        continue
    for G in (32, 64, 128):
        if G < least or G != 64 and tile.form == "dot4":
            continue
        built = compile_linear(tile, view, G, groups=64, row_tile=ROW_TILES[87])
        report = inspect(built)
        rows.append({
            "what": f"{view} G={G} {tile}", "view": view, "form": tile.form, "strips": tile.strips,
            "registers": report.registers, "stack": report.stack_bytes, "spills": report.spills,
            "shared": report.shared_bytes, "wide": report.wide_loads, "bytes": report.byte_loads,
            "imma": report.count("IMMA"), "dp4a": report.count("IDP.4A"),
            "conversions": report.count("PRMT"), "fused": report.count("FFMA"),
        })
built.save(folder, "linear")
print(json.dumps(rows))
"""


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[dict[str, Any]], Path]:
    folder = tmp_path_factory.mktemp("sm87")
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    root = str(Path(driver.__file__).parents[3])
    environment["PYTHONPATH"] = os.pathsep.join([*sys.path, root])
    done = subprocess.run(
        [sys.executable, "-c", COMPILE, str(folder)], env=environment, cwd=folder,
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1]), folder


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_machine_code(built: tuple[list[dict[str, Any]], Path]) -> None:
    for row in built[0]:
        what = row["what"]
        assert row["spills"] == row["stack"] == 0, what
        assert row["registers"] <= 255, what
        assert row["shared"] <= SHARED_PER_SM, what
        assert row["bytes"] == 0, what
        assert row["wide"] >= (2 if row["view"] == "w8" else 1), what
        assert row["fused"] == 0, f"{what}: a product and a sum were fused"
        most = 40
        if row["form"] == "prompt" and row["view"] == "w8":
            most += 120 * row["strips"]  # the digits of multipliers, once a tile
        if "G=32" not in what:  # there half of x is zeroed, byte by byte
            assert row["conversions"] <= most, f"{what}: unpacked byte by byte"
        if row["form"] == "dot4":
            assert row["dp4a"] % 8 == 0 < row["dp4a"], what
        else:
            assert row["imma"] > 0, what


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_saved_files(built: tuple[list[dict[str, Any]], Path]) -> None:
    folder = built[1]
    read = Compiled.read(folder, "linear")
    assert read.arch == 87
    assert ".target sm_87" in read.ptx
    assert read.cubin[:4] == b"\x7fELF"
    assert read.parameters == ptx_parameters(read.ptx)
    assert read.parameters[:10] == ("u64",) * 10
    assert (folder / "linear.json").exists()


def test_parameters_of_an_entry() -> None:
    ptx = """.visible .entry k(
        .param .u64 .ptr .global .align 1 k_param_0,
        .param .u32 k_param_1,
        .param .f32 k_param_2
    )"""
    assert ptx_parameters(ptx) == ("u64", "u32", "f32")


def test_no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", absent)
    driver._library.cache_clear()
    compiled = Compiled(
        name="k", arch=87, num_warps=1, shared_bytes=0, parameters=(), ptx="", cubin=b""
    )
    with pytest.raises(BackendUnavailable, match=r"libcuda\.so\.1"):
        driver.load(compiled)
    driver._library.cache_clear()
