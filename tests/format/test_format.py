"""The checkpoint format: what is written is what is read, and every kind of damage is named."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import struct
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import killed
import numpy as np
import pytest
import tiny_checkpoints
from safetensors.numpy import load_file, save_file

from edge_runtime.errors import CheckpointError, UsageError
from edge_runtime.format.manifest import MANIFEST, TOKENIZER, decode_manifest, expected_planes
from edge_runtime.format.reader import Checkpoint
from edge_runtime.format.writer import CheckpointWriter, digest


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("format")
    return tiny_checkpoints.convert_tiny(
        folder, "qwen3", options={"base": "rtn", "refine": "closed"}, num_hidden_layers=1
    )


@pytest.fixture
def folder(original: Path, tmp_path: Path) -> Path:
    """A copy to damage."""
    return Path(shutil.copytree(original, tmp_path / "model"))


def edit(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    manifest = json.loads((folder / MANIFEST).read_text())
    change(manifest)
    (folder / MANIFEST).write_text(json.dumps(manifest))


def refused(folder: Path, *words: str) -> CheckpointError:
    """Opening and verifying fails with one line that holds all the words."""
    with pytest.raises(CheckpointError) as caught:
        Checkpoint(folder).verify()
    message = caught.value.message
    assert "\n" not in message
    for word in words:
        assert word in message, message
    return caught.value


# ---- the round trip


def test_a_good_checkpoint(folder: Path) -> None:
    checkpoint = Checkpoint(folder)
    checkpoint.verify()
    manifest = checkpoint.manifest
    names = dict(expected_planes(manifest.spec, manifest.group_size, manifest.rotation.kind))
    assert set(names) == set(manifest.planes)
    stored: dict[str, Any] = {}
    for file in folder.glob("*.safetensors"):
        stored |= load_file(file)
    assert set(stored) == set(names)
    for name, data in stored.items():
        plane = checkpoint.plane(name)
        assert plane.dtype == data.dtype
        assert np.array_equal(plane, data)
        assert not plane.flags.writeable
        assert plane.shape == names[name][1]
    checkpoint.close()
    assert sorted(p.name for p in folder.iterdir()) == [
        "embed.safetensors", "head.safetensors", "layer-000.safetensors", "manifest.json",
        "report.json", "tokenizer.json",
    ]  # fmt: skip


def test_manifest_round_trip(folder: Path) -> None:
    data = (folder / MANIFEST).read_bytes()
    manifest = decode_manifest(data, "here")
    assert manifest.provenance["kind"] == "hf"
    assert manifest.spec.architecture == "qwen3"
    assert json.loads(data)["spec"]["rope"]["theta"] == 10000.0


# ---- damaged bytes


def test_a_flipped_bit_in_every_plane_is_named(folder: Path) -> None:
    manifest = Checkpoint(folder).manifest
    for name, entry in manifest.planes.items():
        file = folder / entry.file
        good = file.read_bytes()
        (header,) = struct.unpack("<Q", good[:8])
        a, z = json.loads(good[8 : 8 + header])[name]["data_offsets"]
        at = 8 + header + (a + z) // 2
        file.write_bytes(good[:at] + bytes([good[at] ^ 1]) + good[at + 1 :])
        refused(folder, name, entry.file, "damaged")
        file.write_bytes(good)
    Checkpoint(folder).verify()


@pytest.mark.parametrize("keep", [0, 4, 8, 40, -1, -3000])
@pytest.mark.parametrize("file", ["embed.safetensors", "layer-000.safetensors"])
def test_truncated_files(folder: Path, file: str, keep: int) -> None:
    data = (folder / file).read_bytes()
    (folder / file).write_bytes(data[:keep])
    refused(folder, file)


@pytest.mark.parametrize(
    "header",
    [b"{", b"[1]", b"null", b"\xff\xfe", b"[" * 50_000, b'{"head.base": 3}',
     b'{"head.base": {"dtype": "U8", "shape": [277, 32], "data_offsets": [0, "8864"]}}'],
)  # fmt: skip
def test_broken_headers(folder: Path, header: bytes) -> None:
    file = folder / "head.safetensors"
    file.write_bytes(struct.pack("<Q", len(header)) + header + bytes(20_000))
    refused(folder, "head.safetensors")


def test_a_header_that_claims_the_world(folder: Path) -> None:
    file = folder / "head.safetensors"
    file.write_bytes(struct.pack("<Q", 2**63) + b"{}" * 100)
    refused(folder, "head.safetensors", "header claims")


@pytest.mark.parametrize("name", ["embed.safetensors", "head.safetensors", TOKENIZER])
def test_missing_files(folder: Path, name: str) -> None:
    (folder / name).unlink()
    refused(folder, name, "missing")


@pytest.mark.parametrize("name", ["embed.safetensors", TOKENIZER, MANIFEST])
def test_a_pointer_in_place_of_a_file(folder: Path, name: str) -> None:
    (folder / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    assert "git lfs pull" in refused(folder, name, "Git LFS pointer").hint


def test_missing_plane_in_a_file(folder: Path) -> None:
    file = folder / "layer-000.safetensors"
    planes = load_file(file)
    del planes["layers.0.o.mult"]
    save_file(planes, file)
    refused(folder, "layer-000.safetensors", "layers.0.o.mult", "missing")


@pytest.mark.parametrize("change", ["shape", "dtype"])
def test_plane_of_another_shape_or_type(folder: Path, change: str) -> None:
    file = folder / "layer-000.safetensors"
    planes = load_file(file)
    plane = planes["layers.0.o.base"]
    planes["layers.0.o.base"] = plane[:-1].copy() if change == "shape" else plane.view(np.int8)
    save_file(planes, file)
    refused(folder, "layers.0.o.base", "expected U8")


def test_tokenizer_that_was_changed(folder: Path) -> None:
    file = folder / TOKENIZER
    file.write_text(file.read_text().replace("hello", "hallo"))
    refused(folder, TOKENIZER, "damaged")


# ---- the manifest


def test_not_a_checkpoint(tmp_path: Path) -> None:
    refused(tmp_path, "not a converted model")
    for data in (b"", b"{", b"[]", b"\xff\x00", b"[" * 100_000, b'{"format": "gguf"}', b"null"):
        (tmp_path / MANIFEST).write_bytes(data)
        refused(tmp_path, MANIFEST)


@pytest.mark.parametrize("version", [0, 2, "1", None, 1.5])
def test_versions(folder: Path, version: Any) -> None:
    edit(folder, lambda m: m.update(version=version))
    refused(folder, "expected format version 1")


AGREEMENT = ("target_original", "draft_target", "draft_original", "w8_rtn_original")
EDITS: dict[str, tuple[Callable[[dict[str, Any]], Any], tuple[str, ...]]] = {
    "unknown field": (lambda m: m.update(colour=1), ("colour",)),
    "unknown spec field": (lambda m: m["spec"].update(window=9), ("window", "$.spec")),
    "unknown rope": (lambda m: m["spec"]["rope"].update(kind="spiral"), ("spiral",)),
    "unknown architecture": (lambda m: m["spec"].update(architecture="rwkv"), ("rwkv",)),
    "missing field": (lambda m: m.pop("group_size"), ("group_size",)),
    "wrong type": (lambda m: m["spec"].update(num_layers="1"), ("num_layers",)),
    "group size": (lambda m: m.update(group_size=48), ("group_size", "48")),
    "other group size": (lambda m: m.update(group_size=32), ("mult", "expected I16")),
    "missing plane": (lambda m: m["planes"].pop("head.base"), ("head.base", "missing")),
    "unknown plane": (
        lambda m: m["planes"].update({"x.base": m["planes"]["head.base"]}), ("unknown", "x.base"),
    ),
    "plane shape": (
        lambda m: m["planes"]["head.base"].update(shape=[1, 1]), ("head.base", "expected U8"),
    ),
    "plane dtype": (lambda m: m["planes"]["head.base"].update(dtype="F64"), ("dtype",)),
    "more layers": (lambda m: m["spec"].update(num_layers=2), ("layers.1.", "missing")),
    "no layers": (lambda m: m["spec"].update(num_layers=0), ("num_layers", "got 0")),
    "absurd layers": (lambda m: m["spec"].update(num_layers=10**9), ("num_layers",)),
    "negative heads": (lambda m: m["spec"].update(num_heads=-4), ("num_heads",)),
    "kv heads": (lambda m: m["spec"].update(num_kv_heads=3), ("num_kv_heads", "multiple")),
    "no tokens": (lambda m: m["text"].update(num_tokens=0), ("num_tokens",)),
    "epsilon": (lambda m: m["spec"].update(rms_norm_eps=-1), ("rms_norm_eps",)),
    "theta": (lambda m: m["spec"]["rope"].update(theta=0), ("rope.theta",)),
    "factor": (lambda m: m["spec"]["rope"].update(factor=0), ("rope.factor",)),
    "huge theta": (lambda m: m["spec"]["rope"].update(theta=1e308), ("rope.theta",)),
    "huge factor": (lambda m: m["spec"]["rope"].update(factor=1e308), ("rope.factor",)),
    "beta": (lambda m: m["spec"]["rope"].update(beta_fast=-1), ("rope.beta_fast",)),
    "share": (lambda m: m.update(clipped_share=1e308), ("clipped_share", "0 to 1")),
    "agreement": (
        lambda m: m.update(agreement=dict.fromkeys(AGREEMENT, 1e308) | {"positions": 1}),
        ("agreement.", "0 to 1"),
    ),
    "odd head_dim": (lambda m: m["spec"].update(head_dim=15), ("head_dim", "even")),
    "rotation": (lambda m: m["rotation"].update(kind="none"), ("unknown plane", "r1")),
    "r3": (lambda m: m["spec"].update(head_dim=24), ("expected",)),
    "swapped checksums": (
        lambda m: m["planes"]["head.base"].update(sha256=m["planes"]["head.refine"]["sha256"]),
        ("head.base", "damaged"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", EDITS)
def test_edited_manifests(folder: Path, name: str) -> None:
    change, words = EDITS[name]
    edit(folder, change)
    refused(folder, *words)


@pytest.mark.parametrize(
    "file",
    ["../embed.safetensors", "/etc/passwd", "a/b.safetensors", "..\\x.safetensors", "embed.bin",
     "", "/x.safetensors", "\0.safetensors", "nowhere.safetensors"],
)  # fmt: skip
def test_file_names_that_lead_elsewhere(folder: Path, file: str) -> None:
    shutil.copy(folder / "embed.safetensors", folder.parent / "embed.safetensors")
    edit(folder, lambda m: m["planes"]["embed.codes"].update(file=file))
    refused(folder)


# ---- the writer

PLANES = {"a": np.arange(6, dtype=np.int16).reshape(2, 3), "b": np.zeros((0, 4), np.float32)}


def test_shards_are_atomic_and_resumable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "deep" / "model"
    writer = CheckpointWriter(out, "one")
    assert not writer.has("s")
    writer.shard("s", PLANES, {"rows": [1, 2]})
    monkeypatch.setattr("edge_runtime.format.writer.write_atomic", _fail)
    with pytest.raises(KeyboardInterrupt):  # between a shard and its report
        writer.shard("t", PLANES, {})
    monkeypatch.undo()
    writer.close()
    assert not out.exists()
    again = CheckpointWriter(out, "one")
    assert again.has("s")
    assert not again.has("t")
    assert again.read_report("s") == {"rows": [1, 2]}
    read = again.read_shard("s")
    assert np.array_equal(read["a"], PLANES["a"])
    entry = again.planes(["s"])["a"]
    assert (entry.dtype, entry.shape, entry.file) == ("I16", (2, 3), "s.safetensors")
    assert entry.sha256 == hashlib.sha256(PLANES["a"].tobytes()).hexdigest()
    again.close()


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o027, 0o640), (0o077, 0o600)])
def test_every_file_has_the_mode_that_umask_says(tmp_path: Path, umask: int, mode: int) -> None:
    """A service's own user reads what another converted."""
    before = os.umask(umask)
    try:
        writer = CheckpointWriter(tmp_path / "out", "one")
        writer.shard("whole", PLANES, {})
        with writer.stream("pieces", {"a": ("I16", (2, 3))}) as stream:
            stream.write("a", PLANES["a"])
    finally:
        os.umask(before)
    files = [p for p in writer.partial.rglob("*") if p.is_file() and p.name != "lock"]
    assert {p.name: p.stat().st_mode & 0o777 for p in files} == {p.name: mode for p in files}
    assert len(files) == 5
    writer.close()


