"""A folder of machine code: written where Triton is, run by the driver where it is not.

    index.json      what made it, and for every launch (`launch.Signature`) the stem of its files
    STEM.cubin.gz   for one chip
    STEM.ptx.gz     for it and every newer one: the driver compiles it

Invariant: nothing is loaded before the index and the size and hash of every file are checked, and
a folder that was made from other kernels than this package's is refused. A launch takes the code
made for it, or such as knows less of its arguments (that 16 divides them); never any other.
Loading and launching need torch for its stream alone.
"""

from __future__ import annotations

import functools
import gzip
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edge_runtime import __version__
from edge_runtime.atomic import write_atomic
from edge_runtime.errors import BackendUnavailable, cut
from edge_runtime.kernels.cuda import driver, launch
from edge_runtime.kernels.cuda.compile import Compiled
from edge_runtime.kernels.cuda.launch import Signature

if TYPE_CHECKING:
    import torch

INDEX = "index.json"
FORMAT = 1
FACTS = ("name", "num_warps", "shared_bytes", "parameters")  # of `Compiled`, in the index
MAKE = "make it again with this version: bitnest-edge kernels save MODEL -o FOLDER"
MAKE_MODEL = "make the folder for this model: bitnest-edge kernels save MODEL -o FOLDER"


@functools.cache
def sources_sha256() -> str:
    """Hash of all that is written in Triton's language in this package."""
    total = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        text = path.read_bytes()
        if b"\nimport triton" in text:
            total.update(path.name.encode() + b"\0" + text)
    return total.hexdigest()


# writing


def write(
    built: Mapping[Signature, Compiled], folder: Path, facts: Mapping[str, Any]
) -> dict[str, Any]:
    """Write a folder, in place of one that is there, and return its index. facts: what is to be
    known of its making, with arch, fewest_columns and triton. What is the same code under two
    signatures is written once, under a name that tells it; the index comes after all of it, and
    what only an older index knew goes last, so that a folder is the old one or the new one."""
    folder.mkdir(parents=True, exist_ok=True)
    code: dict[str, dict[str, Any]] = {}
    stems: dict[Compiled, str] = {}
    launches = []
    for signature, compiled in built.items():
        if compiled not in stems:
            told = [getattr(compiled, name) for name in FACTS]
            text = repr((told, compiled.ptx, compiled.cubin))
            digest = hashlib.sha256(text.encode()).hexdigest()[:16]
            stem = stems[compiled] = f"{compiled.name}-{digest}"
            code[stem] = _write_code(compiled, folder, stem)
        launches.append({"code": stems[compiled], **signature._asdict()})
    index = {
        "format": FORMAT,
        "package": __version__,
        "sources_sha256": sources_sha256(),
        **facts,
        "code": code,
        "launches": launches,
    }
    write_atomic(folder / INDEX, (json.dumps(index, indent=1) + "\n").encode())
    known = {name for facts in code.values() for name in facts["files"]}
    for old in (*folder.glob("*.ptx.gz"), *folder.glob("*.cubin.gz")):
        if old.name not in known:
            old.unlink(missing_ok=True)
    return index


