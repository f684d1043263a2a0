"""The safetensors files of a folder: which belong to the model, and what each of them holds.

Invariant: a `TensorFile` was checked against its length before anything reads its data, and
`find_tensors` maps every tensor name to exactly one file. Nothing here reads tensor data.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, NamedTuple

from edge_runtime.convert.source import describe_file
from edge_runtime.errors import CheckpointError, UnsupportedModel
from edge_runtime.format.lfs import refuse_pointer

ELEMENT_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
_OTHER_TYPES = {"I64": 8, "U64": 8, "I32": 4, "U32": 4, "I16": 2, "U16": 2, "I8": 1, "U8": 1}
_OTHER_TYPES |= {"BOOL": 1}
_MAX_HEADER_BYTES = 100_000_000
_AGAIN = "download the file again"
INDEX = "model.safetensors.index.json"


class TensorInfo(NamedTuple):
    """Where a tensor lies: file name in the folder, safetensors dtype name, shape."""

    file: str
    dtype: str
    shape: tuple[int, ...]


def read_header(path: Path) -> dict[str, TensorInfo]:
    """Read and check one file's header. Raises CheckpointError naming the file and the tensor."""
    refuse_pointer(path)
    size = path.stat().st_size
    with path.open("rb") as file:
        header_bytes = int.from_bytes(file.read(8), "little")
        raw = file.read(header_bytes) if 2 <= header_bytes <= min(size, _MAX_HEADER_BYTES) else b""
    if not raw.startswith(b"{"):
        raise CheckpointError(
            f"{path.name} is not a safetensors file: got {describe_file(path)}", _AGAIN
        )
    try:
        header = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{path.name}: the header of {header_bytes} bytes is not JSON ({error}); the file has "
            f"{size} bytes",
            _AGAIN,
        ) from None
    found: dict[str, TensorInfo] = {}
    end = 0
    for name, entry in header.items():
        if name != "__metadata__":
            info, stop = _entry(path.name, name, entry)
            found[name] = info
            end = max(end, stop)
    if size != 8 + header_bytes + end:
        what = "is truncated" if size < 8 + header_bytes + end else "has bytes after its data"
        raise CheckpointError(
            f"{path.name} {what}: expected {8 + header_bytes + end} bytes, got {size}", _AGAIN
        )
    return found


def _entry(file: str, name: str, entry: Any) -> tuple[TensorInfo, int]:
    try:
        dtype = str(entry["dtype"])
        shape = tuple(int(n) for n in entry["shape"])
        start, stop = (int(n) for n in entry["data_offsets"])
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{file}: the entry of tensor {name} is broken ({error})") from None
    expected = ELEMENT_BYTES.get(dtype, _OTHER_TYPES.get(dtype, 0))
    for n in shape:
        expected *= n
    if (expected and stop - start != expected) or not 0 <= start <= stop:
        raise CheckpointError(
            f"{file}: tensor {name} of shape {list(shape)} {dtype}: expected {expected} bytes, got "
            f"{stop - start}",
            _AGAIN,
        )
    return TensorInfo(file, dtype, shape), stop


def find_tensors(folder: Path, warnings: list[str]) -> dict[str, TensorInfo]:
    """Map every tensor of the folder's model to its file. Raises CheckpointError (see module)."""
    on_disk = sorted(
        p.name
        for p in folder.glob("*.safetensors")
        if not p.name.startswith(("consolidated", "adapter_"))
    )
    if (folder / INDEX).is_file():
        return _from_index(folder, on_disk, warnings)
    if not on_disk:
        raise _no_weights(folder)
    if "model.safetensors" in on_disk and len(on_disk) > 1:
        others = [name for name in on_disk if name != "model.safetensors"]
        warnings.append(f"ignored beside model.safetensors: {', '.join(others)}")
        on_disk = ["model.safetensors"]
    _refuse_missing_shards(on_disk)
    return _merge(folder, on_disk)


