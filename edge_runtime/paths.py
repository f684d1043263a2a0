"""Where this program keeps files of its own.

Invariant: nothing of our own is written outside these folders unless the user named a path (Hub
downloads lie in the usual Hugging Face cache).
"""

from __future__ import annotations

import errno
import os
from pathlib import Path

import platformdirs

from edge_runtime.errors import BitnestError, BudgetError, DownloadError, UsageError, cut

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def cache_dir() -> Path:
    """Folder for things that can be fetched or computed again; `BITNEST_CACHE` overrides it.

    The folder is not created here.
    """
    override = os.environ.get("BITNEST_CACHE")
    if override:
        return Path(os.path.expanduser(override)).absolute()
    return platformdirs.user_cache_path("bitnest-edge", appauthor=False)


def state_dir() -> Path:
    """Folder for what should outlast a run and cannot be made again: the chat's input history.

    The folder is not created here.
    """
    return platformdirs.user_state_path("bitnest-edge", appauthor=False)


def usable(path: str | os.PathLike[str]) -> Path:
    """Return a path that a user gave. Raises UsageError for what can be none."""
    text = os.fspath(path)
    if not text:
        raise UsageError("expected a path or a name, got an empty text")
    try:
        os.stat(text)
    except (FileNotFoundError, NotADirectoryError):
        pass
    except (OSError, ValueError) as error:
        raise UsageError(f"not a usable path: {cut(text, 80)} ({error.args[-1]})") from None
    return Path(text)


def not_written(path: Path, error: OSError, hint: str) -> BitnestError:
    """Return what to raise where a file cannot be written: there is no room, or it is not ours."""
    reason = error.strerror or str(error)
    if error.errno in FULL:
        return BudgetError(f"{path}: no room on the disk: {reason}", "free some space")
    return UsageError(f"{path}: cannot write there: {reason}", hint)


def cache_error(folder: Path, error: OSError, setting: str = "BITNEST_CACHE") -> BitnestError:
    """Return what to raise when a cache folder refuses a file: it is full, or not ours."""
    reason = error.strerror or str(error)
    if error.errno in FULL:
        return BudgetError(
            f"disk: the cache folder {folder} cannot grow: {reason}",
            f"free some space, or set {setting} to a folder with room",
        )
    return DownloadError(
        f"cannot use the cache folder {folder}: {reason}",
        f"set {setting} to a folder that can be written",
    )
