"""How kernels are launched: compiled by Triton, as saved machine code, or only noted down.

    quantise_kernel = Kernel("activation_kernels", "quantise_kernel")
    quantise_kernel[grid](x, codes, K, G=64, num_warps=4, **EXACT)

Invariant: a launcher does not know which way is taken; what runs is the same. Run-time arguments
are given by position, constants and the options of the launch by name, so that what a launch needs
compiled (`Signature`) is known without Triton. The way is chosen once for a process (`way`), is
said by `doctor`, and never changes by itself: what a folder of machine code lacks is an error.

No launcher imports Triton. What is written in Triton's language lies in modules of its own
(`*_kernels.py`, `numeric.py`, `floats.py`, `noise.py`, `unpack.py`), which only `Kernel.function`
imports.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.metadata
import importlib.util
import os
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from edge_runtime.errors import BackendUnavailable
from edge_runtime.kernels.cuda import INSTALL_TRITON

if TYPE_CHECKING:
    import torch

EXACT = {"enable_fp_fusion": False}  # of a kernel whose fp32 steps are the contract
OPTIONS = ("num_warps", "maxnreg", "enable_fp_fusion")
FOLDER_VARIABLE = "BITNEST_EDGE_KERNELS"
PACKAGED = Path(__file__).parent / "code"  # a folder that a build of the package may bring along
NEITHER = (
    "Triton is not installed, and no folder of machine code is given "
    f"(--kernels, {FOLDER_VARIABLE})"
)
GET_ONE = (
    f"make a folder where Triton is: bitnest-edge kernels save MODEL -o FOLDER; or {INSTALL_TRITON}"
)
ORIN = 87  # compute capability 8.7
ALIGNED = ":16"  # ends the type of an address or an integer that 16 divides
_PACKAGE = "edge_runtime.kernels.cuda"


class Signature(NamedTuple):
    """What a launch needs compiled. kernel: module and name; arguments: types of the run-time
    arguments in order, as in "*i8:16", "i32", "fp32"; constants: by name, sorted."""

    kernel: str
    arguments: tuple[str, ...]
    constants: tuple[tuple[str, Any], ...]
    num_warps: int
    max_registers: int | None

    def serves(self, other: Signature) -> bool:
        """Whether code for this may run where `other` is launched: it knows no more than is so."""
        return (
            self[0] == other[0]
            and self[2:] == other[2:]
            and len(self.arguments) == len(other.arguments)
            and all(
                mine in (its, its.removesuffix(ALIGNED))
                for mine, its in zip(self.arguments, other.arguments, strict=True)
            )
        )

    @property
    def num_aligned(self) -> int:
        """Arguments that 16 divides."""
        return sum(kind.endswith(ALIGNED) for kind in self.arguments)

    def __str__(self) -> str:
        constants = "".join(f", {name}={value}" for name, value in self.constants)
        return f"{self.kernel}({', '.join(self.arguments)}{constants}; {self.num_warps} warps" + (
            f", {self.max_registers} registers)" if self.max_registers else ")"
        )


class Kernel:
    """A @triton.jit function by module and name. kernel[grid](*arguments, NAME=constant, …).

    plain: places of the integers of which nothing is to be known (the function's own
    `do_not_specialize`): numbers of rows, so that one code serves all, and what only costs
    registers when it is known. pdl: it may start before the launch before it has ended
    (`overlap_kernels.py`).
    """

    def __init__(
        self, module: str, name: str, plain: tuple[int, ...] = (), *, pdl: bool = False
    ) -> None:
        self.name, self.plain, self.pdl = f"{module}.{name}", plain, pdl
        self._function: Any = None

    @property
    def function(self) -> Any:
        """The function, imported on first use: what Triton compiles or interprets."""
        if self._function is None:
            module, _, name = self.name.rpartition(".")
            self._function = getattr(importlib.import_module(f"{_PACKAGE}.{module}"), name)
        return self._function

    def __getitem__(self, grid: tuple[int, ...] | int) -> partial[None]:
        """Return what launches it; the grid has up to three numbers of programs."""
        return partial(_launch, self, grid if isinstance(grid, tuple) else (grid,))


def _launch(kernel: Kernel, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
    (_way or way()).launch(kernel, grid, arguments, options)


class Way(Protocol):
    """One way to launch. assembly: whether kernels use inline assembly."""

    assembly: bool

    @property
    def fewest_columns(self) -> int:
        """Columns of an int8 product, at least, for the Triton that compiles."""
        ...

    @property
    def why(self) -> str:
        """What is used and by whose choice, for people."""
        ...

    def arch(self, device: torch.device) -> int:
        """Compute capability whose tiles are used: 87 is 8.7."""
        ...

    def launch(
        self,
        kernel: Kernel,
        grid: tuple[int, ...],
        arguments: Sequence[Any],
        options: Mapping[str, Any],
    ) -> None:
        """Enqueue on torch's current stream."""
        ...


