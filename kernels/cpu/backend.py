"""The native CPU backend: repacked planes, a nested cache, and programs as native step lists.

Invariant: a pass is one native call whatever the number of ops, and gives the bits of the reference
backend for every instruction set, number of threads and number of rows.
"""

from __future__ import annotations

import ctypes
import time
from typing import Any

import numpy as np
import numpy.typing as npt

from edge_runtime.errors import BudgetError, UsageError
from edge_runtime.kernels import ops
from edge_runtime.kernels.cpu import library
from edge_runtime.kernels.cpu.arena import Arena
from edge_runtime.kernels.cpu.logits import CpuLogits, LogitsBuffer
from edge_runtime.kernels.layout import CHUNK_ROWS, ROW_TILE, padded

PAGE_BYTES = 4096
Arrays = dict[str, npt.NDArray[Any]]


class CpuCache:
    """A nested cache in the backend's own order of bytes."""

    def __init__(self, backend: CpuBackend, capacity: int) -> None:
        self.capacity, self._backend = capacity, backend
        self._lib = backend.lib
        self.handle = self._lib.edge_cache_new(backend.model, capacity)
        if not self.handle:
            raise BudgetError(
                f"memory: no room for a cache of {capacity} tokens", "lower --ctx or --budget"
            )

    def __del__(self) -> None:
        """Free it."""
        if getattr(self, "handle", None):
            self._lib.edge_cache_free(self.handle)

    @property
    def num_bytes(self) -> int:
        """Bytes that are allocated."""
        return int(self._lib.edge_cache_bytes(self.handle))

    def planes(self, length: int, layer: int | None = None) -> Arrays:
        """Return the first tokens in the canonical order (`kernels.ops.Cache`)."""
        g = self._backend.geometry
        shape = (g.num_layers if layer is None else 1, 2, length, g.num_kv_heads)
        found: Arrays = {
            "base": np.empty((*shape, g.head_dim // 2), np.uint8),
            "refine": np.empty((*shape, g.head_dim // 2), np.uint8),
            "scale": np.empty(shape, np.float16),
        }
        self._copy(found, layer, store=False)
        return found

    def load(self, planes: Arrays, layer: int | None = None) -> None:
        """Overwrite the first tokens."""
        self._copy({n: np.ascontiguousarray(a) for n, a in planes.items()}, layer, store=True)

    def _copy(self, arrays: Arrays, layer: int | None, *, store: bool) -> None:
        layers, _, length, _ = arrays["scale"].shape
        assert 0 <= length <= self.capacity, (length, self.capacity)
        first = layer or 0
        assert first + layers <= self._backend.geometry.num_layers, (layer, layers)
        self._lib.edge_cache_copy(
            self._backend.model,
            self.handle,
            first,
            first + layers,
            length,
            int(store),
            *(arrays[n].ctypes.data for n in ("base", "refine", "scale")),
        )


class CpuBackend:
    """Holds repacked weights, one pool of threads and the native programs."""

    name = "cpu"
    chunk_rows = CHUNK_ROWS

    def __init__(
        self, weights: ops.ModelWeights, geometry: ops.Geometry, threads: int, isa: str
    ) -> None:
        """threads: of the pool, the caller's included; isa: one of `library.available_isas`."""
        assert not library.limits(geometry.head_dim, geometry.num_heads // geometry.num_kv_heads)
        self.lib = library.load()
        self.geometry, self.isa, self.threads = geometry, isa, threads
        self.spare: LogitsBuffer | None = None
        self._batch = library.Batch()
        self._set_inputs(1)
        self._arrays: list[npt.NDArray[Any]] = []  # everything the native side points into
        self._programs: dict[int, tuple[ops.Program, int, bool]] = {}
        self._head_norms = weights.head_norms
        self._arena = Arena()
        self._linears: dict[str, tuple[int, int]] = {}  # number on the native side, outputs
        group_size = next(iter(weights.linears.values())).group_size
        self._native_geometry = library.Geometry(
            *(getattr(geometry, name) for name in library.SIZES),
            group_size,
            np.float32(1.0) / np.sqrt(np.float32(geometry.head_dim)),
        )
        self._model: int | None = self.lib.edge_model_new(
            self._native_geometry,
            isa.encode(),
            threads,
            self._keep(weights.embedding),
            self._keep(weights.embedding_scale),
            self._keep(weights.cos),
            self._keep(weights.sin),
        )
        # the head, mostly the largest, first: its file's pages are gone when the rest is there
        for name in reversed(list(weights.linears)):
            linear = weights.linears[name]
            self._linears[name] = (self._add_linear(linear), linear.base.shape[0])
            weights.release()
        # the table stays in its file: what it takes is there from the start, and counted
        weights.embedding.view(np.uint8).reshape(-1)[::PAGE_BYTES].max()
        self._batch.stride = padded(max(n for _, n in self._linears.values()), ROW_TILE)

    @property
    def weights_bytes(self) -> int:
        """Bytes of the embedding, the planes and their scales."""
        return sum(a.nbytes for a in self._arrays)

    @property
    def workspace_bytes(self) -> int:
        """Bytes of the activations, shared by all programs."""
        return int(self.lib.edge_workspace_bytes(self.model))

    def prepare(self, program: ops.Program) -> None:
        """Compile a program."""
        self._native(program)

    def new_cache(self, capacity: int) -> CpuCache:
        """Allocate a cache. Raises BudgetError."""
        return CpuCache(self, capacity)

    def run(
        self, program: ops.Program, batch: ops.Batch, cache: CpuCache, *, skip: int = 0
    ) -> CpuLogits | None:
        """Replay a program in one native call. skip: bit k leaves out `library.KINDS[k]`."""
        M = len(batch.positions)
        if self._inputs.shape[1] < M:
            self._set_inputs(M)
        inputs, native = self._inputs, self._batch
        inputs[0, :M], inputs[1, :M] = batch.positions, batch.full_from
        rows = None
        if batch.ids is None:
            rows = np.ascontiguousarray(batch.rows, np.float32)
            native.ids, native.rows = None, rows.ctypes.data
        else:
            inputs[2, :M] = batch.ids
            native.ids, native.rows = self._ids_address, None
        assert inputs[0, :M].max() < cache.capacity, "a row beyond the cache"
        native.M, native.num_logits, native.skip = M, batch.num_logits, skip
        handle, has_logits = self._native(program)
        logits = None
        if has_logits:
            buffer = self._buffer(batch.num_logits)
            logits = CpuLogits(self, buffer, batch.num_logits)
            native.logits, native.best, native.finite = buffer.addresses
        self.lib.edge_run(handle, native, cache.handle)
        return logits

    def read_seconds(self, data: npt.NDArray[np.uint8]) -> float:
        """Return the seconds that the threads take to read all of `data`."""
        started = time.perf_counter()
        self.lib.edge_read(self.model, data.ctypes.data, data.nbytes)
        return time.perf_counter() - started

    def relieve(self, cache: CpuCache, length: int, *, running: bool = False) -> None:
        """Give back activations, spare logits, and the cache behind its first `length` tokens."""
        self.spare = None
        self.lib.edge_cache_trim(cache.handle, length)
        self.lib.edge_release_workspace(self.model)

    def close(self) -> None:
        """End the threads and free the programs and the planes."""
        for _, program, _ in self._programs.values():
            self.lib.edge_program_free(program)
        self._programs.clear()
        if self._model:
            self.lib.edge_model_free(self._model)
            self._model = None
        self._arrays.clear()

    def __del__(self) -> None:
        """Close what was dropped without it."""
        if getattr(self, "_model", None):
            self.close()

    @property
    def model(self) -> int:
        """Address of the native model. Raises UsageError after `close`."""
        if not self._model:
            raise UsageError("the engine is closed", "open it again with Engine.open")
        return self._model

    def _set_inputs(self, rows: int) -> None:
        """Make room for positions, first full tokens and ids of a pass."""
        self._inputs = np.zeros((3, rows), np.int64)
        address, row_bytes = self._inputs.ctypes.data, self._inputs.strides[0]
        self._batch.positions, self._batch.full_from = address, address + row_bytes
        self._ids_address = address + 2 * row_bytes

    def _buffer(self, rows: int) -> LogitsBuffer:
        spare, self.spare = self.spare, None
        if spare is not None and spare.rows >= rows:
            return spare
        return LogitsBuffer(rows, self._batch.stride)

    def _keep(self, array: npt.NDArray[Any] | None) -> int | None:
        if array is None:
            return None
        self._arrays.append(np.ascontiguousarray(array))
        return int(self._arrays[-1].ctypes.data)

    def _add_linear(self, w: ops.LinearWeights) -> int:
        N, half = w.base.shape
        rows, Kp, G = padded(N, ROW_TILE), 2 * half, w.group_size
        base, refine = (self._arena.take(rows * half) for _ in range(2))
        mult = self._arena.take(rows * (Kp // G) * 2).view(np.int16)
        planes = [np.ascontiguousarray(p) for p in (w.base, w.refine, w.mult)]
        self.lib.edge_repack(
            self.model,
            *(p.ctypes.data for p in planes),
            N,
            Kp,
            G,
            *(a.ctypes.data for a in (base, refine, mult)),
        )
        wide = [None if a is None else np.pad(a, (0, rows - N)) for a in (w.scale, w.bias)]
        args = library.LinearArgs(
            *(self._keep(a) for a in (base, refine, mult, *wide)), N, w.num_inputs, Kp, G
        )
        return int(self.lib.edge_model_linear(self.model, args))

    # from a program to native ops

    def _native(self, program: ops.Program) -> tuple[int, bool]:
        """Return the native program, and whether it makes logits."""
        found = self._programs.get(id(program))
        if found is None:
            found = (program, self._compile(program), program[-1].out == "logits")
            self._programs[id(program)] = found
        return found[1:]

    def _compile(self, program: ops.Program) -> int:
        registers: dict[tuple[str, int], int] = {}
        widths: dict[str, int] = {}
        g = self.geometry
        q_size = g.num_heads * g.head_dim

        def read(name: str) -> int:
            return registers[name, widths[name]]

        def write(name: str, width: int) -> int:
            widths[name] = width
            return registers.setdefault((name, width), len(registers))

        native: list[library.Op] = []

        def emit(kind: str, **fields: Any) -> None:
            op = library.Op(a=-1, out=-1, residual=-1, gate_up=-1, kind=library.KINDS.index(kind))
            for name, value in fields.items():
                setattr(op, name, value)
            native.append(op)

        for op, after in zip(program, (*program[1:], None), strict=True):
            match op:
                case ops.Embed(out):
                    emit("embed", out=write(out, g.hidden_size))
                case ops.NormQuantise(x, out, eps):
                    emit("norm_quantise", a=read(x), out=write(out, widths[x]), eps=eps)
                case ops.Quantise(x, out):
                    emit("quantise", a=read(x), out=write(out, widths[x]))
                case ops.SiluMulQuantise(x, out):  # the linear before has multiplied
                    emit("quantise", a=read(x), out=write(out, widths[x]))
                case ops.RopeKv(x, out, layer, eps, qk_norm):
                    norms = {
                        f"{n}_norm": self._keep(self._head_norms[f"layers.{layer}.{n}_norm"])
                        for n in ("q", "k")
                        if qk_norm
                    }
                    emit(
                        "rope_kv", a=read(x), out=write(out, q_size), layer=layer, eps=eps, **norms
                    )
                case ops.Attention(x, out, layer):
                    a = read(x)
                    emit("attention", a=a, out=write(out, q_size), layer=layer)
                    emit("combine", a=a, out=read(out))
                case ops.SelectRows(x, out):
                    emit("select_rows", a=read(x), out=write(out, widths[x]))
                case ops.Linear(a, weight, out, view, residual):
                    number, N = self._linears[weight]
                    fields = {"a": read(a), "weight": number, "w8": view == "w8"}
                    if out == "logits":
                        emit("head", **fields)
                        continue
                    rest = -1 if residual is None else read(residual)
                    if isinstance(after, ops.SiluMulQuantise):
                        assert (after.gate_up, residual) == (out, None), (op, after)
                        fields["gate_up"], N = write(out, N), N // 2
                    emit("linear", **fields, residual=rest, out=write(out, N))
        sizes = (ctypes.c_int32 * len(registers))(*(width for _, width in registers))
        array = (library.Op * len(native))(*native)
        return int(self.lib.edge_program_new(self.model, array, len(native), sizes, len(registers)))
