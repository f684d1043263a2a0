"""The unquantised model of a source, on the same graph: `--view fp`, and the yardstick of quality.

Invariant: only norms are folded in (and, if asked, rotations); weights stay fp32.
"""

from __future__ import annotations

import torch
from torch import Tensor

from edge_runtime.convert import layer as layers
from edge_runtime.convert.hadamard import Rotation, random_rotation
from edge_runtime.convert.rotate import fuse_layer, rotate_embedding_rows, rotate_head
from edge_runtime.convert.source import Source, layer_tensors
from edge_runtime.kernels.reference.float_ops import FloatBackend, FloatWeights
from edge_runtime.model.rope import rope_tables
from edge_runtime.model.runner import Model
from edge_runtime.model.transformer import geometry


def r2_seed(seed: int, layer: int) -> int:
    """Seed of a layer's R2, distinct from R1's and from every other layer's."""
    return seed * 1_000_003 + layer + 1


def float_model(source: Source, context: int, *, rotate_seed: int | None = None) -> Model:
    """Load every tensor of a source in fp32; with a seed, fold R1 and R2 in as conversion does."""
    spec = source.spec
    r1 = None if rotate_seed is None else random_rotation(spec.hidden_size, rotate_seed)
    # the large tables first: what loading one takes is then taken from an empty house
    embedding = rotate_embedding_rows(source.tensor("embed"), r1)
    weights = {"head": head_matrix(source, r1)}
    biases: dict[str, Tensor] = {}
    norms: dict[str, Tensor] = {}
    for i in range(spec.num_layers):
        p = f"layers.{i}."
        tensors = {n: source.tensor(p + n) for n in layer_tensors(spec)}
        r2 = None
        if rotate_seed is not None:
            r2 = random_rotation(spec.head_dim, r2_seed(rotate_seed, i))
        fused = fuse_layer(tensors, spec, r1, r2)
        w, b = layers.matrices(fused, p)
        weights |= w
        biases |= b
        norms |= layers.head_norms(fused, p)
    cos, sin = rope_tables(spec, context)
    backend = FloatBackend(
        FloatWeights(
            matrices=weights,
            biases=biases,
            embedding=embedding,
            cos=torch.from_numpy(cos),
            sin=torch.from_numpy(sin),
            head_norms=norms,
        ),
        geometry(spec, source.text.num_tokens),
    )
    dense = None if r1 is None else r1.matrix.numpy()
    scale = 1.0 if r1 is None else r1.scale
    return Model(spec, backend, r1=dense, r1_scale=scale, quantised=False)


def head_matrix(source: Source, r1: Rotation | None, device: torch.device | str = "cpu") -> Tensor:
    """The LM head with the final norm (and R1, on the same device) folded in.

    A tied embedding serves as the head.
    """
    name = "embed" if source.spec.tied_embedding else "head"
    return rotate_head(source.tensor(name).to(device), source.tensor("norm").to(device), r1)
