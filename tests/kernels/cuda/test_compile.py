"""The linear's machine code for Orin (sm_87), made without a GPU: registers, spills, loads, mix."""

from __future__ import annotations

import ctypes

import pytest
import torch

from edge_runtime.errors import BackendUnavailable
from edge_runtime.kernels.cuda import driver, linear
from edge_runtime.kernels.cuda.compile import SHARED_PER_SM, Compiled, ptx_parameters
from edge_runtime.kernels.cuda.tiles import HOPPER, ORIN, ROW_TILES, Tile

pytest.importorskip("triton")

from machine_code import empty, reports

from edge_runtime.kernels.cuda.launch import triton_columns
from edge_runtime.kernels.cuda.record import blank_linear

N, GROUPS = 512, 64
LINES = ORIN + tuple(line for line in HOPPER if line.tile.form == "dot4")


def launch_tile(tile: Tile, view: str, group: int, rows: int) -> None:
    """One linear with a tile, of as many rows as it is for."""
    M = rows if tile.form == "dot4" else 17 if tile.form == "prompt" else tile.columns - 1
    K = GROUPS * group
    w = blank_linear(N, K, group, row_tile=1 if tile.form == "dot4" else ROW_TILES[87], by_row=True)
    sums = empty(M, GROUPS, dtype=torch.int32)
    linear.linear(
        empty(M, K, dtype=torch.int8), empty(M), sums, w, view,  # type: ignore[arg-type]
        out=empty(M, N), tile=tile,
    )  # fmt: skip


def launch_all() -> None:
    lines = [(n.view, n.tile, n.min_group, n.max_rows) for n in LINES]
    for view, tile, least, rows in dict.fromkeys(lines):
        if tile.form == "mma" and tile.columns < triton_columns():
            continue
        for group in (32, 64, 128):
            if group >= least and (group == 64 or tile.form != "dot4"):
                launch_tile(tile, view, group, rows)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_machine_code() -> None:
    found = {s: r for s, r in reports(launch_all).items() if "sum_digits" not in s.kernel}
    assert len(found) > 20
    for signature, report in found.items():
        c = dict(signature.constants)
        assert report.registers <= 255, signature
        assert report.shared_bytes <= SHARED_PER_SM, signature
        assert report.byte_loads == 0, signature
        assert report.wide_loads >= (2 if c["W8"] else 1), signature
        assert report.count("FFMA") == 0, f"{signature}: a product and a sum were fused"
        most = 40
        if "prompt" in signature.kernel and c["W8"]:
            most += 120 * (2 if c["TWO"] else 1)  # the digits of multipliers, once a tile
        if c["G"] != 32:  # there half of x is zeroed, byte by byte
            assert report.count("PRMT") <= most, f"{signature}: unpacked byte by byte"
        if "dot4" in signature.kernel:
            assert report.count("IDP.4A") % 8 == 0 < report.count("IDP.4A"), signature
        else:
            assert report.count("IMMA") > 0, signature


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
