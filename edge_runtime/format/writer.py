"""Write a checkpoint: shards into a partial folder, each atomically, then one rename.

Invariant: the final folder either does not exist or is complete. A partial folder may be continued:
a shard is there whole or not at all, `resume/identity` says which conversion it belongs to, and
`resume/lock` is held by the one process that writes.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shlex
import shutil
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy.typing as npt
from safetensors import SafetensorError, safe_open

from edge_runtime.atomic import write_atomic
from edge_runtime.errors import CheckpointError, UsageError
from edge_runtime.format.manifest import MANIFEST, TOKENIZER, Manifest, Plane
from edge_runtime.format.stream import Shapes, ShardStream

DTYPE_NAMES = {"uint8": "U8", "int8": "I8", "int16": "I16", "float16": "F16", "float32": "F32"}
RESUME = "resume"  # what only a continued conversion needs; removed last


class CheckpointWriter:
    """Writes into `<out>.partial`; `finish` renames it to `out`."""

    def __init__(self, out: Path, identity: str) -> None:
        """identity: a digest of source and options; another conversion's leftovers are refused.

        Raises UsageError if `out` exists or the partial folder is another's or in use.
        """
        self.out = out
        refuse_taken(out)
        self.partial = _partial(out)
        state = self.partial / RESUME / "identity"
        state.parent.mkdir(parents=True, exist_ok=True)
        lock = _lock(self.partial / RESUME / "lock", self.partial)
        self._unlock = weakref.finalize(self, os.close, lock)
        found = state.read_text() if state.is_file() else None
        kept = {p.name for p in self.partial.iterdir()} - {RESUME}
        if found != identity and kept:  # a conversion stopped before its first shard kept nothing
            self.close()
            raise UsageError(
                f"{self.partial}: holds a conversion of another model, with other options, or by "
                "another version",
                f"remove it to start again: rm -r {shlex.quote(str(self.partial))}",
            )
        if found != identity:
            write_atomic(state, identity.encode())

    def close(self) -> None:
        """Let another conversion have the folder; what is written stays."""
        self._unlock()

    def has(self, shard: str) -> bool:
        """Whether a shard and its report are already written (from an earlier, stopped run)."""
        return self._shard(shard).is_file() and self._report(shard).is_file()

    def _shard(self, shard: str) -> Path:
        return self.partial / f"{shard}.safetensors"

    def _report(self, shard: str) -> Path:
        return self.partial / RESUME / f"{shard}.json"

    def shard(self, shard: str, planes: dict[str, npt.NDArray[Any]], report: Any) -> None:
        """Write one shard, then its report, each atomically."""
        shapes = {name: (DTYPE_NAMES[p.dtype.name], p.shape) for name, p in planes.items()}
        with ShardStream(self._shard(shard), shapes) as stream:
            for name, plane in planes.items():
                stream.write(name, plane)
        write_atomic(self._report(shard), msgspec.json.encode(report))

    @contextlib.contextmanager
    def stream(self, shard: str, shapes: Shapes) -> Iterator[ShardStream]:
        """Write one shard in pieces, then its report: its planes, hashed on the way."""
        with ShardStream(self._shard(shard), shapes) as stream:
            yield stream
        write_atomic(self._report(shard), msgspec.json.encode(stream.planes()))

    def read_shard(self, shard: str) -> dict[str, npt.NDArray[Any]]:
        """Read back a shard that an earlier run wrote. Raises CheckpointError if it is damaged."""
        file = self._shard(shard)
        try:
            with safe_open(file, framework="np") as f:
                return {name: f.get_tensor(name) for name in f.keys()}  # noqa: SIM118
        except (SafetensorError, OSError) as e:
            raise CheckpointError(
                f"{file}: cannot be read back ({e})", f"remove it and convert again: rm {file}"
            ) from e

    def read_report(self, shard: str) -> Any:
        """Read back the report of a shard."""
        return msgspec.json.decode(self._report(shard).read_bytes())

    def planes(self, shards: list[str]) -> dict[str, Plane]:
        """Return the manifest entries of all shards, hashed from disk."""
        entries: dict[str, Plane] = {}
        for shard in shards:
            for name, data in self.read_shard(shard).items():
                entries[name] = Plane(
                    file=f"{shard}.safetensors",
                    dtype=DTYPE_NAMES[data.dtype.name],  # type: ignore[arg-type]
                    shape=tuple(data.shape),
                    sha256=hashlib.sha256(data.tobytes()).hexdigest(),
                )
        return entries

    def finish(self, manifest: Manifest, tokenizer_json: str, report: Any = None) -> None:
        """Write manifest, tokenizer and report, clear what only a resume needs, rename."""
        write_atomic(self.partial / TOKENIZER, tokenizer_json.encode())
        if report is not None:
            write_atomic(self.partial / "report.json", _pretty(report))
        write_atomic(self.partial / MANIFEST, _pretty(manifest))
        for file in self.partial.glob("*.tmp"):
            file.unlink()
        self.partial.rename(self.out)
        self.close()
        shutil.rmtree(self.out / RESUME, ignore_errors=True)

    def discard(self) -> None:
        """Remove the partial folder."""
        self.close()
        shutil.rmtree(self.partial, ignore_errors=True)


def refuse_taken(out: Path) -> None:
    """Raise UsageError if `out` cannot become a checkpoint: something is there or in the way."""
    if not out.name or os.path.lexists(out):
        raise UsageError(f"{out}: already exists", "choose another folder, or remove it first")
    above = next(p for p in out.absolute().parents if os.path.lexists(p))
    if not above.is_dir():
        raise UsageError(f"{out}: {above} is no folder", "choose another -o DIR")
    partial = _partial(out)
    if not os.path.lexists(partial):
        return
    ours = partial.is_dir() and (
        (partial / RESUME / "identity").is_file()
        or not {p.name for p in partial.iterdir()} - {RESUME}
    )
    if not ours:
        raise UsageError(
            f"{partial}: is in the way: expected nothing, or a conversion that was stopped",
            "move it elsewhere, or choose another -o DIR",
        )


def _partial(out: Path) -> Path:
    return out.with_name(out.name + ".partial")


def _lock(file: Path, folder: Path) -> int:
    """Lock a partial folder until what is returned is closed. Raises UsageError if another has."""
    lock = os.open(file, os.O_WRONLY | os.O_CREAT, 0o666)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        raise UsageError(
            f"{folder}: another conversion is writing into it",
            "wait until it ends, or choose another -o DIR",
        ) from None
    except OSError:
        pass  # a file system without locks
    return lock


def digest(text: str) -> str:
    """sha256 of a string, in hex."""
    return hashlib.sha256(text.encode()).hexdigest()


def _pretty(value: Any) -> bytes:
    return msgspec.json.format(msgspec.json.encode(value), indent=1) + b"\n"