def _write_code(compiled: Compiled, folder: Path, stem: str) -> dict[str, Any]:
    files = {
        f"{stem}.ptx.gz": gzip.compress(compiled.ptx.encode(), mtime=0),
        f"{stem}.cubin.gz": gzip.compress(compiled.cubin, mtime=0),
    }
    for name, data in files.items():
        write_atomic(folder / name, data)
    sums = {
        name: {"num_bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        for name, data in files.items()
    }
    return {**{name: getattr(compiled, name) for name in FACTS}, "files": sums}


# reading


@dataclass(frozen=True, slots=True)
class Folder:
    """A folder that was checked. launches: stem by signature."""

    path: Path
    index: Mapping[str, Any]
    launches: Mapping[Signature, str]

    @classmethod
    def read(cls, path: Path) -> Folder:
        """Read the index and check every file. Raises BackendUnavailable."""
        try:
            index = json.loads((path / INDEX).read_text(encoding="utf-8"))
            if index["format"] != FORMAT:
                raise _broken(path, f"format {index['format']}, expected {FORMAT}")
            if index["package"] != __version__:
                raise _broken(path, f"made by version {index['package']}, this is {__version__}")
            if index["sources_sha256"] != sources_sha256():
                raise _broken(path, "it was made from other kernels than those of this package")
            for facts in index["code"].values():
                if len(facts["files"]) != 2 or not isinstance(facts["parameters"], list):
                    raise ValueError("code without its two files and its parameters")
                str(facts["name"]), int(facts["num_warps"]), int(facts["shared_bytes"])
                for name, known in facts["files"].items():
                    _check(path, name, **known)
            launches = {_signature(entry): entry["code"] for entry in index["launches"]}
            int(index["arch"]), int(index["fewest_columns"]), str(index["triton"])
            if unknown := set(launches.values()) - set(index["code"]):
                raise _broken(path, f"{INDEX} names {min(unknown)}, which it does not describe")
        except OSError as error:
            raise _broken(path, f"{error.filename}: {error.strerror}") from error
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise _broken(path, f"{INDEX} is not what was written: {cut(str(error))}") from error
        return cls(path, index, launches)

    def find(self, wanted: Signature) -> str | None:
        """Return the stem for a launch: made for it, or the one that knows most of what is so."""
        if wanted in self.launches:
            return self.launches[wanted]
        able = [known for known in self.launches if known.serves(wanted)]
        if not able:
            return None
        return self.launches[max(able, key=lambda known: known.num_aligned)]

    def compiled(self, stem: str) -> Compiled:
        """Read the code of a stem, checked once more."""
        facts = self.index["code"][stem]
        try:
            cubin, ptx = (
                gzip.decompress(_check(self.path, name, **known))
                for name, known in sorted(facts["files"].items())
            )
        except OSError as error:
            raise _broken(self.path, f"{error.filename}: {error.strerror}") from error
        return Compiled(
            name=facts["name"],
            arch=self.index["arch"],
            num_warps=facts["num_warps"],
            shared_bytes=facts["shared_bytes"],
            parameters=tuple(facts["parameters"]),
            ptx=ptx.decode(),
            cubin=cubin,
        )


def _signature(entry: Mapping[str, Any]) -> Signature:
    return Signature(
        entry["kernel"],
        tuple(entry["arguments"]),
        tuple((name, value) for name, value in entry["constants"]),
        entry["num_warps"],
        entry["max_registers"],
    )


def _check(folder: Path, name: str, *, num_bytes: int, sha256: str) -> bytes:
    if Path(name).name != name:
        raise _broken(folder, f"{INDEX} names {cut(name)!r}, which lies elsewhere")
    data = (folder / name).read_bytes()
    if len(data) != num_bytes:
        raise _broken(folder, f"{name} has {len(data)} bytes, expected {num_bytes}")
    if hashlib.sha256(data).hexdigest() != sha256:
        raise _broken(folder, f"{name} is not what was written: its hash differs")
    return data


def _broken(folder: Path, why: str) -> BackendUnavailable:
    return BackendUnavailable(f"machine code in {folder} cannot be used: {why}", MAKE)


# launching


class Machine:
    """Launches machine code through the driver; where it comes from is `find`'s.

    A function belongs to the CUDA context that was current when it was first launched: a slice of
    a GPU has a `Machine` of its own.
    """

    assembly = True

    def __init__(self, arch: int, fewest_columns: int) -> None:
        self.fewest_columns, self._arch = fewest_columns, arch
        self._functions: dict[Any, driver.Function] = {}

    @property
    def why(self) -> str:
        """Overridden."""
        return f"code for sm_{self._arch}"

    def arch(self, device: torch.device) -> int:
        """The chip that the code is for: its tiles are used on every one."""
        return self._arch

    def find(self, signature: Signature) -> Compiled:
        """Return the code of a launch. Raises BackendUnavailable."""
        raise NotImplementedError

    def launch(
        self,
        kernel: launch.Kernel,
        grid: tuple[int, ...],
        arguments: Sequence[Any],
        options: Mapping[str, Any],
    ) -> None:
        """Enqueue on torch's current stream."""
        kinds, values = launch.described(arguments, kernel.plain)
        key = (kernel.name, kinds, *options.values())
        function = self._functions.get(key)
        if function is None:
            function = self._load(self.find(launch.signature(kernel.name, kinds, options)))
            self._functions[key] = function
        function.launch(grid, values, self._current())

    def _load(self, compiled: Compiled) -> driver.Function:
        """The cubin on its own chip, the PTX on newer ones."""
        return driver.load(compiled, ptx=_chip() != compiled.arch)

    @staticmethod
    def _current() -> int:
        import torch

        return int(torch.cuda.current_stream().cuda_stream)


class Saved(Machine):
    """Launches what a folder holds."""

    def __init__(self, folder: Folder, chosen_by: str) -> None:
        """chosen_by: an option or a variable, for people."""
        super().__init__(folder.index["arch"], folder.index["fewest_columns"])
        self.folder, self._chosen_by = folder, chosen_by

    @classmethod
    def open(cls, path: Path, chosen_by: str) -> Saved:
        """Read and check a folder. Raises BackendUnavailable."""
        return cls(Folder.read(path), chosen_by)

    @property
    def why(self) -> str:
        """The folder, what made it and who chose it."""
        index = self.folder.index
        return (
            f"{len(index['code'])} kernels for sm_{self._arch} from {self.folder.path} "
            f"({self._chosen_by}; made with Triton {index['triton']})"
        )

    def find(self, signature: Signature) -> Compiled:
        """Return the code of a launch. Raises BackendUnavailable that names what is missing."""
        stem = self.folder.find(signature)
        if stem is None:
            raise BackendUnavailable(
                f"no machine code in {self.folder.path} for {signature}", MAKE_MODEL
            )
        return self.folder.compiled(stem)


def _chip() -> int:
    import torch

    return launch.capability(torch.device("cuda", torch.cuda.current_device()))
