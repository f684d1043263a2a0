"""What an engine launches, noted down without a GPU, and compiled into a folder of machine code.

Invariant: there is no list of kernels. The engine's own code runs on tensors without memory (the
"meta" device of torch) with a way of launching that only notes (`Recorder`), for every program,
number of rows, bucket of lengths and way of choosing that it can meet; what was noted is compiled.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from edge_runtime.kernels import ops
from edge_runtime.kernels.cuda import launch, require_triton, saved, sizes
from edge_runtime.kernels.cuda.backend import CudaBackend
from edge_runtime.kernels.cuda.compile import Compiled, compile_signature
from edge_runtime.kernels.cuda.cycle import CudaCycles
from edge_runtime.kernels.cuda.launch import ORIN, Kernel, Signature
from edge_runtime.kernels.cuda.linear import MULT_PAD, DeviceLinear
from edge_runtime.kernels.cuda.logits import Sampler
from edge_runtime.kernels.cuda.ngram import BLOCK as LOOK_UP_BLOCK
from edge_runtime.kernels.cuda.passes import CudaCache
from edge_runtime.kernels.cuda.weights import DeviceWeights
from edge_runtime.kernels.layout import KV_BLOCK, MAX_GAMMA, padded
from edge_runtime.kernels.sampling import Parameters

META = torch.device("meta")
CHOICES = (
    Parameters(),
    Parameters(temperature=0.8),
    Parameters(temperature=0.8, top_k=40),
)
PENALTY = 1.5
POLICIES = (None, 0, KV_BLOCK)  # of `layout.full_from`
Told = Callable[[int, int, str], None]


class Recorder:
    """Notes what is launched; nothing runs."""

    assembly = True
    why = "only noted down"

    def __init__(self, arch: int = ORIN) -> None:
        self.signatures: dict[Signature, None] = {}  # in the order of their first launch
        self._arch = arch
        self.fewest_columns = launch.triton_columns()

    def arch(self, device: torch.device) -> int:
        """The chip that is compiled for."""
        return self._arch

    def launch(
        self,
        kernel: Kernel,
        grid: tuple[int, ...],
        arguments: Sequence[Any],
        options: Mapping[str, Any],
    ) -> None:
        """Note."""
        kinds, _ = launch.described(arguments, kernel.plain)
        self.signatures[launch.signature(kernel.name, kinds, options)] = None


class Built(saved.Machine):
    """Compiles for a chip what is met, and launches that: the code of an Orin on a larger GPU."""

    def __init__(self, arch: int = ORIN) -> None:
        super().__init__(arch, launch.triton_columns())
        self.compiled: dict[Signature, Compiled] = {}

    def find(self, signature: Signature) -> Compiled:
        """Compile."""
        if signature not in self.compiled:
            self.compiled[signature] = compile_signature(signature, self._arch)
        return self.compiled[signature]


# what an engine meets


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """A model as far as its launches go. linears: [N, K] by name; biased: names of those with a
    bias; programs: with logits and without, of the target and of the draft; max_context: tokens."""

    geometry: ops.Geometry
    linears: Mapping[str, tuple[int, int]]
    biased: frozenset[str]
    head_norms: tuple[str, ...]
    embedding_rows: int
    group_size: int
    programs: Mapping[ops.View, tuple[ops.Program, ops.Program]]
    max_context: int


def engine_signatures(subject: Subject, arch: int = ORIN) -> list[Signature]:
    """Return what an engine of this model launches with any context, policy and request."""
    recorder = Recorder(arch)
    with launch.using(recorder):
        backend = CudaBackend(blank_weights(subject, arch), subject.geometry, META)
        for pair in subject.programs.values():
            for program in pair:
                backend.prepare(program)
        for capacity in capacities(subject.max_context):
            cache = backend.new_cache(capacity)
            _decode(backend, subject, cache)
            _look_ups(backend, subject, cache)
        cache = backend.new_cache(2 * backend.chunk_rows)
        _prompts(backend, subject, cache)
        _cycles(backend, subject, cache)
        _choices(backend, subject.geometry.num_tokens)
    return list(recorder.signatures)


def capacities(most: int) -> Iterator[int]:
    """Contexts that differ in what is launched: from one block on every bucket of lengths; and
    each number of blocks of a look-up that is a power of two or one less."""
    found = {min(most, KV_BLOCK), most}
    size = 2 * KV_BLOCK
    while size < most:
        found.add(size)
        size *= 2
    blocks = 1
    while blocks * LOOK_UP_BLOCK < 2 * most:
        for some in (blocks - 1, blocks):
            capacity = some * LOOK_UP_BLOCK - sizes.REPORT_IDS
            if 0 < capacity <= most:
                found.add(capacity)
        blocks *= 2
    yield from sorted(found)


def blank_linear(
    N: int, K: int, group_size: int, *, row_tile: int, by_row: bool = False, bias: bool = False
) -> DeviceLinear:
    """A matrix without memory. by_row: its multipliers by row too, for the dp4a form."""
    groups, empty = padded(K, group_size) // group_size, partial(torch.empty, device=META)
    plane = (padded(N, row_tile) // row_tile, groups, row_tile, group_size // 2)
    return DeviceLinear(
        base=empty(plane, dtype=torch.uint8),
        refine=empty(plane, dtype=torch.uint8),
        mult=empty(groups, padded(N, MULT_PAD), dtype=torch.int16),
        scale=empty(N),
        bias=empty(N) if bias else None,
        group_size=group_size,
        mult_rows=empty(N, groups, dtype=torch.int16) if by_row else None,
    )


def blank_weights(subject: Subject, arch: int) -> DeviceWeights:
    """Weights without memory."""
    g, empty = subject.geometry, partial(torch.empty, device=META)
    linears = {
        name: blank_linear(
            *shape,
            subject.group_size,
            row_tile=sizes.row_tile(arch),
            by_row=sizes.by_row(arch),
            bias=name in subject.biased,
        )
        for name, shape in subject.linears.items()
    }
    rope = (subject.max_context, g.head_dim // 2)
    return DeviceWeights(
        linears=linears,
        embedding=empty(subject.embedding_rows, g.hidden_size, dtype=torch.int8),
        embedding_scale=empty(subject.embedding_rows),
        cos=empty(rope),
        sin=empty(rope),
        head_norms={name: empty(g.head_dim) for name in subject.head_norms},
        num_bytes=0,
    )


def _run(
    backend: CudaBackend, program: ops.Program, cache: CudaCache, rows: int, num_logits: int = 1
) -> None:
    """One pass at the end of the cache."""
    positions = np.arange(cache.capacity - rows, cache.capacity)
    batch = ops.Batch(
        ids=np.zeros(rows, np.int64),
        positions=positions,
        full_from=np.zeros(rows, np.int64),
        num_logits=num_logits,
    )
    backend.run(program, batch, cache)


def _decode(backend: CudaBackend, subject: Subject, cache: CudaCache) -> None:
    """Few rows over this many tokens."""
    for program, silent in subject.programs.values():
        for rows in range(1, sizes.SMALL_ROWS + 1):
            if rows <= cache.capacity:
                for num_logits in {1, rows}:
                    _run(backend, program, cache, rows, num_logits)
                _run(backend, silent, cache, rows)


def _prompts(backend: CudaBackend, subject: Subject, cache: CudaCache) -> None:
    """Every number of rows of a prompt; logits of the last row, of all, and in parts, which begin
    at any row."""
    most = backend.chunk_rows
    for program, silent in subject.programs.values():
        for rows in range(1, most + 1):
            _run(backend, program, cache, rows)
            _run(backend, program, cache, rows, rows)
            _run(backend, silent, cache, rows)
        for less in range(4):
            rows = most + 64
            _run(backend, program, cache, rows, rows - less)


def _cycles(backend: CudaBackend, subject: Subject, cache: CudaCache) -> None:
    """Every length of a cycle and way of choosing; acceptance forced, for timing, too."""
    for recent in POLICIES:
        cycles = _new_cycles(backend, subject, cache, recent)
        for choice in CHOICES:
            for forced in ((), (1,)):
                for base in range(MAX_GAMMA + 1):
                    for look_up in range(MAX_GAMMA + 1 - base):
                        cycles.begin([1], choice, forced)
                        cycles.launch(base, look_up, 1)


def _look_ups(backend: CudaBackend, subject: Subject, cache: CudaCache) -> None:
    """Look-ups in a text of this size, behind any number of drafted tokens."""
    cycles = _new_cycles(backend, subject, cache, None)
    for base in range(MAX_GAMMA):
        cycles.begin([1], Parameters())
        cycles.launch(base, 1, 1)


def _new_cycles(
    backend: CudaBackend, subject: Subject, cache: CudaCache, recent: int | None
) -> CudaCycles:
    target, draft = (subject.programs[view][0] for view in ("w8", "w4"))
    return CudaCycles(backend, target, draft, cache, recent)


def _choices(backend: CudaBackend, num_tokens: int) -> None:
    """What the host asks for row by row: of some tokens, sampled, with penalties."""
    sampler = Sampler(META, lambda found: np.zeros(found.shape, np.int32))
    values, allowed = backend.free_room().values, np.zeros(1, np.int64)
    sampler.argmax(values, num_tokens, allowed)
    for row in range(len(values)):
        for parameters in CHOICES:
            for seen in (None, np.zeros((1, num_tokens), np.uint8)):
                for some in (None, allowed):
                    sampler.sample(
                        values[row : row + 1], num_tokens, 0, parameters, seen=seen, allowed=some
                    )


# compiling


def save(
    signatures: Sequence[Signature],
    folder: Path,
    *,
    arch: int = ORIN,
    facts: Mapping[str, Any] | None = None,
    jobs: int = 1,
    told: Told = lambda done, total, what: None,
) -> dict[str, Any]:
    """Compile for sm_`arch`, in `jobs` processes, and write a folder; return its index. facts: of
    what it was made for. Raises BackendUnavailable without Triton."""
    require_triton()
    built = compile_all(signatures, arch=arch, jobs=jobs, told=told)
    from importlib.metadata import version

    made = {
        "triton": version("triton"), "arch": arch, "fewest_columns": launch.triton_columns(),
    }  # fmt: skip
    return saved.write(built, folder, {**made, **(facts or {})})


def compile_all(
    signatures: Sequence[Signature],
    *,
    arch: int = ORIN,
    jobs: int = 1,
    told: Told = lambda done, total, what: None,
) -> dict[Signature, Compiled]:
    """Compile in processes of their own: in this one the interpreter may have taken the kernels'
    place."""
    spawn = multiprocessing.get_context("spawn")
    built = {}
    with ProcessPoolExecutor(jobs, mp_context=spawn, initializer=_compiler) as pool:
        found = pool.map(partial(compile_signature, arch=arch), signatures)
        for done, signature in enumerate(signatures):
            told(done, len(signatures), signature.kernel)
            built[signature] = next(found)
    told(len(signatures), len(signatures), "compiled")
    return built


def _compiler() -> None:
    """Settings of Triton, before it is imported. Lines of sources are half of a cubin, and carry
    the paths of this machine."""
    os.environ.pop("TRITON_INTERPRET", None)
    os.environ["TRITON_DISABLE_LINE_INFO"] = "1"