class Jit:
    """Triton compiles what is met, for the GPU that is here, or interprets it."""

    def __init__(self) -> None:
        self.assembly = os.environ.get("TRITON_INTERPRET") != "1"

    @functools.cached_property
    def fewest_columns(self) -> int:
        """Columns of an int8 product, at least."""
        return triton_columns()

    @functools.cached_property
    def _has_pdl(self) -> bool:
        import torch

        return self.assembly and capability(torch.device("cuda")) >= 90

    @property
    def why(self) -> str:
        """The version."""
        return f"Triton {importlib.metadata.version('triton')}"

    def arch(self, device: torch.device) -> int:
        """The GPU's own; the interpreter's is an Orin's."""
        return capability(device) or ORIN

    def launch(
        self,
        kernel: Kernel,
        grid: tuple[int, ...],
        arguments: Sequence[Any],
        options: Mapping[str, Any],
    ) -> None:
        """Let Triton do it."""
        if kernel.pdl and self._has_pdl:
            options = {**options, "PDL": True, "launch_pdl": True}
        kernel.function[grid](*arguments, **options)


_way: Way | None = None
_folder: tuple[Path, str] | None = None  # given by an option, and its name


def use_folder(folder: Path, option: str) -> None:
    """Take machine code from a folder from now on. option: who chose it. Raises
    BackendUnavailable for one that is broken."""
    global _folder, _way
    from edge_runtime.kernels.cuda.saved import Saved

    if _folder != (folder, option):
        _way = Saved.open(folder, option)
        _folder = (folder, option)


def folder() -> tuple[Path, str] | None:
    """Return the folder of machine code that is to be used and who chose it, or None."""
    if _folder is not None:
        return _folder
    if given := os.environ.get(FOLDER_VARIABLE):
        return Path(given), FOLDER_VARIABLE
    if PACKAGED.is_dir() and importlib.util.find_spec("triton") is None:
        return PACKAGED, "of this package"
    return None


def way() -> Way:
    """Return how kernels are launched, chosen on first use: from a folder if one is given, else by
    Triton. Raises BackendUnavailable where there is neither, or the folder is broken."""
    global _way
    if _way is None:
        if (given := folder()) is not None:
            from edge_runtime.kernels.cuda.saved import Saved

            _way = Saved.open(*given)
        elif importlib.util.find_spec("triton") is not None:
            _way = Jit()
        else:
            raise BackendUnavailable(NEITHER, GET_ONE)
    return _way


def described_way() -> tuple[str | None, str]:
    """Return how kernels would be launched, for people, or None, and the reason."""
    try:
        found = way()
    except BackendUnavailable as error:
        return None, error.message
    if isinstance(found, Jit):
        return found.why, f"Triton is installed, and neither --kernels nor {FOLDER_VARIABLE} is set"
    return found.why, "a folder of machine code comes first"


@contextlib.contextmanager
def using(other: Way) -> Iterator[None]:
    """Launch another way within: to note launches down, or to run the code of another chip."""
    global _way
    before, _way = _way, other
    try:
        yield
    finally:
        _way = before


def triton_columns() -> int:
    """Columns of an int8 product, at least, in the Triton that is installed."""
    return 8 if triton_version() >= (3, 5) else 16


def triton_version() -> tuple[int, int]:
    """Major and minor version of the Triton that is installed."""
    major, minor = importlib.metadata.version("triton").split(".")[:2]
    return int(major), int(minor)


@functools.cache
def capability(device: torch.device) -> int:
    """Compute capability of a GPU, 87 for 8.7; 0 for what is none."""
    if device.type != "cuda":
        return 0
    import torch

    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def arch(device: torch.device) -> int:
    """Compute capability whose tiles are used on a device."""
    return way().arch(device)


def cdiv(number: int, size: int) -> int:
    """Pieces of a size that hold a number of things."""
    return -(-number // size)


def power_of_two(number: int) -> int:
    """The least power of two that is not below a number >= 1."""
    return 1 << (number - 1).bit_length()


# what is compiled


@functools.cache
def type_names() -> dict[Any, str]:
    """Names of pointers by torch's dtype."""
    import torch

    return {
        torch.int8: "*i8",
        torch.uint8: "*u8",
        torch.int16: "*i16",
        torch.int32: "*i32",
        torch.int64: "*i64",
        torch.float16: "*fp16",
        torch.bfloat16: "*bf16",
        torch.float32: "*fp32",
        torch.float64: "*fp64",
    }


def described(
    arguments: Sequence[Any], plain: tuple[int, ...] = ()
) -> tuple[tuple[str, ...], list[int | float]]:
    """Return types, and addresses and numbers, of run-time arguments; plain: of `Kernel`."""
    names = type_names()
    kinds: list[str] = []
    values: list[int | float] = []
    for place, argument in enumerate(arguments):
        value = argument
        if isinstance(argument, float):
            kind = "fp32"
        else:
            if isinstance(argument, int):
                kind = "i32" if -(1 << 31) <= argument < 1 << 31 else "i64"
            else:
                kind, value = names[argument.dtype], argument.data_ptr()
            if value % 16 == 0 and place not in plain:
                kind += ALIGNED
        kinds.append(kind)
        values.append(value)
    return tuple(kinds), values


def signature(kernel: str, kinds: tuple[str, ...], options: Mapping[str, Any]) -> Signature:
    """Return what a launch needs compiled."""
    constants = {name: value for name, value in options.items() if name not in OPTIONS}
    return Signature(
        kernel,
        kinds,
        tuple(sorted(constants.items())),
        options.get("num_warps", 4),
        options.get("maxnreg"),
    )
