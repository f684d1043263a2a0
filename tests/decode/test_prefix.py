"""A prompt's beginning from a file: answers without it, refusals with what differs, whole files."""

from __future__ import annotations

import errno
import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edge_runtime.cache import prompt_file
from edge_runtime.decode import prefix
from edge_runtime.decode.engine import Engine
from edge_runtime.decode.sampling import Sampling
from edge_runtime.decode.session import Session
from edge_runtime.errors import BitnestError, BudgetError, CheckpointError, ContextError, UsageError

Engines = Callable[..., Engine]
HASH = "ab" * 32
BEGINNING = np.random.default_rng(3).integers(0, 277, 90).tolist()
PROMPT = BEGINNING + np.random.default_rng(4).integers(0, 277, 25).tolist()
OTHER = np.random.default_rng(5).integers(0, 277, 40).tolist()
SAMPLED = Sampling(temperature=0.8, top_k=40, seed=11)


def new(engines: Engines, name: str = "llama", **options: Any) -> Engine:
    engine = engines(name, **options)
    engine.model_sha256 = HASH  # as Engine.open sets it
    return engine


def answer(engine: Engine, prompt: list[int], **options: Any) -> Any:
    options = {"max_new_tokens": 20, "ignore_eos": True} | options
    return engine.generate(prompt, **options).complete()


def saved(engine: Engine, file: Path, ids: list[int] = BEGINNING) -> Path:
    prefix.save(engine, file, ids)
    return file


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "llama-r3"])
@pytest.mark.parametrize("sampling", [Sampling(), SAMPLED])
def test_answers_are_those_without_it(
    engines: Engines, tmp_path: Path, name: str, sampling: Sampling
) -> None:
    want = answer(new(engines, name), PROMPT, sampling=sampling)
    file = saved(new(engines, name), tmp_path / "kept")
    for gamma, policy in ((0, "kv8"), (4, "kv8"), (4, "kv4"), (7, "recent:64")):
        engine = new(engines, name, gamma=gamma, policy=policy)
        answer(engine, OTHER)  # something else is in the cache
        assert prefix.load(engine, file).ids == BEGINNING
        got = answer(engine, PROMPT, sampling=sampling)
        assert (got.token_ids, got.text) == (want.token_ids, want.text), (gamma, policy)
        assert got.cached_tokens == len(BEGINNING)
        planes = engine.cache.planes(len(PROMPT))
        plain = new(engines, name)
        answer(plain, PROMPT, sampling=sampling)
        for plane, part in plain.cache.planes(len(PROMPT)).items():
            assert part.tobytes() == planes[plane].tobytes()


def test_it_outlives_other_conversations(engines: Engines, tmp_path: Path) -> None:
    engine = new(engines, gamma=4)
    want, other = answer(engine, PROMPT).token_ids, answer(engine, OTHER).token_ids
    prefix.load(engine, saved(new(engines), tmp_path / "kept"))
    for _ in range(2):
        got = answer(engine, PROMPT)
        assert (got.token_ids, got.cached_tokens) == (want, len(BEGINNING))
        longer = answer(engine, PROMPT + want[:5])  # the cache has more of it than the file
        assert longer.cached_tokens >= len(PROMPT)
        got = answer(engine, OTHER)
        assert (got.token_ids, got.cached_tokens) == (other, 0)
        part = answer(engine, BEGINNING[:50] + OTHER)
        assert part.cached_tokens == 50
    whole = answer(engine, BEGINNING)
    assert whole.cached_tokens == len(BEGINNING) - 1  # its last token gives the logits
    engine.relieve(0)
    assert answer(engine, PROMPT).token_ids == want


@pytest.mark.parametrize("backends", [("reference", "cpu"), ("cpu", "reference")])
def test_a_file_serves_every_backend(
    checkpoints: Callable[[str], Path], tmp_path: Path, backends: tuple[str, str]
) -> None:
    here, there = (Engine.open(checkpoints("llama"), backend=b, ctx=320) for b in backends)
    with here, there:
        want = answer(there, PROMPT).token_ids
        prefix.load(there, saved(here, tmp_path / "kept"))
        there.reuse([])
        got = answer(there, PROMPT)
    assert (got.token_ids, got.cached_tokens) == (want, len(BEGINNING))


class Loaded(list[Any]):
    """A cache that keeps what is put into it."""

    def load(self, planes: Any, layer: int) -> None:
        assert layer == len(self)
        self.append(planes)


def test_only_the_asked_prompt_is_computed_for_it(engines: Engines, tmp_path: Path) -> None:
    engine = new(engines)
    answer(engine, PROMPT)
    assert engine.holds(PROMPT)
    before = engine.cache.planes(len(BEGINNING))
    file = prompt_file.PromptFile(
        saved(engine, tmp_path / "kept"), prefix.bound(engine), prefix._geometry(engine)
    )
    loaded = Loaded()
    file.restore(loaded, len(BEGINNING))
    for layer, planes in enumerate(loaded):
        for name, part in planes.items():
            assert part.tobytes() == before[name][layer].tobytes()
    assert len(loaded) == engine.model.spec.num_layers
    assert (tmp_path / "kept").stat().st_mode & 0o777 == 0o600


