"""The KV of a prompt's beginning in a file, so that it is computed once.

Invariant: a file is there whole or not at all, and nothing of it is used before it is proven: every
size against the model's, the hash of ids and planes against the header's. The bytes that are used
are the very bytes that were hashed: the file is read, never mapped, and hashed again each time, for
others may cut it or write into it at any moment. It is a safetensors file; its metadata hold the
format, `bound` (what the numbers depend on: model, view, rope), the token ids and a sha256; layer i
has `layers.i.scale` fp16 [2, T, Hkv], `layers.i.base` and `layers.i.refine`
uint8 [2, T, Hkv, D/2], in that order (`kernels.ops.Cache`). The nest is stored once, so a file
serves every KV policy and, since backends agree on all bits, every backend. Not stored: embedding
rows, plain 16-bit caches.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from edge_runtime.atomic import PRIVATE, open_regular, whole_file
from edge_runtime.errors import (
    CheckpointError,
    UsageError,
    cut,
    cut_apart,
)
from edge_runtime.format.lfs import refuse_pointer
from edge_runtime.kernels.ops import Cache, Geometry
from edge_runtime.paths import not_written

FORMAT = "bitnest-prompt-cache"
VERSION = "1"
NAMES = ("scale", "base", "refine")
ELSEWHERE = "give a file in a folder that is there and is yours"
BEGIN_AGAIN = "remove it, and the next run makes it again"
NO_HASH = "0" * 64
MAX_HEADER_BYTES = 16 << 20  # the ids of two million tokens
NUMPY = {"F16": np.float16, "U8": np.uint8}
Layout = dict[str, dict[str, Any]]  # every plane, in order, as safetensors headers have it
Planes = dict[str, npt.NDArray[Any]]


def layout(geometry: Geometry, length: int) -> Layout:
    """Return the planes of `length` tokens."""
    vectors = [2, length, geometry.num_kv_heads]
    nibbles = [*vectors, geometry.head_dim // 2]
    kinds = (("scale", "F16", vectors), ("base", "U8", nibbles), ("refine", "U8", nibbles))
    planes: Layout = {}
    at = 0
    for layer in range(geometry.num_layers):
        for name, dtype, shape in kinds:
            end = at + math.prod(shape) * np.dtype(NUMPY[dtype]).itemsize
            plane = {"dtype": dtype, "shape": shape, "data_offsets": [at, end]}
            planes[f"layers.{layer}.{name}"] = plane
            at = end
    return planes


def save(
    path: Path, bound: Mapping[str, str], ids: list[int], cache: Cache, geometry: Geometry
) -> None:
    """Write the first tokens of a cache, one layer in memory at a time.

    bound: what else must be equal where it is loaded. Raises UsageError while another process
    saves there and where it cannot be written, BudgetError where there is no room.
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
        raise not_written(path, error, ELSEWHERE) from None


def check_writable(path: Path) -> None:
    """Raise, before anything is computed, what `save` would raise for a bad place."""
    target = Path(os.path.realpath(path))  # of a link that is written
    folder = target.parent
    if target.exists() and not target.is_file():
        why = "it is a folder" if target.is_dir() else "it is no file"
    elif folder.is_dir() and os.access(folder, os.W_OK):
        return
    else:
        why = f"no writable folder {folder}"
    raise UsageError(f"{path}: cannot keep a prompt's cache there: {why}", ELSEWHERE)


def check(path: Path, *, made: bool) -> None:
    """Raise, before a model is loaded, UsageError or CheckpointError for what cannot be used.

    made: a file that is not there will be made.
    """
    if made and not path.exists():
        check_writable(path)
        return
    fd = _open(path)
    try:
        _header(path, fd)
    finally:
        os.close(fd)


