"""Synthetic checkpoints on the command line: made, and called by their name wherever they run."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import tiny_models

from edge_runtime.convert import resources
from edge_runtime.format.manifest import read_manifest


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sizes of a tiny model, as a file that `plan` takes."""
    folder = tmp_path_factory.mktemp("sizes") / "tiny-sizes"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(tiny_models.hf_config("qwen2")))
    return folder / "config.json"


@pytest.fixture
def checkpoint(call, config: Path, tmp_path: Path) -> Path:
    assert call("convert", "--synthetic", config, "-o", tmp_path / "random")[0] == 0
    return tmp_path / "random"


def test_the_document_and_the_report(call, config: Path, tmp_path: Path) -> None:
    out_dir = tmp_path / "out"
    code, out, err = call("convert", "--synthetic", config, "-o", out_dir, "--seed", 7, "--json")
    assert code == 0, err
    document = json.loads(out)
    size = document.pop("bytes")
    assert size == sum(p.stat().st_size for p in out_dir.iterdir())
    assert document.pop("seconds") > 0
    assert document.pop("peak_rss_bytes") > 0
    assert document == {
        "out_dir": str(out_dir), "group_size": 64, "agreement": None, "verdict": None,
        "synthetic": True, "shape": "tiny-sizes",
    }  # fmt: skip
    assert "no model" in err
    assert "GB of disk" in err
    manifest = read_manifest(out_dir)
    assert manifest.synthetic is not None
    assert manifest.synthetic.seed == 7
    code, _, err = call("convert", "--synthetic", config, "-o", out_dir)
    assert code == 2
    assert "already exists" in err


@pytest.mark.parametrize(
    ("args", "code", "reason"),
    [
        (["no-such-shape"], 2, "no-such-shape"),
        (["llama-2-7c"], 2, "did you mean llama-2-7b"),
        (["./nothing.json"], 5, "does not exist"),
        (["llama-2-7b", "--bound", "0.5"], 2, "--bound has no effect with --synthetic"),
        (["llama-2-7b", "--calib-tokens", "512"], 2, "--calib-tokens has no effect"),
        (["llama-2-7b", "--backend", "cuda"], 2, "--backend has no effect"),
    ],
)
def test_what_is_refused(call, tmp_path: Path, args: list[str], code: int, reason: str) -> None:
    found, out, err = call("convert", "--synthetic", *args, "-o", tmp_path / "out")
    assert (found, out) == (code, "")
    assert reason in err
    assert not list(tmp_path.iterdir())


def test_a_full_disk(call, config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resources.shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))
    code, _, err = call("convert", "--synthetic", config, "-o", tmp_path / "out")
    assert code == 3
    assert "disk: " in err
    monkeypatch.undo()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("edge_runtime.format.stream.ShardStream.write", full)
    code, _, err = call("convert", "--synthetic", config, "-o", tmp_path / "out")
    assert code == 3
    assert "run the same command again: it continues" in err
    monkeypatch.undo()
    assert call("convert", "--synthetic", config, "-o", tmp_path / "out")[0] == 0


COMMANDS = {
    "generate": ("generate", None, "-p", "hello", "-n", 4, "--backend", "cpu"),
    "generate w8": ("generate", None, "-p", "hello", "-n", 4, "--backend", "cpu", "--view", "w8"),
    "chat": ("chat", None, "--once", "hello", "-n", 4, "--backend", "cpu"),
    "bench decode": ("bench", "decode", None, "-n", 4, "--limit", 1, "--backend", "cpu"),
    "bench kernels": ("bench", "kernels", None, "--repeats", 1, "--rows", 1, "--backend", "cpu"),
    "selftest": ("selftest", None, "--limit", 1, "-n", 2, "--backend", "cpu"),
    "profile": ("profile", None, "--modes", "w8", "--context", 8, "-n", 4, "--repeats", 1),
    "plan": ("plan", None, "--device", "orin-nx-16gb"),
}


@pytest.mark.parametrize("command", COMMANDS)
def test_whatever_runs_it_says_so(call, checkpoint: Path, command: str) -> None:
    args = [checkpoint if a is None else a for a in COMMANDS[command]]
    code, out, err = call(*args, "--json")
    assert code == 0, err
    assert json.loads(out.splitlines()[-1])["synthetic"] is True
    assert "random weights" in err


def test_how_good_it_is_is_not_measured(call, checkpoint: Path, tmp_path: Path) -> None:
    data = tmp_path / "text.txt"
    data.write_text("some words of text")
    code, out, err = call("eval", checkpoint, "--task", "ppl", "--data", data)
    assert (code, out) == (5, "")
    assert "eval needs a model: expected a converted one, got random weights" in err


def test_and_of_a_model_it_does_not(call, tiny_checkpoint: Path) -> None:
    code, out, err = call("generate", tiny_checkpoint, "-p", "hello", "-n", 2, "--json")
    assert code == 0
    assert json.loads(out)["synthetic"] is False
    assert "random weights" not in err


def test_only_declared_acceptance_is_a_figure(call, checkpoint: Path) -> None:
    args = ("bench", "decode", checkpoint, "-n", 9, "--limit", 1, "--backend", "reference")
    code, out, err = call(*args, "--accept", "0.75", "--draft", 4, "--json")
    assert code == 0, err
    document = json.loads(out)
    assert [(r["mode"], r["accept"]) for r in document["rows"]] == [
        ("w8", None), ("w4", None), ("nest", "0.75"),
    ]  # fmt: skip
    assert document["differing"] is None
    assert "declared, not measured" in err
