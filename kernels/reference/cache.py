"""Storage of the nested KV cache for the reference backend: packed planes, as on any device.

Invariant: a token is written whole (both planes and scales, K and V) and never partly; what lies
past a sequence's length is dead and may be overwritten at any time.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from edge_runtime.kernels.layout import KV_BLOCK, padded
from edge_runtime.kernels.ops import Geometry


class NestedCache:
    """base, refine: uint8 [L, 2, T, Hkv, D/2], byte i packs dims (i, i + D/2), low nibble first,
    base as two's complement, refinement + 8. scale: fp16 [L, 2, T, Hkv]. T is whole blocks."""

    def __init__(
        self, geometry: Geometry, capacity: int, device: torch.device | str = "cpu"
    ) -> None:
        g = geometry
        self.capacity = capacity
        shape = (g.num_layers, 2, padded(capacity, KV_BLOCK), g.num_kv_heads)
        self.base = torch.zeros(*shape, g.head_dim // 2, dtype=torch.uint8, device=device)
        self.refine = torch.zeros_like(self.base)
        self.scale = torch.zeros(*shape, dtype=torch.float16, device=device)

    @property
    def num_bytes(self) -> int:
        """Bytes of the planes and scales."""
        return self.base.nbytes + self.refine.nbytes + self.scale.nbytes

    def write(
        self, layer: int, kind: int, positions: Tensor, nested: tuple[Tensor, Tensor, Tensor]
    ) -> None:
        """Store (q4, q_r, scale) of rows at `positions`; kind 0 is K, 1 is V."""
        q4, qr, s = nested
        self.base[layer, kind, positions] = _pack(q4.to(torch.int32) & 15)
        self.refine[layer, kind, positions] = _pack(qr.to(torch.int32) + 8)
        self.scale[layer, kind, positions] = s

    def read(self, layer: int, kind: int, length: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return 16·q4 and q_r [T, Hkv, D] and scales [T, Hkv], fp32, of the first tokens."""
        b = self.base[layer, kind, :length]
        r = self.refine[layer, kind, :length]
        high = torch.cat(((b << 4).view(torch.int8), (b & 0xF0).view(torch.int8)), -1)
        low = torch.cat((r & 15, r >> 4), -1)
        return high.float(), low.float() - 8.0, self.scale[layer, kind, :length].float()

    def planes(self, length: int, layer: int | None = None) -> dict[str, npt.NDArray[Any]]:
        """Return copies of the first `length` tokens of every plane."""
        L = layers(layer)
        parts = {"base": self.base, "refine": self.refine, "scale": self.scale}
        return {name: np.array(t[L, :, :length].numpy()) for name, t in parts.items()}

    def load(self, planes: dict[str, npt.NDArray[Any]], layer: int | None = None) -> None:
        """Overwrite the first tokens."""
        for name, part in planes.items():
            plane = getattr(self, name)[layers(layer)]
            plane[:, :, : part.shape[2]] = torch.from_numpy(np.array(part))


class PlainCache:
    """The simplest correct cache, fp32 and unquantised: for the `fp` view and as a test double."""

    def __init__(
        self, geometry: Geometry, capacity: int, device: torch.device | str = "cpu"
    ) -> None:
        g = geometry
        self.capacity = capacity
        shape = (g.num_layers, 2, capacity, g.num_kv_heads, g.head_dim)
        self.kv = torch.zeros(shape, device=device)

    @property
    def num_bytes(self) -> int:
        """Bytes that are allocated."""
        return self.kv.nbytes

    def planes(self, length: int, layer: int | None = None) -> dict[str, npt.NDArray[Any]]:
        """Return a copy of the first `length` tokens."""
        return {"kv": np.array(self.kv[layers(layer), :, :length].numpy())}

    def load(self, planes: dict[str, npt.NDArray[Any]], layer: int | None = None) -> None:
        """Overwrite the first tokens."""
        part = planes["kv"]
        self.kv[layers(layer), :, : part.shape[2]] = torch.from_numpy(np.array(part))


def layers(layer: int | None) -> slice:
    """Return the layers that are meant: one, or all."""
    return slice(None) if layer is None else slice(layer, layer + 1)


def _pack(nibbles: Tensor) -> Tensor:
    low, high = nibbles.chunk(2, -1)
    return (low | (high << 4)).to(torch.uint8)
