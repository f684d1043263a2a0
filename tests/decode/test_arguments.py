"""What a program may hand to the engine, and that anything else is one line."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from edge_runtime.decode.engine import Engine
from edge_runtime.errors import UsageError

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
]


@pytest.mark.parametrize(("name", "value"), WRONG, ids=lambda v: repr(v)[:30])
def test_arguments_of_the_wrong_kind(engines: Engines, name: str, value: Any) -> None:
    options = {"prompt": [1, 2], name: value}
    with pytest.raises(UsageError) as caught:
        engines("llama").generate(**options)
    assert "\n" not in caught.value.message
    assert "expected" in caught.value.message or "template" in caught.value.message


def test_what_is_as_good_as_the_usual_kind(engines: Engines) -> None:
    engine = engines("llama")
    want = engine.generate([3, 1, 2], max_new_tokens=4, allowed_ids=[5, 6]).complete()
    for ids in ((3, 1, 2), np.array([3, 1, 2]), [[3], (1, 2)]):
        got = engine.generate(
            ids, max_new_tokens=np.int64(4),
            allowed_ids=np.array([5, 6]), deadline_s=np.float32(60),
        )  # fmt: skip
        assert got.complete().token_ids == want.token_ids


@pytest.mark.parametrize("threads", [0, -1, 1.5, True, "2"])
def test_threads(checkpoints: Callable[[str], Any], threads: Any) -> None:
    with pytest.raises(UsageError, match="threads: expected a whole number of at least 1, got"):
        Engine.open(checkpoints("llama"), threads=threads)
