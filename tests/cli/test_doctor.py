"""doctor: what it finds, what it says of what is missing, and that it never fails."""

from __future__ import annotations

import builtins
import json
import subprocess
import sys
from pathlib import Path

import pytest

from edge_runtime import cli, doctor, paths

# Jetson Orin Nano developer kit, L4T 36.4.7, as in NVIDIA's release file format
R36 = "# R36 (release), REVISION: 4.7, GCID: 42132812, BOARD: generic, EABI: aarch64, DATE: Thu\n"


@pytest.fixture
def board(tmp_path: Path) -> Path:
    """A root folder with what a board shows of itself."""
    (tmp_path / "proc/device-tree").mkdir(parents=True)
    (tmp_path / "etc").mkdir()
    model = b"NVIDIA Jetson Orin Nano Engineering Reference Developer Kit Super\0"
    (tmp_path / "proc/device-tree/model").write_bytes(model)
    (tmp_path / "etc/nv_tegra_release").write_text(R36)
    return tmp_path


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache" / "deep"
    monkeypatch.setattr(paths, "cache_dir", lambda: folder)
    return folder


def refuse(monkeypatch: pytest.MonkeyPatch, name: str, error: Exception) -> None:
    """Make `import name` raise `error`."""
    real = builtins.__import__

    def importing(wanted, *args, **kwargs):
        if wanted == name:
            raise error
        return real(wanted, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", importing)


def test_a_board_is_recognised(board: Path) -> None:
    found = doctor.jetson_board(board)
    assert found["board"].endswith("Developer Kit Super")
    assert (found["l4t"], found["jetpack"], found["reason"]) == ("36.4.7", 6, None)


def test_a_machine_that_is_no_board(tmp_path: Path) -> None:
    found = doctor.jetson_board(tmp_path)
    assert found["board"] is None
    assert "/proc/device-tree/model" in found["reason"]


def test_another_arm_board_is_no_jetson(board: Path) -> None:
    (board / "proc/device-tree/model").write_bytes(b"Raspberry Pi 5 Model B Rev 1.0\0")
    (board / "etc/nv_tegra_release").unlink()
    found = doctor.jetson_board(board)
    assert found["board"] is None
    assert "Raspberry" in found["reason"]


@pytest.mark.parametrize("text", ["", "rubbish", "# R99 (release), REVISION: 1.0"])
def test_an_unknown_release_keeps_the_board_and_says_why(board: Path, text: str) -> None:
    (board / "etc/nv_tegra_release").write_text(text)
    found = doctor.jetson_board(board)
    assert found["board"] is not None
    assert found["jetpack"] is None
    assert found["reason"]


def test_the_document_is_json_and_has_its_sections(board: Path, empty_cache: Path) -> None:
    document = doctor.examine(board)
    assert json.loads(json.dumps(document, allow_nan=False)) == document
    assert list(document) == [
        "version",
        "python",
        "platform",
        "cpu",
        "memory",
        "jetson",
        "torch",
        "gguf",
        "backends",
        "kernels",
        "cache",
        "power",
        "device",
        "findings",
    ]
    assert document["memory"]["available_bytes"] <= document["memory"]["total_bytes"]
    assert {b["name"] for b in document["backends"]} >= {"reference", "cpu", "cuda"}
    assert all(isinstance(b["available"], bool) and b["reason"] for b in document["backends"])
    text = "\n".join(doctor.describe(document))
    assert "JetPack 6" in text
    assert "bitnest-edge pull default" in text


@pytest.mark.parametrize(
    ("on_jetson", "words"), [(False, "pip install torch==2.13.0"), (True, "NVIDIA's torch")]
)
def test_torch_not_installed(monkeypatch, on_jetson: bool, words: str) -> None:
    refuse(monkeypatch, "torch", ModuleNotFoundError("No module named 'torch'", name="torch"))
    found = doctor.torch_install(on_jetson)
    assert found["version"] is None
    assert found["reason"].startswith("not installed")
    assert words in found["reason"]


def test_torch_that_does_not_load(monkeypatch) -> None:
    refuse(monkeypatch, "torch", OSError("libcudart.so.12: cannot open shared object file"))
    found = doctor.torch_install(on_jetson=True)
    assert "does not load: libcudart.so.12" in found["reason"]
    assert any("libcudart" in line for line in doctor._torch_lines(found))


def test_power_readings_that_do_not_load(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "edge_runtime.power", None)
    found = doctor.power()
    assert found["source"] is None
    assert "do not load" in found["reason"]
    assert doctor._power_line(found).startswith("- power")


def test_a_missing_package() -> None:
    found = doctor.package("no-such-package-here", "pip install it")
    assert found == {"version": None, "reason": "not installed: pip install it"}


def test_kernels_that_do_not_load(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "edge_runtime.kernels", None)
    [found] = doctor.backends()
    assert found["available"] is False
    assert "kernels" in found["reason"]


def test_cached_models_are_listed(empty_cache: Path) -> None:
    assert doctor.cache()["exists"] is False
    assert doctor.cache()["models"] == []
    assert doctor.cache()["free_bytes"] > 0
    (empty_cache / "nest").mkdir(parents=True)
    (empty_cache / "nest/manifest.json").write_text("{}")
    (empty_cache / "source.gguf").write_bytes(b"GGUF")
    (empty_cache / ".download-1").mkdir()
    (empty_cache / ".download-1/source.gguf").write_bytes(b"GG")
    found = doctor.cache()
    assert [(m["kind"], m["bytes"]) for m in found["models"]] == [("checkpoint", 2), ("gguf", 4)]


def test_the_cpu_is_named_on_arm(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/cpuinfo").write_text("processor\t: 0\nCPU part\t: 0xd42\n")
    assert doctor.cpu(tmp_path)["model"] == "part 0xd42"


def test_the_command_prints_one_document_last(empty_cache: Path, capsys) -> None:
    with pytest.raises(SystemExit) as done:
        cli.main(["doctor", "--json"])
    out, err = capsys.readouterr()
    assert done.value.code == 0
    assert json.loads(out.splitlines()[-1])["version"]
    assert len(out.splitlines()) == 1
    assert "backend reference" in err


def test_without_json_the_report_is_stdout() -> None:
    done = subprocess.run(
        [sys.executable, "-c", "from edge_runtime.cli import main; main(['doctor'])"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "+ bitnest-edge" in done.stdout
