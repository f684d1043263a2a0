"""The public names are the ones README shows, no more and no fewer."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import edge_runtime


def test_every_public_name_exists() -> None:
    assert len(set(edge_runtime.__all__)) == len(edge_runtime.__all__)
    for name in edge_runtime.__all__:
        assert getattr(edge_runtime, name) is not None


def test_dir_lists_the_public_names() -> None:
    assert set(edge_runtime.__all__) <= set(dir(edge_runtime))


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = edge_runtime.no_such_name


def test_readme_names_every_public_name(repository: Path) -> None:
    readme = (repository / "README.md").read_text(encoding="utf-8")
    missing = [n for n in edge_runtime.__all__ if not re.search(rf"\b{re.escape(n)}\b", readme)]
    assert not missing


def test_readme_imports_only_public_names(repository: Path) -> None:
    readme = (repository / "README.md").read_text(encoding="utf-8")
    lines = re.findall(r"^\s*from edge_runtime import (.+)$", readme, re.MULTILINE)
    shown = {name.strip() for line in lines for name in line.strip("()").split(",")}
    assert shown <= set(edge_runtime.__all__)


def test_the_version_is_said_once_and_the_same() -> None:
    from importlib.metadata import version

    assert version("bitnest-edge") == edge_runtime.__version__
