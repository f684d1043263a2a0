"""The KV of a prompt's beginning in a file, so that it is computed once.

Invariant: a file is there whole or not at all, and nothing of it is used before it is proven: every
size against the model's, the hash of ids and planes against the header's. It is a safetensors file;
its metadata hold the format, `bound` (what the numbers depend on: model, view, rope), the token ids
and a sha256; layer i has `layers.i.scale` fp16 [2, T, Hkv], `layers.i.base` and `layers.i.refine`
uint8 [2, T, Hkv, D/2], in that order (`kernels.ops.Cache`). The nest is stored once, so a file
serves every KV policy and, since backends agree on all bits, every backend. Not stored: embedding
rows, plain 16-bit caches.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open

from edge_runtime.atomic import PRIVATE, whole_file
from edge_runtime.errors import BitnestError, BudgetError, CheckpointError, UsageError, cut_apart
from edge_runtime.format.lfs import refuse_pointer
from edge_runtime.kernels.ops import Cache, Geometry
from edge_runtime.paths import FULL

FORMAT = "bitnest-prompt-cache"
VERSION = "1"
NAMES = ("scale", "base", "refine")
BEGIN_AGAIN = "remove it, and the next run makes it again"
NO_HASH = "0" * 64
Layout = list[tuple[str, str, tuple[int, ...]]]  # name, dtype and shape of every plane, in order


def layout(geometry: Geometry, length: int) -> Layout:
    """Return the planes of `length` tokens."""
    g = geometry
    vectors = (2, length, g.num_kv_heads)
    nibbles = (*vectors, g.head_dim // 2)
    kinds: Layout = [("scale", "F16", vectors), ("base", "U8", nibbles), ("refine", "U8", nibbles)]
    return [(f"layers.{i}.{n}", dtype, s) for i in range(g.num_layers) for n, dtype, s in kinds]


def save(
    path: Path, bound: Mapping[str, str], ids: list[int], cache: Cache, geometry: Geometry
) -> None:
    """Write the first tokens of a cache, one layer in memory at a time.

    bound: what else must be equal where it is loaded. Raises UsageError while another process
    saves there, BudgetError where it cannot be written.
    """
    planes = layout(geometry, len(ids))
    try:
        with whole_file(path, PRIVATE, alone=True) as file:  # a prompt may be private
            head = _head(bound, ids, planes, NO_HASH)
            file.write(head)
            digest = _begin(bound, ids)
            for layer in range(geometry.num_layers):
                parts = cache.planes(len(ids), layer)
                for name in NAMES:
                    data = np.ascontiguousarray(parts[name]).reshape(-1).view(np.uint8).data
                    file.write(data)
                    digest.update(data)
            file.seek(0)
            file.write(_head(bound, ids, planes, digest.hexdigest()))
    except OSError as error:
        raise _not_written(path, error) from None


def check_writable(path: Path) -> None:
    """Raise, before anything is computed, what `save` would raise for a bad place."""
    folder = path.absolute().parent
    if path.is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK):
        why = "it is a folder" if path.is_dir() else f"no writable folder {folder}"
        raise UsageError(
            f"{path}: cannot keep a prompt's cache there: {why}",
            "give a file in a folder that is there and is yours",
        )


class PromptFile:
    """A file that was proven to be of this model and of so many tokens."""

    def __init__(self, path: Path, bound: Mapping[str, str], geometry: Geometry) -> None:
        """Read all of it once. Raises CheckpointError with what differs."""
        self.path, self._geometry = path, geometry
        if not path.is_file():
            raise CheckpointError(
                f"{path}: expected a file with a prompt's cache, got none",
                "chat --system TEXT --prompt-cache FILE makes one",
            )
        refuse_pointer(path)
        try:
            opened: Any = safe_open  # its methods have no types
            self._file = opened(path, framework="np")
            found: dict[str, str] = self._file.metadata() or {}
            self._compare(found, bound)
            self.ids = _ids(found.get("ids", ""), geometry.num_tokens, path)
            self._check_sizes()
            digest = _begin(bound, self.ids)
            for layer in range(geometry.num_layers):
                for part in self.planes(layer).values():
                    digest.update(part.reshape(-1).view(np.uint8).data)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(
                f"{path}: no prompt's cache, or a damaged one ({error})",
                f"give another file, or, if it was one, {BEGIN_AGAIN}",
            ) from None
        if digest.hexdigest() != found.get("sha256"):
            raise CheckpointError(f"{path}: damaged (its checksum differs)", BEGIN_AGAIN)

    def planes(self, layer: int, length: int | None = None) -> dict[str, npt.NDArray[Any]]:
        """Return the first tokens of a layer in the shapes that `Cache.load` takes."""
        get = self._file.get_tensor
        return {name: get(f"layers.{layer}.{name}")[None, :, :length] for name in NAMES}

    def restore(self, cache: Cache, length: int) -> None:
        """Put the first tokens into a cache, one layer in memory at a time."""
        for layer in range(self._geometry.num_layers):
            cache.load(self.planes(layer, length), layer)

    def _compare(self, found: dict[str, str], bound: Mapping[str, str]) -> None:
        if found.get("format") != FORMAT:
            raise CheckpointError(
                f"{self.path}: a safetensors file, but no prompt's cache", "give another file"
            )
        wanted = {"version": VERSION, **bound}
        differing = [name for name, value in wanted.items() if found.get(name) != value]
        if differing:
            said = []
            for name in differing:
                mine, theirs = cut_apart(wanted[name], found.get(name, "none"))
                what = "version of the format" if name == "version" else name
                said.append(f"another {what}: expected {mine}, got {theirs}")
            raise CheckpointError(
                f"{self.path}: made for " + "; for ".join(said),
                f"give another file, or {BEGIN_AGAIN}",
            )

    def _check_sizes(self) -> None:
        wanted = layout(self._geometry, len(self.ids))
        there = set(self._file.keys())
        if there != {name for name, _, _ in wanted}:
            raise CheckpointError(
                f"{self.path}: expected the planes of {self._geometry.num_layers} layers, got "
                f"{len(there)} others",
                BEGIN_AGAIN,
            )
        for name, dtype, shape in wanted:
            plane = self._file.get_slice(name)
            if (plane.get_dtype(), tuple(plane.get_shape())) != (dtype, shape):
                raise CheckpointError(
                    f"{self.path}: plane {name!r}: expected {dtype} {list(shape)}, got "
                    f"{plane.get_dtype()} {plane.get_shape()}",
                    BEGIN_AGAIN,
                )


def _head(bound: Mapping[str, str], ids: list[int], planes: Layout, sha256: str) -> bytes:
    """Return a safetensors header; it has the same length with every hash."""
    metadata = {"format": FORMAT, "version": VERSION, **bound, "ids": _json(ids), "sha256": sha256}
    header: dict[str, Any] = {"__metadata__": metadata}
    at = 0
    for name, dtype, shape in planes:
        end = at + math.prod(shape) * (2 if dtype == "F16" else 1)
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, end]}
        at = end
    text = _json(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _begin(bound: Mapping[str, str], ids: list[int]) -> Any:
    """Return a hash of what is not in the planes."""
    return hashlib.sha256(_json([VERSION, sorted(bound.items()), ids]).encode())


def _json(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))


def _ids(text: str, num_tokens: int, path: Path) -> list[int]:
    try:
        ids = json.loads(text)
    except (ValueError, RecursionError):
        ids = None
    if (
        not isinstance(ids, list)
        or not ids
        or not all(type(i) is int and 0 <= i < num_tokens for i in ids)
    ):
        raise CheckpointError(f"{path}: its token ids are none of this model's", BEGIN_AGAIN)
    return ids


def _not_written(path: Path, error: OSError) -> BitnestError:
    reason = error.strerror or str(error)
    if error.errno in FULL:
        return BudgetError(f"{path}: no room on the disk: {reason}", "free some space")
    return BudgetError(f"{path}: cannot write there: {reason}", "give another file")
