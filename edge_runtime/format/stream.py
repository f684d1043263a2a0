"""Write one shard piece by piece, so that none of its planes is ever in memory as a whole.

Invariant: the file is there whole or not at all, and a plain safetensors file; wider types come
first, so that each plane is aligned. Planes are hashed as they are written.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from edge_runtime.format.manifest import DTYPES, Plane

Shapes = Mapping[str, tuple[str, tuple[int, ...]]]  # by plane name: dtype and shape


class ShardStream:
    """A context: `write` appends to a plane, in any order of planes; its end is the file's."""

    def __init__(self, file: Path, shapes: Shapes) -> None:
        """file: to be made; it is written beside, under another name."""
        self._path, self.shapes = file, shapes
        self._temporary = file.with_suffix(".tmp")
        header, at = {}, 0
        self._next: dict[str, int] = {}  # where the next bytes of a plane go
        self.ends: dict[str, int] = {}  # of planes, after the header
        for name in sorted(shapes, key=lambda n: -DTYPES[shapes[n][0]]):
            dtype, shape = shapes[name]
            end = at + math.prod(shape) * DTYPES[dtype]
            header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, end]}
            self._next[name], self.ends[name], at = at, end, end
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        self._head = len(text).to_bytes(8, "little") + text
        self._hashes = {name: hashlib.sha256() for name in shapes}

    def __enter__(self) -> ShardStream:
        """Open the file."""
        self._file = self._temporary.open("wb")
        self._file.write(self._head)
        return self

    def write(self, name: str, part: npt.NDArray[Any]) -> None:
        """Append the next elements of a plane."""
        data = np.ascontiguousarray(part).reshape(-1).view(np.uint8).data
        self._file.seek(len(self._head) + self._next[name])
        self._file.write(data)
        self._hashes[name].update(data)
        self._next[name] += len(data)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Give the file its name; after an error remove it."""
        try:
            if kind is None:
                assert self._next == self.ends, "planes that are not complete"
                self._file.flush()
                os.fsync(self._file.fileno())
                self._temporary.replace(self._path)
        finally:
            with contextlib.suppress(OSError):
                self._file.close()  # a full disk says so again
            with contextlib.suppress(FileNotFoundError):
                self._temporary.unlink()

    def planes(self) -> dict[str, Plane]:
        """Return the manifest's entries of what was written."""
        return {
            name: Plane(
                file=self._path.name,
                dtype=dtype,  # type: ignore[arg-type]
                shape=shape,
                sha256=self._hashes[name].hexdigest(),
            )
            for name, (dtype, shape) in self.shapes.items()
        }
