"""Random nested weights of a spec, without a conversion: what backends are compared on."""

from __future__ import annotations

from typing import Any

import numpy as np

from edge_runtime.format.spec import ModelSpec
from edge_runtime.kernels import ops, pack
from edge_runtime.kernels.layout import padded
from edge_runtime.model.load import head_norm_names
from edge_runtime.model.rope import rope_tables
from edge_runtime.plan.footprint import linear_shapes

F = np.float32


def random_spec(**fields: Any) -> ModelSpec:
    """A tiny llama with an odd vocabulary; keyword arguments replace fields."""
    defaults: dict[str, Any] = {
        "architecture": "llama",
        "num_layers": 2,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 16,
        "vocab_size": 331,
        "max_position": 512,
        "rms_norm_eps": 1e-5,
    }
    return ModelSpec(**(defaults | fields))


def random_linear(
    rng: np.random.Generator, N: int, K: int, G: int, *, bias: bool
) -> ops.LinearWeights:
    """A nested matrix whose outputs are about as large as its inputs; multipliers of both signs."""
    Kp = padded(K, G)
    q4 = rng.integers(-8, 8, (N, Kp), dtype=np.int8)
    qr = rng.integers(np.where(q4 == -8, 0, -8), 8, (N, Kp)).astype(np.int8)
    q4[:, K:] = qr[:, K:] = 0
    scale = rng.uniform(0.5, 2, N) / (74 * 16384 * K**0.5)  # 74: of codes, about
    return ops.LinearWeights(
        base=pack.pack_base(q4, G),
        refine=pack.pack_refine(qr, G),
        mult=rng.integers(-32768, 32768, (N, Kp // G), dtype=np.int16),
        scale=scale.astype(F),
        bias=rng.standard_normal(N).astype(F) if bias else None,
        num_inputs=K,
        group_size=G,
    )


def random_weights(
    spec: ModelSpec, group_size: int, context: int, seed: int = 0
) -> ops.ModelWeights:
    """Weights of a whole model."""
    rng = np.random.default_rng(seed)
    biases = {
        "qkv": spec.qkv_bias,
        "o": spec.o_bias,
        "gate_up": spec.mlp_bias,
        "down": spec.mlp_bias,
    }
    cos, sin = rope_tables(spec, context)
    V, H = spec.vocab_size, spec.hidden_size
    return ops.ModelWeights(
        linears={
            name: random_linear(
                rng, *shape, group_size, bias=biases.get(name.split(".")[-1], False)
            )
            for name, shape in linear_shapes(spec).items()
        },
        embedding=rng.integers(-127, 128, (V, H), dtype=np.int8),
        embedding_scale=rng.uniform(0.5, 2, V).astype(F) / F(127),
        cos=cos,
        sin=sin,
        head_norms={
            name: rng.uniform(0.5, 2, spec.head_dim).astype(F) for name in head_norm_names(spec)
        },
    )
