"""Unquantised models with random numbers: what 16 bits are compared on."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from edge_runtime.format.spec import ModelSpec
from edge_runtime.kernels import ops
from edge_runtime.kernels.reference.float_ops import FloatBackend, FloatWeights
from edge_runtime.model.rope import rope_tables
from edge_runtime.model.runner import Model
from edge_runtime.model.transformer import geometry
from edge_runtime.plan.footprint import half_shapes

CONTEXT = 384
NUM_TOKENS = 317


def tensors(spec: ModelSpec) -> dict[str, torch.Tensor]:
    rng = np.random.default_rng(0)
    found = {}
    for name, shape in half_shapes(spec).items():
        x = rng.standard_normal(shape, np.float32)
        if name.endswith("norm"):
            x = 1 + x / 4
        elif name != "embed" and len(shape) == 2:
            x /= shape[1] ** 0.5
        found[name] = torch.from_numpy(x)
    return found


def half_model(spec: ModelSpec, context: int = CONTEXT) -> Any:
    from edge_runtime.kernels.cuda.half import HalfModel

    cos, sin = rope_tables(spec, context)
    found = tensors(spec)
    return HalfModel(
        architecture=spec.architecture,
        shapes=half_shapes(spec),
        rows=lambda name: torch.split(found[name], max(1, len(found[name]) // 3)),
        cos=cos,
        sin=sin,
    )


def reference(spec: ModelSpec) -> FloatBackend:
    """The fp view of the reference, norms folded in as it wants them."""
    found = tensors(spec)
    found.setdefault("head", found["embed"])
    matrices = {n: w for n, w in found.items() if w.ndim == 2 and n != "embed"}
    for name in matrices:
        if (norm := found.get(name + ".norm")) is not None:
            matrices[name] = matrices[name] * norm
    cos, sin = (torch.from_numpy(x) for x in rope_tables(spec, CONTEXT))
    return FloatBackend(
        FloatWeights(
            matrices=matrices,
            biases={n.removesuffix(".bias"): w for n, w in found.items() if n.endswith(".bias")},
            embedding=found["embed"],
            cos=cos,
            sin=sin,
            head_norms={n: w for n, w in found.items() if n.endswith(("q_norm", "k_norm"))},
        ),
        geometry(spec, NUM_TOKENS),
    )


def play(model: Model, view: ops.View, rows: list[int]) -> Iterator[ops.F32]:
    kv, rng, start = model.backend.new_cache(CONTEXT), np.random.default_rng(1), 0
    for count in rows:
        ids = rng.integers(0, NUM_TOKENS, count).tolist()
        yield model.forward(view, ids, start, kv, num_logits=min(count, 9)).numpy()
        start += count
