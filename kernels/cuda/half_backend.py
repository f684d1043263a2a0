"""Other ways to hold a model behind the same backend, to compare with the nest.

    HalfBackend       the unquantised model in 16 bits (`half.py`), a plain 16-bit cache
    Kv16Backend       nested linears, a plain fp16 cache (W8A8 with KV16)
    TwoCopiesBackend  nested linears, and a W4 draft with planes of its own beside them

Invariant: what is launched, captured and chosen is `backend.py`'s; tokens of two copies are the
nest's bit for bit, of the others near those of the fp and w8 views of the reference.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from edge_runtime.kernels import ops
from edge_runtime.kernels.cuda import graphs, half, half_attention, sizes, weights
from edge_runtime.kernels.cuda.backend import CACHE_HINT, CudaBackend
from edge_runtime.kernels.cuda.half import HalfModel, HalfPasses, HalfWeights
from edge_runtime.kernels.cuda.half_attention import HalfCache
from edge_runtime.kernels.cuda.linear import DeviceLinear
from edge_runtime.kernels.cuda.memory import asking_for
from edge_runtime.kernels.cuda.passes import Pass, Passes


class _PlainCache(CudaBackend):
    """What backends over a plain cache share."""

    cache_dtype = torch.float16
    _captures_prompts = False  # attention of many rows is torch's, which is told the length

    def new_cache(self, capacity: int) -> Any:
        """Allocate a cache. Raises BudgetError."""
        num_bytes = sizes.half_cache(self.geometry, capacity)
        with asking_for(f"a cache of {capacity} tokens", num_bytes, self.device, CACHE_HINT):
            return HalfCache(self.geometry, capacity, self.cache_dtype, self.device)

    def run(self, program: ops.Program, batch: ops.Batch, cache: Any) -> Any:
        """Replay a program; many rows are those of one text. Raises BudgetError."""
        first, M = int(batch.positions[0]), len(batch.positions)
        assert M <= sizes.SMALL_ROWS or int(batch.positions[-1]) == first + M - 1
        return super().run(program, batch, cache)


class HalfBackend(_PlainCache):
    """The unquantised model. Raises BudgetError."""

    def __init__(
        self,
        model: HalfModel | HalfWeights,
        geometry: ops.Geometry,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """model: to be brought to the device, or there already; dtype: its own by default."""
        self.cache_dtype = dtype or model.dtype
        super().__init__(cast(Any, model), geometry, device)
        if self._gpu:
            self._warm_up()

    @property
    def chunk_rows(self) -> int:
        """Rows of a prompt that pass together, at most."""
        return sizes.HALF_CHUNK_ROWS

    def _new_passes(self, model: Any) -> Passes:
        loaded = model
        if not isinstance(loaded, HalfWeights):
            loaded = half.load(loaded, self.device, self.cache_dtype)
        return HalfPasses(self.geometry, loaded, self.cache_dtype, self.device)

    def _warm_up(self) -> None:
        """Let cuBLAS take its room of both streams now, outside of any graph."""
        x = torch.zeros(16, 16, dtype=self.cache_dtype, device=self.device)
        for stream in (torch.cuda.current_stream(), graphs.capture_stream()):
            with torch.cuda.stream(stream):
                torch.mm(x, x)
        torch.cuda.synchronize()


class Kv16Passes(Passes):
    """Passes whose attention goes over a plain fp16 cache. q lies in its fp32 register's room; R3
    is left out, since a rotation of q and k alike changes no product."""

    def _rope_kv(self, op: ops.RopeKv, one: Pass) -> None:
        g, w = self.geometry, self.weights
        width, M = g.num_heads * g.head_dim, one.num_rows
        room: Tensor = self.registers.floats(op.out, width, M)
        out = room.view(-1).view(torch.float16)[: M * width].view(M, width)
        half_attention.rope_kv(
            one.registers[op.qkv],
            one.positions,
            w.cos,
            w.sin,
            cast(HalfCache, one.cache),
            op.layer,
            out.view(M, g.num_heads, g.head_dim),
            head_norms=self._head_norms(op),
            eps=op.eps,
        )
        one.registers[op.out] = out

    def _attention(self, op: ops.Attention, one: Pass) -> None:
        q: Tensor = one.registers[op.q]
        out = self.registers.floats(op.out, q.shape[1], one.num_rows)
        half.attend(q, op.layer, one, self.geometry, out)
        one.registers[op.out] = out


class Kv16Backend(_PlainCache):
    """W8A8 with KV16."""

    def _new_passes(self, model: ops.ModelWeights | weights.DeviceWeights) -> Passes:
        loaded = self._on_device(model)
        return Kv16Passes(self.geometry, loaded, loaded.group_size, self.device)


class TwoCopiesPasses(Passes):
    """Passes whose w4 view has planes of its own."""

    draft: dict[str, DeviceLinear]

    def linear_of(self, op: ops.Linear) -> DeviceLinear:
        """Return the copy that an op reads."""
        return (self.draft if op.view == "w4" else self.weights.linears)[op.weight]


class TwoCopiesBackend(CudaBackend):
    """A W4 draft beside the W8 target."""

    def _new_passes(self, model: ops.ModelWeights | weights.DeviceWeights) -> Passes:
        assert isinstance(model, ops.ModelWeights)
        loaded = self._on_device(model)
        passes = TwoCopiesPasses(self.geometry, loaded, loaded.group_size, self.device)
        passes.draft, self._draft_bytes = weights.load_draft(model, loaded, self.device, self._arch)
        return passes

    @property
    def weights_bytes(self) -> int:
        """Bytes of both copies, embedding, norms and rope tables on the device."""
        return 0 if self._passes is None else super().weights_bytes + self._draft_bytes
