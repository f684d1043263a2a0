"""Machine code of a whole engine: recorded, saved, checked, and launched where there is no Triton.

Without a GPU the driver is a fake one, which keeps what it is called with.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from random_weights import random_spec, random_weights
from triton_devices import device_of

from edge_runtime.cache.policy import KV8
from edge_runtime.format.spec import ModelSpec
from edge_runtime.kernels import ops
from edge_runtime.kernels.cuda import driver, launch, saved
from edge_runtime.kernels.cuda.compile import inspect
from edge_runtime.kernels.cuda.launch import Jit, Signature
from edge_runtime.kernels.reference.ops import ReferenceBackend
from edge_runtime.kernels.sampling import Parameters
from edge_runtime.model import launches
from edge_runtime.model.runner import Model
from edge_runtime.model.transformer import geometry
from edge_runtime.plan.footprint import usual_group_size
from edge_runtime.profiles.load import shape

pytest.importorskip("triton")

from machine_code import JOBS, check_spills

from edge_runtime.kernels.cuda import record

CONTEXT, NUM_TOKENS, GROUP = 384, 317, 64
SPEC = random_spec(num_layers=2, hidden_size=128, head_dim=32, intermediate_size=200)
CHOICES = (Parameters(), Parameters(temperature=0.8), Parameters(temperature=0.8, top_k=9))

# a shape takes a minute or two: other known ones are for tools/check_gpu
MORE_SHAPES = os.environ.get("BITNEST_SHAPES", "").split()


def subject(spec: ModelSpec = SPEC) -> record.Subject:
    return launches._subject(spec, GROUP, frozenset(), NUM_TOKENS, False)


@pytest.fixture(scope="module")
def signatures() -> list[Signature]:
    return record.engine_signatures(subject())


@pytest.fixture(scope="module")
def folder(signatures: list[Signature], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All code of the tiny model."""
    folder = tmp_path_factory.mktemp("orin")
    record.save(signatures, folder, jobs=JOBS)
    return folder


def backend(device: str) -> Any:
    from edge_runtime.kernels.cuda.backend import CudaBackend

    return CudaBackend(
        random_weights(SPEC, GROUP, CONTEXT), geometry(SPEC, NUM_TOKENS), torch.device(device)
    )


def batch(rows: int, start: int, num_logits: int = 1) -> ops.Batch:
    positions = np.arange(start, start + rows)
    return ops.Batch(
        ids=positions % NUM_TOKENS, positions=positions, full_from=KV8.full_from(positions),
        num_logits=num_logits,
    )  # fmt: skip


# what is recorded


class Spy(Jit):
    """Notes what the interpreter runs."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[Signature, None] = {}

    def launch(
        self, kernel: Any, grid: Any, arguments: Sequence[Any], options: Mapping[str, Any]
    ) -> None:
        kinds, _ = launch.described(arguments, kernel.plain)
        of_a_gpu = dict(options) | ({"ASM": True} if "ASM" in options else {})
        self.seen[launch.signature(kernel.name, kinds, of_a_gpu)] = None
        super().launch(kernel, grid, arguments, options)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_run_meets_only_what_was_recorded(signatures: list[Signature]) -> None:
    device_of("cpu")
    spy = Spy()
    with launch.using(spy):
        b = backend("cpu")
        model, kv = Model(SPEC, b), b.new_cache(CONTEXT)
        for rows, view in ((40, "w8"), *((M, ("w8", "w4")[M % 2]) for M in range(1, 9))):
            logits = b.run(model.program(view), batch(rows, 0, rows), kv)
        assert logits is not None
        b.run(model.program("w8", logits=False), batch(24, 0), kv)
        for parameters in CHOICES:
            penalised = dataclasses.replace(parameters, repetition_penalty=1.5)
            for one in (parameters, penalised):
                logits.sample(len(CHOICES), 50, [1, 2], [3], one)
                logits.sample(2, 50, [1, 2], [3], one, np.arange(9))
        logits.argmax([4, 5])
        cycles = b.cycles(model.program("w8"), model.program("w4"), kv, 0)
        for parameters, lengths in zip(CHOICES, ((1, 2), (2, 0), (0, 3)), strict=True):
            cycles.begin([1, 2, 3, 1, 2], parameters)
            cycles.launch(*lengths, 6)
            cycles.read()
    missing = [str(s) for s in spy.seen if s not in signatures]
    assert not missing
    names = {s.kernel for s in spy.seen}
    assert {s.kernel for s in signatures} - names == set()


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", ["tiny", "llama-2-7b", *MORE_SHAPES])
def test_nothing_spills_on_an_orin(name: str, signatures: list[Signature]) -> None:
    if name != "tiny":
        spec = shape(name).spec
        subjects = launches.of_shape(spec, usual_group_size(spec))
        signatures = record.engine_signatures(subjects[0])
    built = record.compile_all(signatures, jobs=JOBS)
    assert len(built) > 60
    for signature, compiled in built.items():
        report = inspect(compiled)
        check_spills(signature, report)
        assert ".file" not in compiled.ptx, "paths of this machine"


def test_shapes_without_switches_are_taken_both_ways() -> None:
    spec = shape("llama-2-7b").spec
    first, second = launches.of_shape(spec, 128)
    assert {first.geometry.rotate_kv, second.geometry.rotate_kv} == {False, True}
    assert first.geometry.num_tokens == second.geometry.num_tokens + 1 == spec.vocab_size


def test_kernels_assume_what_triton_does() -> None:
    """`Kernel.plain` names the places that the function does not specialise."""
    code = """
