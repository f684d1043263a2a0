"""Compile a Triton kernel for a chip without a GPU, and look into its machine code.

A compiled kernel is PTX, a cubin and a few facts (`Compiled`), which `driver.load` runs without
Triton or a compiler; `saved.py` keeps many in a folder. sm_87 PTX runs on every newer GPU too.
Registers and stack come from the cubin's resource table, the mix from its disassembly (cuobjdump,
which Triton's package carries). A stack above zero is a spill here: no kernel uses local arrays.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from edge_runtime.errors import BackendUnavailable
from edge_runtime.kernels.cuda import require_triton
from edge_runtime.kernels.cuda.launch import ALIGNED, ORIN, Kernel, Signature

SHARED_PER_SM = 164 * 1024  # of sm_87, shared by the programs that run on it at once
_OPCODE = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)")
_RESOURCES = re.compile(r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)")
_PARAMETER = re.compile(r"\.param\s+(?:\.align\s+\d+\s+)?\.(\w+)\s+(?:\.ptr\s+\S+\s+)?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Compiled:
    """A kernel as a driver takes it. shared_bytes: dynamic; parameters: PTX types, in order."""

    name: str
    arch: int
    num_warps: int
    shared_bytes: int
    parameters: tuple[str, ...]
    ptx: str = field(repr=False)
    cubin: bytes = field(repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What the machine code of a kernel is made of. mix: instructions by full opcode."""

    registers: int
    stack_bytes: int
    shared_bytes: int
    mix: Mapping[str, int] = field(repr=False)

    def count(self, *starts: str) -> int:
        """Instructions whose opcode begins with one of `starts`."""
        return sum(n for opcode, n in self.mix.items() if opcode.startswith(starts))

    @property
    def spills(self) -> int:
        """Stores to and loads from local memory."""
        return self.count("STL", "LDL")

    @property
    def wide_loads(self) -> int:
        """128-bit loads from global memory, into registers or shared memory."""
        return sum(
            n for o, n in self.mix.items() if o.startswith(("LDG", "LDGSTS")) and ".128" in o
        )

    @property
    def byte_loads(self) -> int:
        """Loads of single bytes from global or shared memory."""
        narrow = re.compile(r"(LDG|LDS)\..*[US]8\b")
        return sum(n for opcode, n in self.mix.items() if narrow.match(opcode))


def compile_kernel(
    kernel: Any,
    types: Mapping[str, str],
    constants: Mapping[str, Any],
    *,
    num_warps: int,
    max_registers: int | None = None,
    arch: int = ORIN,
    unaligned: tuple[str, ...] = (),
) -> Compiled:
    """Compile a @triton.jit function for sm_`arch`.

    types: Triton type by argument, "*i8" or "i32"; constants: the constexpr ones. Pointers and
    integers count as divisible by 16, as at a launch, except those named in `unaligned`.
    """
    require_triton()
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = list(kernel.arg_names)
    missing = set(names) - set(types) - set(constants)
    assert not missing, f"{kernel.__name__}: no type for {sorted(missing)}"
    aligned = [n for n in names if n in types and n not in unaligned and types[n][:2] != "fp"]
    source = ASTSource(
        kernel,
        {n: types.get(n, "constexpr") for n in names},
        {(names.index(n),): value for n, value in constants.items()},
        {(names.index(n),): [["tt.divisibility", 16]] for n in aligned},
    )
    options = {"num_warps": num_warps, "maxnreg": max_registers, "enable_fp_fusion": False}
    built = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    return Compiled(
        name=built.metadata.name,
        arch=arch,
        num_warps=num_warps,
        shared_bytes=built.metadata.shared,
        parameters=ptx_parameters(built.asm["ptx"]),
        ptx=built.asm["ptx"],
        cubin=built.asm["cubin"],
    )


def compile_signature(signature: Signature, arch: int = ORIN) -> Compiled:
    """Compile what a launch needs."""
    module, _, name = signature.kernel.rpartition(".")
    function = Kernel(module, name).function
    constants = dict(signature.constants)
    if "PDL" in function.arg_names:
        constants.setdefault("PDL", False)
    given = [name for name in function.arg_names if name not in constants]
    kinds = dict(zip(given, signature.arguments, strict=True))
    return compile_kernel(
        function,
        {name: kind.removesuffix(ALIGNED) for name, kind in kinds.items()},
        constants,
        num_warps=signature.num_warps,
        max_registers=signature.max_registers,
        arch=arch,
        unaligned=tuple(name for name, kind in kinds.items() if not kind.endswith(ALIGNED)),
    )


def ptx_parameters(ptx: str) -> tuple[str, ...]:
    """Return the types of the entry's parameters, as in ("u64", "u32"); later Tritons add two
    pointers to scratch memory at the end, which our kernels do not use."""
    match = re.search(r"\.entry\s+\w+\s*\((.*?)\)", ptx, re.DOTALL)
    assert match is not None, "PTX without an entry"
    return tuple(_PARAMETER.findall(match.group(1)))


def inspect(compiled: Compiled) -> Report:
    """Take the machine code apart."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.cubin)
        file.flush()
        resources = _cuobjdump("--dump-resource-usage", file.name)
        listing = _cuobjdump("-sass", file.name)
    match = _RESOURCES.search(resources)
    assert match is not None, resources
    registers, stack, static_shared, _ = (int(n) for n in match.groups())
    return Report(
        registers=registers,
        stack_bytes=stack,
        shared_bytes=max(static_shared, compiled.shared_bytes),
        mix=dict(Counter(_OPCODE.findall(listing))),
    )


def _cuobjdump(*arguments: str) -> str:
    import triton

    packaged = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    tool = str(packaged) if packaged.exists() else shutil.which("cuobjdump")
    if tool is None:
        raise BackendUnavailable("cuobjdump is neither in Triton's package nor on the PATH")
    done = subprocess.run([tool, *arguments], capture_output=True, text=True, check=True)
    return done.stdout
