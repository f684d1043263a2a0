"""jetson/: the installer against fake boards, the unit and the scripts against their linters."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import boards
import pytest

SCRIPTS = (
    "jetson/install.sh", ".ci/run", "tools/check", "tools/check_gpu",
)  # fmt: skip
ORIN_JP7 = boards.NX16 | {"l4t": "39.2.0"}
NVIDIA_TORCH = "2.5.0a0+872d972e41.nv24.08 12.6"
Install = Callable[..., subprocess.CompletedProcess[str]]

PYTHON = """#!/bin/sh
case "$*" in
  *version_info*) echo {version} ;;
  *"import torch"*) {torch} ;;
  *ensurepip*) exit {no_venv} ;;
  *) echo "python $*" >>{log}; exit 1 ;;
esac
"""


def program(folder: Path, name: str, text: str) -> None:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(text)
    (folder / name).chmod(0o755)


@pytest.fixture
def install(repository: Path, tmp_path: Path) -> Install:
    """Run the installer on a board, with a Python and a machine that say what they are told."""

    def install(
        *args: object,
        board: dict[str, Any] | None = boards.NX16,
        machine: str = "aarch64",
        python: str = "3.10",
        torch: str = "",
        no_venv: int = 0,
        dry: bool = True,
    ) -> subprocess.CompletedProcess[str]:
        root = tmp_path / "root"
        if board is not None and not (root / "etc/nv_tegra_release").exists():
            boards.make(root, **board)
        root.mkdir(exist_ok=True)
        program(tmp_path / "bin", "uname", f"#!/bin/sh\necho {machine}\n")
        text = PYTHON.format(
            version=python, torch=f"echo {torch}" if torch else "exit 1", no_venv=no_venv,
            log=tmp_path / "log",
        )  # fmt: skip
        program(tmp_path / "bin", "python3", text)
        if not (tmp_path / "bin/runuser").exists():  # every user can read everything
            program(tmp_path / "bin", "runuser", "#!/bin/sh\n")
        command = [str(repository / "jetson/install.sh"), "--root", str(root), *map(str, args)]
        command += ["--dry-run"] if dry else []
        environment = os.environ | {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"}
        environment.pop("PYTHON", None)
        return subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=60,
            stdin=subprocess.DEVNULL,
        )  # fmt: skip

    return install


def steps(done: subprocess.CompletedProcess[str]) -> list[str]:
    assert done.returncode == 0, done.stderr
    return [
        line.removeprefix("would run: ")
        for line in done.stdout.splitlines()
        if line.startswith("would run")
    ]


def test_torch_that_is_there_is_used_and_held(install: Install, tmp_path: Path) -> None:
    done = install("--venv", tmp_path / "v", torch=NVIDIA_TORCH)
    make, pip, program_ = steps(done)
    assert make.startswith("python3 -m venv --system-site-packages")
    assert pip.rstrip().endswith("pip install --upgrade pip")
    assert f"-c {tmp_path / 'v'}/hold.txt -c " in program_
    assert "constraints-jp6.txt" in program_
    assert "would hold torch, torchvision, torchaudio, triton and numpy" in done.stdout
    assert "torch 2.5.0a0+872d972e41.nv24.08 for CUDA 12.6" in done.stderr
    assert not (tmp_path / "v").exists()
    assert not (tmp_path / "log").exists()


def test_a_wheel_goes_in_before_this_program(install: Install, tmp_path: Path) -> None:
    wheel = tmp_path / "torch-2.5.0-cp310-cp310-linux_aarch64.whl"
    wheel.touch()
    for one in (wheel, "https://example.invalid/torch-2.5.0-cp310-cp310-linux_aarch64.whl"):
        make, _, torch, this = steps(install("--torch", one))
        assert "--system-site-packages" not in make
        assert str(one) in torch.replace("\\", "")
        assert "convert" in this
        assert "hold.txt" in this


def test_without_torch(install: Install) -> None:
    *_, this = steps(install("--torch", "none"))
    assert "convert" not in this


@pytest.mark.parametrize("torch", ["", "2.9.1+cpu none", "2.9.1 none"])
def test_without_a_torch_for_the_gpu_it_asks(install: Install, torch: str) -> None:
    done = install(torch=torch)
    assert done.returncode == 4
    assert "docs.nvidia.com" in done.stderr
    assert "--torch WHEEL" in done.stderr
    assert done.stdout == ""


@pytest.mark.parametrize(
    ("board", "python", "jetpack"),
    [
        (boards.NX16, "3.10", 6),
        (boards.NANO_SUPER, "3.10", 6),
        (boards.AGX64, "3.10", 6),
        (boards.THOR, "3.12", 7),
        (ORIN_JP7, "3.12", 7),
    ],
)
def test_boards(install: Install, board: dict[str, Any], python: str, jetpack: int) -> None:
    done = install("--torch", "none", board=board, python=python)
    assert f"JetPack {jetpack}" in done.stderr
    assert f"constraints-jp{jetpack}.txt" in steps(done)[-1]


@pytest.mark.parametrize(
    ("wrong", "code", "said"),
    [
        ({"board": None}, 4, "this is no Jetson"),
        ({"board": boards.NANO}, 4, "older than JetPack 6"),
        ({"board": boards.NX16 | {"l4t": "40.1.0"}}, 4, "L4T release 40 .* is not known"),
        ({"machine": "x86_64"}, 4, "expected an aarch64 machine, got x86_64"),
        ({"python": "3.12"}, 4, "JetPack 6 has Python 3.10, .* is 3.12"),
        ({"no_venv": 1}, 4, "cannot make virtual environments"),
    ],
)
def test_what_is_refused(install: Install, wrong: dict[str, Any], code: int, said: str) -> None:
    done = install("--torch", "none", **wrong)
    assert done.returncode == code
    assert re.search(said, done.stderr)
    assert "hint: " in done.stderr
    assert done.stdout == ""


@pytest.mark.parametrize(
    "args", [("--torch",), ("--sun",), ("--jetpack", "5"), ("--torch", "x"), ("--torch", "x.whl"),
             ("--torch", "none", "--service", "/nowhere")]
)  # fmt: skip
def test_usage(install: Install, args: tuple[str, ...]) -> None:
    done = install(*args)
    assert done.returncode == 2, done.stderr
    assert done.stderr.count("error: ") == 1


def test_force_installs_anywhere(install: Install) -> None:
    done = install(
        "--torch", "none", "--force", board=None, machine="x86_64", python="3.11"
    )  # fmt: skip
    assert "constraints-jp6.txt" in steps(done)[-1]


def test_a_step_that_fails_ends_it(install: Install, tmp_path: Path) -> None:
    done = install("--torch", "none", "--venv", tmp_path / "v", dry=False)
    assert done.returncode == 1  # the fake Python makes no environment
    assert (tmp_path / "log").read_text().count("\n") == 1


def wheel(folder: Path, name: str, version: str, *requires: str) -> Path:
    """A package of one empty module."""
    file = folder / f"{name}-{version}-py3-none-any.whl"
    head = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    info = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr(f"{name}.py", "")
        needs = "".join(f"Requires-Dist: {one}\n" for one in requires)
        archive.writestr(f"{info}/METADATA", head + needs)
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return file


def shell(repository: Path, settings: str, function: str) -> str:
    """Run one function of the installer; what it tells."""
    script = (repository / "jetson/install.sh").read_text().removesuffix('main "$@"\n')
    command = f"{script}here={repository / 'jetson'} {settings}\n{function}"
    done = subprocess.run(
        ["bash", "-c", command], check=True, timeout=60, capture_output=True, text=True
    )
    return done.stderr


def test_pip_never_replaces_torch(repository: Path, tmp_path: Path) -> None:
    """A newer torch is on offer and something asks for it: pip fails, and torch stays."""
    folder, venv = tmp_path / "wheels", tmp_path / "v"
    folder.mkdir()
    nvidia = wheel(folder, "torch", "2.5.0a0+872d972e41.nv24.08")
    wheel(folder, "torch", "2.9.0")
    wheel(folder, "modest", "1", "torch>=2.4")
    wheel(folder, "greedy", "1", "torch>=2.5")
    subprocess.run([sys.executable, "-m", "venv", venv], check=True, timeout=60)

    def pip(*args: object) -> subprocess.CompletedProcess[str]:
        command = [venv / "bin/python", "-m", "pip", "install", "--no-index", *args]
        environment = {k: v for k, v in os.environ.items() if not k.startswith("PIP_")}
        return subprocess.run(
            list(map(str, command)), capture_output=True, text=True, timeout=60,
            env=environment | {"PIP_CONFIG_FILE": os.devnull},
        )  # fmt: skip

    assert pip(nvidia).returncode == 0
    shell(repository, f"venv={venv}", "hold")
    hold = ("-c", venv / "hold.txt", "--find-links", folder)
    refused = pip(*hold, "greedy")
    assert refused.returncode != 0
    assert "conflict" in refused.stderr
    assert "Would install" in pip("--dry-run", "--find-links", folder, "greedy").stdout
    assert pip(*hold, "modest").returncode == 0
    there = subprocess.run(
        [venv / "bin/python", "-m", "pip", "list"], capture_output=True, text=True, timeout=60
    )
    assert "2.5.0a0+872d972e41.nv24" in there.stdout


# ---- the service


def test_service(install: Install, repository: Path, tmp_path: Path) -> None:
    """Its part alone: main without what needs a network."""
    boards.write(tmp_path / "root", "etc/group", "root:x:0:\nvideo:x:44:\n")
    model, root = a_model(tmp_path / "root/srv/model"), tmp_path / "root"
    done = install("--torch", "none", "--service", model)
    assert f"would write {root}/etc/systemd/system/bitnest-edge.service" in done.stdout
    assert "groups video" in done.stdout
    settings_of = f"root={root} venv=/srv/edge model={model}"
    shell(repository, settings_of, "install_service")
    unit = (root / "etc/systemd/system/bitnest-edge.service").read_text()
    assert "ExecStart=/srv/edge/bin/bitnest-edge serve ${MODEL} $OPTIONS" in unit
    assert "SupplementaryGroups=video\n" in unit
    settings = root / "etc/bitnest-edge/serve.env"
    assert settings.read_text() == f"MODEL={model}\nOPTIONS=\n"
    assert "kept" not in shell(repository, settings_of, "install_service")
    settings.write_text("MODEL=/mine\nOPTIONS=--port 9\n")
    said = shell(repository, settings_of, "install_service")
    assert f"kept as it is, with another model than {model}: {settings}" in said
    assert settings.read_text() == "MODEL=/mine\nOPTIONS=--port 9\n"


def a_model(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "manifest.json").touch()
    return folder


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("--service", "/nowhere"), "expected the folder of a converted model, got /nowhere"),
        (("--service", "{root}/tmp/m"), "the unit hides .* and {root}/tmp/m lies there"),
        (("--service", "{root}/home/me/m"), "{root}/home/me/m lies there"),
        (("--service", "{root}/srv/m", "--venv", "/home/me/v"), "/home/me/v lies there"),
        (("--service", "{root}/srv/m", "--venv", "/opt/../home/me/v"), "/home/me/v lies there"),
        (("--service", "{root}/srv/linked"), "{root}/home/me/m/manifest.json lies there"),
        (("--service", "{root}/srv/a b"), "--service: expected a path without spaces"),
        (("--venv", "v|e&n"), "--venv: expected a path without spaces"),
        (("--venv", "a%b"), "--venv: expected a path without spaces"),
        (("--venv", "it's"), "--venv: expected a path without spaces"),
    ],
)
def test_a_service_that_could_not_run(
    install: Install, tmp_path: Path, args: tuple[str, ...], said: str
) -> None:
    """Refused before anything is installed."""
    root = tmp_path / "root"
    for folder in ("tmp/m", "home/me/m", "srv/m", "srv/a b"):
        a_model(root / folder)
    (root / "srv/linked").mkdir()
    (root / "srv/linked/manifest.json").symlink_to(root / "home/me/m/manifest.json")
    done = install("--torch", "none", *(a.format(root=root) for a in args), dry=False)
    assert done.returncode == 2
    assert re.search(said.format(root=re.escape(str(root))), done.stderr)
    assert done.stderr.count("error: ") == 1
    assert not (tmp_path / "log").exists()


@pytest.mark.parametrize("closed", ["", "/srv/m/head.safetensors"])
def test_a_model_that_the_service_cannot_read(
    install: Install, tmp_path: Path, closed: str
) -> None:
    model = a_model(tmp_path / "root/srv/m")
    program(tmp_path / "bin", "id", "#!/bin/sh\n[ $1 = -u ] && echo 0\n")
    program(tmp_path / "bin", "runuser", f'#!/bin/sh\necho "$@" >{tmp_path}/as\necho {closed}\n')
    done = install("--torch", "none", "--venv", "/srv/edge", "--service", model)
    assert (tmp_path / "as").read_text().startswith(f"-u nobody -- find -L {model}")
    assert done.returncode == (2 if closed else 0)
    if closed:
        assert f"cannot read the model: {closed}" in done.stderr
        assert f"chmod -R a+rX {model}" in done.stderr


def test_a_relative_folder_is_made_absolute(install: Install) -> None:
    make, *_ = steps(install("--torch", "none", "--venv", "here"))
    assert make.rstrip().endswith(f" {Path.cwd()}/here")
