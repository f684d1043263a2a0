"""The small kernels compiled for sm_87 without a GPU: no spills, shared memory, wide loads."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SHARED_LIMIT = 164 * 1024
# reads that matter are of a row of fp32 or int8 numbers
WIDE = {
    "quantise_kernel", "norm_quantise_kernel", "silu_mul_kernel", "quantise_chunks_kernel",
    "embed_kernel", "argmax_blocks_kernel", "peaks_kernel", "screen_kernel", "scores_kernel",
}  # fmt: skip
BYTES = {"decide_kernel"}  # a group of 128 tokens on 128 threads: one flag each


@pytest.mark.timeout(300)
def test_small_kernels_on_orin(repository: Path) -> None:
    if importlib.util.find_spec("triton") is None:  # it is the compiler; the tests' extra has it
        pytest.skip("Triton is not installed")
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, str(repository / "tests" / "orin_small_ops.py")],
        env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    reports = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(reports) > 20
    for report in reports:
        name = report["kernel"]
        assert report["stack"] == report["spills"] == 0, report
        assert report["registers"] <= 128, report
        assert report["shared"] <= SHARED_LIMIT, report
        assert report["byte_loads"] == 0 or name in BYTES, report
        assert report["wide_loads"] > 0 or name not in WIDE, report
