"""The base plane as an unquantised model: 4-bit weights, activations and KV cache in fp32.

Invariant: weights and embedding rows are those of the checkpoint; what differs from the view w4 is
the activations, the cache and the order of sums.
"""

from __future__ import annotations

import torch

from edge_runtime.convert.quantize import dequantize
from edge_runtime.format.reader import Checkpoint
from edge_runtime.kernels import pack
from edge_runtime.kernels.reference.float_ops import FloatBackend, FloatWeights
from edge_runtime.model.load import model_weights
from edge_runtime.model.runner import Model
from edge_runtime.model.transformer import geometry


def wide_model(checkpoint: Checkpoint, context: int) -> Model:
    """Load the base plane of every matrix in fp32: W4A16, with 32 bits for the 16."""
    manifest = checkpoint.manifest
    G = manifest.group_size
    planes = model_weights(checkpoint.plane, manifest, context)
    matrices, biases = {}, {}
    for name, w in planes.linears.items():
        codes = torch.from_numpy(pack.unpack_base(w.base, G)).short() * 16
        scales = torch.from_numpy(w.mult.copy()), torch.from_numpy(w.scale.copy())
        matrices[name] = dequantize(codes, *scales, G, w.num_inputs)
        if w.bias is not None:
            biases[name] = torch.from_numpy(w.bias.copy())
    rows = torch.from_numpy(planes.embedding.astype("float32"))
    weights = FloatWeights(
        matrices=matrices,
        biases=biases,
        embedding=rows * torch.from_numpy(planes.embedding_scale.copy())[:, None],
        cos=torch.from_numpy(planes.cos),
        sin=torch.from_numpy(planes.sin),
        head_norms={n: torch.from_numpy(w.copy()) for n, w in planes.head_norms.items()},
    )
    rotation = manifest.rotation
    return Model(
        manifest.spec,
        FloatBackend(weights, geometry(manifest.spec, manifest.text.num_tokens)),
        r1=None if rotation.kind == "none" else checkpoint.plane("r1"),
        r1_scale=rotation.scale,
        quantised=False,
    )
