"""Read a checkpoint: manifest first, then planes one at a time, each proven before it is used.

Invariant: `plane(name)` returns bytes whose dtype, shape and sha256 are the manifest's, or raises
CheckpointError naming the plane. Files are opened by the names in the manifest, inside the folder
only, and read with safetensors (never pickle).
"""

from __future__ import annotations

import hashlib
import json
import mmap
import struct
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from edge_runtime.errors import CheckpointError
from edge_runtime.format.lfs import refuse_pointer
from edge_runtime.format.manifest import (
    DTYPES,
    MANIFEST,
    RECONVERT,
    TOKENIZER,
    read_bounded,
    read_manifest,
)

NUMPY = {"U8": np.uint8, "I8": np.int8, "I16": np.int16, "F16": np.float16, "F32": np.float32}
MAX_HEADER_BYTES = 16 << 20


class Checkpoint:
    """An opened checkpoint folder."""

    def __init__(self, path: Path) -> None:
        """Read and check the manifest. Raises CheckpointError."""
        self.path = path
        self.manifest = read_manifest(path)
        self.sha256 = hashlib.sha256((path / MANIFEST).read_bytes()).hexdigest()
        self._files: dict[str, _PlaneFile] = {}
        self._verified: set[str] = set()

    def plane(self, name: str) -> npt.NDArray[Any]:
        """Return one plane as a read-only array on the mapped file; checked on first use."""
        entry = self.manifest.planes[name]
        if entry.file not in self._files:
            self._files[entry.file] = _PlaneFile(self.path / entry.file)
        data = self._files[entry.file].get(name, entry.dtype, entry.shape)
        if name not in self._verified:
            if hashlib.sha256(data).hexdigest() != entry.sha256:
                raise CheckpointError(
                    f"{self.path / entry.file}: plane {name!r} is damaged (its checksum differs)",
                    "copy the folder again, or convert the model again",
                )
            self._verified.add(name)
        return np.frombuffer(data, dtype=NUMPY[entry.dtype]).reshape(entry.shape)

    def tokenizer_json(self) -> str:
        """Return the tokenizer's JSON. Raises CheckpointError if it is missing or damaged."""
        file = self.path / TOKENIZER
        if not file.is_file():
            raise CheckpointError(f"{self.path}: {TOKENIZER} is missing", RECONVERT)
        data = read_bounded(file, 256 << 20)
        if hashlib.sha256(data).hexdigest() != self.manifest.tokenizer_sha256:
            raise CheckpointError(f"{file}: damaged (its checksum differs)", RECONVERT)
        return data.decode("utf-8")

    def verify(self) -> None:
        """Check every plane and the tokenizer."""
        for name in self.manifest.planes:
            self.plane(name)
        self.tokenizer_json()

    def release(self) -> None:
        """Give the pages of the mapped files back; what is used again is read again."""
        for file in self._files.values():
            file.release()

    def close(self) -> None:
        """Forget the mapped files; arrays handed out keep their pages."""
        self._files.clear()


class _PlaneFile:
    """One safetensors file, mapped; the header is checked against the file's length."""

    def __init__(self, path: Path) -> None:
        self.path = path
        if not path.is_file():
            raise CheckpointError(f"{path}: file is missing", RECONVERT)
        refuse_pointer(path)
        size = path.stat().st_size
        if size < 8:
            raise CheckpointError(f"{path}: truncated: {size} bytes", RECONVERT)
        with path.open("rb") as f:
            self._map = mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ)
        (header_bytes,) = struct.unpack("<Q", self._map[:8])
        if header_bytes > min(size - 8, MAX_HEADER_BYTES):
            raise CheckpointError(
                f"{path}: not a safetensors file, or truncated: its header claims "
                f"{header_bytes} bytes, the file has {size}",
                RECONVERT,
            )
        try:
            self._header = json.loads(self._map[8 : 8 + header_bytes])
        except (ValueError, RecursionError) as e:
            raise CheckpointError(f"{path}: its header is not JSON", RECONVERT) from e
        if not isinstance(self._header, dict):
            raise CheckpointError(f"{path}: its header is not a JSON object", RECONVERT)
        self._start = 8 + header_bytes

    def release(self) -> None:
        self._map.madvise(mmap.MADV_DONTNEED)

    def get(self, name: str, dtype: str, shape: tuple[int, ...]) -> memoryview:
        entry = self._header.get(name)
        if not isinstance(entry, dict):
            raise CheckpointError(f"{self.path}: plane {name!r} is missing", RECONVERT)
        if entry.get("dtype") != dtype or entry.get("shape") != list(shape):
            raise CheckpointError(
                f"{self.path}: plane {name!r}: expected {dtype} {list(shape)}, "
                f"got {entry.get('dtype')} {entry.get('shape')}",
                RECONVERT,
            )
        offsets = entry.get("data_offsets")
        want = int(np.prod(shape, dtype=object)) * DTYPES[dtype]
        available = len(self._map) - self._start
        if (
            not isinstance(offsets, list)
            or len(offsets) != 2
            or not all(isinstance(o, int) for o in offsets)
            or not 0 <= offsets[0] <= offsets[1] <= available
            or offsets[1] - offsets[0] != want
        ):
            raise CheckpointError(
                f"{self.path}: plane {name!r}: expected {want} bytes inside the file, got "
                f"offsets {offsets} of {available} (truncated?)",
                RECONVERT,
            )
        begin = self._start + offsets[0]
        return memoryview(self._map)[begin : begin + want]
