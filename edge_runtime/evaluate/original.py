"""What a checkpoint is compared with: plain W8A8 of its matrices ("b"), and its base at W4A16.

Invariant: of plain W8A8 only the matrices differ from the checkpoint's target: the same rotations
(by the seed in the manifest), embedding rows, KV cache, activations and integer arithmetic.
"""

from __future__ import annotations

import numpy as np

from edge_runtime.convert import layer as layers
from edge_runtime.convert.hadamard import Rotation, random_rotation
from edge_runtime.convert.nest import rtn8_linear
from edge_runtime.convert.original import head_matrix, r2_seed
from edge_runtime.convert.rotate import fuse_layer
from edge_runtime.convert.source import Source, layer_tensors
from edge_runtime.convert.wide import wide_model
from edge_runtime.decode.draft import DraftChoice
from edge_runtime.decode.engine import Engine
from edge_runtime.decode.load import load_model, load_tokenizer
from edge_runtime.errors import UsageError
from edge_runtime.format.reader import Checkpoint
from edge_runtime.kernels.reference.ops import ReferenceBackend


def w8a8_engine(
    checkpoint: Checkpoint, source: Source, context: int, threads: int | None = None
) -> Engine:
    """Open a checkpoint on the reference backend with its w8 view replaced, matrix by matrix."""
    manifest = checkpoint.manifest
    spec, G = manifest.spec, manifest.group_size
    seed, r1 = _rotation(checkpoint)
    model = load_model(checkpoint, "reference", context, threads)
    backend = model.backend
    assert isinstance(backend, ReferenceBackend)
    for i in range(spec.num_layers):
        p = f"layers.{i}."
        tensors = {n: source.tensor(p + n) for n in layer_tensors(spec)}
        r2 = None
        if r1 is not None:
            r2 = random_rotation(spec.head_dim, r2_seed(seed, i))
        weights, biases = layers.matrices(fuse_layer(tensors, spec, r1, r2), p)
        for name, W in weights.items():
            backend.set_linear(name, "w8", rtn8_linear(W, biases.get(name), G, name))
    backend.set_linear("head", "w8", rtn8_linear(head_matrix(source, r1), None, G, "head"))
    return Engine(
        model,
        load_tokenizer(checkpoint),
        manifest.text,
        view="w8",
        context=context,
        draft=DraftChoice(0, "base", "no nested draft in it"),
        backend_why="plain W8A8 has no planes: the definition in torch runs it",
        group_size=G,
    )


def w4a16_engine(checkpoint: Checkpoint, context: int) -> Engine:
    """Open the base plane with activations and cache that are not quantised."""
    return Engine(
        wide_model(checkpoint, context),
        load_tokenizer(checkpoint),
        checkpoint.manifest.text,
        view="fp",
        context=context,
        draft=DraftChoice(0, "base", "no nested draft in it"),
        backend_why="activations that are not quantised run in torch",
        group_size=checkpoint.manifest.group_size,
    )


def _rotation(checkpoint: Checkpoint) -> tuple[int, Rotation | None]:
    """Make the R1 of a checkpoint again; return its seed too. Raises UsageError where no seed
    tells it."""
    manifest = checkpoint.manifest
    if manifest.options is None:
        raise UsageError("view w8a8: this checkpoint was converted from no model")
    seed = manifest.options.seed
    if manifest.rotation.kind == "none":
        return seed, None
    if manifest.rotation.kind != "learned":
        r1 = random_rotation(manifest.spec.hidden_size, seed)
        if np.array_equal(r1.matrix.numpy(), checkpoint.plane("r1")):
            return seed, r1
    raise UsageError(
        f"view w8a8 needs rotations that a seed gives; this checkpoint's are "
        f"{manifest.rotation.kind} and not kept",
        "leave w8a8 out of --views",
    )
