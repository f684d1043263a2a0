"""Refusals and edits that the tests of model sources share."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from edge_runtime.convert.source import open_source
from edge_runtime.errors import CheckpointError


def edit(path: Path, **changes: Any) -> None:
    body = json.loads(path.read_text())
    path.write_text(json.dumps(body | changes))


def refused(folder: Path, *words: str) -> CheckpointError:
    with pytest.raises(CheckpointError) as caught:
        open_source(folder)
    assert "\n" not in caught.value.message
    for word in words:
        assert word in caught.value.message, caught.value.message
    return caught.value
