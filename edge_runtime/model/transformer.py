"""The model, once: a decoder-only transformer as a flat program of fused ops.

Invariant: it knows no backend and no row count; llama, qwen2 and qwen3 differ only in biases
(carried by the weights) and head norms. One token's way: embed -> per layer (norm, qkv, rope and
cache, attention, o + residual, norm, gate|up, silu·mul, down + residual) -> norm -> head.
"""

from __future__ import annotations

from edge_runtime.format.spec import ModelSpec
from edge_runtime.kernels import ops


def geometry(spec: ModelSpec, num_tokens: int, *, rotate_kv: bool = False) -> ops.Geometry:
    """Return the sizes that a backend needs."""
    return ops.Geometry(
        num_layers=spec.num_layers,
        hidden_size=spec.hidden_size,
        num_heads=spec.num_heads,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        num_tokens=min(num_tokens, spec.vocab_size),
        rotate_kv=rotate_kv,
    )


def layer_program(spec: ModelSpec, layer: int, view: ops.View) -> ops.Program:
    """One layer: register "x" [M, H] -> "x"."""
    p, eps = f"layers.{layer}.", spec.rms_norm_eps
    return (
        ops.NormQuantise("x", "a", eps),
        ops.Linear("a", p + "qkv", "qkv", view),
        ops.RopeKv("qkv", "q", layer, eps, spec.qk_norm),
        ops.Attention("q", "att", layer),
        ops.Quantise("att", "a"),
        ops.Linear("a", p + "o", "x", view, residual="x"),
        ops.NormQuantise("x", "a", eps),
        ops.Linear("a", p + "gate_up", "gu", view),
        ops.SiluMulQuantise("gu", "a"),
        ops.Linear("a", p + "down", "x", view, residual="x"),
    )


def head_program(spec: ModelSpec, view: ops.View) -> ops.Program:
    """Register "x" -> "logits" of the rows that are asked for."""
    return (
        ops.SelectRows("x", "y"),
        ops.NormQuantise("y", "a", spec.rms_norm_eps),
        ops.Linear("a", "head", "logits", view),
    )


def model_program(spec: ModelSpec, view: ops.View, *, logits: bool = True) -> ops.Program:
    """The whole model; without logits for the chunks of a prompt that only fill the cache."""
    program: list[ops.Op] = [ops.Embed("x")]
    for layer in range(spec.num_layers):
        program += layer_program(spec, layer, view)
    if logits:
        program += head_program(spec, view)
    return tuple(program)
