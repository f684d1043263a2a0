"""Converted tiny models for decoding, and what identity tests compare."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import tiny_checkpoints
import torch

from edge_runtime.cache.policy import parse_policy
from edge_runtime.decode.draft import DraftChoice
from edge_runtime.decode.engine import Engine
from edge_runtime.kernels.cpu.library import library_path

CONTEXT = 320
# odd shapes on purpose; weights are random, so the draft agrees with the target about half the time
MODELS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "llama": ("llama", {}, {"r3": False}),
    "qwen2": (
        "qwen2",
        {"hidden_size": 96, "intermediate_size": 100, "num_attention_heads": 6,
         "num_key_value_heads": 1, "tie_word_embeddings": True},
        {},
    ),
    "qwen3": ("qwen3", {"head_dim": 24, "num_attention_heads": 6, "num_key_value_heads": 2}, {}),
    "llama-r3": ("llama", {"num_hidden_layers": 1}, {"r3": True, "base": "rtn"}),
}  # fmt: skip


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def get(name: str) -> Path:
        if name not in made:
            architecture, model, options = MODELS[name]
            folder = tmp_path_factory.mktemp(name)
            made[name] = tiny_checkpoints.convert_tiny(
                folder, architecture, options=options, max_position_embeddings=512, **model
            )
        return made[name]

    return get


@pytest.fixture(scope="session", params=["reference", "cpu", "cuda"])
def engines(
    request: pytest.FixtureRequest,
    checkpoints: Callable[[str], Path],
    give_up: Callable[[str, str], None],
) -> Iterator[Callable[..., Engine]]:
    """Fresh engines (cache, policy, draft) over one loaded model each, on every backend."""
    opened: dict[str, Engine] = {}
    if request.param == "cuda" and not torch.cuda.is_available():
        # these run hundreds of passes, and Triton's interpreter takes seconds for one
        pytest.skip("no GPU: test_cuda_interpreted.py has a few cases")
    if request.param == "cpu" and library_path() is None:
        give_up("native", "the native CPU kernels were not built")

    def get(
        name: str = "llama", *, gamma: int = 0, source: str = "base", policy: str = "kv8",
        context: int = CONTEXT, chunk: int = 256, eos: Sequence[int] | None = None,
    ) -> Engine:  # fmt: skip
        if name not in opened:
            opened[name] = Engine.open(checkpoints(name), backend=request.param, ctx=CONTEXT)
        first = opened[name]
        text = first.text if eos is None else replace_eos(first, eos)
        engine = Engine(
            first.model,
            first.tokenizer,
            text,
            view="nest",
            context=context,
            draft=DraftChoice(gamma, source, "test"),  # type: ignore[arg-type]
            policy=parse_policy(policy),
        )
        engine.chunk = chunk
        return engine

    yield get
    for engine in opened.values():
        engine.close()


def replace_eos(engine: Engine, eos: Sequence[int]) -> Any:
    import msgspec

    return msgspec.structs.replace(engine.text, eos_ids=tuple(eos))


@pytest.fixture(scope="session")
def scripted() -> type[Scripted]:
    return Scripted


class Scripted:
    """A draft that knows the true continuation and is wrong where it is told to be."""

    def __init__(self, truth: list[int], prompt_length: int, wrong: Callable[[int], bool]) -> None:
        self.truth, self.prompt_length, self.wrong = truth, prompt_length, wrong

    def propose(self, tokens: Sequence[int], start: int, gamma: int) -> list[int]:
        at = len(tokens) - self.prompt_length
        return [
            (t + 1) % 270 if self.wrong(i) else t for i, t in enumerate(self.truth[at : at + gamma])
        ]