def test_a_chats_beginning(tiny_checkpoint: Path, tmp_path: Path) -> None:
    file = tmp_path / "kept"
    with Engine.open(tiny_checkpoint, backend="cpu", ctx=320) as engine:
        session = Session(engine, system="hello the world")
        want = [token.id for token in session.ask("hell", max_new_tokens=8)]
        ids = prefix.chat_beginning(Session(engine, system="hello the world"))
        prefix.begin(engine, file, ids)
        made = file.read_bytes()
        engine.reuse([])
        again = Session(engine, system="hello the world")
        assert [token.id for token in again.ask("hell", max_new_tokens=8)] == want
        assert again.last is not None
        assert again.last.cached_tokens == len(ids)
        prefix.begin(engine, file, ids)
        assert file.read_bytes() == made
        other = prefix.chat_beginning(Session(engine, system="hello world"))
        with pytest.raises(CheckpointError, match=r"another prompt: it holds .* begins with"):
            prefix.begin(engine, file, other)


# ---- refusals


def header(file: Path) -> tuple[dict[str, Any], bytes]:
    data = file.read_bytes()
    (size,) = struct.unpack("<Q", data[:8])
    return json.loads(data[8 : 8 + size]), data[8 + size :]


def rewrite(file: Path, head: dict[str, Any], planes: bytes) -> None:
    text = json.dumps(head).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + planes)


def with_metadata(**values: str) -> Callable[[dict[str, Any], bytes], tuple[Any, bytes]]:
    return lambda head, planes: (
        head | {"__metadata__": head["__metadata__"] | values},
        planes,
    )


def reshaped(head: dict[str, Any], planes: bytes) -> tuple[Any, bytes]:
    for plane in (v for k, v in head.items() if k.startswith("layers.0")):
        plane["shape"][:2] = [plane["shape"][1], plane["shape"][0]]
    return head, planes


DAMAGE = {
    "format": (with_metadata(format="x"), "no prompt's cache"),
    "version": (with_metadata(version="2"), "another version of the format: expected 1, got 2"),
    "model": (with_metadata(model="cd" * 32), "another model: expected abab.*, got cdcd"),
    "a model nearly": (
        with_metadata(model=HASH[:40] + "cd" * 12),
        r"another model: expected \.\.\.abababababababa.*, got \.\.\.ababababab[abcd]*cdcd",
    ),
    "model and view": (
        with_metadata(model="cd" * 32, view="w4"),
        "another model: expected .*; for another view: expected w8, got w4$",
    ),
    "view": (with_metadata(view="w4"), "another view: expected w8, got w4"),
    "heads": (with_metadata(shape="2x2x20"), "another shape"),
    "context": (with_metadata(context="99"), "another context: expected any, got 99"),
    "ids": (with_metadata(ids="[1,2"), "token ids"),
    "no ids": (with_metadata(ids="[]"), "token ids"),
    "an id": (with_metadata(ids="[1,999999]"), "token ids"),
    "a true id": (with_metadata(ids="[true]"), "token ids"),
    "other ids": (with_metadata(ids=json.dumps([*BEGINNING[:-1], 5])), "checksum"),
    "fewer ids": (with_metadata(ids=json.dumps(BEGINNING[:-1])), "expected F16 .*, got F16"),
    "a bit": (lambda h, p: (h, p[:-9] + bytes([p[-9] ^ 16]) + p[-8:]), "checksum"),
    "cut": (lambda h, p: (h, p[:-1]), "damaged"),
    "longer": (lambda h, p: (h, p + b"x"), "damaged"),
    "shapes": (reshaped, "plane 'layers.0"),
}  # fmt: skip


@pytest.fixture(scope="module")
def reference(checkpoints: Callable[[str], Path]) -> Any:
    with Engine.open(checkpoints("llama"), backend="reference", ctx=320) as engine:
        yield engine


@pytest.mark.parametrize("what", DAMAGE)
def test_what_differs_is_refused(reference: Engine, tmp_path: Path, what: str) -> None:
    change, said = DAMAGE[what]
    reference.model_sha256 = HASH
    file = saved(reference, tmp_path / "kept")
    rewrite(file, *header(file))
    prefix.load(reference, file)  # as it was it is taken
    rewrite(file, *change(*header(file)))
    with pytest.raises(CheckpointError, match=said) as refused:
        prefix.load(reference, file)
    assert "\n" not in refused.value.message
    assert refused.value.exit_code == 5


