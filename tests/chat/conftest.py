"""A model whose template lets thinking be chosen, for the tests of chat."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import tiny_models
from tiny_checkpoints import convert_tiny

from edge_runtime import Engine

THINKING_TEMPLATE = tiny_models.CHAT_TEMPLATE.replace(
    "{{ '<|im_start|>assistant\n' }}",
    "{{ '<|im_start|>assistant\n' }}"
    "{% if enable_thinking is defined and enable_thinking is false %}"
    "{{ '<think>\n\n</think>\n\n' }}{% endif %}",
)


@pytest.fixture(scope="session")
def thinking_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("thinker")
    return convert_tiny(folder, "qwen3", chat_template=THINKING_TEMPLATE)


@pytest.fixture(scope="module")
def thinker(thinking_checkpoint: Path) -> Iterator[Engine]:
    with Engine.open(thinking_checkpoint, ctx=256) as opened:
        yield opened
