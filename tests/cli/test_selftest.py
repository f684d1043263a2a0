"""selftest: it passes on a good engine, and catches one that is made to err."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path

import pytest

from edge_runtime import Engine, selftest
from edge_runtime.cli.selftest import prompt_of, read_prompts
from edge_runtime.decode import draft
from edge_runtime.errors import CheckpointError
from edge_runtime.kernels.ops import Logits
from edge_runtime.model.runner import Model


def test_the_whole_grid_is_exact(tiny_checkpoint: Path) -> None:
    with Engine.open(tiny_checkpoint, ctx=256) as engine:
        prompts = [engine.encode_chat([{"role": "user", "content": "hello " * n}]) for n in (1, 40)]
        before = engine.draft, engine.policy, engine.chunk
        cases = (*selftest.FULL, *selftest.CHUNKED)
        rows = selftest.summarise(selftest.run_grid(engine, prompts, cases, new_tokens=12))
        assert (engine.draft, engine.policy, engine.chunk) == before
    assert len(rows) == len(cases)
    for row in rows:
        assert (row.prompts, row.tokens, row.differing, row.first) == (2, 24, 0, None)
        assert row.drafted == row.accepted + row.rejections
    by_source = {kind: [r for r in rows if f" {kind}," in r.case] for kind in ("base", "spoiled")}
    for found in by_source.values():
        assert sum(r.accepted for r in found) > 0
        assert sum(r.rejections for r in found) > 0


def test_the_document(call, tiny_checkpoint: Path) -> None:
    code, out, err = call("selftest", tiny_checkpoint, "-n", 4, "--limit", 2, "--json")
    assert code == 0
    document = json.loads(out)
    assert len(out.splitlines()) == 1
    assert document["planes_verified"] == 39
    assert document["prompts"] == 2
    assert document["total"]["differing"] == 0
    assert len(document["rows"]) == len(selftest.QUICK) + len(selftest.CHUNKED)
    names = "case prompts tokens cycles drafted accepted acceptance rejections differing seconds"
    assert set(names.split()) <= set(document["rows"][0])
    assert "exact:" in err
    code, out, _ = call("selftest", tiny_checkpoint, "-n", 2, "--limit", 1)
    assert code == 0
    assert out.splitlines()[-1].startswith("exact:")


def test_every_plane_is_hashed_once(call, tiny_checkpoint: Path, monkeypatch) -> None:
    hashed: list[int] = []
    sha256 = hashlib.sha256

    def counting(data: bytes) -> object:
        hashed.append(len(data))
        return sha256(data)

    monkeypatch.setattr("edge_runtime.format.reader.hashlib.sha256", counting)
    code, out, _ = call("selftest", tiny_checkpoint, "-n", 1, "--limit", 1, "--json")
    assert code == 0
    others = [(tiny_checkpoint / f).stat().st_size for f in ("tokenizer.json", "manifest.json")]
    planes = [size for size in hashed if size not in others]
    assert len(planes) == json.loads(out)["planes_verified"] == 39


def test_a_wrong_acceptance_is_caught(call, tiny_checkpoint: Path, monkeypatch) -> None:
    monkeypatch.setattr(
        "edge_runtime.decode.generation.Generation._accept",
        lambda self, logits, start, drafted: [*drafted, logits.argmax(None)[-1]],
    )
    code, _, err = call("selftest", tiny_checkpoint, "-n", 8, "--limit", 1)
    assert code == 5
    # which case meets a rejected draft first depends on how good the drafts are
    assert re.search(r"first: draft \d base, kv\d+, prompt 0, position", err)


def test_a_model_that_depends_on_chunks_is_caught(tiny_checkpoint: Path, monkeypatch) -> None:
    right = Model.prefill

    def wrong(self: Model, *args: object, **more: object) -> tuple[int, Logits | None]:
        done, logits = right(self, *args, **more)
        if more["chunk"] == 7 and logits is not None:
            logits.argmax = lambda allowed=None: [3]  # type: ignore[method-assign]
        return done, logits

    monkeypatch.setattr(Model, "prefill", wrong)
    with Engine.open(tiny_checkpoint, ctx=256) as engine:
        rows = selftest.summarise(
            selftest.run_grid(engine, [[1, 2, 3, 4] * 5], selftest.CHUNKED, new_tokens=3)
        )
    assert [row.differing for row in rows] == [0, 1, 0, 0]
    first = rows[1].first
    assert first is not None
    assert (first.prompt, first.position, first.got) == (0, 20, 3)


def test_a_broken_checkpoint(call, tmp_path: Path, tiny_checkpoint: Path) -> None:
    import shutil

    copy = shutil.copytree(tiny_checkpoint, tmp_path / "copy")
    (copy / "tokenizer.json").write_text("{}")
    code, out, err = call("selftest", copy)
    assert (code, out) == (5, "")
    assert "tokenizer.json" in err


def test_no_prompt_fits(call, tiny_checkpoint: Path, tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(json.dumps({"prompt": "hello " * 100}))
    code, _, err = call("selftest", tiny_checkpoint, "--prompts", file, "--ctx", 64)
    assert code == 2
    assert "leaves room" in err


@pytest.mark.parametrize(
    ("row", "prompt"),
    [
        ({"prompt": "a"}, "a"),
        ({"question": "a", "answer": "b"}, "a"),
        ({"task_id": "HumanEval/0", "prompt": "def f():\n"}, "def f():\n"),
        ({"turns": ["a", "b"]}, "a"),
        ({"prompt": ["a", "b"], "category": "writing"}, "a"),
        (
            {"conversations": [{"from": "system", "value": "s"}, {"from": "human", "value": "a"}]},
            "a",
        ),
        ({"text": "a"}, "a"),
        (
            {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]},
            [{"role": "user", "content": "a"}],
        ),
        ({"messages": [{"role": "user"}]}, None),
        ({"other": "a"}, None),
        ({"prompt": " "}, None),
        ("a", None),
    ],
)
def test_rows_of_data_sets(row: object, prompt: object) -> None:
    assert prompt_of(row) == prompt


def test_files_of_prompts(tmp_path: Path) -> None:
    file = tmp_path / "p.jsonl"
    file.write_text('{"prompt": "a\u2028b"}\r\n\n{"question": "c"}\n', encoding="utf-8")
    assert read_prompts(file) == ["a\u2028b", "c"]
    file.write_text('[{"prompt": "a"},\n {"turns": ["b"]}]')
    assert read_prompts(file) == ["a", "b"]
    for text, reason in (("", "no prompts"), ('{"prompt": "a"}\nx', ":2: not JSON"), ("3", ":1: ")):
        file.write_text(text)
        with pytest.raises(CheckpointError, match=reason):
            read_prompts(file)
    with pytest.raises(CheckpointError, match="No such file"):
        read_prompts(tmp_path / "missing")
    with file.open("wb") as stream:
        stream.truncate((64 << 20) + 1)
    with pytest.raises(CheckpointError, match="at most 67108864 bytes"):
        read_prompts(file)


def test_the_adversary_is_not_the_library() -> None:
    spoiled = selftest.SpoiledDraft([5, 6, 7, 8], 10, 300, 0)
    assert len(spoiled.propose([1] * 11, 10, 7)) == 3  # what is left of the answer
    noise = selftest.RandomDraft(300, 0)
    assert isinstance(noise.propose([1], 0, 4), list)
    assert max(selftest.GAMMAS) == draft.MAX_GAMMA