def _no_weights(folder: Path) -> CheckpointError:
    pickles = sorted(
        p.name for ext in ("bin", "pt", "pth", "ckpt") for p in folder.glob(f"*.{ext}")
    )
    if pickles:
        return UnsupportedModel(
            f"{folder} has only pickle weights ({pickles[0]}), expected *.safetensors",
            "pickle files can run code and are never opened; save the model as safetensors",
        )
    return CheckpointError(
        f"{folder} has no *.safetensors files: expected model.safetensors or its shards",
        "download the whole repository",
    )


def _refuse_missing_shards(files: list[str]) -> None:
    counts: dict[str, set[int]] = {}
    for name in files:
        match = re.fullmatch(r"(.*)-(\d+)-of-(\d+)\.safetensors", name)
        if match:
            key = f"{match[1]}-{{}}-of-{match[3]}.safetensors"
            counts.setdefault(key, set()).add(int(match[2]))
    for pattern, present in counts.items():
        width = len(pattern.rsplit("-of-", 1)[1].removesuffix(".safetensors"))
        total = int(pattern.rsplit("-of-", 1)[1].removesuffix(".safetensors"))
        for number in range(1, total + 1):
            if number not in present:
                raise CheckpointError(
                    f"shard {pattern.format(str(number).zfill(width))} is missing: expected "
                    f"{total} shards, got {len(present)}",
                    "download the missing shard",
                )


def _from_index(folder: Path, on_disk: list[str], warnings: list[str]) -> dict[str, TensorInfo]:
    weight_map = _weight_map(folder)
    files = sorted(set(weight_map.values()))
    missing = [name for name in files if name not in on_disk and not (folder / name).is_file()]
    if missing:
        single = "model.safetensors" in on_disk and "model.safetensors" not in files
        raise CheckpointError(
            f"{INDEX} names {missing[0]}, which is not there ({len(missing)} of {len(files)} files "
            "missing)",
            f"the index is stale: delete {INDEX} to use model.safetensors"
            if single
            else "download the missing shard",
        )
    stray = [name for name in on_disk if name not in files]
    if "model.safetensors" in stray:
        raise CheckpointError(
            f"{folder} holds two sets of weights: model.safetensors and the shards of {INDEX}",
            "delete the one that is stale",
        )
    if stray:
        warnings.append(f"ignored, not in {INDEX}: {', '.join(stray)}")
    found = _merge(folder, files)
    for name, file in weight_map.items():
        if name not in found or found[name].file != file:
            where = f"it is in {found[name].file}" if name in found else "it is in no shard"
            raise CheckpointError(
                f"{INDEX} says that tensor {name} is in {file}, but {where}",
                f"the index is stale; download it again, or delete it ({INDEX})",
            )
    for name in found:
        if name not in weight_map:
            raise CheckpointError(
                f"tensor {name} is in {found[name].file} but not in {INDEX}",
                f"the index is stale; download it again, or delete it ({INDEX})",
            )
    return found


def _weight_map(folder: Path) -> dict[str, str]:
    refuse_pointer(folder / INDEX)
    try:
        index = json.loads((folder / INDEX).read_bytes())
        weight_map = {str(k): str(v) for k, v in index["weight_map"].items()}
    except (ValueError, KeyError, TypeError, AttributeError):
        raise CheckpointError(
            f"{INDEX} is not a safetensors index: got {describe_file(folder / INDEX)}",
            "download it again",
        ) from None
    for name in weight_map.values():
        if Path(name).name != name or not name.endswith(".safetensors"):
            raise CheckpointError(f"{INDEX} names {name!r}, which is not a file of this folder")
    if not weight_map:
        raise CheckpointError(f"{INDEX} names no tensors", "download it again")
    return weight_map


def _merge(folder: Path, files: list[str]) -> dict[str, TensorInfo]:
    found: dict[str, TensorInfo] = {}
    for file in files:
        for name, info in read_header(folder / file).items():
            if name in found:
                raise CheckpointError(
                    f"tensor {name} is in two files, {found[name].file} and {file}: expected one",
                    "delete the file that does not belong to the model",
                )
            found[name] = info
    return found