def _fail(*_: Any) -> None:
    raise KeyboardInterrupt


def test_another_conversion_is_refused(tmp_path: Path) -> None:
    out = tmp_path / "model"
    with closing(CheckpointWriter(out, "one")) as writer:
        writer.shard("s", PLANES, {})
    with pytest.raises(UsageError, match="another model, with other options") as caught:
        CheckpointWriter(out, "two")
    assert caught.value.hint == f"remove it to start again: rm -r {out}.partial"
    CheckpointWriter(out, "one").discard()
    CheckpointWriter(out, "one").close()  # stopped before its first shard: nothing to lose
    with closing(CheckpointWriter(out, "two")) as writer:
        writer.shard("s", PLANES, {})
    shutil.rmtree(tmp_path / "model.partial" / "resume")
    with pytest.raises(UsageError, match=re.escape("model.partial")):
        CheckpointWriter(out, "two")


def test_one_conversion_at_a_time(tmp_path: Path) -> None:
    out = tmp_path / "model"
    with closing(CheckpointWriter(out, "one")):
        for identity in ("one", "two"):
            with pytest.raises(UsageError, match="another conversion is writing into it"):
                CheckpointWriter(out, identity)
    CheckpointWriter(out, "one").close()


def test_what_is_in_the_way_is_left_alone(tmp_path: Path) -> None:
    partial = tmp_path / "model.partial"
    for make in (lambda: partial.write_text(""), lambda: partial.symlink_to("nowhere")):
        make()
        with pytest.raises(UsageError, match="is in the way"):
            CheckpointWriter(tmp_path / "model", "one")
        partial.unlink()
    partial.mkdir()
    (partial / "thesis.tex").write_text("mine")
    with pytest.raises(UsageError, match="is in the way") as caught:
        CheckpointWriter(tmp_path / "model", "one")
    assert "rm" not in caught.value.hint
    assert [p.name for p in partial.iterdir()] == ["thesis.tex"]
    (tmp_path / "link").symlink_to("nowhere")
    with pytest.raises(UsageError, match="already exists"):
        CheckpointWriter(tmp_path / "link", "one")
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match=r"file is no folder$"):
        CheckpointWriter(tmp_path / "file" / "deep" / "x", "one")


