"""From a checkpoint to what an engine runs: the tokenizer first, then the weights on a backend."""

from __future__ import annotations

from edge_runtime import kernels
from edge_runtime.decode.memory import trim_heap
from edge_runtime.format.reader import Checkpoint
from edge_runtime.model.load import model_weights
from edge_runtime.model.runner import Model
from edge_runtime.model.transformer import geometry
from edge_runtime.plan.footprint import Layout
from edge_runtime.text.tokenizer import Tokenizer


def load_tokenizer(checkpoint: Checkpoint) -> Tokenizer:
    """Read the tokenizer, before the weights: what reading it took is theirs again then."""
    text = checkpoint.tokenizer_json()
    tokenizer = Tokenizer.from_json(text, checkpoint.manifest.text.eos_ids)
    del text
    trim_heap()
    return tokenizer


def load_model(
    checkpoint: Checkpoint,
    backend: str,
    context: int,
    threads: int | None,
    layout: Layout = "nest",
) -> Model:
    """Bring the weights of a checkpoint to a backend that `kernels.choose_backend` has named."""
    manifest = checkpoint.manifest
    rotation = manifest.rotation
    weights = model_weights(checkpoint.plane, manifest, context, checkpoint.release)
    shape = geometry(manifest.spec, manifest.text.num_tokens, rotate_kv=rotation.r3)
    return Model(
        manifest.spec,
        kernels.open_backend(backend, weights, shape, threads, layout),
        r1=None if rotation.kind == "none" else checkpoint.plane("r1"),
        r1_scale=rotation.scale,
    )
