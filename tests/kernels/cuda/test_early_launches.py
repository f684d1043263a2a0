"""Kernels that start while the launch before them ends: which, and what they touch first."""

from __future__ import annotations

import re

import pytest
from machine_code import JOBS

from edge_runtime.kernels.cuda import record
from edge_runtime.kernels.cuda.launch import Kernel, Signature
from edge_runtime.model import launches
from edge_runtime.profiles.load import shape

HOPPER = 90


def is_early(kernel: str) -> bool:
    module, _, name = kernel.rpartition(".")
    return "PDL" in Kernel(module, name).function.arg_names


def before_the_wait(ptx: str) -> list[str]:
    """Loads and stores of global memory that come before the wait for the launch before."""
    body = ptx[ptx.index(".entry") :]
    assert "griddepcontrol.wait" in body
    first = body[: body.index("griddepcontrol.wait")]
    return re.findall(r"\b(?:ld|st|red|atom)\.(?:volatile\.)?global[\w.:]*", first)


@pytest.fixture(scope="module")
def signatures() -> list[Signature]:
    # the launches are recorded without it, but only Triton makes the code that is looked at
    pytest.importorskip("triton", reason="Triton is not installed")
    subject = launches.of_shape(shape("llama-2-7b").spec, 128)[0]
    return record.engine_signatures(subject, HOPPER)


def test_launchers_say_which_are_early(signatures: list[Signature]) -> None:
    from edge_runtime.kernels.cuda import (
        activations,
        attention,
        cycle,
        embedding,
        head,
        kv,
        linear,
    )  # fmt: skip

    kernels = [
        value
        for module in (activations, attention, cycle, embedding, head, kv, linear)
        for value in vars(module).values()
        if isinstance(value, Kernel)
    ]
    assert len(kernels) > 15
    for kernel in kernels:
        assert kernel.pdl == is_early(kernel.name), kernel.name


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_nothing_is_touched_before_the_wait(signatures: list[Signature]) -> None:
    """But planes, multipliers and scales, which no launch writes, by the linear of few rows."""
    one_of_a_kind: dict[tuple[str, object], Signature] = {}
    for signature in signatures:
        constants = dict(signature.constants)
        if is_early(signature.kernel):
            early = signature._replace(constants=tuple(sorted({**constants, "PDL": True}.items())))
            one_of_a_kind.setdefault((signature.kernel, constants.get("W8")), early)
    assert len(one_of_a_kind) > 10
    found = record.compile_all(list(one_of_a_kind.values()), arch=HOPPER, jobs=JOBS)
    for signature, code in found.items():
        touched = before_the_wait(code.ptx)
        if signature.kernel == "linear_kernels.linear_dot4":
            assert touched
            assert all(t.startswith("ld") for t in touched), signature
        else:
            assert not touched, signature
