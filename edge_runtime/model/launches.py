"""What the CUDA kernels are compiled for: a model by its shapes, as `kernels save` takes it.

Invariant: one layer stands for all, as they are alike. What a shape alone does not say (R3, ids
that are padding) is taken both ways.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import msgspec

from edge_runtime.format.manifest import Manifest
from edge_runtime.format.spec import ModelSpec
from edge_runtime.kernels.ops import View
from edge_runtime.model.load import head_norm_names
from edge_runtime.model.transformer import geometry, model_program
from edge_runtime.plan.footprint import linear_shapes

if TYPE_CHECKING:
    from edge_runtime.kernels.cuda.record import Subject

VIEWS: tuple[View, ...] = ("w8", "w4")


def of_checkpoint(manifest: Manifest) -> list[Subject]:
    """Return what a checkpoint needs."""
    spec = manifest.spec
    biased = frozenset(name for name in _first(spec) if f"{name}.bias" in manifest.planes)
    shape = (manifest.text.num_tokens, manifest.rotation.r3)
    return [_subject(spec, manifest.group_size, biased, *shape)]


def of_shape(spec: ModelSpec, group_size: int) -> list[Subject]:
    """Return what checkpoints of a shape need, whatever their switches."""
    flags = {
        "qkv": spec.qkv_bias,
        "o": spec.o_bias,
        "gate_up": spec.mlp_bias,
        "down": spec.mlp_bias,
    }
    biased = frozenset(name for name in _first(spec) if flags.get(name.rpartition(".")[2]))
    return [_subject(spec, group_size, biased, *some) for some in _unknowns(spec)]


def _unknowns(spec: ModelSpec) -> Iterator[tuple[int, bool]]:
    yield spec.vocab_size, False
    yield spec.vocab_size - 1, spec.head_dim & (spec.head_dim - 1) == 0


def _first(spec: ModelSpec) -> dict[str, tuple[int, int]]:
    """Linears of the first layer, and the head."""
    return linear_shapes(msgspec.structs.replace(spec, num_layers=1))


def _subject(
    spec: ModelSpec, group_size: int, biased: frozenset[str], num_tokens: int, r3: bool
) -> Subject:
    from edge_runtime.kernels.cuda.record import Subject

    one = msgspec.structs.replace(spec, num_layers=1)
    return Subject(
        geometry=geometry(one, num_tokens, rotate_kv=r3),
        linears=linear_shapes(one),
        biased=biased,
        head_norms=tuple(head_norm_names(one)),
        embedding_rows=spec.vocab_size,
        group_size=group_size,
        programs={
            view: (model_program(one, view), model_program(one, view, logits=False))
            for view in VIEWS
        },
        max_context=spec.max_position,
    )
