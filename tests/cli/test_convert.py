"""convert: the document and report, interruption and resumption, and first use of a known name."""

from __future__ import annotations

import inspect
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import tiny_models
from tiny_checkpoints import tiny_options

from edge_runtime.cli import convert, model
from edge_runtime.cli.progress import Progress, seconds_text
from edge_runtime.convert.pipeline import ConvertOptions
from edge_runtime.errors import CheckpointError
from edge_runtime.format.reader import Checkpoint
from edge_runtime.format.writer import CheckpointWriter

SHOWN = Progress.__call__


@pytest.fixture
def calibration(tmp_path: Path) -> list[object]:
    file = tiny_options(tmp_path).calibration
    return ["--calib", file, "--calib-tokens", 512, "--backend", "cpu"]


def hashes(checkpoint: Path) -> dict[str, str]:
    return {n: p.sha256 for n, p in Checkpoint(checkpoint).manifest.planes.items()}


def test_the_document_and_the_report(call, tiny_source, tmp_path, calibration) -> None:
    out_dir = tmp_path / "out"
    code, out, err = call("convert", tiny_source, "-o", out_dir, *calibration, "--json")
    assert code == 0
    assert out.count("\n") == 1
    document = json.loads(out)
    assert set(document) == {
        "out_dir",
        "bytes",
        "seconds",
        "seconds_per_layer",
        "backend",
        "peak_rss_bytes",
        "device_peak_bytes",
        "group_size",
        "clipped_share",
        "agreement",
        "verdict",
        "synthetic",
    }
    assert document["synthetic"] is False
    assert document["seconds_per_layer"] > 0
    assert (document["backend"], document["device_peak_bytes"]) == ("cpu", None)
    assert "backend cpu: torch on the CPU" in err
    assert set(document["agreement"]) == {
        "target_original",
        "draft_target",
        "draft_original",
        "w8_rtn_original",
        "positions",
    }
    assert document["out_dir"] == str(out_dir)
    assert document["bytes"] == sum(p.stat().st_size for p in out_dir.iterdir())
    assert "of disk and about" in err
    assert f"{document['agreement']['target_original']:.3f}" in err
    assert set(document["verdict"]) == {"view", "speedup", "gamma", "text"}
    assert document["verdict"]["text"] in err.splitlines()[-1]
    code, out, err = call("convert", tiny_source, "-o", out_dir, *calibration)
    assert (code, out) == (2, "")
    assert "already exists" in err


def test_ctrl_c_and_on_again(
    call, tiny_source, tiny_checkpoint, tmp_path, calibration, monkeypatch
) -> None:
    def interrupted(self: Progress, done: int, total: int, what: str) -> None:
        if done == 2:
            os.kill(os.getpid(), signal.SIGINT)
        SHOWN(self, done, total, what)

    out_dir = tmp_path / "out"
    monkeypatch.setattr(Progress, "__call__", interrupted)
    code, out, err = call("convert", tiny_source, "-o", out_dir, *calibration)
    assert (code, out) == (130, "")
    assert "same command continues" in err
    assert not out_dir.exists()
    assert (tmp_path / "out.partial" / "layer-000.safetensors").is_file()

    monkeypatch.setattr(Progress, "__call__", SHOWN)
    code, _, err = call("convert", tiny_source, "-o", out_dir, *calibration, "--seed", 1)
    assert code == 2
    assert "other options" in err
    code, _, _ = call("convert", tiny_source, "-o", out_dir, *calibration)
    assert code == 0
    assert hashes(out_dir) == hashes(tiny_checkpoint)


@pytest.mark.parametrize(
    ("args", "code", "reason"),
    [
        (["--group-size", "48"], 2, "--group-size"),
        (["--bound", "-1"], 2, "--bound"),
        (["--bound", "inf"], 2, "--bound"),
        (["--calib", "/no/such/file"], 5, "calibration file not found"),
        (["--calib-tokens", "100"], 2, "--calib-tokens"),
        (["--backend", "reference"], 2, "--backend"),
    ],
)
def test_exit_codes(call, tiny_source, tmp_path, args, code, reason) -> None:
    found, out, err = call("convert", tiny_source, "-o", tmp_path / "out", *args)
    assert (found, out) == (code, "")
    assert reason in err


