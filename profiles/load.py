"""Read one device profile or one known shape, by its name.

Invariant: only the file asked for is read; a name is the name of a file in our own folders, never a
path.
"""

from __future__ import annotations

import functools
import importlib
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from edge_runtime.errors import InternalError, UsageError, cut
from edge_runtime.profiles.schema import DeviceProfile, KnownShape

try:
    tomllib = importlib.import_module("tomllib")
except ModuleNotFoundError:  # Python 3.10
    tomllib = importlib.import_module("tomli")

FOLDER = Path(__file__).resolve().parent
T = TypeVar("T")


def device_names() -> list[str]:
    """Return the names of all device profiles, sorted."""
    return _names("devices")


def shape_names() -> list[str]:
    """Return the names of all known shapes, sorted."""
    return _names("models")


@functools.cache
def device(name: str) -> DeviceProfile:
    """Return a device profile. Raises UsageError for an unknown name, with the near ones."""
    return _read("devices", name, "device", DeviceProfile)


@functools.cache
def shape(name: str) -> KnownShape:
    """Return a model's known shape. Raises UsageError for an unknown name, with the near ones."""
    return _read("models", name, "model shape", KnownShape)


def device_of_part(part: str) -> str | None:
    """Return the name of the device profile that lists a part number; None: none does."""
    for name in device_names():
        text = (FOLDER / "devices" / f"{name}.toml").read_text("utf-8")
        if f'"{part}"' in text and part in device(name).part_numbers:
            return name
    return None


def _names(folder: str) -> list[str]:
    return sorted(path.stem for path in (FOLDER / folder).glob("*.toml"))


def _read(folder: str, name: str, what: str, kind: type[T]) -> T:
    names = _names(folder)
    wanted = name.strip().lower()
    if wanted not in names:
        raise UsageError(f"unknown {what} {cut(name)!r}", _hint(wanted, names))
    path = FOLDER / folder / f"{wanted}.toml"
    try:
        document: dict[str, Any] = tomllib.loads(path.read_text("utf-8"))
        return msgspec.convert({"name": wanted, **document}, kind)
    except (OSError, ValueError, msgspec.ValidationError) as error:
        raise InternalError(f"{path}: {error}", "this file comes with the program") from None


def _hint(wanted: str, names: list[str]) -> str:
    import difflib

    near = difflib.get_close_matches(wanted, names, n=3, cutoff=0.5)
    near += [name for name in names if wanted and wanted in name and name not in near]
    return f"did you mean {', '.join(near)}?" if near else f"known: {', '.join(names)}"