@pytest.mark.parametrize(
    "data", [b"", b"x", b"\xff" * 64, struct.pack("<Q", 1 << 60) + b"{}", b"\x02\0\0\0\0\0\0\0{}"]
)
def test_what_is_no_such_file(reference: Engine, tmp_path: Path, data: bytes) -> None:
    reference.model_sha256 = HASH
    (tmp_path / "kept").write_bytes(data)
    with pytest.raises(CheckpointError, match="prompt's cache") as refused:
        prefix.load(reference, tmp_path / "kept")
    assert refused.value.hint.startswith("give another file")  # it may be a user's thesis
    with pytest.raises(CheckpointError, match="got none"):
        prefix.load(reference, tmp_path)


def test_longer_than_the_context(engines: Engines, tmp_path: Path) -> None:
    file = saved(new(engines), tmp_path / "kept")
    with pytest.raises(ContextError, match="90 tokens, the context 90") as refused:
        prefix.load(new(engines, context=len(BEGINNING)), file)
    assert "--ctx" in refused.value.hint
    prefix.load(new(engines, context=len(BEGINNING) + 1), file)


def test_what_cannot_be_kept(reference: Engine, tmp_path: Path) -> None:
    link = tmp_path / "link"
    for target, bad in (
        ("", tmp_path),
        ("", tmp_path / "none" / "kept"),
        ("none/kept", link),
        (os.devnull, link),
    ):
        if target:
            link.symlink_to(target)
        with pytest.raises(UsageError, match="cannot keep") as refused:
            prefix.save(reference, bad, BEGINNING)
        assert refused.value.hint
        link.unlink(missing_ok=True)
    reference.model_sha256 = ""
    with pytest.raises(UsageError, match="converted model"):
        prefix.save(reference, tmp_path / "kept", BEGINNING)
    assert list(tmp_path.iterdir()) == []


# ---- files that change while they are used


def overwritten(file: Path, at: int) -> None:
    with file.open("r+b") as stream:
        stream.seek(at, os.SEEK_END if at < 0 else os.SEEK_SET)
        stream.write(bytes(40))


CHANGES: dict[str, Callable[[Path], object]] = {
    "emptied": lambda file: os.truncate(file, 0),
    "cut in the last layer": lambda file: os.truncate(file, file.stat().st_size - 1),
    "the last layer": lambda file: overwritten(file, -40),
    "the first layer": lambda file: overwritten(file, file.stat().st_size // 3),
}


@pytest.mark.parametrize("what", CHANGES)
def test_a_file_changed_in_place_is_used_no_more(
    engines: Engines, tmp_path: Path, what: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing of another's bytes gets into an answer, and no page of the file is waited for."""
    engine = new(engines)
    want, begun = answer(engine, PROMPT).token_ids, BEGINNING[:30] + OTHER
    wanted = answer(engine, begun).token_ids
    file = saved(new(engines), tmp_path / "kept")
    for before, shared in ((OTHER, 0), (begun, 30)):
        caplog.clear()
        data = file.read_bytes()
        prefix.load(engine, file)
        assert answer(engine, PROMPT).token_ids == want
        assert answer(engine, before).cached_tokens == shared
        CHANGES[what](file)
        for cached in (shared, len(PROMPT) - 1):
            got = answer(engine, PROMPT)
            assert (got.token_ids, got.cached_tokens) == (want, cached)
        assert answer(engine, begun).token_ids == wanted
        assert [r.message for r in caplog.records if r.levelname == "WARNING"] == [
            f"{file}: changed since it was opened: prompts are computed without it"
        ]
        file.write_bytes(data)


def test_a_file_replaced_or_removed_is_used_on(engines: Engines, tmp_path: Path) -> None:
    engine = new(engines)
    want = answer(engine, PROMPT).token_ids
    prefix.load(engine, saved(new(engines), tmp_path / "kept"))
    for change in (
        lambda: saved(new(engines), tmp_path / "kept", OTHER),
        (tmp_path / "kept").unlink,
    ):
        answer(engine, OTHER)
        change()
        got = answer(engine, PROMPT)
        assert (got.token_ids, got.cached_tokens) == (want, len(BEGINNING))


@pytest.mark.parametrize(
    ("why", "error", "said"),
    [
        (errno.ENOSPC, BudgetError, "no room on the disk"),
        (errno.EDQUOT, BudgetError, "no room on the disk"),
        (errno.EROFS, UsageError, "cannot write there: Read-only"),
        (errno.EIO, UsageError, "cannot write there: Input"),
    ],
)
def test_a_disk_that_refuses(
    reference: Engine,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    why: int,
    error: type[BitnestError],
    said: str,
) -> None:
    reference.model_sha256 = HASH
    file = saved(reference, tmp_path / "kept")
    old = file.read_bytes()

    def full(fd: int) -> None:
        raise OSError(why, os.strerror(why))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(error, match=said):
        prefix.save(reference, file, BEGINNING[:-5])
    assert file.read_bytes() == old
    assert {path.name for path in tmp_path.iterdir()} == {"kept"}
