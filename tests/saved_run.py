"""An engine on saved machine code, with a driver that only notes: `test_saved.py` runs it in a
process that has no Triton.

What the driver gets of every launch (function, grid, threads, arguments) is compared with what the
launcher gave.
"""

from __future__ import annotations

import ctypes
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from random_weights import random_spec, random_weights

from edge_runtime.kernels import ops
from edge_runtime.kernels.cuda import driver, launch, saved
from edge_runtime.kernels.cuda.backend import CudaBackend
from edge_runtime.kernels.cuda.compile import Compiled
from edge_runtime.kernels.sampling import Parameters
from edge_runtime.model.runner import Model
from edge_runtime.model.transformer import geometry

CONTEXT, NUM_TOKENS, GROUP = 384, 317, 64
SPEC = random_spec(num_layers=2, hidden_size=128, head_dim=32, intermediate_size=200)
CHOICES = (Parameters(), Parameters(temperature=0.8), Parameters(temperature=0.8, top_k=9))
STREAM = 7


class FakeDriver:
    """Keeps launches: function's name, grid, threads, shared bytes, stream, argument pointers."""

    def __init__(self) -> None:
        self.names: dict[int, str] = {}
        self.loaded: list[bytes] = []
        self.launches: list[tuple[Any, ...]] = []

    def cuModuleLoadData(self, module: Any, image: Any) -> int:
        self.loaded.append(image.value)
        return 0

    def cuModuleGetFunction(self, handle: Any, module: Any, name: bytes) -> int:
        number = len(self.names) + 1
        ctypes.cast(handle, ctypes.POINTER(ctypes.c_void_p))[0] = number
        self.names[number] = name.decode()
        return 0

    def cuFuncSetAttribute(self, *_: Any) -> int:
        return 0

    def cuLaunchKernel(self, handle: Any, *rest: Any) -> int:
        grid, threads, shared, stream, pointers = rest[:3], rest[3], rest[6], rest[7], rest[8]
        raw = [ctypes.string_at(p, 8) for p in pointers]
        self.launches.append((self.names[handle.value], grid, threads, shared, stream.value, raw))
        return 0


class Noting(saved.Saved):
    """Notes what the launchers give, and which code is taken."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.given: list[tuple[Any, ...]] = []
        self.code: dict[launch.Signature, Compiled] = {}

    @staticmethod
    def _current() -> int:
        return STREAM

    def find(self, signature: launch.Signature) -> Compiled:
        self.code[signature] = super().find(signature)
        return self.code[signature]

    def launch(
        self,
        kernel: launch.Kernel,
        grid: tuple[int, ...],
        arguments: Sequence[Any],
        options: Mapping[str, Any],
    ) -> None:
        kinds, _ = launch.described(arguments, kernel.plain)
        values = [a if isinstance(a, (int, float)) else a.data_ptr() for a in arguments]
        super().launch(kernel, grid, arguments, options)
        signature = launch.signature(kernel.name, kinds, options)
        self.given.append((signature, grid, values))


def run_engine(way: Noting) -> None:
    """Passes, choices and cycles; nothing that is computed is looked at."""
    with launch.using(way):
        weights = random_weights(SPEC, GROUP, CONTEXT)
        backend = CudaBackend(weights, geometry(SPEC, NUM_TOKENS), torch.device("cpu"))
        model, kv = Model(SPEC, backend), backend.new_cache(CONTEXT)
        for view in ("w8", "w4"):
            for rows in (*range(1, 20), 64, 100, 255, 256, 300):
                positions = np.arange(rows)
                batch = ops.Batch(
                    ids=positions % 9, positions=positions, full_from=0 * positions,
                    num_logits=max(1, rows - 1),
                )  # fmt: skip
                backend.run(model.program(view), batch, kv)
                backend.run(model.program(view, logits=False), batch, kv)
        values = backend.free_room().values
        for row in range(len(values)):
            for parameters in CHOICES:
                backend._sampler.sample(
                    values[row : row + 1], NUM_TOKENS, 3, parameters, seen=None, allowed=None
                )
        for recent in (None, 0, 64):
            cycles = backend.cycles(model.program("w8"), model.program("w4"), kv, recent)
            for parameters in CHOICES:
                for lengths in ((0, 0), (3, 0), (0, 7), (2, 5), (7, 0), (4, 1)):
                    cycles.begin([1, 2, 3], parameters)
                    cycles.launch(*lengths, 3)


def same(value: float, kind: str, raw: bytes) -> bool:
    """Whether an argument arrived."""
    number = driver._C_TYPES[kind]
    want = bytes(number(value))
    return raw[: len(want)] == want


def main(folder: str) -> None:
    """Run, compare, print what was seen as JSON."""
    fake = FakeDriver()
    driver._library = lambda: fake  # type: ignore[assignment]
    saved._chip = lambda: 87
    way = Noting(saved.Folder.read(Path(folder)), "a test")
    run_engine(way)
    assert len(fake.launches) == len(way.given)
    for (signature, grid, values), got in zip(way.given, fake.launches, strict=True):
        code = next(c for s, c in way.code.items() if s == signature)
        name, blocks, threads, shared, stream, raw = got
        assert name == code.name == signature.kernel.rpartition(".")[2], (name, signature)
        assert blocks == (*grid, 1, 1)[:3], (blocks, grid)
        assert (threads, shared, stream) == (32 * signature.num_warps, code.shared_bytes, STREAM)
        padding = [0] * (len(code.parameters) - len(values))
        for value, kind, data in zip([*values, *padding], code.parameters, raw, strict=True):
            assert same(value, kind, data), (signature, value, kind, data)
    assert all(image[:4] == b"\x7fELF" for image in fake.loaded)
    document = {
        "launches": len(way.given),
        "kernels": len({name for name, *_ in fake.launches}),
        "loaded": len(fake.loaded),
        "triton": sys.modules.get("triton") is not None,
    }
    print(json.dumps(document))
