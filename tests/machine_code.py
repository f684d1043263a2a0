"""What launches compile to for an Orin (sm_87), without a GPU: they are noted down, not run.

The compiler works in processes of its own: here the interpreter may have taken the kernels' place.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from functools import partial

import pytest
import torch

from edge_runtime.kernels.cuda import launch
from edge_runtime.kernels.cuda.compile import Compiled, Report, inspect
from edge_runtime.kernels.cuda.launch import Signature
from edge_runtime.kernels.cuda.record import META, Recorder, compile_all

JOBS = min(4, os.cpu_count() or 1)
empty = partial(torch.empty, device=META)


def check_spills(signature: Signature, report: Report) -> None:
    """Nothing is spilled; Tritons before 3.9 keep an address of the prompt form in local memory."""
    if "linear_prompt" in signature.kernel and launch.triton_version() < (3, 9):
        assert report.spills <= 3, signature
    else:
        assert report.stack_bytes == report.spills == 0, signature


def signatures(launches: Callable[[], object], columns: int = 8) -> list[Signature]:
    """What is launched. columns: of an int8 product, at least."""
    recorder = Recorder()
    recorder.fewest_columns = max(recorder.fewest_columns, columns)
    with launch.using(recorder):
        launches()
    return list(recorder.signatures)


def compiled(launches: Callable[[], object], columns: int = 8) -> dict[Signature, Compiled]:
    """The code of what is launched."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("Triton is not installed")
    return compile_all(signatures(launches, columns), jobs=JOBS)


def reports(launches: Callable[[], object], columns: int = 8) -> dict[Signature, Report]:
    """The code of what is launched, taken apart; none of it spills."""
    found = {s: inspect(code) for s, code in compiled(launches, columns).items()}
    for signature, report in found.items():
        check_spills(signature, report)
    return found
