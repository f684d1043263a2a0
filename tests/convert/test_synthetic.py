"""Synthetic checkpoints: the same bytes for a seed, finite through all layers, never a model."""

from __future__ import annotations

import hashlib
import json
import resource
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import killed
import msgspec
import numpy as np
import pytest
from random_weights import random_spec

from edge_runtime import profiles
from edge_runtime.convert import resources, synthetic
from edge_runtime.convert.synthetic import Synthesis, SyntheticOptions
from edge_runtime.decode.engine import Engine
from edge_runtime.errors import BudgetError, CheckpointError, UsageError
from edge_runtime.format import manifest as fmt
from edge_runtime.format.reader import Checkpoint
from edge_runtime.format.spec import ModelSpec
from edge_runtime.format.stream import ShardStream
from edge_runtime.format.writer import digest
from edge_runtime.kernels import ops, pack
from edge_runtime.model.transformer import layer_program
from edge_runtime.plan import footprint

SPECS: dict[str, dict[str, Any]] = {
    "llama": {},
    "tied": {"tied_embedding": True, "hidden_size": 96, "num_heads": 6, "num_kv_heads": 1},
    "qwen2": {"architecture": "qwen2", "qkv_bias": True},
    "qwen3": {"architecture": "qwen3", "qk_norm": True, "head_dim": 24},
    "biases": {"o_bias": True, "mlp_bias": True, "intermediate_size": 100},  # and padded inputs
}


def make(out: Path, progress: Any = lambda *_: None, **fields: Any) -> fmt.Manifest:
    options = SyntheticOptions(**{k: fields.pop(k) for k in ("seed", "rotate") if k in fields})
    return Synthesis(random_spec(**fields), "tiny", out, options, progress).run()


def digests(folder: Path) -> dict[str, str]:
    return {f.name: hashlib.sha256(f.read_bytes()).hexdigest() for f in folder.iterdir()}


@pytest.mark.parametrize("name", SPECS)
def test_a_whole_checkpoint(name: str, tmp_path: Path) -> None:
    fields = SPECS[name]
    manifest = make(tmp_path / "a", **fields)
    checkpoint = Checkpoint(tmp_path / "a")
    checkpoint.verify()
    assert checkpoint.manifest == manifest
    assert manifest.spec == random_spec(**fields)
    assert manifest.synthetic == fmt.Synthetic(shape="tiny", seed=0)
    assert (manifest.version, manifest.options, manifest.agreement) == (2, None, None)
    for plane in (p for p in manifest.planes if p.endswith(".base")):
        q4 = pack.unpack_base(checkpoint.plane(plane), manifest.group_size)
        qr = pack.unpack_refine(
            checkpoint.plane(plane.replace("base", "refine")), manifest.group_size
        )
        assert (qr[q4 == -8] >= 0).all()
        K = footprint.linear_shapes(manifest.spec)[plane.removesuffix(".base")][1]
        assert not q4[:, K:].any()
        assert not qr[:, K:].any()
    norms = [p for p in manifest.planes if p.endswith("_norm")]
    assert len(norms) == (4 if name == "qwen3" else 0)
    assert all(0.75 <= checkpoint.plane(p).min() <= 1.25 for p in norms)


def test_the_gains_are_those_that_were_taken(tmp_path: Path) -> None:
    make(tmp_path / "a", hidden_size=512, intermediate_size=1024, num_heads=32, num_layers=30)
    checkpoint = Checkpoint(tmp_path / "a")
    G = checkpoint.manifest.group_size
    for name, (_, K) in footprint.linear_shapes(checkpoint.manifest.spec).items():
        base, refine, mult, scale = (
            checkpoint.plane(f"{name}.{p}") for p in ("base", "refine", "mult", "scale")
        )
        codes = 16.0 * pack.unpack_base(base, G) + pack.unpack_refine(refine, G)
        W = codes * np.repeat(mult.astype(float), G, axis=1) * scale[:, None]
        gain = synthetic.GAINS[name.rsplit(".", 1)[-1]]
        assert W.std() * K**0.5 == pytest.approx(gain, rel=0.15), name
        assert (np.abs(mult).max(1) == 32767).all()
    counts = np.bincount(pack.unpack_base(checkpoint.plane("head.base"), G).ravel() + 8)
    assert np.abs(256 * counts / counts.sum() - synthetic.BASE_COUNTS).max() < 1


def test_bytes_are_the_seeds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        make(tmp_path / name, seed=seed)
    monkeypatch.setattr(synthetic, "PIECE_BYTES", 1 << 9)  # smaller pieces, the same bits
    make(tmp_path / "d")
    a, b, c, d = (digests(tmp_path / name) for name in "abcd")
    assert a == b == d
    same = {name for name in a if a[name] == c[name]}
    assert same == {"tokenizer.json"}
    total = digest("".join(a[name] for name in sorted(a) if name.endswith("safetensors")))
    assert total.startswith("2e2dcd1d"), "other bytes than before: figures measured earlier differ"


