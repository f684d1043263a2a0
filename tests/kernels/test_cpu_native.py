"""The native kernels bit by bit: `native/tests/kernel_bits.cpp`, here and on Arm in an emulator."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

ARM_COMPILER = "aarch64-linux-gnu-g++"
BUILDER, GENERATOR = ("ninja", "Ninja") if shutil.which("ninja") else ("make", "Unix Makefiles")
GROUPS = {
    *("linear", "quantisers", "silu_mul", "rope_kv", "attention", "argmax", "sampling", "checksum"),
}
LINE = re.compile(r"(\w+) +(\d+) cases, digest ([0-9a-f]{16}), (\w+): (.*)")
Results = dict[str, tuple[str, list[str]]]  # by group: digest, instruction sets
GiveUp = Callable[[str, str], None]


def command(*args: str | Path) -> str:
    done = subprocess.run([str(a) for a in args], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{args}: exit {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def build(repository: Path, folder: Path, *options: str) -> Path:
    source = repository / "kernels" / "cpu" / "native"
    command("cmake", "-G", GENERATOR, "-S", source, "-B", folder, "-DEDGE_TESTS=ON", *options)
    threads = str(len(os.sched_getaffinity(0)))
    command("cmake", "--build", folder, "--target", "kernel_bits", "--parallel", threads)
    return folder / "kernel_bits"


def results(*args: str | Path) -> Results:
    found: Results = {}
    for line in command(*args).splitlines():
        match = LINE.fullmatch(line)
        assert match, line
        group, cases, digest, verdict, isas = match.groups()
        assert int(cases) > 0
        assert verdict == "equal"
        found[group] = digest, isas.split()
    assert found.keys() == GROUPS
    return found


def missing(*tools: str) -> str:
    return ", ".join(tool for tool in tools if shutil.which(tool) is None)


@pytest.fixture(scope="module")
def here(repository: Path, tmp_path_factory: pytest.TempPathFactory, give_up: GiveUp) -> Results:
    if tools := missing("cmake", BUILDER, os.environ.get("CXX", "c++").split()[0]):
        give_up("native", f"not installed: {tools}")
    return results(build(repository, tmp_path_factory.mktemp("native")))


@pytest.fixture(scope="module")
def arm_program(
    repository: Path, tmp_path_factory: pytest.TempPathFactory, give_up: GiveUp
) -> Path:
    if tools := missing("cmake", BUILDER, ARM_COMPILER, "qemu-aarch64"):
        give_up("aarch64", f"not installed: {tools} (Debian: g++-aarch64-linux-gnu, qemu-user)")
    return build(
        repository,
        tmp_path_factory.mktemp("aarch64"),
        "-DCMAKE_SYSTEM_NAME=Linux",
        "-DCMAKE_SYSTEM_PROCESSOR=aarch64",
        f"-DCMAKE_CXX_COMPILER={ARM_COMPILER}",
        "-DCMAKE_EXE_LINKER_FLAGS=-static",
    )


def test_every_instruction_set_of_this_processor(here: Results) -> None:
    flags = Path("/proc/cpuinfo").read_text()
    for _, isas in here.values():
        assert isas[0] == "portable"
        for isa, flag in (("avx2", "avx2"), ("avx512_vnni", "avx512_vnni"), ("dotprod", "asimddp")):
            assert (isa in isas) == bool(re.search(rf"\b{flag}\b", flags)), isa


@pytest.mark.parametrize(
    ("cpu", "isas"),
    [("max", ["portable", "dotprod"]), ("cortex-a57", ["portable"])],
    ids=["with dot products", "without"],
)
def test_arm(here: Results, arm_program: Path, cpu: str, isas: list[str]) -> None:
    """The same bits as here; the instructions are found, and not used where there are none."""
    found = results("qemu-aarch64", "-cpu", cpu, arm_program)
    assert {group: digest for group, (digest, _) in found.items()} == {
        group: digest for group, (digest, _) in here.items()
    }
    assert all(names == isas for _, names in found.values())
