"""A file of finished items, so that a run that was stopped goes on where it was.

Invariant: a line is there whole or does not count. The first line says which run it is (model,
task, options, data); a file of another run is refused with what differs, never mixed in.

Format: JSON lines. First `{"eval": 1, "identity": {…}}`, then `{"item": key, "record": {…}}` each
followed by a newline and an fsync. What lies behind the last newline was being written when the
run was stopped: it is cut off.
"""

from __future__ import annotations

import fcntl
import json
import os
from pathlib import Path
from typing import Any, BinaryIO

from edge_runtime.errors import BudgetError, CheckpointError, UsageError, cut_apart

FORMAT = 1
_BEGINS = b'{"eval":'
Record = dict[str, Any]


class Finished:
    """Records of finished items by key. Without a file they are kept in memory alone."""

    def __init__(self, path: Path | None, identity: dict[str, Any]) -> None:
        """identity: what must be equal for records to be of use. Raises UsageError for a file of
        another run or one in use, CheckpointError for a file that is something else."""
        self.records: dict[str, Record] = {}
        self._file: BinaryIO | None = None
        if path is None:
            return
        try:
            self._file = _open(path)
        except OSError as error:
            raise CheckpointError(f"cannot write {path}: {error.strerror or error}") from None
        try:
            self._read(path, json.loads(json.dumps(identity)))
        except BaseException:
            self.close()
            raise

    def add(self, key: str, record: Record) -> Record:
        """Note a finished item; it is on disk when this returns. Raises BudgetError."""
        record = json.loads(json.dumps(record))  # what a resumed run would read
        if self._file is not None:
            try:
                self._write({"item": key, "record": record})
            except OSError as error:
                raise BudgetError(f"{self._file.name}: {error.strerror or error}") from None
        self.records[key] = record
        return record

    def close(self) -> None:
        """Let another run have the file."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _read(self, path: Path, identity: dict[str, Any]) -> None:
        assert self._file is not None
        data = self._file.read()
        whole = data.rfind(b"\n") + 1
        if not whole:
            if data[: len(_BEGINS)] != _BEGINS[: len(data)]:
                raise _something_else(path)
            self._file.truncate(0)
            self._file.seek(0)
            self._write({"eval": FORMAT, "identity": identity})
            return
        lines = data[:whole].splitlines()
        head = _parsed(lines[0], path)
        if head.get("eval") != FORMAT or not isinstance(head.get("identity"), dict):
            raise _something_else(path)
        _refuse_other(path, head["identity"], identity)
        for line in lines[1:]:
            row = _parsed(line, path)
            if not isinstance(row.get("item"), str) or not isinstance(row.get("record"), dict):
                raise _something_else(path)
            self.records[row["item"]] = row["record"]
        self._file.truncate(whole)
        self._file.seek(whole)

    def _write(self, value: Any) -> None:
        assert self._file is not None
        self._file.write(json.dumps(value, separators=(",", ":"), allow_nan=False).encode() + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())


def _open(path: Path) -> BinaryIO:
    """Open a file for reading and writing, made if need be, and lock it."""
    file = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o666), "r+b")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise UsageError(
            f"--resume {path}: another run is writing into it",
            "wait until it ends, or name another file",
        ) from None
    except OSError:
        pass  # a file system without locks
    return file


def _parsed(line: bytes, path: Path) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        raise _something_else(path) from None
    if not isinstance(value, dict):
        raise _something_else(path)
    return value


def _something_else(path: Path) -> CheckpointError:
    return CheckpointError(
        f"--resume {path}: expected the finished items of an eval, got something else",
        "name a file that does not exist yet: it is made",
    )


def _refuse_other(path: Path, there: dict[str, Any], here: dict[str, Any]) -> None:
    """Raise UsageError, naming what differs, for the records of another run."""
    missing = object()
    differing = []
    for name in dict.fromkeys([*here, *there]):
        old, new = there.get(name, missing), here.get(name, missing)
        if old != new:
            texts = ["none" if v is missing else json.dumps(v) for v in (old, new)]
            shown = cut_apart(texts[0], texts[1], 60)
            differing.append(f"{name} was {shown[0]}, now {shown[1]}")
    if differing:
        raise UsageError(
            f"--resume {path}: finished items of another run: " + "; ".join(differing[:3]),
            "give the same model, task, data and options, or name another file",
        )
