"""Files that are there whole or not at all, and nothing but files.

Invariant: what is written lies beside, under a name that no other file has, locked while it is
written, and takes the file's name when it is whole and on the disk. What a killed process left
behind is removed by the next one that writes there; no other file is touched.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from edge_runtime.errors import UsageError

PRIVATE = 0o600  # readable by its owner alone
SHARED = 0o666  # less the umask
NAME_CHARS = 40  # of the file's name in that of the temporary one, which has its own limit


@contextlib.contextmanager
def whole_file(path: Path, mode: int = SHARED, *, alone: bool = False) -> Iterator[IO[bytes]]:
    """Write a file, in place of one that is there; a link stays one, its target is written.

    mode: of the file. alone: raise UsageError while another process writes there; else the last
    one to end wins. Raises OSError, leaving what was there.
    """
    path = Path(os.path.realpath(path))
    _need_regular(path)
    if _sweep(path) and alone:
        raise UsageError(f"{path}: another process is saving there", "give each its own file")
    file, temporary = _begin(path, mode)
    with file:
        try:
            yield file
            file.flush()
            os.fsync(file.fileno())
            temporary.replace(path)
        except BaseException:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise
    with contextlib.suppress(OSError):  # not every file system can
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def write_atomic(path: Path, data: bytes, mode: int = SHARED) -> None:
    """Write all of a file; see `whole_file`."""
    with whole_file(path, mode) as file:
        file.write(data)


def open_regular(path: Path, flags: int, mode: int = PRIVATE) -> int:
    """Open a file, or the one a link leads to, and nothing else: a pipe may never answer, and a
    device may act on being opened.

    Raises OSError.
    """
    _need_regular(path)
    fd = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC, mode)
    try:
        _need_regular(fd)  # it may be another one by now
    except OSError:
        os.close(fd)
        raise
    return fd


def _need_regular(path: Path | int) -> None:
    """Raise OSError for what is there and is no file, as /dev/null, which root could replace."""
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise OSError(errno.EINVAL, "not a regular file")


def _beginning(path: Path) -> str:
    return f".{path.name[:NAME_CHARS]}.bitnest-"


def _begin(path: Path, mode: int) -> tuple[IO[bytes], Path]:
    """Make a temporary file that is ours; another's sweep may take it before it is locked."""
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    while True:
        temporary = path.with_name(f"{_beginning(path)}{secrets.token_hex(4)}.tmp")
        file = os.fdopen(os.open(temporary, flags, mode), "wb")
        if _lock(file) is not False and temporary.exists():
            return file, temporary
        file.close()


def _sweep(path: Path) -> bool:
    """Remove what killed processes left; return whether a living one writes there."""
    ours = re.compile(re.escape(_beginning(path)) + r"[0-9a-f]{8}\.tmp")
    busy = False
    with contextlib.suppress(OSError), os.scandir(path.parent) as entries:
        for entry in entries:
            if not ours.fullmatch(entry.name) or not entry.is_file(follow_symlinks=False):
                continue
            with contextlib.suppress(OSError), open(entry.path, "r+b") as file:
                locked = _lock(file)
                busy |= locked is False
                if locked:
                    os.unlink(entry.path)
    return busy


def _lock(file: IO[bytes]) -> bool | None:
    """Whether the file could be locked; None on a file system without locks."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True
