"""The unquantised model in 16 bits on a GPU: `--view fp --backend cuda`.

Invariant: a tensor is read, cast and sent before the next one is read. A synthetic checkpoint has
no original: its target stands for it, since speed and memory do not depend on the numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from edge_runtime.convert.source import Source
from edge_runtime.format.manifest import Manifest
from edge_runtime.format.spec import ModelSpec
from edge_runtime.kernels import pack
from edge_runtime.model.rope import rope_tables
from edge_runtime.model.runner import Model
from edge_runtime.model.transformer import geometry
from edge_runtime.plan.footprint import half_shapes

if TYPE_CHECKING:
    from edge_runtime.kernels.cuda.half import HalfModel

ROWS = 1024  # of a matrix that are dequantised at a time
GetPlane = Callable[[str], NDArray[Any]]


def from_source(source: Source, context: int) -> HalfModel:
    """Return an original model as it is to be brought to a device; nothing is read yet."""
    return _half_model(source.spec, context, partial(source_rows, source))


def from_planes(get: GetPlane, manifest: Manifest, context: int) -> HalfModel:
    """Return the target of a checkpoint as it is to be brought to a device."""
    return _half_model(manifest.spec, context, partial(plane_rows, get, manifest))


def open_model(half: HalfModel, spec: ModelSpec, num_tokens: int) -> Model:
    """Bring a model to the GPU. Raises BudgetError."""
    from edge_runtime.kernels.cuda.half_backend import HalfBackend

    return Model(spec, HalfBackend(half, geometry(spec, num_tokens)), quantised=False)


def blank(spec: ModelSpec, context: int) -> HalfModel:
    """Return a model without numbers: what it would launch is all that is asked of it."""
    return _half_model(spec, context, lambda name: iter(()))


def _half_model(
    spec: ModelSpec, context: int, rows: Callable[[str], Iterator[Tensor]]
) -> HalfModel:
    from edge_runtime.kernels.cuda.half import HalfModel

    cos, sin = rope_tables(spec, context)
    return HalfModel(
        architecture=spec.architecture, shapes=half_shapes(spec), rows=rows, cos=cos, sin=sin
    )


def source_rows(source: Source, name: str) -> Iterator[Tensor]:
    """Yield the rows of a tensor of `footprint.half_shapes`, fp32, one source tensor at a time.

    Nothing is folded: norms stay weights of their own.
    """
    if not name.startswith("layers."):
        yield source.tensor({"head.norm": "norm"}.get(name, name))
        return
    layers, number, role = name.split(".", 2)
    norms = {"qkv.norm": "attn_norm", "gate_up.norm": "mlp_norm"}
    fused = {"qkv": ("q", "k", "v"), "gate_up": ("gate", "up")}
    matrix, dot, bias = role.partition(".")
    names = (
        [norms[role]] if role in norms else [n + dot + bias for n in fused.get(matrix, (matrix,))]
    )
    for part in names:
        yield source.tensor(f"{layers}.{number}.{part}")


def plane_rows(get: GetPlane, manifest: Manifest, name: str) -> Iterator[Tensor]:
    """Yield the rows of a tensor of `footprint.half_shapes` from planes, fp32, in pieces.

    Norms are in the planes already, so their weights are 1; a tied head is the embedding.
    """
    shape, G = half_shapes(manifest.spec)[name], manifest.group_size
    if name.endswith(".norm"):
        yield torch.ones(shape)
    elif len(shape) == 1:
        yield torch.from_numpy(np.array(get(name)))
    else:
        for first in range(0, shape[0], ROWS):
            rows = slice(first, first + ROWS)
            if name == "embed":
                part = get("embed.codes")[rows] * get("embed.scale")[rows, None]
            else:
                part = _dequantised(get, name, rows, G)[:, : shape[1]]
            yield torch.from_numpy(np.ascontiguousarray(part, np.float32))


def _dequantised(get: GetPlane, name: str, rows: slice, G: int) -> NDArray[np.float32]:
    """Some rows of the target view of a linear, fp32 [n, Kp]: code · m · S."""
    codes: NDArray[np.float32] = pack.unpack_base(get(f"{name}.base")[rows], G).astype(np.float32)
    codes *= 16
    codes += pack.unpack_refine(get(f"{name}.refine")[rows], G)
    scale = get(f"{name}.mult")[rows] * get(f"{name}.scale")[rows, None]
    codes = (codes.reshape(*scale.shape, G) * scale[..., None]).reshape(codes.shape)
    return codes
