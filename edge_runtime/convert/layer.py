"""One layer at a time: run it unquantised or quantised over whole sequences, watching its inputs.

Invariant: the layer that is calibrated and measured is the program that ships (`layer_program`),
only fed with registers instead of a whole model.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from edge_runtime.convert.rotate import FusedLayer
from edge_runtime.format.spec import ModelSpec
from edge_runtime.kernels.ops import Batch, Geometry, Linear, ModelWeights, Program
from edge_runtime.kernels.reference.float_ops import FloatBackend, FloatWeights
from edge_runtime.kernels.reference.linear import ExactLinear
from edge_runtime.kernels.reference.ops import ReferenceBackend
from edge_runtime.model.rope import rope_tables

Observe = Callable[[str, Tensor], None]
NO_EMBEDDING = np.zeros((0, 0), dtype=np.int8)
NO_SCALE = np.zeros(0, dtype=np.float32)


def matrices(layer: FusedLayer, prefix: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the fp32 matrices and biases of a fused layer by linear name."""
    found = {
        "qkv": (layer.qkv, layer.qkv_bias),
        "o": (layer.o, layer.o_bias),
        "gate_up": (layer.gate_up, layer.gate_up_bias),
        "down": (layer.down, layer.down_bias),
    }
    weights = {prefix + n: w for n, (w, _) in found.items()}
    biases = {prefix + n: b for n, (_, b) in found.items() if b is not None}
    return weights, biases


def head_norms(layer: FusedLayer, prefix: str) -> dict[str, Tensor]:
    """Return q_norm and k_norm of a layer that has them."""
    if layer.q_norm is None or layer.k_norm is None:
        return {}
    return {prefix + "q_norm": layer.q_norm, prefix + "k_norm": layer.k_norm}


def float_layer(layer: FusedLayer, spec: ModelSpec, one: Geometry, length: int) -> FloatBackend:
    """The unquantised layer as number 0 of a one-layer model."""
    device = layer.qkv.device
    cos, sin = rope_tables(spec, length)
    weights, biases = matrices(layer, "layers.0.")
    return FloatBackend(
        FloatWeights(
            matrices=weights,
            biases=biases,
            embedding=torch.zeros(0),
            cos=torch.from_numpy(cos).to(device),
            sin=torch.from_numpy(sin).to(device),
            head_norms=head_norms(layer, "layers.0."),
        ),
        one,
    )


def quantised_layer(
    linears: dict[str, ExactLinear],
    norms: dict[str, Tensor],
    spec: ModelSpec,
    one: Geometry,
    length: int,
    view: Literal["w8", "w4"],
) -> ReferenceBackend:
    """A layer on the reference backend from linears that are already in one view."""
    cos, sin = rope_tables(spec, length)
    backend = ReferenceBackend(
        ModelWeights(
            linears={},
            embedding=NO_EMBEDDING,
            embedding_scale=NO_SCALE,
            cos=cos,
            sin=sin,
            head_norms={n: w.cpu().numpy() for n, w in norms.items()},
        ),
        one,
        device=next(iter(linears.values())).scale.device,
    )
    for name, linear in linears.items():
        backend.set_linear(name, view, linear)
    return backend


def advance(
    backend: FloatBackend | ReferenceBackend,
    program: Program,
    states: list[Tensor],
    observe: Observe | None = None,
) -> None:
    """Replace every hidden state fp32 [L, H] by the program's register "x" after it.

    observe(linear name, input fp32 [L, K]) is called before each linear.
    """
    for i, x in enumerate(states):
        registers: dict[str, Any] = {"x": x}
        run(backend, program, registers, observe)
        states[i] = registers["x"]


def run(
    backend: Any, program: Program, registers: dict[str, Any], observe: Observe | None = None
) -> None:
    """Run a program over one sequence whose hidden state is in register "x"."""
    length = registers["x"].shape[0]
    batch = Batch(
        ids=None,
        positions=np.arange(length, dtype=np.int64),
        full_from=np.zeros(length, dtype=np.int64),
        num_logits=length,
    )
    cache = backend.new_cache(length)
    for op in program:
        if observe is not None and isinstance(op, Linear):
            observe(op.weight, registers[op.a])
        backend.replay((op,), batch, cache, registers)
