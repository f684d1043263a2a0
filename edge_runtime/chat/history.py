"""What was typed in earlier chats: one file of JSON lines in the user's state folder.

Invariant: readable by its owner alone, and bounded; what cannot be read or written is done without,
and `why` says it, but of a link to /dev/null, which switches it off. Two chats at once add to the
same file, and a line that was cut spoils no other.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from edge_runtime.atomic import PRIVATE, open_regular, write_atomic

MAX_ENTRIES = 1000
MAX_ENTRY_CHARS = 16_384  # of a longer message (a pasted file) nothing is kept
MAX_BYTES = 4 << 20
SLACK = 256  # entries beyond the bound, before the file is written anew


class HistoryFile:
    """Messages and commands, oldest first; `why` says what keeps them from being kept."""

    def __init__(self, path: Path) -> None:
        """Nothing is read or made yet."""
        self._path = path
        self._last = ""
        self.why = ""

    def load(self) -> list[str]:
        """Return the entries that are kept; writes a file anew that has outgrown its bound."""
        try:
            with _opened(self._path, "rb") as stream:
                size = os.fstat(stream.fileno()).st_size
                stream.seek(max(0, size - MAX_BYTES))
                lines = stream.read(MAX_BYTES).splitlines()
                kept = [entry for line in lines if (entry := _entry(line))][-MAX_ENTRIES:]
                if len(lines) > MAX_ENTRIES + SLACK or size > MAX_BYTES:
                    self._write_anew(kept)
        except FileNotFoundError:
            return []
        except OSError as error:
            self._give_up(error)
            return []
        self._last = kept[-1] if kept else ""
        return kept

    def append(self, text: str) -> None:
        """Keep an entry, unless it is empty, very long, or what was typed just before."""
        if self.why or not text.strip() or len(text) > MAX_ENTRY_CHARS or text == self._last:
            return
        try:
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with _opened(self._path, "a+b") as stream:
                os.fchmod(stream.fileno(), PRIVATE)  # of a file that was there
                data = _line(text)
                size = stream.seek(0, os.SEEK_END)
                if size and os.pread(stream.fileno(), 1, size - 1) != b"\n":
                    data = b"\n" + data  # after one that a kill or a full disk cut
                if stream.write(data) != len(data):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            self._give_up(error)
        self._last = text

    def _write_anew(self, entries: list[str]) -> None:
        try:
            write_atomic(self._path, b"".join(map(_line, entries)), PRIVATE)
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        with contextlib.suppress(OSError):
            if os.path.samefile(self._path, os.devnull):
                return
        self.why = f"{self._path}: {error.strerror or error}"


@contextlib.contextmanager
def _opened(path: Path, mode: str) -> Iterator[IO[bytes]]:
    """Open the file and lock it; another chat that writes it anew gives the name to another one."""
    while True:
        with open(path, mode, buffering=0, opener=lambda _, f: open_regular(path, f)) as stream:
            with contextlib.suppress(OSError):  # a file system without locks
                fcntl.flock(stream, fcntl.LOCK_EX)
            if os.path.samestat(os.fstat(stream.fileno()), os.stat(path)):
                yield stream
                return


def _line(entry: str) -> bytes:
    return json.dumps(entry).encode() + b"\n"


def _entry(line: bytes) -> str:
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):
        return ""  # cut at the front, or not ours
    return entry if isinstance(entry, str) else ""
