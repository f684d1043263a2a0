"""What a program may hand to the engine, and that anything else is one line."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edge_runtime.decode.arguments import shown
from edge_runtime.decode.draft import NgramDraft
from edge_runtime.decode.engine import Engine
from edge_runtime.decode.sampling import Sampling
from edge_runtime.errors import BudgetError, CheckpointError, UsageError

Engines = Callable[..., Engine]

WRONG: list[tuple[str, Any]] = [
    *(("prompt", p) for p in (None, 5, 1.5, {1, 2}, b"text", {"role": "user"}, [1, "a"], [1.5])),
    *(("prompt", p) for p in (np.array(3), [[1.5]], [["a"]], [True], [None], iter([1]))),
    *(("prompt", [m]) for m in ({}, {"role": "user"}, {"role": ["user"], "content": "a"})),
    *(("max_new_tokens", n) for n in (1.5, "3", True, 0, -1, float("nan"))),
    *(("deadline_s", s) for s in (float("nan"), "1", -0.1, True, [1])),
    *(("allowed_ids", ids) for ids in ({1, 2}, [1.5], ["a"], 7, "ab", np.array(3), [[1]])),
    *(("stop", s) for s in (None, 3, ["a", 1], {"a"}, b"a")),
    *(("sampling", s) for s in ("greedy", 0.5, {"temperature": 1})),
    *(("ignore_eos", s) for s in ("no", 0, 1, None)),
    *(("draft_source", s) for s in ("ngram", 5, True, NgramDraft, 10**6000)),
    *(("max_new_tokens", n) for n in (-(10**400), -(10**6000))),
    ("allowed_ids", [10**6000]),
    ("prompt", [10**6000]),
    ("prompt", [np.full((1, 64), -(2**63), np.int64)]),
    ("prompt", [np.full((1, 64), np.inf, np.float16)]),
    ("prompt", [np.full((1, 64), np.longdouble(2) ** 5000)]),
]


@pytest.mark.parametrize(("name", "value"), WRONG, ids=lambda v: shown(v)[:30])
@pytest.mark.filterwarnings("error")
def test_arguments_of_the_wrong_kind(engines: Engines, name: str, value: Any) -> None:
    options = {"prompt": [1, 2], name: value}
    with pytest.raises(UsageError) as caught:
        engines("llama").generate(**options)
    assert "\n" not in caught.value.message
    assert (
        "expected" in caught.value.message
        or "embedding rows" in caught.value.message
        or "template" in caught.value.message
    )
    assert len(caught.value.message) < 200


def test_what_is_as_good_as_the_usual_kind(engines: Engines) -> None:
    engine = engines("llama")
    want = engine.generate([3, 1, 2], max_new_tokens=4, allowed_ids=[5, 6]).complete()
    for ids in ((3, 1, 2), np.array([3, 1, 2]), [[3], (1, 2)]):
        got = engine.generate(
            ids, max_new_tokens=np.int64(4),
            allowed_ids=np.array([5, 6]), deadline_s=np.float32(60), ignore_eos=np.bool_(False),
        )  # fmt: skip
        assert got.complete().token_ids == want.token_ids


def test_a_seed_of_numpy_can_be_reported(engines: Engines) -> None:
    options = {"max_new_tokens": np.int8(2), "sampling": Sampling(seed=np.int32(5), temperature=1)}
    result = engines("llama").generate([1, 2], **options).complete()
    assert json.loads(json.dumps(dataclasses.asdict(result)))["seed"] == 5


def test_what_is_huge_and_harmless(engines: Engines) -> None:
    engine = engines("llama")
    got = engine.generate([1, 2], max_new_tokens=10**6000, deadline_s=10**6000)
    next(got)
    got.close()
    rows = engine.generate([np.ones((2, 64), np.float16)], max_new_tokens=1).complete()
    assert rows.prompt_tokens == 2


OPEN: list[tuple[str, Any]] = [
    *(("threads", n) for n in (0, -1, 1.5, True, "2", 257, 100_000, 10**6000)),
    *(("budget_bytes", n) for n in ("3G", [], -1, float("nan"), 3e9, True)),
    *(("reserve_bytes", n) for n in (None, "1G", -1, float("inf"), -(10**6000))),
    *(("backend", b) for b in ([], None, {}, 10**6000, "tpu", "x" * 5000)),
    *(("view", v) for v in ([], None, np.array([1, 2]), 10**6000, "fp", "x" * 5000)),
    *(("draft", d) for d in ([], None, -1, 8, 2.0, True, 10**6000, "9" * 5000)),
    *(("draft_source", s) for s in ([], None, 5, "other", "x" * 5000)),
    *(("kv_policy", p) for p in ([], None, 5, 10**6000, "recent:" + "9" * 5000)),
    *(("ctx", c) for c in ([], None, 1, -1, 64.0, True, 10**6000, 10**400, "9" * 5000, "²")),
    *(("path", p) for p in (None, 5, b"x", [], "", "x" * 5000, "a\0b")),
]


@pytest.mark.parametrize(("name", "value"), OPEN, ids=lambda v: shown(v)[:30])
def test_what_cannot_be_opened(checkpoints: Callable[[str], Any], name: str, value: Any) -> None:
    options = {"path": checkpoints("llama"), "ctx": 64, "backend": "reference"} | {name: value}
    with pytest.raises(UsageError) as caught:
        Engine.open(**options)
    assert "\n" not in caught.value.message
    assert len(caught.value.message) < 250


def test_a_path_that_is_not_there(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "no", str(tmp_path / "file" / "x"), tmp_path / "file", "/dev/null"):
        with pytest.raises(CheckpointError, match="expected the folder of a converted") as caught:
            Engine.open(path)
        assert "convert it" not in caught.value.hint


def test_amounts_that_no_machine_has(checkpoints: Callable[[str], Any]) -> None:
    with pytest.raises(BudgetError, match=r"\b0 MiB are available"):
        Engine.open(checkpoints("llama"), reserve_bytes=10**6000)
    with Engine.open(checkpoints("llama"), ctx="64", budget_bytes=10**6000, threads=2) as engine:
        assert engine.context == 64
