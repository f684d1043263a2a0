"""From a checkpoint to weights a backend can take: strict names, mapped planes, no copies.

Invariant: planes stay on the mapped file until a backend repacks them; nothing is unpacked here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from edge_runtime.format.manifest import Manifest
from edge_runtime.format.spec import ModelSpec
from edge_runtime.kernels.ops import LinearWeights, ModelWeights
from edge_runtime.model.rope import rope_tables
from edge_runtime.model.transformer import linear_shapes

GetPlane = Callable[[str], npt.NDArray[Any]]


def linear_weights(
    get: GetPlane, name: str, num_inputs: int, group_size: int, *, bias: bool
) -> LinearWeights:
    """Collect the planes of one linear."""
    return LinearWeights(
        base=get(f"{name}.base"),
        refine=get(f"{name}.refine"),
        mult=get(f"{name}.mult"),
        scale=get(f"{name}.scale"),
        bias=get(f"{name}.bias") if bias else None,
        num_inputs=num_inputs,
        group_size=group_size,
    )


def model_weights(get: GetPlane, manifest: Manifest, context: int) -> ModelWeights:
    """Collect all weights; rope tables are made for `context` positions."""
    spec = manifest.spec
    cos, sin = rope_tables(spec, context)
    linears = {
        name: linear_weights(
            get, name, shape[1], manifest.group_size, bias=f"{name}.bias" in manifest.planes
        )
        for name, shape in linear_shapes(spec).items()
    }
    return ModelWeights(
        linears=linears,
        embedding=get("embed.codes"),
        embedding_scale=get("embed.scale"),
        cos=cos,
        sin=sin,
        head_norms={n: get(n) for n in head_norm_names(spec)},
    )


def head_norm_names(spec: ModelSpec) -> list[str]:
    """Names of the per-layer head norms (qwen3 only)."""
    if not spec.qk_norm:
        return []
    return [f"layers.{i}.{n}" for i in range(spec.num_layers) for n in ("q_norm", "k_norm")]


def rotate_rows(
    rows: npt.NDArray[Any], r1: npt.NDArray[Any] | None, scale: float
) -> tuple[npt.NDArray[np.int8], npt.NDArray[np.float32]]:
    """Rotate embedding rows into the model's basis and quantise them like the embedding.

    rows: [n, H] in the original basis -> codes int8 [n, H], scale fp32 [n]. With a ±1 matrix the
    fp64 sums are exact for 16-bit weights, so a row gives the same bits alone or in a table.
    """
    wide = np.asarray(rows, dtype=np.float64)
    if r1 is not None:
        wide = (wide @ r1.astype(np.float64)) * scale
    return quantise_rows(wide.astype(np.float32))


def quantise_rows(
    x: npt.NDArray[np.float32],
) -> tuple[npt.NDArray[np.int8], npt.NDArray[np.float32]]:
    """The contract's int8 quantiser (`kernels/ops.py`) on rows."""
    peak = np.abs(x).max(-1)
    peak = np.where(peak < np.float32(2.0**-100), np.float32(0), peak)
    inverse = np.divide(np.float32(127), peak, out=np.zeros_like(peak), where=peak > 0)
    codes = np.clip(np.rint(x * inverse[:, None]), -127, 127).astype(np.int8)
    return codes, peak / np.float32(127)
