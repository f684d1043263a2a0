"""Small stand-ins for packages that a machine without network may lack: safetensors, tokenizers.

Invariant: a package that is there is used; the program itself never does this. They do what a
conversion of a model from `write_safetensors` and bytes as tokens needs, and no more.
"""

from __future__ import annotations

import importlib.util
import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import numpy as np
import torch

TYPES = {"F16": "float16", "F32": "float32", "U8": "uint8", "I8": "int8", "I16": "int16"}


def install() -> list[str]:
    """Put stand-ins in the places of missing packages and return their names."""
    missing = [n for n in ("safetensors", "tokenizers") if importlib.util.find_spec(n) is None]
    if "safetensors" in missing:
        package = ModuleType("safetensors")
        vars(package).update(SafetensorError=ValueError, safe_open=SafeOpen)
        sys.modules["safetensors"] = package
    if "tokenizers" in missing:
        sys.modules["tokenizers"] = ModuleType("tokenizers")
        from edge_runtime.convert import pipeline, source_hf

        vars(pipeline)["Tokenizer"] = Bytes
        vars(source_hf)["read_text_assets"] = read_text_assets
    return missing


class SafeOpen:
    """`safetensors.safe_open` of one file."""

    def __init__(self, file: str | Path, framework: str) -> None:
        self._torch = framework == "pt"
        with Path(file).open("rb") as opened:
            size = int.from_bytes(opened.read(8), "little")
            self._header = json.loads(opened.read(size))
        self._header.pop("__metadata__", None)
        self._data = np.memmap(file, np.uint8, "c", 8 + size)

    def __enter__(self) -> SafeOpen:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def keys(self) -> list[str]:
        """Names."""
        return list(self._header)

    def get_tensor(self, name: str) -> Any:
        """Return one tensor: a view of the file for torch, a copy for numpy."""
        entry = self._header[name]
        start, end = entry["data_offsets"]
        view = self._data[start:end].view(TYPES[entry["dtype"]]).reshape(entry["shape"])
        return torch.from_numpy(view) if self._torch else np.array(view)


def write_safetensors(
    file: Path, shapes: dict[str, tuple[str, tuple[int, ...]]], arrays: Iterator[np.ndarray]
) -> None:
    """Write a file of tensors (numpy's dtype name, shape) that come one by one, in this order."""
    names, header, at = {v: k for k, v in TYPES.items()}, {}, 0
    for name, (dtype, shape) in shapes.items():
        size = math.prod(shape) * np.dtype(dtype).itemsize
        header[name] = {"dtype": names[dtype], "shape": shape, "data_offsets": [at, at + size]}
        at += size
    raw = json.dumps(header).encode()
    raw += b" " * (-len(raw) % 8)
    with file.open("wb") as opened:
        opened.write(len(raw).to_bytes(8, "little") + raw)
        for array in arrays:
            array.tofile(opened)


class Bytes:
    """A tokenizer whose tokens are bytes."""

    @classmethod
    def from_json(cls, tokenizer_json: str, control_ids: Any = ()) -> Bytes:
        """Make one; there is nothing to read."""
        return cls()

    def encode(self, text: str, *, allow_special: bool) -> list[int]:
        """Return the bytes."""
        return list(text.encode())


def read_text_assets(folder: Path, config: Any, vocab_size: int) -> tuple[str, Any, list[str]]:
    """Text without a template, in bytes."""
    from edge_runtime.convert.synthetic_text import byte_tokenizer

    text, tokenizer_json = byte_tokenizer(vocab_size)
    return tokenizer_json, msgspec.structs.replace(text, chat_template=None), []
