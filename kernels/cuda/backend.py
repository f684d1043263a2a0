"""The CUDA backend: weights, registers and cache on the device, a pass as launches or as one graph.

Invariant: bits of the reference backend, whatever the number of rows and whether they come by a
graph. What a pass reads of its batch (ids, positions, first full tokens) lies on the device, in
tensors that stay where they are, so that a graph captured once serves every pass of its kind: the
same program, rows and bucket of lengths. Between the copy of a batch and the choice that is read
back the host waits for nothing, and a pass allocates nothing but in the first of its kind.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from edge_runtime.errors import UsageError
from edge_runtime.kernels import ops
from edge_runtime.kernels.cuda import sizes, weights
from edge_runtime.kernels.cuda.cycle import CudaCycles
from edge_runtime.kernels.cuda.logits import CudaLogits, Room, Sampler
from edge_runtime.kernels.cuda.memory import PASS_HINT, asking_for, pool, usual_device
from edge_runtime.kernels.cuda.passes import CudaCache, Pass, Passes

CACHE_HINT = "lower --ctx or --budget"


class CudaBackend:
    """Holds the weights of one model on one device."""

    name = "cuda"

    def __init__(
        self,
        model: ops.ModelWeights | weights.DeviceWeights,
        geometry: ops.Geometry,
        device: torch.device | None = None,
    ) -> None:
        """model: to be copied to the device, or there already; device: the usual one by default.

        Raises BudgetError."""
        self.geometry, self.device = geometry, device or usual_device()
        self._gpu = self.device.type == "cuda"
        found = pool(self.device)
        self._arch, self.discrete = found.arch, found.discrete
        self._passes: Passes | None = self._new_passes(model)
        self._programs: dict[int, ops.Program] = {}
        self._room: Room | None = None
        self._cycles: weakref.WeakSet[CudaCycles] = weakref.WeakSet()
        self._last: Callable[[], CudaLogits | None] = lambda: None
        rows = self.chunk_rows
        self._host = torch.zeros(3, rows, dtype=torch.int32, pin_memory=self._gpu)
        self._inputs = torch.zeros(3, rows, dtype=torch.int32, device=self.device)
        self._answers = torch.zeros(2 * sizes.LOGIT_ROWS, dtype=torch.int32, pin_memory=self._gpu)
        self._sampler = Sampler(self.device, self._fetch)
        if self._gpu:  # a wait sleeps: a busy core of an Orin costs joules
            self._copied, self._done = (torch.cuda.Event(blocking=True) for _ in range(2))

    @property
    def passes(self) -> Passes:
        """What launches programs. Raises UsageError after `close`."""
        if self._passes is None:
            raise UsageError("the engine is closed", "open it again with Engine.open")
        return self._passes

    @property
    def weights_bytes(self) -> int:
        """Bytes of planes, scales, embedding, norms and rope tables on the device."""
        return 0 if self._passes is None else self._passes.weights.num_bytes

    @property
    def workspace_bytes(self) -> int:
        """Bytes of the registers, of the logits' room and of the batch."""
        room = self._room
        parts = () if room is None else (room.values, room.found, room.partial, room.flags)
        rest: int = sum(part.nbytes for part in (*parts, self._inputs))
        return rest + (0 if self._passes is None else self._passes.registers.num_bytes)

    @property
    def chunk_rows(self) -> int:
        """Rows of a prompt that pass together, at most."""
        return sizes.chunk_rows(self._arch)

    def prepare(self, program: ops.Program) -> None:
        """Make the registers of a program, and the room of its logits. Raises BudgetError."""
        if id(program) in self._programs:
            return
        widths = {name: w.num_outputs for name, w in self.passes.weights.linears.items()}
        self.passes.registers.add(program, self.geometry, widths)
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
            step = self.chunk_rows
            for first in range(0, M, step):
                rows = slice(first, min(first + step, M))
                one = self._send(batch, rows, cache)
                begin = max(first, first_logit)
                if room is not None and begin < rows.stop:
                    one.num_logits = rows.stop - begin
                    one.logits = room.part(slice(begin - first_logit, rows.stop - first_logit))
                place = None if room is not None and room is not self._room else begin - first_logit
                self._replay(program, one, place)
        return logits

    def cycles(
        self, target: ops.Program, draft: ops.Program, cache: CudaCache, recent: int | None
    ) -> CudaCycles:
        """Return what drafts and verifies on the device (`ops.RunsCycles`)."""
        made = CudaCycles(self, target, draft, cache, recent)
        self._cycles.add(made)
        return made

    def free_room(self) -> Room:
        """Return the room of a pass's logits; those that someone holds move out of it."""
        assert self._room is not None
        if (last := self._last()) is not None:
            last.keep(self._room)
        self._last = lambda: None
        return self._room

    def relieve(self, cache: CudaCache, length: int, *, running: bool = False) -> None:
        """Give registers, graphs and the samplers' rooms back to the device; while a generation is
        running, which would make them again at once, only what is not in use. The cache keeps what
        it has: a tensor cannot give a part back."""
        if not running:
            self.passes.relieve()
            self._programs.clear()
            cache.graphs.clear()
            self._release()
        if self._gpu:
            torch.cuda.empty_cache()

    def close(self) -> None:
        """Free everything but the caches, which are free when they are dropped."""
        self._passes = None
        self._programs.clear()
        self._room = None
        self._release()
        if self._gpu:
            torch.cuda.empty_cache()

    def _release(self) -> None:
        if self._gpu:
            torch.cuda.synchronize(self.device)  # a cycle may be on its way
        for cycles in self._cycles:
            cycles.release()
        self._sampler.release()

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

    # what other ways to hold a model replace (`half_backend.py`)

    _captures_prompts = True

    def _on_device(self, model: ops.ModelWeights | weights.DeviceWeights) -> weights.DeviceWeights:
        if isinstance(model, weights.DeviceWeights):
            return model
        return weights.load(model, self.device, self._arch)

    def _new_passes(self, model: ops.ModelWeights | weights.DeviceWeights) -> Passes:
        loaded = self._on_device(model)
        return Passes(self.geometry, loaded, loaded.group_size, self.device)

    # a pass

    def _new_logits(self, program: ops.Program, rows: int) -> tuple[CudaLogits | None, Room | None]:
        """Return the logits of a pass and where they go; nothing, if the program makes none."""
        if program[-1].out != "logits":
            return None, None
        assert self._room is not None
        room = self._room
        if rows > sizes.LOGIT_ROWS:
            room = self._new_room(rows, room.values.shape[1])
        else:
            self.free_room()
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
        length = int(host[0, :M].max()) + 1
        return Pass(
            num_rows=M,
            num_logits=0,
            positions=self._inputs[0, :M],
            full_from=self._inputs[1, :M],
            ids=None if own is not None else self._inputs[2, :M],
            rows=own,
            cache=cache,
            tokens=cache.bucket(length),
            length=length,
            logits=None,
        )

    def _replay(self, program: ops.Program, one: Pass, place: int | None) -> None:
        """Run a pass by its graph, which is captured when its kind is met again; or its launches
        one by one. place: of its first logits in the room that all passes share, None in another.
        """
        if one.ids is None:
            self.passes.put_rows(program[0], one)
        launch = partial(self.passes.launch, program, one)
        small = one.num_rows <= sizes.SMALL_ROWS
        if not self._gpu or place is None or not (small or self._captures_prompts):
            launch()
            return
        # how attention of many rows is laid out does not depend on the length
        kind = (
            id(program), one.num_rows, one.num_logits, place, one.tokens if small else 0,
            one.ids is None,
        )  # fmt: skip
        one.cache.graphs.run(kind, launch, self.passes.registers)

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