@pytest.mark.slow
def test_kill_9_and_on_again(call, tiny_source, tmp_path, calibration) -> None:
    """A killed process leaves whole shards and no checkpoint; the next one goes on from them."""
    out, partial = tmp_path / "out", tmp_path / "out.partial"
    program = [sys.executable, "-c", "from edge_runtime.cli import main; main()", "convert"]
    for count in (1, 2):
        with subprocess.Popen(
            [*program, *map(str, (tiny_source, "-o", out, *calibration))], stderr=subprocess.DEVNULL
        ) as process:
            deadline = time.monotonic() + 60
            while len(list(partial.glob("resume/*.json"))) < count:
                assert process.poll() is None
                assert time.monotonic() < deadline
                time.sleep(0.001)
            process.kill()
        assert process.returncode == -signal.SIGKILL
        assert not out.exists()
    done = [f"{report.stem}.safetensors" for report in partial.glob("resume/*.json")]
    kept = {name: (partial / name).stat().st_ino for name in done}
    assert len(kept) >= 2
    assert call("convert", tiny_source, "-o", out, *calibration)[0] == 0
    assert {name: (out / name).stat().st_ino for name in kept} == kept
    assert call("convert", tiny_source, "-o", tmp_path / "whole", *calibration)[0] == 0
    assert hashes(out) == hashes(tmp_path / "whole")


