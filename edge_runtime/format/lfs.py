"""Git LFS pointers: small text files that stand where a clone did not fetch the large ones."""

from __future__ import annotations

from pathlib import Path

from edge_runtime.errors import CheckpointError

_POINTER = b"version https://git-lfs"


def refuse_pointer(path: Path) -> None:
    """Raise CheckpointError if a file is only a pointer to what it should be."""
    with path.open("rb") as file:
        if file.read(len(_POINTER)) == _POINTER:
            raise CheckpointError(
                f"{path} is a Git LFS pointer: expected the file itself",
                "fetch it: run git lfs pull in its folder",
            )
