"""A pass over a model on the device: its rows, its cache, and how each op is launched.

Invariant: what a pass reads of its batch (ids, positions, first full tokens) lies on the device, in
tensors that stay where they are, so that a graph of its launches serves every pass of its kind: the
same program, rows and bucket of lengths. A launch waits for nothing and allocates nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from edge_runtime.kernels import ops
from edge_runtime.kernels.cuda import activations, head, launch, sizes
from edge_runtime.kernels.cuda.activations import Activation, SiluRoom
from edge_runtime.kernels.cuda.attention import Workspace, attention
from edge_runtime.kernels.cuda.cache import NestedCache
from edge_runtime.kernels.cuda.embedding import embed
from edge_runtime.kernels.cuda.graphs import Graphs
from edge_runtime.kernels.cuda.kv import rope_kv
from edge_runtime.kernels.cuda.linear import (
    DeviceLinear,
    Digits,
    digits_of,
    linear,
    takes_digits,
)
from edge_runtime.kernels.cuda.registers import Registers
from edge_runtime.kernels.cuda.weights import DeviceWeights
from edge_runtime.kernels.layout import padded

LEAST_BUCKET = 512  # tokens; buckets double from here


class Buckets:
    """A cache's capacity in buckets of lengths, and the graphs of passes over it."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.graphs = Graphs()

    def bucket(self, length: int) -> int:
        """Tokens that the launches of a pass are laid out for, which reads `length` at most."""
        size = LEAST_BUCKET
        while size < length:
            size *= 2
        return min(size, padded(self.capacity, 64))


class CudaCache(NestedCache, Buckets):
    """A nested cache with what passes over it need: attention's workspace, and their graphs."""

    def __init__(self, geometry: ops.Geometry, capacity: int, device: torch.device) -> None:
        NestedCache.__init__(self, geometry, capacity, device)
        Buckets.__init__(self, capacity)
        self.workspace = Workspace(
            sizes.SMALL_ROWS, geometry.num_heads, geometry.head_dim, capacity, device
        )


