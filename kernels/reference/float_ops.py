"""The same programs with an identity quantiser: the unquantised model, in fp32 torch.

Invariant: it runs what `model.transformer` emits for the `fp` view, so the graph that is checked
against transformers is the graph that ships. What it does not do: promise bits; sums are torch's.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from edge_runtime.kernels import ops
from edge_runtime.kernels.layout import CHUNK_ROWS
from edge_runtime.kernels.reference import numeric
from edge_runtime.kernels.reference.cache import PlainCache
from edge_runtime.kernels.reference.ops import TorchLogits


@dataclass(frozen=True, slots=True, kw_only=True)
class FloatWeights:
    """fp32: matrices [N, K] and optional biases [N] by linear name, embedding [V, H], rope tables
    [T, D/2], head norms [D]. Norm weights are already folded in."""

    matrices: dict[str, Tensor]
    embedding: Tensor
    cos: Tensor
    sin: Tensor
    biases: dict[str, Tensor] = field(default_factory=dict)
    head_norms: dict[str, Tensor] = field(default_factory=dict)


class FloatBackend:
    """Unquantised ops."""

    name = "reference"
    chunk_rows = CHUNK_ROWS

    def __init__(self, weights: FloatWeights, geometry: ops.Geometry) -> None:
        self.weights = weights
        self.geometry = geometry

    @property
    def weights_bytes(self) -> int:
        """Bytes of all tensors."""
        return self.weights.embedding.nbytes + sum(w.nbytes for w in self.weights.matrices.values())

    def prepare(self, program: ops.Program) -> None:
        """Nothing to do: the matrices are as they were given."""

    def new_cache(self, capacity: int) -> PlainCache:
        """Allocate an fp32 cache."""
        return PlainCache(self.geometry, capacity, self.weights.cos.device)

    @torch.inference_mode()
    def run(self, program: ops.Program, batch: ops.Batch, cache: PlainCache) -> TorchLogits | None:
        """Replay a program."""
        logits = self.replay(program, batch, cache, {}).get("logits")
        return None if logits is None else TorchLogits(logits[:, : self.geometry.num_tokens])

    def replay(
        self, program: ops.Program, batch: ops.Batch, cache: PlainCache, registers: dict[str, Any]
    ) -> dict[str, Any]:
        """Run ops over given registers and return them."""
        for op in program:
            run = getattr(self, ops.METHODS[type(op)])
            registers[op.out] = run(op, registers, batch, cache)
        return registers

    def relieve(self, cache: Any, length: int, *, running: bool = False) -> None:
        """Do nothing: a pass keeps nothing here, and torch has no pages to give back."""

    def close(self) -> None:
        """Drop the matrices."""
        self.weights.matrices.clear()

    def _embed(self, op: ops.Embed, reg: dict[str, Any], batch: ops.Batch, _: PlainCache) -> Tensor:
        if batch.ids is None:
            return torch.from_numpy(batch.rows)
        return self.weights.embedding[torch.from_numpy(batch.ids)]

    def _norm_quantise(
        self, op: ops.NormQuantise, reg: dict[str, Any], _: ops.Batch, __: PlainCache
    ) -> Tensor:
        return numeric.rms_norm(reg[op.x], op.eps)

    def _quantise(
        self, op: ops.Quantise, reg: dict[str, Any], _: ops.Batch, __: PlainCache
    ) -> Tensor:
        x: Tensor = reg[op.x]
        return x

    def _linear(self, op: ops.Linear, reg: dict[str, Any], _: ops.Batch, __: PlainCache) -> Tensor:
        y = torch.nn.functional.linear(
            reg[op.a], self.weights.matrices[op.weight], self.weights.biases.get(op.weight)
        )
        return y if op.residual is None else reg[op.residual] + y

    def _rope_kv(
        self, op: ops.RopeKv, reg: dict[str, Any], batch: ops.Batch, cache: PlainCache
    ) -> Tensor:
        g = self.geometry
        positions = torch.from_numpy(batch.positions).to(reg[op.qkv].device)
        heads = reg[op.qkv].unflatten(-1, (g.num_heads + 2 * g.num_kv_heads, g.head_dim))
        q, k, v = heads.split([g.num_heads, g.num_kv_heads, g.num_kv_heads], 1)
        if op.qk_norm:
            p = f"layers.{op.layer}."
            q = numeric.rms_norm(q, op.eps) * self.weights.head_norms[p + "q_norm"]
            k = numeric.rms_norm(k, op.eps) * self.weights.head_norms[p + "k_norm"]
        cos, sin = self.weights.cos[positions], self.weights.sin[positions]
        cache.kv[op.layer, 0, positions] = numeric.rope(k, cos, sin)
        cache.kv[op.layer, 1, positions] = v
        return numeric.rope(q, cos, sin)

    def _attention(
        self, op: ops.Attention, reg: dict[str, Any], batch: ops.Batch, cache: PlainCache
    ) -> Tensor:
        q: Tensor = reg[op.q]
        positions = torch.from_numpy(batch.positions).to(q.device)
        length = int(batch.positions.max()) + 1
        group = self.geometry.num_heads // self.geometry.num_kv_heads
        k, v = cache.kv[op.layer, :, :length].repeat_interleave(group, 2)
        visible = torch.arange(length, device=q.device) <= positions[:, None]
        out = torch.nn.functional.scaled_dot_product_attention(
            q.transpose(0, 1)[None],
            k.transpose(0, 1)[None],
            v.transpose(0, 1)[None],
            attn_mask=visible,
        )
        return out[0].transpose(0, 1).flatten(1)

    def _silu_mul_quantise(
        self, op: ops.SiluMulQuantise, reg: dict[str, Any], _: ops.Batch, __: PlainCache
    ) -> Tensor:
        gate, up = reg[op.gate_up].chunk(2, -1)
        return numeric.silu_mul(gate, up)

    def _select_rows(
        self, op: ops.SelectRows, reg: dict[str, Any], batch: ops.Batch, _: PlainCache
    ) -> Tensor:
        x: Tensor = reg[op.x]
        return x[-batch.num_logits :]
