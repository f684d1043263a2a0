"""The reference backend: the ops of `kernels/ops.py` in plain torch, the definition.

Invariant: no result depends on the number of rows, on chunking or on the order in which torch
adds. What it does not do: be fast on models beyond a few hundred million weights (each view is
held as one fp32 number a weight).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from edge_runtime.kernels import ops
from edge_runtime.kernels.layout import CHUNK_ROWS, KV_BLOCK, padded
from edge_runtime.kernels.reference import numeric
from edge_runtime.kernels.reference.cache import NestedCache
from edge_runtime.kernels.reference.linear import ExactLinear
from edge_runtime.kernels.sampling import Parameters, choose

Activation = tuple[Tensor, Tensor]  # codes fp32 [M, Kp], scale fp32 [M]


class TorchLogits:
    """fp32 [rows, V] with V cut to the real vocabulary."""

    def __init__(self, logits: Tensor) -> None:
        self._logits = logits

    def wait(self) -> None:
        """Do nothing: `run` waits."""

    def _checked(self) -> Tensor:
        if not bool(torch.isfinite(self._logits).all()):
            raise ops.not_finite()
        return self._logits

    def argmax(self, allowed: Sequence[int] | ops.I64 | None = None) -> list[int]:
        """Return the lowest winning id per row."""
        logits = self._checked()
        if allowed is None:
            return [int(i) for i in logits.numpy().argmax(-1)]  # numpy: first maximum
        ids = np.unique(np.asarray(allowed, dtype=np.int64))
        return [int(ids[i]) for i in logits.numpy()[:, ids].argmax(-1)]

    def sample(
        self,
        row: int,
        position: int,
        prompt: Sequence[int],
        answer: Sequence[int],
        parameters: Parameters,
        allowed: ops.I64 | None = None,
    ) -> int:
        """Choose a token from one row."""
        logits = self._checked()[row].numpy()
        return choose(logits, position, prompt, answer, parameters, allowed)

    def numpy(self) -> ops.F32:
        """Return the logits as a numpy array."""
        return self._checked().numpy()


class ReferenceBackend:
    """Quantised ops. Views of a linear are made on first use and kept."""

    name = "reference"
    chunk_rows = CHUNK_ROWS

    def __init__(
        self,
        weights: ops.ModelWeights,
        geometry: ops.Geometry,
        threads: int | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        """threads: for all of torch in this process; None keeps its choice.

        device: of everything; conversion runs single layers on a GPU, without promising bits there.
        """
        if threads is not None:
            torch.set_num_threads(threads)
        self.weights = weights
        self.geometry = geometry
        self._linears: dict[tuple[str, str], ExactLinear] = {}
        self._device = device

        def brought(array: NDArray[Any]) -> Tensor:
            return torch.from_numpy(array.copy()).to(device)

        self._embedding = brought(weights.embedding)
        self._embedding_scale = brought(weights.embedding_scale)
        self._cos, self._sin = brought(weights.cos), brought(weights.sin)
        self._head_norms = {n: brought(w) for n, w in weights.head_norms.items()}
        self._softmax_scale = float(np.float32(1.0) / np.sqrt(np.float32(geometry.head_dim)))

    @property
    def weights_bytes(self) -> int:
        """Bytes of the embedding and of the views made so far."""
        return self._embedding.nbytes + sum(w.num_bytes for w in self._linears.values())

    def prepare(self, program: ops.Program) -> None:
        """Unpack the views that a program reads."""
        for op in program:
            if isinstance(op, ops.Linear):
                self.linear(op.weight, op.view)

    def new_cache(self, capacity: int) -> NestedCache:
        """Allocate a nested cache."""
        return NestedCache(self.geometry, capacity, self._device)

    @torch.inference_mode()
    def run(self, program: ops.Program, batch: ops.Batch, cache: NestedCache) -> TorchLogits | None:
        """Replay a program; the register "logits", if there is one, is the result."""
        logits = self.replay(program, batch, cache, {}).get("logits")
        return None if logits is None else TorchLogits(logits[:, : self.geometry.num_tokens])

    def replay(
        self, program: ops.Program, batch: ops.Batch, cache: NestedCache, registers: dict[str, Any]
    ) -> dict[str, Any]:
        """Run ops over given registers and return them (conversion runs single layers this way)."""
        for op in program:
            getattr(self, ops.METHODS[type(op)])(op, registers, batch, cache)
        return registers

    def relieve(self, cache: Any, length: int, *, running: bool = False) -> None:
        """Do nothing: a pass keeps nothing here, and torch has no pages to give back."""

    def close(self) -> None:
        """Drop the views."""
        self._linears.clear()

    # ops, in the order of kernels/ops.py

    def _embed(self, op: ops.Embed, reg: dict[str, Any], batch: ops.Batch, _: NestedCache) -> None:
        if batch.ids is None:
            assert batch.rows is not None
            reg[op.out] = torch.from_numpy(batch.rows)
            return
        ids = torch.from_numpy(batch.ids)
        reg[op.out] = self._embedding[ids].float() * self._embedding_scale[ids][:, None]

    def _norm_quantise(
        self, op: ops.NormQuantise, reg: dict[str, Any], _: ops.Batch, __: NestedCache
    ) -> None:
        reg[op.out] = numeric.quantise(numeric.rms_norm(reg[op.x], op.eps))

    def _quantise(
        self, op: ops.Quantise, reg: dict[str, Any], _: ops.Batch, __: NestedCache
    ) -> None:
        reg[op.out] = numeric.quantise(reg[op.x])

    def _linear(self, op: ops.Linear, reg: dict[str, Any], _: ops.Batch, __: NestedCache) -> None:
        codes, scale = reg[op.a]
        linear = self.linear(op.weight, op.view)
        groups, G, _n = linear.codes.shape
        if codes.shape[1] < groups * G:
            codes = torch.nn.functional.pad(codes, (0, groups * G - codes.shape[1]))
        y = linear(codes, scale)
        reg[op.out] = y if op.residual is None else reg[op.residual] + y

    def linear(self, name: str, view: str) -> ExactLinear:
        """Return one view of a linear, making it if need be."""
        key = (name, view)
        if key not in self._linears:
            self._linears[key] = ExactLinear.from_weights(self.weights.linears[name], view)
            self.weights.release()
        return self._linears[key]

    def set_linear(self, name: str, view: str, linear: ExactLinear) -> None:
        """Give a view directly (conversion makes its linears without packing them first)."""
        self._linears[name, view] = linear

    def split_qkv(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[M, (heads + 2·kv)·D] -> q [M, heads, D], k, v [M, kv, D]."""
        g = self.geometry
        q, k, v = qkv.split(
            [g.num_heads * g.head_dim, *([g.num_kv_heads * g.head_dim] * 2)], dim=-1
        )
        return (
            q.unflatten(-1, (g.num_heads, g.head_dim)),
            k.unflatten(-1, (g.num_kv_heads, g.head_dim)),
            v.unflatten(-1, (g.num_kv_heads, g.head_dim)),
        )

    def rotated_qkv(
        self, op: ops.RopeKv, qkv: Tensor, positions: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Split, normalise heads, apply RoPE and R3."""
        q, k, v = self.split_qkv(qkv)
        if op.qk_norm:
            p = f"layers.{op.layer}."
            q = numeric.rms_norm(q, op.eps) * self._head_norms[p + "q_norm"]
            k = numeric.rms_norm(k, op.eps) * self._head_norms[p + "k_norm"]
        cos, sin = self._cos[positions], self._sin[positions]
        q, k = numeric.rope(q, cos, sin), numeric.rope(k, cos, sin)
        if self.geometry.rotate_kv:
            q, k = numeric.hadamard(q), numeric.hadamard(k)
        return q, k, v

    def _rope_kv(
        self, op: ops.RopeKv, reg: dict[str, Any], batch: ops.Batch, cache: NestedCache
    ) -> None:
        positions = torch.from_numpy(batch.positions).to(self._device)
        q, k, v = self.rotated_qkv(op, reg[op.qkv], positions)
        cache.write(op.layer, 0, positions, numeric.kv_nest(k))
        cache.write(op.layer, 1, positions, numeric.kv_nest(v))
        reg[op.out] = q

    def _attention(
        self, op: ops.Attention, reg: dict[str, Any], batch: ops.Batch, cache: NestedCache
    ) -> None:
        q: Tensor = reg[op.q]
        positions = torch.from_numpy(batch.positions).to(self._device)
        length = padded(int(batch.positions.max()) + 1, KV_BLOCK)
        k_high, k_low, k_scale = cache.read(op.layer, 0, length)
        v_high, v_low, v_scale = cache.read(op.layer, 1, length)
        out = torch.empty_like(q)
        token = torch.arange(length, device=self._device)
        for full_from in np.unique(batch.full_from):
            rows = torch.from_numpy(np.flatnonzero(batch.full_from == full_from)).to(self._device)
            full = (token >= int(full_from)).float()[:, None, None]
            out[rows] = attend(
                q[rows],
                positions[rows],
                (k_high + k_low * full, k_scale / 16.0),
                (v_high + v_low * full, v_scale / 16.0),
                self._softmax_scale,
            )
        reg[op.out] = out.flatten(1)

    def _silu_mul_quantise(
        self, op: ops.SiluMulQuantise, reg: dict[str, Any], _: ops.Batch, __: NestedCache
    ) -> None:
        gate, up = reg[op.gate_up].chunk(2, -1)
        reg[op.out] = numeric.quantise(numeric.silu_mul(gate, up))

    def _select_rows(
        self, op: ops.SelectRows, reg: dict[str, Any], batch: ops.Batch, _: NestedCache
    ) -> None:
        x = reg[op.x]
        reg[op.out] = x[x.shape[0] - batch.num_logits :]


def attend(
    q: Tensor,
    positions: Tensor,
    key: tuple[Tensor, Tensor],
    value: tuple[Tensor, Tensor],
    softmax_scale: float,
) -> Tensor:
    """Attention by the contract. q: fp32 [M, heads, D]; key, value: integer codes fp32 [T, Hkv, D]
    and scales fp32 [T, Hkv], T whole blocks; row i sees tokens 0…positions[i]. -> like q.
    """
    M, heads, D = q.shape
    k, ks = key
    v, vs = value
    T, Hkv, _ = k.shape
    group, blocks = heads // Hkv, T // KV_BLOCK
    codes, scale = numeric.quantise(q)
    codes = codes.view(M, Hkv, group, D).transpose(0, 1).reshape(Hkv, M * group, D)
    scale = (scale * softmax_scale).view(M, Hkv, group).transpose(0, 1)[..., None]
    dots = torch.bmm(codes, k.permute(1, 2, 0)).view(Hkv, M, group, T)  # exact: below 2^24
    s = (dots * scale) * ks.T[:, None, None]
    hidden = torch.arange(T, device=q.device) > positions[:, None]
    hidden = hidden[None, :, None]
    s = s.masked_fill(hidden, -torch.inf).unflatten(-1, (blocks, KV_BLOCK))
    block_max = s.amax(-1)  # [Hkv, M, group, blocks], -inf past the row's own block
    p = numeric.exp_nonpositive(s - block_max.clamp_min(-3e38)[..., None])
    block_sum = numeric.lane_sum(p)
    w = p * vs.T.unflatten(-1, (blocks, KV_BLOCK))[:, None, None]
    w = w.masked_fill(hidden.unflatten(-1, (blocks, KV_BLOCK)), 0.0)  # a dead scale may be NaN
    peak = w.amax(-1)
    peak = torch.where(peak < numeric.TINY, torch.zeros_like(peak), peak)
    inverse = torch.where(peak > 0, torch.full_like(peak, 32767.0) / peak, torch.zeros_like(peak))
    fixed = torch.round(w * inverse[..., None])  # integers 0…32767
    fixed = fixed.permute(0, 3, 1, 2, 4).reshape(Hkv * blocks, M * group, KV_BLOCK)
    codes_v = v.permute(1, 0, 2).reshape(Hkv * blocks, KV_BLOCK, D)
    sums = torch.bmm(fixed.double(), codes_v.double()).float()  # exact before the cast: below 2^29
    step = (peak / 32767.0).permute(0, 3, 1, 2)[..., None]
    block_out = sums.view(Hkv, blocks, M, group, D) * step
    weight = numeric.exp_nonpositive(block_max - block_max.amax(-1, keepdim=True))
    out = torch.zeros(Hkv, M, group, D, device=q.device)
    total = torch.zeros(Hkv, M, group, device=q.device)
    for b in range(blocks):
        c = weight[..., b]
        out = out + block_out[:, b] * c[..., None]
        total = total + block_sum[..., b] * c
    return (out / total[..., None]).transpose(0, 1).reshape(M, heads, D)
