"""How a file begins, and Git LFS pointers: small text files where a clone fetched no large ones."""

from __future__ import annotations

from pathlib import Path

from edge_runtime.errors import CheckpointError

_POINTER = b"version https://git-lfs"


def first_bytes(path: Path, count: int) -> bytes:
    """Return how a file begins. Raises CheckpointError, with its path, if it cannot be read."""
    try:
        with path.open("rb") as file:
            return file.read(count)
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror or error}") from None


def refuse_pointer(path: Path) -> None:
    """Raise CheckpointError if a file is only a pointer to what it should be, or unreadable."""
    if first_bytes(path, len(_POINTER)) == _POINTER:
        raise CheckpointError(
            f"{path} is a Git LFS pointer: expected the file itself",
            "fetch it: run git lfs pull in its folder",
        )
