"""The GGUF container: header, metadata and tensor table of one file, all checked.

Invariant: after `GgufFile(path)` every metadata value is a plain Python value and every tensor's
bytes lie inside the file, aligned and apart from each other; no length, count or offset from the
file was believed before it was compared with the file's size.

Layout (little-endian): magic "GGUF", u32 version, u64 tensor count, u64 metadata count; metadata
as (string key, u32 type, value); tensor table as (string name, u32 dims, u64 each, u32 type,
u64 offset); padding to `general.alignment`; data. A string is u64 length + UTF-8.
Dequantisation is left to the `gguf` package. Split files and big-endian files are refused.
"""

from __future__ import annotations

import mmap
import struct
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from edge_runtime.convert.ggml_types import TYPES
from edge_runtime.convert.source import describe_file
from edge_runtime.errors import CheckpointError, UnsupportedModel, cut
from edge_runtime.format.lfs import refuse_pointer

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?"}
_SCALARS |= {10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_TYPE_NAMES = {str: "a string", bool: "true or false", int: "a whole number", list: "a list"}
_AGAIN = "the file is damaged or incomplete; download it again"
_MAX_DIMS = 4
_MAX_NAME = 256  # the format says 64
_DEFAULT_ALIGNMENT = 32

T = TypeVar("T")
Metadata = dict[str, Any]


class GgufTensor(NamedTuple):
    """Where a tensor lies: shape as [out, in], ggml type number, byte range in the file."""

    shape: tuple[int, ...]
    type: int
    offset: int
    num_bytes: int


class _Cursor:
    """Bounds-checked reads from the mapped file."""

    def __init__(self, data: memoryview, name: str) -> None:
        self.data, self.name, self.at = data, name, 0

    def take(self, size: int, what: str) -> memoryview:
        if size > len(self.data) - self.at:
            raise CheckpointError(
                f"{self.name} is truncated or damaged: {what} at byte {self.at} needs {size} "
                f"bytes, got {len(self.data) - self.at}",
                _AGAIN,
            )
        self.at += size
        return self.data[self.at - size : self.at]

    def scalar(self, code: str, what: str) -> Any:
        return struct.unpack("<" + code, self.take(struct.calcsize("<" + code), what))[0]

    def string(self, what: str) -> str:
        raw = bytes(self.take(self.scalar("Q", what), what))
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            raise CheckpointError(
                f"{self.name}: {what} at byte {self.at} is not UTF-8", _AGAIN
            ) from None

    def value(self, kind: int, what: str) -> Any:
        if kind == _STRING:
            return self.string(what)
        if kind in _SCALARS:
            return self.scalar(_SCALARS[kind], what)
        if kind != _ARRAY:
            raise CheckpointError(f"{self.name}: {what} has unknown type {kind}", _AGAIN)
        item, count = self.scalar("I", what), self.scalar("Q", what)
        if item == _STRING:
            if count > (len(self.data) - self.at) // 8:  # each costs at least its length field
                self.take(count * 8, what)
            return [self.string(what) for _ in range(count)]
        if item not in _SCALARS:
            raise CheckpointError(f"{self.name}: {what} is an array of type {item}", _AGAIN)
        width = struct.calcsize("<" + _SCALARS[item])
        raw = self.take(count * width, what)
        return np.frombuffer(raw, dtype=np.dtype(_SCALARS[item]).newbyteorder("<")).tolist()


class GgufFile:
    """One checked file: `metadata`, `tensors` by name, `data(name)` as a view of the mapping."""

    def __init__(self, path: Path) -> None:
        self.name = path.name
        refuse_pointer(path)
        if path.stat().st_size < 24:
            raise CheckpointError(
                f"{path.name} is not a GGUF file: got {describe_file(path)}", _AGAIN
            )
        self._map: npt.NDArray[np.uint8] | None = np.memmap(path, dtype=np.uint8, mode="r")
        cursor = _Cursor(self._map.data, path.name)
        _check_magic(cursor, path)
        num_tensors, num_values = cursor.scalar("Q", "tensor count"), cursor.scalar("Q", "count")
        for what, count, least in (("tensor", num_tensors, 24), ("metadata", num_values, 13)):
            if count * least > len(cursor.data):
                raise CheckpointError(
                    f"{path.name}: {what} count {count} cannot fit in {len(cursor.data)} bytes",
                    _AGAIN,
                )
        self.metadata: Metadata = {}
        for _ in range(num_values):
            key = cursor.string("a metadata key")
            if key in self.metadata:
                raise CheckpointError(
                    f"{path.name}: metadata key {shown(key)} occurs twice", _AGAIN
                )
            self.metadata[key] = cursor.value(cursor.scalar("I", cut(key)), cut(key))
        parts = self.metadata.get("split.count", 1)
        if not isinstance(parts, int) or parts > 1:
            raise UnsupportedModel(
                f"{path.name} is one of {shown(parts)} parts of a split GGUF",
                "join them first: gguf-split --merge FIRST-PART OUT.gguf",
            )
        self.tensors = self._tensor_table(cursor, num_tensors)

    def data(self, name: str) -> npt.NDArray[np.uint8]:
        """Return the bytes of one tensor as [rows, bytes per row]; a view of the mapped file."""
        assert self._map is not None, "the file was closed"
        info = self.tensors[name]
        raw = self._map[info.offset : info.offset + info.num_bytes]
        return raw.reshape(*info.shape[:-1], -1)

    def release(self) -> None:
        """Give the pages of the mapped file back; what is used again is read again."""
        if self._map is not None:
            # numpy's memmap has no public way to its mapping
            self._map._mmap.madvise(mmap.MADV_DONTNEED)  # type: ignore[attr-defined]

    def close(self) -> None:
        """Drop the mapping; views handed out keep it alive until they go."""
        self._map = None

    def _tensor_table(self, cursor: _Cursor, count: int) -> dict[str, GgufTensor]:
        table: list[tuple[str, tuple[int, ...], int, int]] = []
        for _ in range(count):
            name = cursor.string("a tensor name")
            if len(name) > _MAX_NAME:
                raise CheckpointError(
                    f"{self.name}: expected tensor names of at most {_MAX_NAME} characters, got "
                    f"{len(name)}",
                    _AGAIN,
                )
            dims = cursor.scalar("I", name)
            if not 1 <= dims <= _MAX_DIMS:
                raise CheckpointError(
                    f"{self.name}: tensor {name} has {dims} dimensions, expected 1 to {_MAX_DIMS}",
                    _AGAIN,
                )
            shape = tuple(cursor.scalar("Q", name) for _ in range(dims))[::-1]
            table.append((name, shape, cursor.scalar("I", name), cursor.scalar("Q", name)))
        alignment = self.metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment <= 0 or alignment & (alignment - 1):
            raise CheckpointError(
                f"{self.name}: general.alignment must be a power of two, got {alignment}", _AGAIN
            )
        start = -(-cursor.at // alignment) * alignment
        tensors: dict[str, GgufTensor] = {}
        for name, shape, kind, offset in table:
            if name in tensors:
                raise CheckpointError(f"{self.name}: tensor {name} occurs twice", _AGAIN)
            if offset % alignment:
                raise CheckpointError(
                    f"{self.name}: tensor {name} is unaligned: offset {offset} is not a multiple "
                    f"of {alignment}",
                    _AGAIN,
                )
            size = _tensor_bytes(self.name, name, shape, kind)
            if start + offset + size > len(cursor.data):
                raise CheckpointError(
                    f"{self.name} is truncated: tensor {name} ends at byte "
                    f"{start + offset + size}, got {len(cursor.data)} bytes",
                    _AGAIN,
                )
            tensors[name] = GgufTensor(shape, kind, start + offset, size)
        _refuse_overlap(self.name, tensors)
        return tensors


def optional(meta: Metadata, key: str, kind: type[T]) -> T | None:
    """Return a metadata value, None where there is none. Raises CheckpointError for another type.

    `kind` is str, bool, int or list, exactly: true is not a number.
    """
    value = meta.get(key)
    if value is not None and type(value) is not kind:
        raise CheckpointError(
            f"GGUF metadata: {key} must be {_TYPE_NAMES[kind]}, got {shown(value)}"
        )
    return value


def shown(value: object) -> str:
    """Return a metadata value as an error message quotes it."""
    return cut(repr(value))


def _check_magic(cursor: _Cursor, path: Path) -> None:
    if bytes(cursor.take(4, "the magic")) != b"GGUF":
        raise CheckpointError(
            f"{path.name} is not a GGUF file: got {describe_file(path)}", "download it again"
        )
    version = cursor.scalar("I", "the version")
    if version & 0xFFFF == 0 and version:
        raise UnsupportedModel(f"{path.name} is a big-endian GGUF file: expected little-endian")
    if version not in (2, 3):
        raise UnsupportedModel(
            f"{path.name}: GGUF version {version} is not supported, expected 2 or 3",
            "convert it again with a current llama.cpp" if version == 1 else "",
        )


def _tensor_bytes(file: str, name: str, shape: tuple[int, ...], kind: int) -> int:
    if kind not in TYPES:
        raise UnsupportedModel(
            f"{file}: tensor {name} has unknown ggml type {kind}",
            "the file may be newer than this program, or damaged: convert from the Hugging Face "
            "folder of the model",
        )
    _, block, block_bytes = TYPES[kind]
    elements = 1
    for n in shape:
        elements *= n
    if elements == 0 or shape[-1] % block:
        raise CheckpointError(
            f"{file}: tensor {name} of shape {list(shape)}: expected rows of whole blocks of "
            f"{block}",
            _AGAIN,
        )
    return elements // block * block_bytes


def _refuse_overlap(file: str, tensors: dict[str, GgufTensor]) -> None:
    ordered = sorted(tensors.items(), key=lambda item: item[1].offset)
    for (name, info), (following, after) in pairwise(ordered):
        if info.offset + info.num_bytes > after.offset:
            raise CheckpointError(f"{file}: tensors {name} and {following} overlap", _AGAIN)