class PromptFile:
    """A file that was proven to be of this model and of so many tokens."""

    def __init__(self, path: Path, bound: Mapping[str, str], geometry: Geometry) -> None:
        """Read all of it once. Raises CheckpointError with what differs."""
        self.path, self._geometry = path, geometry
        self._fd = _open(path)
        weakref.finalize(self, os.close, self._fd)
        header, self._start = _header(path, self._fd)
        found = header.pop("__metadata__")
        self._compare(found, bound)
        self.ids = _ids(found.get("ids", ""), geometry.num_tokens, path)
        self._planes = layout(geometry, len(self.ids))
        self._check_sizes(header)
        self._begun = _begin(bound, self.ids)
        self._proven: list[bytes] = []  # for each layer the hash of all up to its end
        digest = self._begun.copy()
        for layer in range(geometry.num_layers):
            self._read(layer, digest)
            self._proven.append(digest.digest())
        if digest.hexdigest() != found.get("sha256"):
            raise CheckpointError(f"{path}: damaged (its checksum differs)", BEGIN_AGAIN)

    def restore(self, cache: Cache, length: int) -> None:
        """Put the first tokens into a cache, one layer in memory at a time.

        Raises CheckpointError at the first layer that is no longer what was proven; the cache has
        those before it then.
        """
        digest = self._begun.copy()
        for layer in range(self._geometry.num_layers):
            cache.load(self._checked(layer, length, digest), layer)

    def _checked(self, layer: int, length: int, digest: Any) -> Planes:
        """Return the first tokens of a layer in the shapes that `Cache.load` takes."""
        planes = self._read(layer, digest)
        if digest.digest() != self._proven[layer]:
            raise self._changed()
        return {name: part[None, :, :length] for name, part in planes.items()}

    def _read(self, layer: int, digest: Any) -> Planes:
        """Return the planes of a layer [2, T, ...] and add their bytes to a hash."""
        planes: Planes = {}
        for name in NAMES:
            plane = self._planes[f"layers.{layer}.{name}"]
            begin, end = plane["data_offsets"]
            data = np.empty(end - begin, np.uint8)
            try:
                count = os.preadv(self._fd, [data.data], self._start + begin)
            except OSError as error:
                raise CheckpointError(
                    f"{self.path}: cannot be read: {error.strerror}", BEGIN_AGAIN
                ) from None
            if count != len(data):
                raise self._changed()
            digest.update(data.data)
            planes[name] = data.view(NUMPY[plane["dtype"]]).reshape(plane["shape"])
        return planes

    def _changed(self) -> CheckpointError:
        return CheckpointError(f"{self.path}: changed since it was opened", BEGIN_AGAIN)

    def _compare(self, found: dict[str, str], bound: Mapping[str, str]) -> None:
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

    def _check_sizes(self, header: dict[str, Any]) -> None:
        if header.keys() != self._planes.keys():
            raise CheckpointError(
                f"{self.path}: expected the planes of {self._geometry.num_layers} layers, got "
                f"{len(header)} others",
                BEGIN_AGAIN,
            )
        end = 0
        for name, wanted in self._planes.items():
            if header[name] != wanted:
                raise CheckpointError(
                    f"{self.path}: plane {name!r}: expected {_shown(wanted)}, got "
                    f"{_shown(header[name])}",
                    BEGIN_AGAIN,
                )
            end = self._start + wanted["data_offsets"][1]
        if (size := os.fstat(self._fd).st_size) != end:
            raise CheckpointError(
                f"{self.path}: damaged: expected {end} bytes, got {size}", BEGIN_AGAIN
            )


def _open(path: Path) -> int:
    try:
        fd = open_regular(path, os.O_RDONLY)
    except OSError as error:
        raise CheckpointError(
            f"{path}: expected a file with a prompt's cache, got none: {error.strerror or error}",
            "chat --system TEXT --prompt-cache FILE makes one",
        ) from None
    return fd


def _header(path: Path, fd: int) -> tuple[dict[str, Any], int]:
    """Return a file's header, whose metadata are this format's, and where it ends."""
    refuse_pointer(path)
    size = int.from_bytes(os.pread(fd, 8, 0), "little")
    try:
        header = json.loads(os.pread(fd, size, 8) if size <= MAX_HEADER_BYTES else b"")
        found = header.get("__metadata__", {})
        header["__metadata__"] = {name: str(value) for name, value in found.items()}
    except (OSError, ValueError, RecursionError, AttributeError, TypeError):
        raise CheckpointError(
            f"{path}: no prompt's cache, or a damaged one (no safetensors header)",
            f"give another file, or, if it was one, {BEGIN_AGAIN}",
        ) from None
    if header["__metadata__"].get("format") != FORMAT:
        raise CheckpointError(
            f"{path}: a safetensors file, but no prompt's cache", "give another file"
        )
    return header, 8 + size


def _head(bound: Mapping[str, str], ids: list[int], planes: Layout, sha256: str) -> bytes:
    """Return a safetensors header; it has the same length with every hash."""
    metadata = {"format": FORMAT, "version": VERSION, **bound, "ids": _json(ids), "sha256": sha256}
    text = _json({"__metadata__": metadata, **planes}).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _shown(plane: Any) -> str:
    if not isinstance(plane, dict):
        return cut(str(plane))
    return cut(f"{plane.get('dtype')} {plane.get('shape')} at {plane.get('data_offsets')}")


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
