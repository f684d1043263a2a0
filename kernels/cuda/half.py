"""The unquantised model in 16 bits: weights on the device, and how each op is launched.

The yardstick of speed and memory, in the same engine: the same graphs, cycles and choices, cuBLAS
for products, attention of `half_attention.py`, norms, RoPE and silu·mul one kernel each. A pass
allocates nothing but what SDPA and cuBLAS take for a prompt, and waits for nothing.

Numbers are fp16, or bf16 for qwen2 and qwen3: their activations leave fp16's range (Qwen2-7B in
fp16 gives NaN: github.com/QwenLM/Qwen3, issues 761 and 868). Both take the same memory and time.
Norm weights stay apart, so that a tied embedding is there once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from edge_runtime.errors import UsageError
from edge_runtime.kernels import ops
from edge_runtime.kernels.cuda import half_attention, sizes
from edge_runtime.kernels.cuda.half_attention import HalfCache
from edge_runtime.kernels.cuda.launch import Kernel, cdiv, power_of_two
from edge_runtime.kernels.cuda.memory import Block, asking_for
from edge_runtime.kernels.cuda.passes import Pass, Passes
from edge_runtime.kernels.cuda.weights import COPIED_BYTES, HINT

NORM = Kernel("half_kernels", "norm16")
SILU_MUL = Kernel("half_kernels", "silu_mul16")
SILU_BLOCK = 1024
WIDE_RANGE = ("qwen2", "qwen3")  # architectures that want the exponents of bf16


@dataclass(frozen=True, slots=True, kw_only=True)
class HalfModel:
    """A model to be brought to a device. shapes: of every tensor by name (`footprint.half_shapes`),
    in order; rows(name): its rows in pieces, fp32 [n, …]; cos, sin: fp32 [T, D/2]."""

    architecture: str
    shapes: Mapping[str, tuple[int, ...]]
    rows: Callable[[str], Iterable[Tensor]]
    cos: ops.F32
    sin: ops.F32

    @property
    def dtype(self) -> torch.dtype:
        """Of all tensors on the device."""
        return torch.bfloat16 if self.architecture in WIDE_RANGE else torch.float16


@dataclass(frozen=True, slots=True)
class HalfLinear:
    """weight: [N, K]; bias: [N]; norm: [K], of the RMSNorm before it."""

    weight: Tensor
    bias: Tensor | None
    norm: Tensor | None

    @property
    def num_outputs(self) -> int:
        """N."""
        return self.weight.shape[0]


@dataclass(frozen=True, slots=True)
class HalfWeights:
    """All of `HalfModel` on one device; num_bytes: of all of it."""

    linears: dict[str, HalfLinear]
    embedding: Tensor
    cos: Tensor
    sin: Tensor
    head_norms: dict[str, Tensor]
    num_bytes: int

    @property
    def dtype(self) -> torch.dtype:
        """Of all but the rope tables."""
        return self.embedding.dtype


def load(model: HalfModel, device: torch.device, dtype: torch.dtype) -> HalfWeights:
    """Bring a model to a device, one tensor after the other. Raises BudgetError, UsageError."""

    def fill(target: Tensor, name: str) -> None:
        _fill(target, model.rows(name), name)

    return _made(model, device, dtype, fill)


def random_weights(model: HalfModel, device: torch.device, dtype: torch.dtype) -> HalfWeights:
    """Make random weights of a model's shapes on the device, for timing: nothing is read. Matrices
    keep the size of numbers, so that all layers stay finite. Raises BudgetError."""

    def fill(target: Tensor, name: str) -> None:
        if target.ndim == 2:
            target.normal_(std=1.0 if name == "embed" else target.shape[1] ** -0.5)
        else:
            target.fill_(name.endswith("norm"))

    return _made(model, device, dtype, fill)


def _made(
    model: HalfModel,
    device: torch.device,
    dtype: torch.dtype,
    fill: Callable[[Tensor, str], None],
) -> HalfWeights:
    needed = {
        name: sizes.piece(math.prod(shape) * dtype.itemsize) for name, shape in model.shapes.items()
    }
    rope = 2 * sizes.piece(model.cos.nbytes)
    total = sum(needed.values()) + rope
    put: dict[str, Tensor] = {}
    with asking_for("the weights", total, device, HINT):
        for names in _by_layer(model.shapes):
            block = Block(sum(needed[name] for name in names), device)
            for name in names:
                put[name] = block.take(model.shapes[name], dtype)
                fill(put[name], name)
        block = Block(rope, device)
        cos, sin = (block.put(torch.from_numpy(x)) for x in (model.cos, model.sin))
    embedding = put.pop("embed")
    matrices = {name: w for name, w in put.items() if w.ndim == 2} | {
        "head": put.get("head", embedding)
    }
    linears = {
        name: HalfLinear(w, put.get(name + ".bias"), put.get(name + ".norm"))
        for name, w in matrices.items()
    }
    norms = {name: w for name, w in put.items() if name.endswith(("q_norm", "k_norm"))}
    return HalfWeights(linears, embedding, cos, sin, norms, total)


def _by_layer(names: Iterable[str]) -> Iterator[list[str]]:
    """Cut names, in order, where "layers.N" changes; what is of no layer comes alone."""
    group: list[str] = []
    for name in names:
        layer = name.split(".")[:2] if name.startswith("layers.") else [name]
        if group and group[-1].split(".")[: len(layer)] != layer:
            yield group
            group = []
        group.append(name)
    yield group


def _fill(target: Tensor, parts: Iterable[Tensor], name: str) -> None:
    """Copy rows, in pieces that a conversion of them may take on the host."""
    at = 0
    for part in parts:
        some = max(1, COPIED_BYTES // max(1, part.nbytes // len(part)))
        for first in range(0, len(part), some):
            piece = part[first : first + some].to(target.dtype)
            if not bool(piece.isfinite().all()):
                raise UsageError(f"{name}: numbers beyond the range of {target.dtype}")
            target[at : at + len(piece)].copy_(piece)
            at += len(piece)
    assert at == len(target), (name, at, target.shape)


class HalfRegisters:
    """By name and width: [rows, width] of 16 bits, and the logits of the rows that have a place."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self._dtype, self._device = dtype, device
        self._tensors: dict[tuple[str, int], Tensor] = {}
        self.num_bytes = 0

    def add(self, program: ops.Program, geometry: ops.Geometry, outputs: Mapping[str, int]) -> None:
        """Make what a program writes and is not there yet. outputs: of linears by name. Raises
        BudgetError."""
        wanted = dict.fromkeys(_written(program, geometry, outputs))
        missing = [key for key in wanted if key not in self._tensors]
        shapes = {key: (_rows(key[0]), key[1]) for key in missing}
        size = sum(sizes.piece(math.prod(s) * self._dtype.itemsize) for s in shapes.values())
        with asking_for("the registers of a pass", size, self._device, HINT):
            block = Block(size, self._device)
        for key, shape in shapes.items():
            self._tensors[key] = block.take(shape, self._dtype)
        self.num_bytes += size

    def of(self, name: str, width: int, rows: int) -> Tensor:
        """Return [rows, width]."""
        return self._tensors[name, width][:rows]


