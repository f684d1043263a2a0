"""The CUDA backend: weights, registers and cache on the device, a pass as launches or as one graph.

Invariant: bits of the reference backend, whatever the number of rows and whether they come by a
graph. What a pass reads of its batch (ids, positions, first full tokens) lies on the device, in
tensors that stay where they are, so that a graph captured once serves every pass of its kind: the
same program, rows and bucket of lengths. Between the copy of a batch and the choice that is read
back the host waits for nothing, and a pass allocates nothing but in the first of its kind.
"""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from edge_runtime.errors import UsageError
from edge_runtime.kernels import ops
from edge_runtime.kernels.cuda import activations, head, sizes, weights
from edge_runtime.kernels.cuda.activations import Activation, SiluRoom
from edge_runtime.kernels.cuda.attention import Workspace, attention
from edge_runtime.kernels.cuda.cache import NestedCache
from edge_runtime.kernels.cuda.embedding import embed
from edge_runtime.kernels.cuda.kv import rope_kv
from edge_runtime.kernels.cuda.linear import Digits, digits_of, linear, takes_digits
from edge_runtime.kernels.cuda.logits import CudaLogits, Room, Sampler
from edge_runtime.kernels.cuda.memory import asking_for, pool, usual_device
from edge_runtime.kernels.cuda.registers import Registers
from edge_runtime.kernels.layout import CHUNK_ROWS, padded

LEAST_BUCKET = 512  # tokens; buckets double from here
CACHE_HINT = "lower --ctx or --budget"
PASS_HINT = "free memory of the GPU, or open the model with a lower --ctx"

Key = tuple[int, int, int, int]  # program, rows, rows of logits, bucket


