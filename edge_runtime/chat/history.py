"""What was typed in earlier chats: one file of JSON lines in the user's state folder.

Invariant: readable by its owner alone, and bounded; what cannot be read or written is done without,
and `why` says it. A line is written whole; two chats at once add to the same file.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

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
            size = self._path.stat().st_size
            with self._path.open("rb") as stream:
                stream.seek(max(0, size - MAX_BYTES))
                lines = stream.read(MAX_BYTES).splitlines()
        except FileNotFoundError:
            return []
        except OSError as error:
            self._give_up(error)
            return []
        entries = [entry for line in lines if (entry := _entry(line))]
        kept = entries[-MAX_ENTRIES:]
        if len(lines) > MAX_ENTRIES + SLACK or size > MAX_BYTES:
            self._write_anew(kept)
        self._last = kept[-1] if kept else ""
        return kept

    def append(self, text: str) -> None:
        """Keep an entry, unless it is empty, very long, or what was typed just before."""
        if self.why or not text.strip() or len(text) > MAX_ENTRY_CHARS or text == self._last:
            return
        try:
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            _write(self._path, [text], os.O_APPEND)
        except OSError as error:
            self._give_up(error)
        self._last = text

    def _write_anew(self, entries: list[str]) -> None:
        temporary = self._path.with_name(f"{self._path.name}.{os.getpid()}.tmp")
        try:
            _write(temporary, entries, os.O_TRUNC)
            temporary.replace(self._path)
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        self.why = f"{self._path}: {error.strerror or error}"


def _write(path: Path, entries: list[str], how: int) -> None:
    number = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | how, 0o600)
    with open(number, "wb", buffering=0) as stream:
        os.fchmod(number, 0o600)  # of a file that was there
        stream.write("".join(json.dumps(entry) + "\n" for entry in entries).encode())


def _entry(line: bytes) -> str:
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):
        return ""  # cut at the front, or not ours
    return entry if isinstance(entry, str) else ""