def _rows(name: str) -> int:
    return sizes.LOGIT_ROWS if name == "logits" else sizes.HALF_CHUNK_ROWS


def _written(
    program: ops.Program, geometry: ops.Geometry, outputs: Mapping[str, int]
) -> Iterator[tuple[str, int]]:
    """Yield name and width of what ops write."""
    widths: dict[str, int] = {}
    for op in program:
        match op:
            case ops.Embed():
                width = geometry.hidden_size
            case ops.NormQuantise(x):
                width = widths[x]
            case ops.SiluMulQuantise(x):
                width = widths[x] // 2
            case ops.Linear(_, weight):
                width = outputs[weight]
            case ops.RopeKv() | ops.Attention():
                width = geometry.num_heads * geometry.head_dim
            case ops.Quantise(x) | ops.SelectRows(x):
                widths[op.out] = widths[x]
                continue  # another name for it
        widths[op.out] = width
        yield op.out, width


class HalfPasses(Passes):
    """Launches programs over 16-bit weights."""

    weights: Any  # HalfWeights
    registers: Any  # HalfRegisters

    def __init__(
        self, geometry: ops.Geometry, weights: HalfWeights, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._dtype = dtype
        super().__init__(geometry, cast(Any, weights), 0, device)

    def new_registers(self) -> Any:
        """Return registers without any."""
        return HalfRegisters(self._dtype, self._device)

    def _launch_op(self, op: ops.Op, following: ops.Op | None, one: Pass) -> None:
        if isinstance(op, ops.NormQuantise):  # its weights are with the linear that it feeds
            assert isinstance(following, ops.Linear)
            self._norm(op, one, following.weight)
        else:
            super()._launch_op(op, following, one)

    # ops, in the order of kernels/ops.py

    def _first(self, op: ops.Op, one: Pass) -> Tensor:
        return cast(Tensor, self.registers.of(op.out, self.geometry.hidden_size, one.num_rows))

    def _embed(self, op: ops.Embed, one: Pass) -> None:
        out = self._first(op, one)
        if one.ids is not None:  # else `put_rows` was here
            torch.index_select(self.weights.embedding, 0, one.ids, out=out)
        one.registers[op.out] = out

    def _norm(self, op: ops.NormQuantise, one: Pass, feeds: str) -> None:
        x: Tensor = one.registers[op.x]
        M, K = x.shape
        out = self.registers.of(op.out, K, M)
        block = power_of_two(K)
        NORM[(M,)](
            x, self.weights.linears[feeds].norm, out, K, op.eps,
            BLOCK=block, num_warps=min(max(block // 256, 1), 16),
        )  # fmt: skip
        one.registers[op.out] = out

    def _quantise(self, op: ops.Quantise, one: Pass) -> None:
        one.registers[op.out] = one.registers[op.x]

    def _linear(self, op: ops.Linear, one: Pass) -> None:
        a: Tensor = one.registers[op.a]
        linear, M = self.weights.linears[op.weight], a.shape[0]
        transposed = linear.weight.T
        if op.out == "logits":
            assert one.logits is not None
            room = None
            if M <= sizes.LOGIT_ROWS:
                room = self.registers.of("logits", linear.num_outputs, M)
            one.logits[0].copy_(torch.mm(a, transposed, out=room))
            return
        out = self.registers.of(op.out, linear.num_outputs, M)
        if op.residual is None:
            torch.mm(a, transposed, out=out)
        elif one.registers[op.residual].data_ptr() == out.data_ptr():
            out.addmm_(a, transposed)
        else:
            torch.addmm(one.registers[op.residual], a, transposed, out=out)
        if linear.bias is not None and not op.weight.endswith(".qkv"):  # that one is RoPE's
            out += linear.bias
        one.registers[op.out] = out

    def _rope_kv(self, op: ops.RopeKv, one: Pass) -> None:
        g, w = self.geometry, self.weights
        out = self.registers.of(op.out, g.num_heads * g.head_dim, one.num_rows)
        half_attention.rope_kv(
            one.registers[op.qkv],
            one.positions,
            w.cos,
            w.sin,
            cast(HalfCache, one.cache),
            op.layer,
            out.view(one.num_rows, g.num_heads, g.head_dim),
            bias=w.linears[f"layers.{op.layer}.qkv"].bias,
            head_norms=self._head_norms(op),
            eps=op.eps,
        )
        one.registers[op.out] = out

    def _attention(self, op: ops.Attention, one: Pass) -> None:
        out = self.registers.of(op.out, one.registers[op.q].shape[1], one.num_rows)
        attend(one.registers[op.q], op.layer, one, self.geometry, out)
        one.registers[op.out] = out

    def _silu_mul_quantise(self, op: ops.SiluMulQuantise, one: Pass) -> None:
        x: Tensor = one.registers[op.gate_up]
        M, F = x.shape[0], x.shape[1] // 2
        out = self.registers.of(op.out, F, M)
        SILU_MUL[M, cdiv(F, SILU_BLOCK)](x, out, F, BLOCK=SILU_BLOCK, num_warps=4)
        one.registers[op.out] = out


def attend(q: Tensor, layer: int, one: Pass, geometry: ops.Geometry, out: Tensor) -> None:
    """Attention of q [rows, heads·D] over a plain cache into `out` of as many columns."""
    shape = (one.num_rows, geometry.num_heads, geometry.head_dim)
    half_attention.attention(
        q.view(shape), one.positions, cast(HalfCache, one.cache), layer, out.view(shape),
        bucket=one.tokens, length=one.length,
    )  # fmt: skip
