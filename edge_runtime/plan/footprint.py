"""What a model takes in memory, line by line, for every way of holding it: the one account.

Invariant: whole bytes, and what engine, bench and plan say comes from here. Memory for a context
comes in blocks of tokens, so the longest context within a limit is exact: it fits and one block
more does not. Lines that a layout does not have are left out.

Layouts: `nest` (base and refinement planes, nested KV), `w4` (the base plane alone, nested KV),
`w8` (8-bit weights, KV16), `fp16` (16-bit weights, KV16), `two_copies` (a W4 draft beside a W8
target, nested KV), `fp` (the unquantised view: fp32 in torch).
"""

from __future__ import annotations

import math
from typing import Literal

import msgspec

from edge_runtime.format.spec import ModelSpec
from edge_runtime.kernels.cuda import sizes
from edge_runtime.kernels.layout import (
    CHUNK_ROWS,
    KV_BLOCK,
    MAX_GAMMA,
    ROW_TILE,
    group_size_for,
    kv_half_per_token_bytes,
    kv_plain_per_token_bytes,
    kv_stored_per_token_bytes,
    padded,
)

Layout = Literal["nest", "w4", "w8", "fp16", "two_copies", "fp"]
LAYOUTS: tuple[Layout, ...] = ("fp16", "w8", "two_copies", "nest", "w4")  # that are compared
TORCH_RUNTIME_BYTES = 500 << 20  # interpreter, torch, tokenizer, scratch, what the allocator keeps
CPU_RUNTIME_BYTES = 48 << 20  # interpreter and libraries, measured
TOKENIZER_BYTES = 350  # an id of the vocabulary (measured: 17 MiB for 49,152)
LOOKUP_BYTES = 600  # a token of context: its id and the n-grams that end in it, as Python objects
CUDA_RUNTIME_BYTES = 1 << 30  # context, libraries, interpreter: assumed where no profile knows it
DISCRETE_RUNTIME_BYTES = sizes.CONTEXT_BYTES + sizes.CODE_BYTES
LEAST_RESERVE_BYTES = 64 << 20  # left free where no more is asked for
LEAST_RESERVE_SHARE = 50  # and never more of a machine than this part by itself
QUERIES = 32  # query vectors that a thread takes through attention together


