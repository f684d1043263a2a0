"""The nested KV cache as the CUDA kernels read it: blocks of 64 tokens at absolute positions.

Invariant: the bytes are the canonical ones (`kernels/ops.py`, `Cache.planes`) in another order: a
head's tokens lie together, and values are transposed within a block, since the tensor core wants
tokens side by side there. Base and refinement lie apart: drafting never touches the refinement.
A byte i packs dims (i, i + D/2), low nibble first.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from edge_runtime.kernels.layout import KV_BLOCK, padded
from edge_runtime.kernels.ops import Geometry


@dataclass(frozen=True, slots=True)
class LayerCache:
    """Views of one layer; T is whole blocks.

    key_base, key_refine: uint8 [Hkv, T, D/2]; value_base, value_refine: uint8
    [Hkv, T/64, D/2, 64]; key_scale, value_scale: fp16 [Hkv, T].
    """

    key_base: Tensor
    key_refine: Tensor
    value_base: Tensor
    value_refine: Tensor
    key_scale: Tensor
    value_scale: Tensor

    @property
    def num_tokens(self) -> int:
        """Tokens there is room for: T."""
        return self.key_scale.shape[1]


class NestedCache:
    """All layers. Invariant: a token is written whole; what lies past a sequence is dead."""

    def __init__(
        self, geometry: Geometry, capacity: int, device: torch.device | str = "cuda"
    ) -> None:
        L, Hkv, half = geometry.num_layers, geometry.num_kv_heads, geometry.head_dim // 2
        T = padded(capacity, KV_BLOCK)
        self.capacity = capacity
        values = (L, Hkv, T // KV_BLOCK, half, KV_BLOCK)
        self.key_base = torch.zeros(L, Hkv, T, half, dtype=torch.uint8, device=device)
        self.key_refine = torch.zeros_like(self.key_base)
        self.value_base = torch.zeros(values, dtype=torch.uint8, device=device)
        self.value_refine = torch.zeros_like(self.value_base)
        self.scale = torch.zeros(L, 2, Hkv, T, dtype=torch.float16, device=device)

    @property
    def num_bytes(self) -> int:
        """Bytes of the planes and scales."""
        return 2 * (self.key_base.nbytes + self.value_base.nbytes) + self.scale.nbytes

    def layer(self, index: int) -> LayerCache:
        """Return the views that the kernels of one layer take."""
        return LayerCache(
            self.key_base[index],
            self.key_refine[index],
            self.value_base[index],
            self.value_refine[index],
            self.scale[index, 0],
            self.scale[index, 1],
        )

    def planes(self, length: int, layer: int | None = None) -> dict[str, npt.NDArray[Any]]:
        """Return copies of the first `length` tokens in canonical order (`ops.Cache`)."""
        L = slice(None) if layer is None else slice(layer, layer + 1)
        parts = {
            "base": _canonical(self.key_base[L], self.value_base[L], length),
            "refine": _canonical(self.key_refine[L], self.value_refine[L], length),
            "scale": self.scale[L, ..., :length].transpose(2, 3),
        }
        return {name: np.array(part.cpu().numpy()) for name, part in parts.items()}

    def load(self, planes: dict[str, npt.NDArray[Any]], layer: int | None = None) -> None:
        """Overwrite the first tokens with canonical planes; later tokens stay."""
        L = slice(None) if layer is None else slice(layer, layer + 1)
        for name, keys, values in (
            ("base", self.key_base[L], self.value_base[L]),
            ("refine", self.key_refine[L], self.value_refine[L]),
        ):
            part = torch.from_numpy(np.array(planes[name])).to(keys.device)
            length = part.shape[2]
            keys[:, :, :length] = part[:, 0].transpose(1, 2)
            whole = length // KV_BLOCK * KV_BLOCK
            new = part[:, 1].permute(0, 2, 3, 1)  # [L, Hkv, D/2, T]
            values[:, :, : whole // KV_BLOCK] = (
                new[..., :whole].unflatten(-1, (-1, KV_BLOCK)).transpose(2, 3)
            )
            if length > whole:
                values[:, :, whole // KV_BLOCK, :, : length - whole] = new[..., whole:]
        scale = torch.from_numpy(np.array(planes["scale"])).to(self.scale.device)
        self.scale[L, ..., : scale.shape[2]] = scale.transpose(2, 3)


def _canonical(keys: Tensor, values: Tensor, length: int) -> Tensor:
    """uint8 [L, Hkv, T, D/2] and [L, Hkv, T/64, D/2, 64] -> [L, 2, length, Hkv, D/2]."""
    blocks = values[:, :, : -(-length // KV_BLOCK)]
    flat = blocks.transpose(3, 4).flatten(2, 3)[:, :, :length]
    return torch.stack((keys[:, :, :length].transpose(1, 2), flat.transpose(1, 2)), 1)