def stopping_at(step: int) -> Callable[[int, int, str], None]:
    def progress(at: int, total: int, what: str) -> None:
        if at == step:
            raise KeyboardInterrupt

    return progress


def test_stopped_anywhere_it_ends_the_same(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    make(tmp_path / "whole", lambda at, count, _: seen.append((at, count)))
    assert seen == [(i, 4) for i in range(5)]
    out = tmp_path / "resumed"
    for step in (1, 2, 3):
        with pytest.raises(KeyboardInterrupt):
            make(out, stopping_at(step))
        assert not out.exists()
        with pytest.raises(UsageError, match="with other options"):
            make(out, seed=1)
    make(out)
    assert digests(out) == digests(tmp_path / "whole")
    assert not (tmp_path / "resumed.partial").exists()


@pytest.mark.slow
def test_killed_anywhere_it_ends_the_same(tmp_path: Path) -> None:
    make(tmp_path / "whole")
    want, out = digests(tmp_path / "whole"), tmp_path / "out"
    for step in killed.at_every_step(lambda: make(out)):
        if not out.exists():  # or it was killed while it cleared up after the rename
            make(out)
        shutil.rmtree(out / "resume", ignore_errors=True)
        assert digests(out) == want, step
        assert not (tmp_path / "out.partial").exists()
        shutil.rmtree(out)


def test_a_disk_that_fills_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(tmp_path / "whole")
    write, written = ShardStream.write, 0

    def full(self: ShardStream, name: str, part: Any) -> None:
        nonlocal written
        written += 1
        if written > 20:
            raise OSError(28, "No space left on device")
        write(self, name, part)

    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        patch.setattr(ShardStream, "write", full)
        with pytest.raises(OSError, match="No space"):
            make(out)
    assert not out.exists()
    assert not list((tmp_path / "out.partial").glob("*.tmp"))  # what could not end is given back
    make(out)
    assert digests(out) == digests(tmp_path / "whole")


def test_room_is_looked_for_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    size = resources.checkpoint_bytes(random_spec(), 32, "hadamard")
    monkeypatch.setattr(
        resources.shutil, "disk_usage", lambda _: SimpleNamespace(free=size * 2 // 3)
    )
    out = tmp_path / "deep" / "out"
    with pytest.raises(BudgetError, match="disk: "):
        make(out)
    assert not (tmp_path / "deep").exists()
    monkeypatch.undo()
    with pytest.raises(KeyboardInterrupt):
        make(out, stopping_at(3))
    monkeypatch.setattr(
        resources.shutil, "disk_usage", lambda _: SimpleNamespace(free=size * 2 // 3)
    )
    make(out)  # most of it is there already


def test_a_vocabulary_without_room_for_bytes(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="at least 258 ids, got 257"):
        make(tmp_path / "a", vocab_size=257)


# ---- the manifest


@pytest.mark.parametrize("name", profiles.shape_names())
def test_every_known_shape(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its manifest goes round, and `plan` counts the bytes of its files, R1 aside."""
    monkeypatch.setattr(resources.shutil, "disk_usage", lambda _: SimpleNamespace(free=1 << 50))
    spec = profiles.shape(name).spec
    made = Synthesis(spec, name, tmp_path / name, SyntheticOptions())
    size = 0
    for shard in made.shards:
        with monkeypatch.context() as patch:  # the sizes without the bytes
            patch.setattr(ShardStream, "__enter__", lambda self: self)
            patch.setattr(ShardStream, "__exit__", lambda *_: None)
            with made.writer.stream(shard, made.shapes(shard)) as stream:
                size += max(stream.ends.values())
    manifest = made.manifest()
    made.writer.close()
    assert fmt.decode_manifest(msgspec.json.encode(manifest), "here") == manifest
    weights = footprint.footprint(spec, backend="cpu").weights_bytes
    assert size == weights + spec.hidden_size**2
    assert size == resources.checkpoint_bytes(spec, manifest.group_size, "hadamard")


def test_files_are_as_large_as_planned(tmp_path: Path) -> None:
    """Of the smallest known shape, written."""
    spec = profiles.shape("smollm2-135m").spec
    small = msgspec.structs.replace(spec, num_layers=2)
    Synthesis(small, "smollm2-135m", tmp_path / "a", SyntheticOptions()).run()
    files = list((tmp_path / "a").glob("*.safetensors"))
    planned = footprint.footprint(small, backend="cpu").weights_bytes + spec.hidden_size**2
    assert planned < sum(f.stat().st_size for f in files) < planned + 4096 * len(files)


def damaged(folder: Path, change: Callable[[dict[str, Any]], object], match: str) -> None:
    file = folder / fmt.MANIFEST
    text = file.read_text()
    document = json.loads(text)
    change(document)
    file.write_text(json.dumps(document))
    with pytest.raises(CheckpointError, match=match):
        Checkpoint(folder)
    file.write_text(text)


def test_what_a_reader_refuses(tmp_path: Path, tiny_checkpoint: Path) -> None:
    make(tmp_path / "a")
    damaged(tmp_path / "a", lambda m: m.update(version=1), "expected format version 1, or 2")
    damaged(tmp_path / "a", lambda m: m.pop("synthetic"), "expected format version 1, or 2")
    agreement = json.loads((tiny_checkpoint / fmt.MANIFEST).read_text())["agreement"]
    damaged(tmp_path / "a", lambda m: m.update(agreement=agreement), "without options and agree")
    ordinary = json.loads((tiny_checkpoint / fmt.MANIFEST).read_text())
    assert ordinary["version"] == 1  # older readers have what they had
    assert "synthetic" not in ordinary
    damaged(
        tmp_path / "a", lambda m: m.update(options=ordinary["options"]), "without options and agree"
    )


# ---- running it


@pytest.mark.parametrize("name", SPECS)
def test_engines_agree_and_end(name: str, tmp_path: Path) -> None:
    make(tmp_path / "a", **SPECS[name])
    answers = []
    for backend in ("reference", "cpu"):
        with Engine.open(tmp_path / "a", backend=backend, ctx=64, draft=3) as engine:
            prompt = [{"role": "user", "content": "Grüße"}]
            result = engine.generate(prompt, max_new_tokens=12, ignore_eos=True).complete()
            answers.append(result.token_ids)
            assert result.text == engine.tokenizer.decode(result.token_ids)
            assert engine.tokenizer.num_tokens == engine.num_tokens == 331
            assert engine.encode_text("é\n") == [0xC3, 0xA9, 0x0A]
    assert answers[0] == answers[1]
    assert len(answers[0]) == 12


def residual_rms(engine: Engine, inputs: dict[str, Any]) -> list[float]:
    """Of the residual stream before the first layer and after the last one, of the last row."""
    spec = engine.model.spec
    layers = [op for i in range(spec.num_layers) for op in layer_program(spec, i, "w8")]
    found = []
    for middle in ([], layers):
        program = (ops.Embed("x"), *middle, ops.SelectRows("x", "logits"))
        batch = ops.Batch(**inputs, num_logits=1)
        registers = engine.model.backend.replay(program, batch, engine.cache, {})
        found.append(float(registers["logits"].double().square().mean().sqrt()))
    return found


def hostile(spec: ModelSpec, rows: int = 5) -> dict[str, np.ndarray[Any, Any]]:
    """Embedding rows at the limits of what a caller may give."""
    rng = np.random.default_rng(0)
    one = np.zeros((rows, spec.hidden_size), np.float32)
    one[:, 0] = 2.0**48
    return {
        "zero": np.zeros((rows, spec.hidden_size), np.float32),
        "one huge": one,
        "huge": (2.0**48 * rng.choice([-1, 1], (rows, spec.hidden_size))).astype(np.float32),
        "tiny": np.full((rows, spec.hidden_size), 1e-30, np.float32),
    }


def check_finite(path: Path, backend: str) -> list[float]:
    """Run ordinary and hostile prompts to finite logits; return the growth of the residual."""
    with Engine.open(path, backend=backend, ctx=64, draft="off") as engine:
        spec = engine.model.spec
        prompts: list[Any] = [[list(range(8))], [[5] * 8]]
        prompts += [[[1, 2], rows] for rows in hostile(spec).values()]
        for prompt in prompts:
            result = engine.generate(prompt, max_new_tokens=2, ignore_eos=True).complete()
            assert len(result.token_ids) == 2  # NaN in logits would have been an error
        if backend != "reference":
            return []
        at = np.arange(6)
        ids = {"ids": at + 7, "positions": at, "full_from": np.zeros(6, np.int64)}
        return residual_rms(engine, ids)


def test_forty_layers_stay_finite(tmp_path: Path) -> None:
    make(tmp_path / "a", num_layers=40, hidden_size=128, intermediate_size=256, num_heads=4)
    before, after = check_finite(tmp_path / "a", "reference")
    assert 0.05 < before < 0.5
    assert after < 200  # each of 80 additions is a few units at most, whatever came before


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_four_layers_of_llama_2_7b(tmp_path: Path) -> None:
    """Its widths, in bounded memory; on the native backend."""
    spec = profiles.shape("llama-2-7b").spec
    small = msgspec.structs.replace(spec, num_layers=4, vocab_size=512)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    Synthesis(small, "slice", tmp_path / "a", SyntheticOptions()).run()
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown < 200 << 10  # KiB; a layer has 200 MB of planes
    check_finite(tmp_path / "a", "cpu")