@dataclass(slots=True)
class Pass:
    """The rows of a chunk, at most, on their way through a program.

    positions, full_from: int32 [rows]; ids: likewise, or None with `rows` fp32 [rows, H] on the
    host; tokens: the bucket; logits: where those of the last num_logits rows go; length: tokens of
    the text with this pass, where the host knows it.
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
    length: int | None = None
    registers: dict[str, Any] = field(default_factory=dict)  # Tensor or Activation by name


class Passes:
    """Launches programs over the weights of one model."""

    def __init__(
        self, geometry: ops.Geometry, weights: DeviceWeights, group_size: int, device: torch.device
    ) -> None:
        self.geometry, self.weights = geometry, weights
        self._group_size, self._device = group_size, device
        self.registers = self.new_registers()

    def relieve(self) -> None:
        """Drop the registers: programs are to be added to the new ones."""
        self.registers = self.new_registers()

    def new_registers(self) -> Registers:
        """Return registers without any."""
        rows = sizes.chunk_rows(launch.arch(self._device))
        return Registers(self._group_size, self._device, rows)

    def linear_of(self, op: ops.Linear) -> DeviceLinear:
        """Return the matrix of an op."""
        return self.weights.linears[op.weight]

    def launch(self, program: ops.Program, one: Pass) -> None:
        """Launch the ops of a pass, and the argmax of its logits."""
        for op, following in zip(program, (*program[1:], None), strict=True):
            if isinstance(op, ops.SelectRows) and not one.num_logits:
                return  # a part of a batch without rows whose logits are asked for
            self._launch_op(op, following, one)
        if one.logits is not None:
            values, choice = one.logits
            head.argmax(values, self.geometry.num_tokens, out=choice)

    def _launch_op(self, op: ops.Op, following: ops.Op | None, one: Pass) -> None:
        getattr(self, ops.METHODS[type(op)])(op, one)

    def put_rows(self, op: ops.Op, one: Pass) -> None:
        """Copy embedding rows from the host to where the first op would put them."""
        assert one.rows is not None
        self._first(op, one).copy_(one.rows)

    def _first(self, op: ops.Op, one: Pass) -> Tensor:
        """Where the first op of a program writes."""
        return self.registers.floats(op.out, self.geometry.hidden_size, one.num_rows)

    # ops, in the order of kernels/ops.py

    def _embed(self, op: ops.Embed, one: Pass) -> None:
        out = self._first(op, one)
        if one.ids is not None:  # else `put_rows` was here
            embed(one.ids, self.weights.embedding, self.weights.embedding_scale, out=out)
        one.registers[op.out] = out

    def _norm_quantise(self, op: ops.NormQuantise, one: Pass) -> None:
        x: Tensor = one.registers[op.x]
        out = self.registers.quantised(op.out, x.shape[1], x.shape[0])
        one.registers[op.out] = activations.norm_quantise(x, op.eps, self._group_size, out)

    def _quantise(self, op: ops.Quantise, one: Pass) -> None:
        x: Tensor = one.registers[op.x]
        out = self.registers.quantised(op.out, x.shape[1], x.shape[0])
        one.registers[op.out] = activations.quantise(x, self._group_size, out)

    def _linear(self, op: ops.Linear, one: Pass) -> None:
        a: Activation = one.registers[op.a]
        weight, M = self.linear_of(op), a.codes.shape[0]
        if op.out == "logits":
            assert one.logits is not None
            out = one.logits[0]
        else:
            out = self.registers.floats(op.out, weight.num_outputs, M)
        sums: Tensor | Digits = a.sums
        if takes_digits(M, self._group_size):
            sums = digits_of(a.sums, self.registers.digits(a.sums))
        residual = None if op.residual is None else one.registers[op.residual]
        one.registers[op.out] = linear(
            a.codes, a.scale, sums, weight, op.view, out=out, residual=residual
        )

    def _head_norms(self, op: ops.RopeKv) -> tuple[Tensor, Tensor] | None:
        """Weights fp32 [D] of the norms of q and of k, where a model has them."""
        if not op.qk_norm:
            return None
        norms, prefix = self.weights.head_norms, f"layers.{op.layer}."
        return norms[prefix + "q_norm"], norms[prefix + "k_norm"]

    def _rope_kv(self, op: ops.RopeKv, one: Pass) -> None:
        g, w = self.geometry, self.weights
        out = self.registers.floats(op.out, g.num_heads * g.head_dim, one.num_rows)
        rope_kv(
            one.registers[op.qkv],
            one.positions,
            w.cos,
            w.sin,
            one.cache.layer(op.layer),
            out.view(one.num_rows, g.num_heads, g.head_dim),
            head_norms=self._head_norms(op),
            eps=op.eps,
            rotate_kv=g.rotate_kv,
        )
        one.registers[op.out] = out

    def _attention(self, op: ops.Attention, one: Pass) -> None:
        g = self.geometry
        shape = (one.num_rows, g.num_heads, g.head_dim)
        out = self.registers.floats(op.out, g.num_heads * g.head_dim, one.num_rows)
        attention(
            one.registers[op.q].view(shape),
            one.positions,
            one.full_from,
            one.cache.layer(op.layer),
            out.view(shape),
            one.cache.workspace,
            max_tokens=one.tokens,
        )
        one.registers[op.out] = out

    def _silu_mul_quantise(self, op: ops.SiluMulQuantise, one: Pass) -> None:
        x: Tensor = one.registers[op.gate_up]
        out = self.registers.quantised(op.out, x.shape[1] // 2, x.shape[0])
        room = SiluRoom(x, self.registers.peaks(x))  # the product lies over the gate
        one.registers[op.out] = activations.silu_mul_quantise(x, self._group_size, out, room)

    def _select_rows(self, op: ops.SelectRows, one: Pass) -> None:
        x: Tensor = one.registers[op.x]
        one.registers[op.out] = x[x.shape[0] - one.num_logits :]