class CudaCache(NestedCache):
    """A nested cache with what passes over it need: attention's workspace, and their graphs."""

    def __init__(self, geometry: ops.Geometry, capacity: int, device: torch.device) -> None:
        super().__init__(geometry, capacity, device)
        self.workspace = Workspace(
            sizes.SMALL_ROWS, geometry.num_heads, geometry.head_dim, capacity, device
        )
        self.graphs: OrderedDict[Key, torch.cuda.CUDAGraph | None] = OrderedDict()  # None: seen
        self.registers: Registers | None = None  # that the graphs write to

    def bucket(self, length: int) -> int:
        """Tokens that the launches of a pass are laid out for, which reads `length` at most."""
        size = LEAST_BUCKET
        while size < length:
            size *= 2
        return min(size, padded(self.capacity, 64))


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """Keep Python from collecting garbage: an old graph among it, freed by a thread that captures,
    would spoil the capture."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@dataclass(slots=True)
class Pass:
    """Up to CHUNK_ROWS rows on their way through a program.

    positions, full_from: int32 [rows]; ids: likewise, or None with `rows` fp32 [rows, H] on the
    host; tokens: the bucket; logits: where those of the last num_logits rows go.
    """

    num_rows: int
    num_logits: int
    positions: Tensor
    full_from: Tensor
    ids: Tensor | None
    rows: Tensor | None
    cache: CudaCache
    tokens: int
    logits: tuple[Tensor, head.Choice] | None
    registers: dict[str, Any] = field(default_factory=dict)  # Tensor or Activation by name


class CudaBackend:
    """Holds the weights of one model on one device."""

    name = "cuda"

    def __init__(
        self, model: ops.ModelWeights, geometry: ops.Geometry, device: torch.device | None = None
    ) -> None:
        """device: the usual one by default. Raises BudgetError."""
        self.geometry, self.device = geometry, device or usual_device()
        self._gpu = self.device.type == "cuda"
        self._group_size = next(iter(model.linears.values())).group_size
        found = pool(self.device)
        self._arch, self.discrete = found.arch, found.discrete
        self._weights: weights.DeviceWeights | None = weights.load(model, self.device, self._arch)
        self._registers = Registers(self._group_size, self.device)
        self._programs: dict[int, ops.Program] = {}
        self._room: Room | None = None
        self._last: Callable[[], CudaLogits | None] = lambda: None
        self._host = torch.zeros(3, CHUNK_ROWS, dtype=torch.int32, pin_memory=self._gpu)
        self._inputs = torch.zeros(3, CHUNK_ROWS, dtype=torch.int32, device=self.device)
        self._answers = torch.zeros(2 * sizes.LOGIT_ROWS, dtype=torch.int32, pin_memory=self._gpu)
        self._sampler = Sampler(self.device, self._fetch)
        if self._gpu:  # a wait sleeps: a busy core of an Orin costs joules
            self._copied, self._done = (torch.cuda.Event(blocking=True) for _ in range(2))
        self._launch: dict[type, Callable[[Any, Pass], None]] = {
            ops.Embed: self._embed,
            ops.NormQuantise: self._norm_quantise,
            ops.Quantise: self._quantise,
            ops.Linear: self._linear,
            ops.RopeKv: self._rope_kv,
            ops.Attention: self._attention,
            ops.SiluMulQuantise: self._silu_mul_quantise,
            ops.SelectRows: self._select_rows,
        }

    @property
    def weights(self) -> weights.DeviceWeights:
        """Weights on the device. Raises UsageError after `close`."""
        if self._weights is None:
            raise UsageError("the engine is closed", "open it again with Engine.open")
        return self._weights

    @property
    def weights_bytes(self) -> int:
        """Bytes of planes, scales, embedding, norms and rope tables on the device."""
        return 0 if self._weights is None else self._weights.num_bytes

    @property
    def workspace_bytes(self) -> int:
        """Bytes of the registers, of the logits' room and of the batch."""
        room = self._room
        parts = () if room is None else (room.values, room.found, room.partial, room.flags)
        rest: int = sum(part.nbytes for part in (*parts, self._inputs))
        return self._registers.num_bytes + rest

    def prepare(self, program: ops.Program) -> None:
        """Make the registers of a program, and the room of its logits. Raises BudgetError."""
        if id(program) in self._programs:
            return
        widths = {name: w.num_outputs for name, w in self.weights.linears.items()}
        self._registers.add(program, self.geometry, widths)
        if self._room is None and program[-1].out == "logits":
            stride = widths[cast(ops.Linear, program[-1]).weight]
            size = sizes.logits(sizes.LOGIT_ROWS, stride)
            with asking_for("the room of the logits", size, self.device, PASS_HINT):
                self._room = self._new_room(sizes.LOGIT_ROWS, stride)
        self._programs[id(program)] = program  # kept: an id is of one object while that lives

    def new_cache(self, capacity: int) -> CudaCache:
        """Allocate a cache. Raises BudgetError."""
        num_bytes = sizes.cache(self.geometry, capacity, self._arch)
        with asking_for(f"a cache of {capacity} tokens", num_bytes, self.device, CACHE_HINT):
            return CudaCache(self.geometry, capacity, self.device)

    def run(self, program: ops.Program, batch: ops.Batch, cache: CudaCache) -> CudaLogits | None:
        """Replay a program. Raises BudgetError; the next pass may fit again."""
        M = len(batch.positions)
        assert int(batch.positions.max()) < cache.capacity, "a row beyond the cache"
        with asking_for(f"a pass of {M} rows", self.workspace_bytes, self.device, PASS_HINT):
            self.prepare(program)
            logits, room = self._new_logits(program, batch.num_logits)
            first_logit = M - (0 if room is None else batch.num_logits)
            for first in range(0, M, CHUNK_ROWS):
                rows = slice(first, min(first + CHUNK_ROWS, M))
                one = self._send(batch, rows, cache)
                begin = max(first, first_logit)
                if room is not None and begin < rows.stop:
                    one.num_logits = rows.stop - begin
                    one.logits = room.part(slice(begin - first_logit, rows.stop - first_logit))
                self._replay(program, one, own_room=room is not None and room is not self._room)
        return logits

    def relieve(self, cache: CudaCache, length: int) -> None:
        """Give registers, graphs and the sampler's room back to the device. The cache keeps what it
        has: a tensor cannot give a part back."""
        self._registers = Registers(self._group_size, self.device)
        self._programs.clear()
        cache.graphs.clear()
        self._sampler.release()
        if self._gpu:
            torch.cuda.empty_cache()

    def close(self) -> None:
        """Free everything but the caches, which are free when they are dropped."""
        self._weights = None
        self._registers = Registers(self._group_size, self.device)
        self._programs.clear()
        self._room = None
        self._sampler.release()
        if self._gpu:
            torch.cuda.empty_cache()

    def device_memory(self) -> dict[str, int]:
        """Bytes that torch holds on the device now and held at most, and those of the CUDA context,
        which are assumed. Nothing in the interpreter."""
        if not self._gpu:
            return {}
        return {
            "device_bytes": torch.cuda.memory_reserved(self.device),
            "device_peak_bytes": torch.cuda.max_memory_reserved(self.device),
            "context_bytes": sizes.CONTEXT_BYTES,
        }

    # a pass

    def _new_logits(self, program: ops.Program, rows: int) -> tuple[CudaLogits | None, Room | None]:
        """Return the logits of a pass and where they go; nothing, if the program makes none."""
        if program[-1].out != "logits":
            return None, None
        assert self._room is not None
        room = self._room
        if rows > sizes.LOGIT_ROWS:
            room = self._new_room(rows, room.values.shape[1])
        elif (last := self._last()) is not None:
            last.keep(room)
        made = CudaLogits(room, rows, self.geometry.num_tokens, self._sampler)
        if room is self._room:
            self._last = weakref.ref(made)
        return made, room

    def _new_room(self, rows: int, stride: int) -> Room:
        return Room.new(rows, stride, self.geometry.num_tokens, self.device)

    def _send(self, batch: ops.Batch, rows: slice, cache: CudaCache) -> Pass:
        """Copy a part of a batch to the device, in one small copy."""
        M = rows.stop - rows.start
        if self._gpu:
            self._copied.synchronize()  # the copy before has been made
        host = self._host.numpy()
        host[0, :M], host[1, :M] = batch.positions[rows], batch.full_from[rows]
        own = None
        if batch.ids is None:
            assert batch.rows is not None
            own = torch.from_numpy(np.array(batch.rows[rows], np.float32))
        else:
            host[2, :M] = batch.ids[rows]
        self._inputs.copy_(self._host, non_blocking=True)
        if self._gpu:
            self._copied.record()
        return Pass(
            num_rows=M,
            num_logits=0,
            positions=self._inputs[0, :M],
            full_from=self._inputs[1, :M],
            ids=None if own is not None else self._inputs[2, :M],
            rows=own,
            cache=cache,
            tokens=cache.bucket(int(host[0, :M].max()) + 1),
            logits=None,
        )

    def _replay(self, program: ops.Program, one: Pass, *, own_room: bool) -> None:
        """Run a pass by its graph, which is captured when its kind is met again; or its launches
        one by one."""
        cache = one.cache
        small = one.num_rows <= sizes.SMALL_ROWS and one.ids is not None and not own_room
        if not (self._gpu and small):
            self._launch_all(program, one)
            return
        if cache.registers is not self._registers:  # the graphs' are gone
            cache.graphs.clear()
            cache.registers = self._registers
        key = (id(program), one.num_rows, one.num_logits, one.tokens)
        if key not in cache.graphs:  # the first of its kind compiles and loads its kernels
            cache.graphs[key] = None
            self._launch_all(program, one)
            return
        graph = cache.graphs[key] or self._captured(program, one)
        cache.graphs[key] = graph
        cache.graphs.move_to_end(key)
        if len(cache.graphs) > sizes.MOST_GRAPHS:
            cache.graphs.popitem(last=False)
        graph.replay()

    def _captured(self, program: ops.Program, one: Pass) -> torch.cuda.CUDAGraph:
        """Capture the launches of a pass; nothing runs."""
        graph = torch.cuda.CUDAGraph()
        with _no_collection(), torch.cuda.stream(torch.cuda.Stream()):
            graph.capture_begin(capture_error_mode="relaxed")
            try:
                self._launch_all(program, one)
            except BaseException:
                with contextlib.suppress(RuntimeError):  # the stream has to leave its capture
                    graph.capture_end()
                raise
            graph.capture_end()
        return graph

    def _launch_all(self, program: ops.Program, one: Pass) -> None:
        for op in program:
            if isinstance(op, ops.SelectRows) and not one.num_logits:
                return  # a part of a batch without rows whose logits are asked for
            self._launch[type(op)](op, one)
        if one.logits is not None:
            values, choice = one.logits
            head.argmax(values, self.geometry.num_tokens, out=choice)

    def _fetch(self, found: Tensor) -> NDArray[Any]:
        """Copy a small int32 tensor to the host, sleeping until the device has made it."""
        if not self._gpu:
            return found.numpy()
        if found.numel() > self._answers.numel():
            return found.cpu().numpy()
        answers = self._answers[: found.numel()].view(found.shape)
        answers.copy_(found, non_blocking=True)
        self._done.record()
        self._done.synchronize()
        return np.array(answers.numpy())

    # ops, in the order of kernels/ops.py

    def _embed(self, op: ops.Embed, one: Pass) -> None:
        out = self._registers.floats(op.out, self.geometry.hidden_size, one.num_rows)
        if one.ids is None:
            assert one.rows is not None
            out.copy_(one.rows)
        else:
            embed(one.ids, self.weights.embedding, self.weights.embedding_scale, out=out)
        one.registers[op.out] = out

    def _norm_quantise(self, op: ops.NormQuantise, one: Pass) -> None:
        x: Tensor = one.registers[op.x]
        out = self._registers.quantised(op.out, x.shape[1], x.shape[0])
        one.registers[op.out] = activations.norm_quantise(x, op.eps, self._group_size, out)

    def _quantise(self, op: ops.Quantise, one: Pass) -> None:
        x: Tensor = one.registers[op.x]
        out = self._registers.quantised(op.out, x.shape[1], x.shape[0])
        one.registers[op.out] = activations.quantise(x, self._group_size, out)

    def _linear(self, op: ops.Linear, one: Pass) -> None:
        a: Activation = one.registers[op.a]
        weight, M = self.weights.linears[op.weight], a.codes.shape[0]
        if op.out == "logits":
            assert one.logits is not None
            out = one.logits[0]
        else:
            out = self._registers.floats(op.out, weight.num_outputs, M)
        sums: Tensor | Digits = a.sums
        if takes_digits(M, self._group_size):
            sums = digits_of(a.sums, self._registers.digits(a.sums))
        residual = None if op.residual is None else one.registers[op.residual]
        one.registers[op.out] = linear(
            a.codes, a.scale, sums, weight, op.view, out=out, residual=residual
        )

    def _rope_kv(self, op: ops.RopeKv, one: Pass) -> None:
        g, w = self.geometry, self.weights
        out = self._registers.floats(op.out, g.num_heads * g.head_dim, one.num_rows)
        norms = None
        if op.qk_norm:
            prefix = f"layers.{op.layer}."
            norms = (w.head_norms[prefix + "q_norm"], w.head_norms[prefix + "k_norm"])
        rope_kv(
            one.registers[op.qkv],
            one.positions,
            w.cos,
            w.sin,
            one.cache.layer(op.layer),
            out.view(one.num_rows, g.num_heads, g.head_dim),
            head_norms=norms,
            eps=op.eps,
            rotate_kv=g.rotate_kv,
        )
        one.registers[op.out] = out

    def _attention(self, op: ops.Attention, one: Pass) -> None:
        g = self.geometry
        shape = (one.num_rows, g.num_heads, g.head_dim)
        out = self._registers.floats(op.out, g.num_heads * g.head_dim, one.num_rows)
        attention(
            one.registers[op.q].view(shape),
            one.positions,
            one.full_from,
            one.cache.layer(op.layer),
            out.view(shape),
            one.cache.workspace,
            max_tokens=one.tokens,
            asm=self._gpu,
        )
        one.registers[op.out] = out

    def _silu_mul_quantise(self, op: ops.SiluMulQuantise, one: Pass) -> None:
        x: Tensor = one.registers[op.gate_up]
        out = self._registers.quantised(op.out, x.shape[1] // 2, x.shape[0])
        room = SiluRoom(x, self._registers.peaks(x))  # the product lies over the gate
        one.registers[op.out] = activations.silu_mul_quantise(x, self._group_size, out, room)

    def _select_rows(self, op: ops.SelectRows, one: Pass) -> None:
        x: Tensor = one.registers[op.x]
        one.registers[op.out] = x[x.shape[0] - one.num_logits :]