def test_a_gpu_that_is_not_there_is_4(call, tiny_source, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    args = ("convert", tiny_source, "-o", tmp_path / "out", "--backend")
    code, out, err = call(*args, "cuda")
    assert (code, out) == (4, "")
    assert "backend cuda is not available: torch " in err
    assert "hint: use --backend auto" in err
    assert not list(tmp_path.iterdir())


def test_what_is_no_source(call, tiny_checkpoint: Path, tmp_path: Path) -> None:
    for source, reason in (
        (tmp_path / "missing", "no model at"),
        (tiny_checkpoint, "already a nested checkpoint"),
        (tmp_path, "config.json"),
    ):
        code, out, err = call("convert", source, "-o", tmp_path / "out")
        assert (code, out) == (5, "")
        assert reason in err


def test_what_is_in_the_way_is_told_before_anything_is_read(
    call, tmp_path: Path, tiny_source: Path, calibration, monkeypatch
) -> None:
    monkeypatch.setattr("edge_runtime.cli.model.source_path", lambda _: pytest.fail("was read"))
    (tmp_path / "file").write_text("")
    (tmp_path / "link").symlink_to("nowhere")
    (tmp_path / "a.partial").write_text("")
    (tmp_path / "b.partial").mkdir()
    (tmp_path / "b.partial" / "mine.txt").write_text("mine")
    for name, reason in (
        ("file/x", f"{tmp_path / 'file'} is no folder"),
        ("link", "already exists"),
        ("a", "a.partial: is in the way"),
        ("b", "b.partial: is in the way"),
    ):
        code, out, err = call("convert", tiny_source, "-o", tmp_path / name, *calibration)
        assert (code, out) == (2, "")
        assert reason in err
        assert "hint: " in err
        assert "rm -r" not in err


def test_the_second_conversion_to_one_folder_is_refused(
    call, tmp_path: Path, tiny_source: Path, calibration
) -> None:
    held = CheckpointWriter(tmp_path / "out", "another")
    code, out, err = call("convert", tiny_source, "-o", tmp_path / "out", *calibration)
    assert (code, out) == (2, "")
    assert "another conversion is writing into it" in err
    held.discard()


def test_files_that_are_pointers(call, tmp_path: Path, tiny_source, tiny_checkpoint) -> None:
    file = tmp_path / "text.jsonl"
    file.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    for args in (
        ("convert", tiny_source, "-o", tmp_path / "out", "--calib", file),
        ("selftest", tiny_checkpoint, "--prompts", file),
    ):
        code, out, err = call(*args)
        assert (code, out) == (5, "")
        assert "is a Git LFS pointer" in err


def test_a_cache_that_cannot_be_used_is_5(call, tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("BITNEST_CACHE", str(tmp_path / "file"))
    for args in (("pull", "default"), ("generate", "default", "-p", "x")):
        code, out, err = call(*args)
        assert (code, out) == (5, "")
        assert "cannot use the cache folder" in err
        assert "BITNEST_CACHE" in err


def test_a_path_is_not_pulled(call) -> None:
    for name in ("./tiny", "/tiny", "../a/b"):
        code, out, err = call("pull", name)
        assert (code, out) == (2, "")
        assert "converted directly, without pull" in err


def test_a_full_disk_is_no_traceback(call, tiny_source, tmp_path, calibration, monkeypatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("edge_runtime.format.writer.CheckpointWriter.shard", full)
    code, _, err = call("convert", tiny_source, "-o", tmp_path / "out", *calibration)
    assert code == 3
    assert "No space left" in err


def test_a_gguf_converts(call, tmp_path: Path, calibration) -> None:
    gguf = tiny_models.write_gguf(tmp_path / "model.gguf")
    code, _, err = call(
        "convert", gguf, "-o", tmp_path / "out", *calibration, "--bound", "none", "--refine",
        "closed", "--group-size", "32", "--rotate", "none",
    )  # fmt: skip
    assert code == 0
    assert "dequantised" in err
    manifest = Checkpoint(tmp_path / "out").manifest
    assert (manifest.group_size, manifest.options.bound) == (32, None)
    assert (manifest.options.refine, manifest.rotation.kind) == ("closed", "none")


def test_first_use_converts_once(call, tiny_source, tmp_path, calibration, monkeypatch) -> None:
    options = ConvertOptions(calibration=calibration[1], calibration_tokens=512)
    pulled: list[str] = []

    def pull(name: str, *, progress: object) -> Path:
        pulled.append(name)
        return tiny_source

    monkeypatch.setenv("BITNEST_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("edge_runtime.convert.pull.pull", pull)
    monkeypatch.setattr("edge_runtime.convert.pipeline.ConvertOptions", lambda: options)
    code, out, err = call("chat", "--once", "hello", "-n", 4)
    assert code == 0
    assert out
    assert "converted once" in err
    assert (tmp_path / "cache/checkpoints/smollm2-135m-v1/manifest.json").is_file()
    code, again, err = call("generate", "SmolLM2", "-p", "hello", "-n", 4)
    assert (code, again) == (0, out)
    assert "converted once" not in err
    assert pulled == ["smollm2-135m"]


def test_the_defaults_are_the_pipelines() -> None:
    options = {p.name: p.default for p in convert.command.params}
    assert options["calib_tokens"] == ConvertOptions().calibration_tokens
    assert float(options["bound"]) == ConvertOptions().bound
    assert options["balance"] == ConvertOptions().balance
    assert options["base"] == ConvertOptions().base
    assert options["refine"] == ConvertOptions().refine
    assert options["rotate"] == ConvertOptions().rotate
    assert options["seed"] == ConvertOptions().seed
    assert set(inspect.signature(ConvertOptions).parameters) == {
        "group_size", "rotate", "base", "refine", "bound", "balance", "calibration",
        "calibration_tokens", "r3", "seed",
    }  # fmt: skip


def test_only_sure_names_are_fetched() -> None:
    assert model.known_name("Default") == "smollm2-135m"
    assert model.known_name("hf:Org/Name") == "hf:Org/Name"
    assert model.known_name("org/name") is None
    with pytest.raises(CheckpointError):
        model.source_path("some/typo")


def test_durations() -> None:
    assert [seconds_text(s) for s in (0.4, 59.4, 61, 3600, 7500)] == [
        "0 s", "59 s", "1 min 01 s", "1 h 00 min", "2 h 05 min",
    ]  # fmt: skip