def test_existing_folders_are_never_touched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.chdir(tmp_path)
    for out in (tmp_path, tmp_path / "file", Path("."), Path(".."), Path("/")):
        with pytest.raises(UsageError, match="already exists"):
            CheckpointWriter(out, "one")
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_damaged_shard_of_a_stopped_conversion(tmp_path: Path) -> None:
    writer = CheckpointWriter(tmp_path / "m", "one")
    writer.shard("s", PLANES, {})
    file = tmp_path / "m.partial" / "s.safetensors"
    file.write_bytes(file.read_bytes()[:-3])
    with pytest.raises(CheckpointError, match=r"s\.safetensors"):
        writer.read_shard("s")
    writer.close()


def test_digest() -> None:
    assert digest("abc").startswith("ba7816bf")


def test_killed_anywhere_it_is_absent_or_whole(folder: Path, tmp_path: Path) -> None:
    """And continued it is the same as if it had never been killed."""
    manifest = Checkpoint(folder).manifest
    tokenizer = (folder / TOKENIZER).read_text()
    data = {file.stem: load_file(file) for file in folder.glob("*.safetensors")}

    def convert(out: Path) -> None:
        writer = CheckpointWriter(out, "one")
        for name, planes in data.items():
            if not writer.has(name):
                writer.shard(name, planes, {"name": name})
        writer.finish(manifest, tokenizer, {"report": 1})

    def files(path: Path) -> dict[str, bytes]:
        return {str(p.relative_to(path)): p.read_bytes() for p in path.rglob("*") if p.is_file()}

    convert(tmp_path / "whole")
    want = files(tmp_path / "whole")
    for step in killed.at_every_step(lambda: convert(tmp_path / "out")):
        out = tmp_path / "out"
        if not out.exists():  # or it was killed while it cleared up after the rename
            convert(out)
        found = files(out)
        assert {n: v for n, v in found.items() if not n.startswith("resume")} == want, step
        Checkpoint(out).verify()
        shutil.rmtree(out)
