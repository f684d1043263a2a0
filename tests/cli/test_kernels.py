"""`kernels save`: what is compiled for a model or a shape, and how the folder is then used."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from edge_runtime import cli, kernels
from edge_runtime.errors import BackendUnavailable
from edge_runtime.kernels.cuda import launch

pytest.importorskip("triton")
pytest.importorskip("torch")

from edge_runtime.kernels.cuda import record, saved
from edge_runtime.kernels.cuda.compile import Compiled


@pytest.fixture(autouse=True)
def _fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is compiled, and nothing that was chosen stays."""

    def compile_all(signatures: Sequence[Any], *, arch: int, **_: Any) -> dict[Any, Compiled]:
        return {
            s: Compiled(
                name=s.kernel.rpartition(".")[2], arch=arch, num_warps=s.num_warps, shared_bytes=0,
                parameters=("u64",), ptx=str(s), cubin=b"\x7fELF",
            )
            for s in signatures
        }  # fmt: skip

    monkeypatch.setattr(record, "compile_all", compile_all)
    monkeypatch.setattr(launch, "_way", None)
    monkeypatch.setattr(launch, "_folder", None)
    monkeypatch.delenv(launch.FOLDER_VARIABLE, raising=False)


def run(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as exit_:
        cli.main(list(args))
    out, err = capsys.readouterr()
    assert "Traceback" not in err
    return exit_.value.code, out, err


def test_a_shape(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "code"
    save = ("kernels", "save", "smollm2-135m", "-o", str(folder), "--json")
    code, out, err = run(capsys, *save)
    assert code == 0, err
    document = json.loads(out)
    assert document.keys() == {
        "folder", "model", "arch", "launches", "kernels", "bytes", "seconds", "triton",
    }  # fmt: skip
    assert document["arch"] == 87
    assert document["launches"] > 60
    assert document["bytes"] == sum(p.stat().st_size for p in folder.iterdir())
    read = saved.Folder.read(folder)
    assert len(read.launches) == document["launches"]
    names = {s.kernel.rpartition(".")[2] for s in read.launches}
    assert {"linear_mma", "rope_kv", "accept", "cut_kernel", "attend_rows"} <= names
    rotated = {dict(s.constants)["ROTATE"] for s in read.launches if "rope_kv" in s.kernel}
    assert rotated == {False, True}  # a shape does not say
    old = folder / "old-001.ptx.gz"
    old.write_bytes(b"")
    assert run(capsys, *save)[0] == 0
    assert not old.exists()


def test_a_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    from tiny_checkpoints import convert_tiny

    model = convert_tiny(tmp_path_factory.mktemp("model"), "llama")
    code, out, err = run(capsys, "kernels", "save", str(model), "-o", str(tmp_path / "a"), "--json")
    assert code == 0, err
    read = saved.Folder.read(tmp_path / "a")
    assert read.index["model"] == json.loads(out)["model"] == model.name
    rotated = {dict(s.constants)["ROTATE"] for s in read.launches if "rope_kv" in s.kernel}
    assert len(rotated) == 1


def test_a_folder_of_something_else(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine.txt").write_text("")
    code, _, err = run(capsys, "kernels", "save", "smollm2-135m", "-o", str(tmp_path))
    assert code == 2
    assert "holds other files" in err
    assert (tmp_path / "mine.txt").exists()


def test_an_option_that_is_broken_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also with --backend auto, which could run elsewhere."""
    code, _, err = run(capsys, "generate", "x", "-p", "a", "--kernels", str(tmp_path))
    assert code == 4
    assert f"machine code in {tmp_path} cannot be used" in err.splitlines()[0]
    assert "hint: make it again" in err
    with pytest.raises(BackendUnavailable):
        kernels.use_folder(tmp_path, "kernels_folder")
    assert launch.FOLDER_VARIABLE not in os.environ


def test_processes_that_are_started_use_it_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved.write({}, tmp_path, {"triton": "3.9.0", "arch": 87, "fewest_columns": 8})
    monkeypatch.setenv(launch.FOLDER_VARIABLE, "elsewhere")
    kernels.use_folder(tmp_path, "--kernels")
    assert os.environ[launch.FOLDER_VARIABLE] == str(tmp_path)
    assert "--kernels" in launch.way().why
    find = launch.importlib.util.find_spec
    monkeypatch.setattr(
        launch.importlib.util, "find_spec", lambda n: None if n == "triton" else find(n)
    )
    assert "not installed" not in kernels.cuda_missing()