import importlib, pkgutil
import edge_runtime.kernels.cuda as cuda
from edge_runtime.kernels.cuda import launch

num = 0
for module in pkgutil.iter_modules(cuda.__path__):
    if module.ispkg or module.name.startswith("half"):
        continue
    for value in vars(importlib.import_module(f"{cuda.__name__}.{module.name}")).values():
        if isinstance(value, launch.Kernel):
            given = [p for p in value.function.params if not p.is_constexpr]
            plain = [i for i, p in enumerate(given) if p.do_not_specialize]
            assert plain == list(value.plain), value.name
            num += 1
assert num > 25, num
"""
    python(code)


# without Triton

LAUNCHERS = """
import importlib, pkgutil, sys
sys.modules["triton"] = None
import edge_runtime.kernels.cuda as cuda

written_in_triton = ("_kernels", "numeric", "floats", "noise", "unpack", "gemm16")
num = 0
for package in (cuda.__name__, cuda.__name__ + ".timing"):
    for module in pkgutil.iter_modules(importlib.import_module(package).__path__):
        if not module.name.endswith(written_in_triton) and module.name != "__main__":
            importlib.import_module(f"{package}.{module.name}")
            num += 1
assert num > 30, num
"""


def python(code: str, *args: object) -> str:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    root = str(Path(driver.__file__).parents[3])
    environment["PYTHONPATH"] = os.pathsep.join([*sys.path, root])
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, args)], env=environment, capture_output=True,
        text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_launchers_import_without_triton() -> None:
    python(LAUNCHERS)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_driver_gets_what_the_launchers_gave(folder: Path) -> None:
    code = "import sys; sys.modules['triton'] = None; import saved_run; saved_run.main(sys.argv[1])"
    out = python(code, folder)
    found = json.loads(out.splitlines()[-1])
    assert found["triton"] is False
    assert found["launches"] > 300
    assert found["kernels"] > 20


# on a GPU


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_answers_of_an_orins_code(folder: Path) -> None:
    device_of("cuda")
    if torch.cuda.get_device_capability() < (8, 7):
        pytest.skip("code for sm_87 needs a GPU of compute capability 8.7 or more")
    weights, sizes = random_weights(SPEC, GROUP, CONTEXT), geometry(SPEC, NUM_TOKENS)
    with launch.using(saved.Saved.open(folder, "a test")):
        found = []
        for b in (ReferenceBackend(weights, sizes), backend("cuda")):
            model, kv, start = Model(SPEC, b), b.new_cache(CONTEXT), 0
            some: list[Any] = []
            for rows in (70, 1, 40, *range(1, 17), 1, 1, 1):
                for view in ("w4", "w8"):
                    logits = b.run(model.program(view), batch(rows, start, min(rows, 8)), kv)
                    assert logits is not None
                    some.append((logits.numpy().tobytes(), logits.argmax()))
                for parameters in CHOICES:
                    some.append(logits.sample(0, start, [1], [2], parameters))
                start += rows
            found.append((some, {n: p.tobytes() for n, p in kv.planes(start).items()}))
        assert found[0] == found[1]
        assert len(kv.graphs) > 10
        cycles = b.cycles(model.program("w8"), model.program("w4"), kv, 0)
        for parameters in CHOICES:
            tokens = [1, 2, 3, 1, 2]
            model.forward("w8", tokens[:-1], 0, kv)
            cycles.begin(tokens, parameters)
            for lengths in ((2, 1), (0, 3), (2, 1), (3, 0), (2, 1)):
                cycles.launch(*lengths, len(tokens))
                tokens += cycles.read().tokens
            reference = ReferenceBackend(weights, sizes)
            check, plain = Model(SPEC, reference), reference.new_cache(CONTEXT)
            logits = check.forward("w8", tokens, 0, plain, num_logits=len(tokens))
            for i in range(5, len(tokens)):
                assert logits.sample(i - 1, i, [], [], parameters) == tokens[i]