class Footprint(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes of one layout on one backend: lines that do not depend on the context, and per block.

    What is of a fixed size and grows as well (workspace, runtime) has a part in both. The embedding
    is counted whole, though only rows that are used become resident.
    """

    layout: str
    weights_bytes: int  # of the fixed bytes
    fixed: dict[str, int]
    per_block: dict[str, int]
    block: int = KV_BLOCK  # tokens

    @property
    def fixed_bytes(self) -> int:
        """Bytes without any context."""
        return sum(self.fixed.values())

    @property
    def block_bytes(self) -> int:
        """Bytes of one block of tokens."""
        return sum(self.per_block.values())

    def lines(self, context: int) -> dict[str, int]:
        """Return the account for a context of so many tokens."""
        blocks = -(-context // self.block)
        return self.fixed | {
            name: self.fixed.get(name, 0) + size * blocks for name, size in self.per_block.items()
        }

    def total_bytes(self, context: int) -> int:
        """Return the sum of the account."""
        return sum(self.lines(context).values())

    def max_context(self, limit_bytes: int) -> int:
        """Return the most tokens, in whole blocks, whose account is within a limit; 0: none."""
        return max(0, limit_bytes - self.fixed_bytes) // self.block_bytes * self.block


def linear_shapes(spec: ModelSpec) -> dict[str, tuple[int, int]]:
    """Return [out, in] of every fused linear by name, in execution order, the head last."""
    H, F = spec.hidden_size, spec.intermediate_size
    shapes: dict[str, tuple[int, int]] = {}
    for i in range(spec.num_layers):
        p = f"layers.{i}."
        shapes[p + "qkv"] = (spec.q_size + 2 * spec.kv_size, H)
        shapes[p + "o"] = (H, spec.q_size)
        shapes[p + "gate_up"] = (2 * F, H)
        shapes[p + "down"] = (H, F)
    shapes["head"] = (spec.vocab_size, H)
    return shapes


def half_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the unquantised model's tensors, matrices fused as linears are, in the
    order in which they are brought to a device. ".norm" belongs to the linear that it feeds; a tied
    head is not there."""
    H, matrices = spec.hidden_size, linear_shapes(spec)
    head = matrices.pop("head")
    shapes: dict[str, tuple[int, ...]] = {"embed": head}
    if not spec.tied_embedding:
        shapes["head"] = head
    shapes["head.norm"] = (H,)
    biases = {"qkv": spec.qkv_bias, "o": spec.o_bias}
    for name, shape in matrices.items():
        prefix, _, role = name.rpartition(".")
        shapes[name] = shape
        if biases.get(role, spec.mlp_bias):
            shapes[name + ".bias"] = shape[:1]
        if role in ("qkv", "gate_up"):
            shapes[name + ".norm"] = (H,)
        if role == "qkv" and spec.qk_norm:
            shapes |= dict.fromkeys((prefix + ".q_norm", prefix + ".k_norm"), (spec.head_dim,))
    return shapes


def layer_linears(spec: ModelSpec) -> list[tuple[int, int]]:
    """Return [out, in] of one layer's linears; all layers are alike."""
    one = linear_shapes(msgspec.structs.replace(spec, num_layers=1))
    return [shape for name, shape in one.items() if name != "head"]


def num_weights(spec: ModelSpec) -> int:
    """Number of weights in all linears, the head included."""
    one = sum(n * k for n, k in layer_linears(spec))
    return spec.num_layers * one + spec.vocab_size * spec.hidden_size


def usual_group_size(spec: ModelSpec) -> int:
    """Return the group size that a conversion chooses."""
    return group_size_for(k for _, k in layer_linears(spec))


def linear_bytes(outputs: int, inputs: int, group_size: int, planes: int) -> int:
    """Bytes of a matrix with one plane or two: planes, group multipliers, row scales."""
    return outputs * (planes * padded(inputs, group_size) // 2) + scale_bytes(
        outputs, inputs, group_size
    )


def scale_bytes(outputs: int, inputs: int, group_size: int) -> int:
    """Bytes of a matrix's int16 group multipliers and fp32 row scales."""
    return outputs * (2 * (padded(inputs, group_size) // group_size) + 4)


def activation_bytes(spec: ModelSpec, group_size: int) -> int:
    """Bytes of the registers of one row: fp32 x, y, qkv, q, att, gate_up and its product, and what
    is quantised, one of each width, with a scale a row and a sum a group."""
    H, q, F = spec.hidden_size, spec.q_size, spec.intermediate_size
    codes = sum(padded(n, group_size) + 4 * -(-n // group_size) + 4 for n in {H, q, F})
    return 4 * (2 * H + 3 * q + 2 * spec.kv_size + 3 * F) + codes


def footprint(
    spec: ModelSpec,
    *,
    layout: Layout = "nest",
    backend: str,
    group_size: int | None = None,
    threads: int | None = None,
    runtime_bytes: int | None = None,
    reserve_bytes: int = 0,
    arch: int = 87,
    discrete: bool = False,
) -> Footprint:
    """Make the account of a layout.

    group_size None: as a conversion chooses. threads None: as the cpu backend chooses.
    runtime_bytes: of the program itself; None: the backend's usual. arch, discrete: of the GPU on
    the cuda backend, 87 being compute capability 8.7; one with memory of its own is accounted for
    what lies there, any other for all of the process.
    """
    G = group_size or usual_group_size(spec)
    if backend == "reference":
        weights = _float_weights(spec) if layout == "fp" else _reference_weights(spec, G)
        workspace = 0  # within its runtime
    else:
        weights = _weights(spec, layout, G, backend, arch)
        logits = (MAX_GAMMA + 1) * padded(spec.vocab_size, ROW_TILE) * 4
        workspace = CHUNK_ROWS * activation_bytes(spec, G) + logits
    if backend == "cuda":
        workspace = _cuda_workspace_bytes(spec, layout, G, arch)
    runtime = runtime_bytes
    if runtime is None:
        runtime = usual_runtime_bytes(spec, backend) if not discrete else DISCRETE_RUNTIME_BYTES
    block = 1 if layout == "fp" else KV_BLOCK
    per_block = {
        "rope": block * 4 * spec.head_dim,  # cos and sin, fp32
        "kv": block * kv_per_token_bytes(spec, layout, backend),
        "runtime": 0 if discrete else block * LOOKUP_BYTES,
    }
    if backend == "cuda":
        per_block["workspace"] = _cuda_attention_bytes(spec, layout, arch)
    elif backend == "cpu":
        per_block["workspace"] = _attention_block_bytes(spec, threads)
    return Footprint(
        layout=layout,
        weights_bytes=sum(weights.values()),
        fixed=weights
        | {
            "rope": 0,
            "kv": 0,
            "workspace": workspace,
            "runtime": runtime,
            "reserve": reserve_bytes,
        },
        per_block=per_block,
        block=block,
    )


def reserve_bytes(asked_bytes: int, total_bytes: int | None) -> int:
    """Return what is left to others: as asked, but at least a little of a machine's memory."""
    least = LEAST_RESERVE_BYTES
    if total_bytes is not None:
        least = min(least, total_bytes // LEAST_RESERVE_SHARE)
    return max(asked_bytes, least)


def kv_per_token_bytes(spec: ModelSpec, layout: Layout, backend: str) -> int:
    """Bytes that one token occupies in the cache of a layout."""
    shape = spec.num_layers, spec.num_kv_heads, spec.head_dim
    if layout == "fp":
        return kv_plain_per_token_bytes(*shape)
    if layout in ("w8", "fp16"):
        return kv_half_per_token_bytes(*shape)
    return kv_stored_per_token_bytes(*shape, backend)


def usual_runtime_bytes(spec: ModelSpec, backend: str) -> int:
    """Bytes of the program itself, where no profile knows better."""
    if backend == "cpu":
        return CPU_RUNTIME_BYTES + TOKENIZER_BYTES * spec.vocab_size
    return TORCH_RUNTIME_BYTES if backend == "reference" else CUDA_RUNTIME_BYTES


def _attention_block_bytes(spec: ModelSpec, threads: int | None) -> int:
    """Bytes that attention on a CPU keeps of a block of the cache: of eight rows, and of a thread's
    own."""
    from edge_runtime.kernels.cpu.threads import usable_cores

    vectors = (MAX_GAMMA + 1) * spec.num_heads + QUERIES * (threads or usable_cores())
    return 4 * vectors * (spec.head_dim + 2)


def _cuda_workspace_bytes(spec: ModelSpec, layout: Layout, G: int, arch: int) -> int:
    """Bytes of a pass's registers, of the rooms of logits and of choosing among them, of what
    libraries take, and of the blocks, at most, that attention has beyond those of the context."""
    widths = spec.hidden_size, spec.q_size, spec.kv_size, spec.intermediate_size
    logits = sizes.logits(sizes.LOGIT_ROWS, spec.vocab_size) + sizes.sampling(spec.vocab_size)
    block = _cuda_attention_bytes(spec, layout, arch)
    if layout == "fp16":
        prompt = sizes.half_prompt(spec.q_size, spec.num_heads, sizes.HALF_CHUNK_ROWS)
        passes = sizes.half_registers(*widths, spec.vocab_size) + logits
        return passes + prompt + sizes.cublas(arch) + block
    passes = sizes.registers(*widths, G, rows := sizes.chunk_rows(arch)) + logits
    if layout == "w8":
        return passes + sizes.half_prompt(spec.q_size, spec.num_heads, rows) + block
    return passes + (sizes.ATTENTION_BLOCKS - 1) * block


def _cuda_attention_bytes(spec: ModelSpec, layout: Layout, arch: int) -> int:
    """Bytes of attention's workspace over a block of the cache of a layout."""
    if layout in ("fp16", "w8"):
        return sizes.half_attention_block(spec.num_heads, spec.head_dim)
    return sizes.attention_block(spec.num_heads, spec.head_dim, arch)


def _cuda_weights(spec: ModelSpec, G: int, arch: int, *, refine: bool) -> dict[str, int]:
    """The nest, or its base alone, in the pieces that the cuda backend allocates."""
    biases = (spec.qkv_bias, spec.o_bias, spec.mlp_bias, spec.mlp_bias)
    layer = [
        sizes.linear(n, padded(k, G), G, arch, bias=bias)
        for (n, k), bias in zip(layer_linears(spec), biases, strict=True)
    ]
    head = sizes.linear(spec.vocab_size, padded(spec.hidden_size, G), G, arch, bias=False)
    norms = 2 * sizes.piece(4 * spec.head_dim) if spec.qk_norm else 0

    def all_layers(*names: str) -> int:
        return spec.num_layers * sum(sum(one[name] for name in names) for one in layer)

    planes = ("base", "refine") if refine else ("base",)
    return {
        **{name: all_layers(name) for name in planes},
        "scales": all_layers("mult", "scale", "mult_rows"),
        "embedding": sizes.piece(spec.vocab_size * spec.hidden_size)
        + sizes.piece(4 * spec.vocab_size),
        "head": sum(size for name, size in head.items() if refine or name != "refine"),
        "norms": all_layers("bias") + spec.num_layers * norms,
    }


def _matrices(spec: ModelSpec) -> tuple[int, list[tuple[int, int]], tuple[int, int]]:
    """Return the number of layers, a layer's matrices and the head, rows padded as in memory."""
    layer = [(padded(n, ROW_TILE), k) for n, k in layer_linears(spec)]
    return spec.num_layers, layer, (padded(spec.vocab_size, ROW_TILE), spec.hidden_size)


def _small_bytes(spec: ModelSpec) -> int:
    """Bytes of biases and head norms, fp32."""
    biased = (spec.qkv_bias, spec.o_bias, spec.mlp_bias, spec.mlp_bias)
    rows = sum(
        padded(n, ROW_TILE)
        for (n, _), there in zip(layer_linears(spec), biased, strict=True)
        if there
    )
    return 4 * spec.num_layers * (rows + (2 * spec.head_dim if spec.qk_norm else 0))


def _embedding_bytes(spec: ModelSpec) -> int:
    """Bytes of the int8 table and its row scales."""
    return spec.vocab_size * (spec.hidden_size + 4)


def _nest_weights(spec: ModelSpec, G: int) -> dict[str, int]:
    layers, layer, head = _matrices(spec)
    plane = layers * sum(n * padded(k, G) // 2 for n, k in layer)
    return {
        "base": plane,
        "refine": plane,
        "scales": layers * sum(scale_bytes(n, k, G) for n, k in layer),
        "embedding": _embedding_bytes(spec),
        "head": linear_bytes(*head, G, 2),
        "norms": _small_bytes(spec),
    }


def _w4_weights(spec: ModelSpec, G: int) -> dict[str, int]:
    both = _nest_weights(spec, G)
    del both["refine"]
    return both | {"head": linear_bytes(*_matrices(spec)[2], G, 1)}


def _weights(spec: ModelSpec, layout: Layout, G: int, backend: str, arch: int) -> dict[str, int]:
    """Plain 8-bit weights take what both planes take, with the scales of the nest. Two copies: such
    a target, and a W4 draft with its own scales and head; the embedding is shared."""
    if layout == "fp16":
        return _cuda_half_weights(spec) if backend == "cuda" else _fp16_weights(spec)
    if backend == "cuda":
        nest, w4 = (_cuda_weights(spec, G, arch, refine=refine) for refine in (True, False))
    else:
        nest, w4 = _nest_weights(spec, G), _w4_weights(spec, G)
    if layout in ("nest", "w4"):
        return nest if layout == "nest" else w4
    w8 = {"weights": nest.pop("base") + nest.pop("refine"), **nest}
    if layout == "w8":
        return w8
    return {"draft": w4["base"] + w4["scales"] + w4["head"], **w8}


def _cuda_half_weights(spec: ModelSpec) -> dict[str, int]:
    """The unquantised model in the pieces that the cuda backend allocates."""
    lines = dict.fromkeys(("weights", "embedding", "head", "norms"), 0)
    for name, shape in half_shapes(spec).items():
        line = {"embed": "embedding", "head": "head"}.get(name)
        line = line or ("weights" if len(shape) == 2 else "norms")
        lines[line] += sizes.piece(2 * math.prod(shape))
    return lines


def _fp16_weights(spec: ModelSpec) -> dict[str, int]:
    layers, layer = spec.num_layers, layer_linears(spec)
    table = 2 * spec.vocab_size * spec.hidden_size
    return {
        "weights": 2 * layers * sum(n * k for n, k in layer),
        "embedding": table,
        "head": 0 if spec.tied_embedding else table,
        "norms": _small_bytes(spec) + 2 * spec.hidden_size * (2 * layers + 1),
    }


def _reference_weights(spec: ModelSpec, G: int) -> dict[str, int]:
    """What the reference backend unpacks: an fp32 number a weight in each of two views, an fp64
    number a group in each, and the largest linear once in fp64 for prompts."""
    table = spec.vocab_size * spec.hidden_size
    layers = num_weights(spec) - table
    return {
        "base": 4 * layers,
        "refine": 4 * layers,
        "scales": 2 * 8 * (num_weights(spec) // G),
        "embedding": _embedding_bytes(spec),
        "head": 2 * 4 * table + 8 * table,
        "norms": _small_bytes(spec),
    }


def _float_weights(spec: ModelSpec) -> dict[str, int]:
    """The unquantised model in fp32: a large tensor is there twice as it comes, largest first."""
    table = spec.vocab_size * spec.hidden_size
    return {
        "weights": 4 * (num_weights(spec) - table),
        "embedding": 4 * table,
        "head": 4 * table,
        "loading": 2 * 4 * table,
    }
