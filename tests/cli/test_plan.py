"""`bitnest-edge plan`: its document, its exit codes, and every kind of MODEL."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch

from edge_runtime import machine, profiles
from edge_runtime.decode import memory
from edge_runtime.format.reader import Checkpoint

PROMISED = {
    "device",
    "budget_bytes",
    "fits",
    "max_context",
    "bytes",
    "kv_stored_per_token",
    "kv_read_per_token",
    "predicted",
}
LINES = {"base", "refine", "scales", "embedding", "head", "kv", "workspace", "runtime", "reserve"}
BOARD = ("--device", "orin-nx-16gb")


def document(call: Any, *args: object, code: int = 0) -> dict[str, Any]:
    found, out, err = call("plan", *args, "--json")
    assert found == code, err
    assert len(out.splitlines()) == 1
    assert "longest context" in err
    return json.loads(out)


def test_the_document(call) -> None:
    found = document(call, "llama-2-7b-32k", *BOARD)
    assert set(found) >= PROMISED
    assert set(found["bytes"]) >= LINES
    assert set(found["max_context"]) >= {"fp16", "w8", "nest"}
    assert set(found["predicted"]) >= {"prefill_tok_s", "decode_tok_s", "j_per_token"}
    assert sum(found["bytes"].values()) == found["total_bytes"] <= found["budget_bytes"]
    assert found["fits"] is True
    assert found["max_context"]["nest"] >= 24 * 1024


def test_the_text_shows_every_line(call) -> None:
    code, out, err = call("plan", "llama-2-7b-32k", *BOARD)
    assert (code, err) == (0, "")
    found = document(call, "llama-2-7b-32k", *BOARD)
    for size in found["bytes"].values():
        assert f"{size:,}" in out
    for most in found["max_context"].values():
        assert str(most) in out
    for figure in (
        "2K, leaving",
        "6K, leaving",
        "10K, leaving",
        "the cuda backend is planned",
        "--view w4",
    ):
        assert figure in out


def test_what_does_not_fit_is_shown_and_refused(call) -> None:
    code, out, err = call("plan", "qwen2.5-7b", "--device", "orin-nano-8gb", "--context", "16K")
    assert code == 3
    assert "base plane" in out
    assert "would fit:" in out
    assert err.startswith("error: memory: qwen2.5-7b with 16384 tokens takes ")
    found = document(call, "qwen2.5-7b", "--device", "orin-nano-8gb", "--context", "16K", code=3)
    assert found["fits"] is False
    assert found["would_fit"]


def test_the_limit(call) -> None:
    most = document(call, "llama-2-7b-32k", *BOARD)["max_context"]["nest"]
    assert document(call, "llama-2-7b-32k", *BOARD, "--context", most)["fits"]
    assert not document(call, "llama-2-7b-32k", *BOARD, "--context", most + 1, code=3)["fits"]


def test_options_change_the_memory(call) -> None:
    free = document(call, "llama-2-7b", *BOARD)
    desktop = document(call, "llama-2-7b", *BOARD, "--desktop")
    assert free["budget_bytes"] - desktop["budget_bytes"] == 907_018_240
    kept = document(call, "llama-2-7b", *BOARD, "--reserve", "2G")
    assert kept["bytes"]["reserve"] == 2 << 30
    assert kept["budget_bytes"] == free["budget_bytes"]
    small = document(call, "llama-2-7b", *BOARD, "--budget", "9G", "--reserve", "1G")
    assert (small["budget_bytes"], small["bytes"]["reserve"]) == (9 << 30, 0)
    assert document(call, "llama-2-7b", *BOARD, "--mode", "10w")["mode"] == "10W"


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("--threads", "4"), "--threads changes nothing"),
        (("--budget", "99999T"), "--budget is more than there is: 14."),
        (("--reserve", "1"), "64 MiB"),
        (("--reserve", "0"), "64 MiB"),
        (("--reserve", "1G", "--budget", "9G"), "outside of the budget"),
    ],
)
def test_a_wish_that_changes_nothing_is_noted(call, args: tuple[str, ...], said: str) -> None:
    plain = document(call, "llama-2-7b", *BOARD)["notes"]
    notes = document(call, "llama-2-7b", *BOARD, *args)["notes"]
    assert [said in note for note in notes if note not in plain] == [True]


def test_what_would_fit_can_be_had(call) -> None:
    args = ("llama-2-7b-32k", *BOARD, "--context", "29120", "--reserve", "0")
    kinds = {a["kind"] for a in document(call, *args, code=3)["would_fit"]}
    assert "reserve" not in kinds  # nothing less than that is left free
    args = ("llama-2-7b", "--device", "orin-nx-8gb", "--reserve", "20G")
    devices = [a for a in document(call, *args, code=3)["would_fit"] if a["kind"] == "device"]
    assert [a["value"] for a in devices][:1] != ["orin-nx-16gb"]
    assert devices


@pytest.mark.parametrize("device", profiles.device_names())
def test_every_device(call, device: str) -> None:
    unknown = profiles.device(device).memory_total_bytes is None
    budget = ("--budget", "8G") if unknown else ()
    code, out, err = call("plan", "smollm2-135m", "--device", device, *budget)
    assert code == 0, err
    assert device in out


@pytest.mark.parametrize("name", profiles.shape_names())
def test_every_shape(call, name: str) -> None:
    code, out, err = call("plan", name, "--device", "agx-orin-64gb")
    assert code == 0, err
    assert out.startswith(name)


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("llama-2-7b-32",), "llama-2-7b-32k"),
        (("llama-2-7b", "--device", "orin-nx-16"), "orin-nx-16gb"),
        (("llama-2-7b", *BOARD, "--mode", "5W"), "15W"),
        (("llama-2-7b", *BOARD, "--context", "1000000"), "4096"),
        (("llama-2-7b", *BOARD, "--context", "0"), "8192 or 24K"),
        (("llama-2-7b", *BOARD, "--context", "k"), "8192 or 24K"),
        (("llama-2-7b", "--device", "cpu"), "--budget"),
        (("llama-2-7b", "--desktop"), "by its name"),
        (("llama-2-7b", *BOARD, "--power", "1"), "No such option"),
        ((), "Missing argument"),
    ],
)
def test_usage(call, args: tuple[str, ...], said: str) -> None:
    code, out, err = call("plan", *args)
    assert (code, out) == (2, "")
    assert said in err


def test_a_checkpoint_is_planned_as_the_engine_does(call, tiny_checkpoint: Path) -> None:
    spec = (manifest := Checkpoint(tiny_checkpoint).manifest).spec
    found = document(call, tiny_checkpoint, "--budget", "64M", "--threads", "2")
    assert found["device"] == "cpu"
    assert found["group_size"] == manifest.group_size
    assert found["predicted"]["decode_tok_s"] is None
    assert any("bench decode" in line for line in found["assumes"])
    for budget in range(36 << 20, 48 << 20, 1 << 20):
        sizes = {"group_size": manifest.group_size, "threads": 2}
        try:
            fits = memory.fit_context(spec, "auto", "cpu", budget, 0, **sizes)
        except memory.BudgetError:
            fits = 0
        code, out, _ = call("plan", tiny_checkpoint, "--budget", budget, "--threads", 2, "--json")
        assert json.loads(out)["max_context"]["nest"] == fits
        assert code == (0 if fits else 3)


def test_a_checkpoints_agreement_is_its_acceptance(call, tiny_checkpoint: Path) -> None:
    agreement = Checkpoint(tiny_checkpoint).manifest.agreement
    found = document(call, tiny_checkpoint, *BOARD)
    assert agreement is not None
    assert found["predicted"]["acceptance"] == agreement.draft_target
    assert "while it was converted" in found["predicted"]["acceptance_source"]


def test_every_kind_of_model_gives_the_same_account(
    call, tiny_checkpoint: Path, tiny_source: Path, tmp_path: Path
) -> None:
    config = json.loads((tiny_source / "config.json").read_text())
    gguf = tiny_models.write_gguf(tmp_path / "m.gguf", max_position_embeddings=2048)
    models = [tiny_checkpoint, tiny_checkpoint / "manifest.json", tiny_source]
    models += [tiny_source / "config.json", gguf]
    found = [document(call, model, *BOARD)["bytes"] for model in models]
    assert config["max_position_embeddings"] == 2048
    assert all(one == found[0] for one in found)


@pytest.mark.parametrize("quant", ["F32", "Q8_0"])
def test_a_gguf_is_planned_without_the_gguf_package(
    call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quant: str
) -> None:
    divisors = {"rope_freqs.weight": torch.ones(8)}
    file = tiny_models.write_gguf(tmp_path / "m.gguf", quant=quant, extra=divisors, head_dim=16)
    with_it = document(call, file, *BOARD)
    for name in [name for name in sys.modules if name.split(".")[0] == "gguf"] + ["gguf"]:
        monkeypatch.setitem(sys.modules, name, None)  # raises ImportError when it is imported
    assert document(call, file, *BOARD) == with_it
    code, _, err = call("convert", file, "-o", tmp_path / "out")
    assert code == 4
    assert "pip install" in err


@pytest.mark.parametrize("damage", ["cut", "not json", "version", "missing"])
def test_a_broken_manifest(call, tiny_checkpoint: Path, tmp_path: Path, damage: str) -> None:
    text = (tiny_checkpoint / "manifest.json").read_text()
    broken = {
        "cut": text[: len(text) // 2],
        "not json": "\x00\x01",
        "version": text.replace('"version":1', '"version":99').replace(
            '"version": 1', '"version": 99'
        ),
        "missing": None,
    }[damage]
    folder = tmp_path / "broken"
    folder.mkdir()
    if broken is not None:
        (folder / "manifest.json").write_text(broken)
    code, out, err = call("plan", folder, *BOARD)
    assert (code, out) == (5, "")
    assert err.startswith("error: ")


def test_files_that_are_no_model(call, tmp_path: Path, tiny_source: Path) -> None:
    for name, content in {
        "config.json": b"[]",
        "other.json": b"{}",
        "m.gguf": b"GGUF\x00",
        "m.bin": b"PK\x03\x04",
        "empty.gguf": b"",
    }.items():
        (tmp_path / name).write_bytes(content)
        assert call("plan", tmp_path / name, *BOARD)[0] == 5, name
    assert call("plan", tmp_path / "nothing", *BOARD)[0] == 5
    assert call("plan", "nothing.gguf", *BOARD)[0] == 5
    folder = tmp_path / "huge"
    shutil.copytree(tiny_source, folder)
    config = json.loads((folder / "config.json").read_text())
    config["num_hidden_layers"] = 10**9
    (folder / "config.json").write_text(json.dumps(config))
    assert call("plan", folder, *BOARD)[0] == 5


@pytest.mark.parametrize("name", ["config.json", "m.gguf", "m.bin"])
def test_a_file_that_cannot_be_read(call, tmp_path: Path, name: str) -> None:
    (tmp_path / name).symlink_to("/proc/self/mem")  # opens, and reading fails
    code, out, err = call("plan", tmp_path / name, *BOARD)
    assert (code, out) == (5, "")
    assert f"cannot read {tmp_path / name}: " in err


def test_this_machine_is_planned_with_what_it_has(call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "available_bytes", lambda: 5 << 30)
    found = document(call, "llama-3.2-3b")
    assert found["budget_bytes"] == 5 << 30
    assert found["pool"] == {"available": 5 << 30}


def test_planning_imports_nothing_heavy() -> None:
    """What keeps the answer under 0.3 s."""
    code = (
        "import sys\nfrom edge_runtime import cli\ntry:\n"
        "    cli.main(['plan', 'llama-2-7b-32k', '--device', 'orin-nx-16gb'])\n"
        "except SystemExit:\n    pass\n"
        "print('loaded', *sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    loaded = set(done.stdout.splitlines()[-1].split())
    assert "edge_runtime.plan.planner" in loaded
    heavy = {"torch", "numpy", "tokenizers", "huggingface_hub", "rich", "jinja2", "psutil"}
    assert not loaded & heavy
