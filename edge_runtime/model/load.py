"""From a checkpoint to weights a backend can take: strict names, mapped planes, no copies.

Invariant: planes stay on the mapped file until a backend repacks them; nothing is unpacked here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from edge_runtime.format.manifest import Manifest
from edge_runtime.format.spec import ModelSpec
from edge_runtime.kernels.ops import LinearWeights, ModelWeights
from edge_runtime.model.rope import rope_tables
from edge_runtime.plan.footprint import linear_shapes

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


class MappedLinears(Mapping[str, LinearWeights]):
    """The linears of a checkpoint, each read when it is asked for."""

    def __init__(self, get: GetPlane, manifest: Manifest) -> None:
        self._get, self._manifest = get, manifest
        self._shapes = linear_shapes(manifest.spec)

    def __getitem__(self, name: str) -> LinearWeights:
        """Read one."""
        bias = f"{name}.bias" in self._manifest.planes
        num_inputs = self._shapes[name][1]
        return linear_weights(self._get, name, num_inputs, self._manifest.group_size, bias=bias)

    def __iter__(self) -> Iterator[str]:
        """Names in the order of use."""
        return iter(self._shapes)

    def __len__(self) -> int:
        """How many there are."""
        return len(self._shapes)


def model_weights(
    get: GetPlane, manifest: Manifest, context: int, release: Callable[[], None] = lambda: None
) -> ModelWeights:
    """Collect all weights; rope tables are made for `context` positions."""
    spec = manifest.spec
    cos, sin = rope_tables(spec, context)
    return ModelWeights(
        linears=MappedLinears(get, manifest),
        embedding=get("embed.codes"),
        embedding_scale=get("embed.scale"),
        cos=cos,
        sin=sin,
        head_norms={n: get(n) for n in head_norm_names(spec)},
        release=release,
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

    rows: [n, H] in the original basis -> codes int8 [n, H], scale fp32 [n]. A row gives the same
    bits alone or in a table, here or on another machine.
    """
    wide = np.asarray(rows, dtype=np.float64)
    if r1 is not None:
        wide = _exact_product(wide, r1) * scale
    return quantise_rows(wide.astype(np.float32))


def _exact_product(x: npt.NDArray[np.float64], r1: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    """x · R1 in whole numbers below 2^53, so that no sum rounds and no library's order shows.

    Each row of x keeps as many bits below its peak as that leaves (42 with ±1 and 1024 inputs);
    an orthogonal R1 is cut to 23 bits after the point, which an int8 code does not notice.
    """
    one = np.issubdtype(r1.dtype, np.integer)
    r1_bits = 0 if one else 23
    bits = 52 - math.ceil(math.log2(r1.shape[0])) - r1_bits
    _, exponent = np.frexp(np.abs(x).max(-1, keepdims=True, initial=0.0))
    whole = np.rint(np.ldexp(x, bits - exponent))
    R = np.rint(np.ldexp(r1.astype(np.float64), r1_bits))
    product: npt.NDArray[np.float64] = np.ldexp(whole @ R, exponent - bits - r1_bits)
    return product


def quantise_rows(
    x: npt.NDArray[np.float32],
) -> tuple[npt.NDArray[np.int8], npt.NDArray[np.float32]]:
    """The contract's int8 quantiser (`kernels/ops.py`) on rows."""
    peak = np.abs(x).max(-1)
    peak = np.where(peak < np.float32(2.0**-100), np.float32(0), peak)
    inverse = np.divide(np.float32(127), peak, out=np.zeros_like(peak), where=peak > 0)
    codes = np.clip(np.rint(x * inverse[:, None]), -127, 127).astype(np.int8)
    scale: npt.NDArray[np.float32] = (peak / np.float32(127)).astype(np.float32)
    return codes, scale
