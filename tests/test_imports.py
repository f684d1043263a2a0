"""What importing loads: never someone else's name, never torch where it is not needed."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

HELP = "from edge_runtime.cli import main; main(['--help'])"
LIGHT = ("edge_runtime.cli", "edge_runtime.decode", "edge_runtime.format", "edge_runtime.text")


def run_python(code: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], cwd=cwd, capture_output=True, text=True, timeout=60
    )


def loaded_after(code: str, cwd: Path) -> set[str]:
    """The modules of a fresh interpreter after `code`, by their names."""
    report = "import atexit, json, sys\n"
    report += "atexit.register(lambda: print(json.dumps(list(sys.modules)), file=sys.stderr))\n"
    done = run_python(report + code, cwd)
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stderr.splitlines()[-1]))


def test_kernels_is_not_ours(repository: Path) -> None:
    spec = importlib.util.find_spec("kernels")
    # a folder without __init__.py (tests/kernels) has no origin and gives way to any real package
    origin = None if spec is None else spec.origin
    assert origin is None or repository not in Path(origin).resolve().parents


def test_the_root_is_off_the_path(repository: Path) -> None:
    assert all(Path(entry).resolve() != repository for entry in sys.path)


def test_subpackages_behind_links_are_real_files() -> None:
    for name in ("kernels", "power", "profiles"):
        spec = importlib.util.find_spec(f"edge_runtime.{name}")
        assert spec is not None
        assert spec.origin is not None
        assert Path(spec.origin).is_file()


@pytest.mark.parametrize("module", LIGHT)
def test_import_loads_no_torch(module: str, tmp_path: Path) -> None:
    loaded = loaded_after(f"import {module}", tmp_path)
    assert module in loaded
    assert not loaded & {"torch", "transformers", "gguf"}


def test_bare_import_is_bare(tmp_path: Path) -> None:
    loaded = loaded_after("import edge_runtime", tmp_path)
    assert not loaded & {"torch", "numpy", "click", "rich", "edge_runtime.decode"}


def test_help_loads_no_command(tmp_path: Path) -> None:
    loaded = loaded_after(HELP, tmp_path)
    heavy = {"torch", "numpy", "transformers", "tokenizers", "jinja2", "rich", "huggingface_hub"}
    assert not loaded & heavy
    ours = {name for name in loaded if name.startswith("edge_runtime.")}
    assert ours <= {f"edge_runtime.{name}" for name in ("cli", "cli.app", "errors", "log")}


def test_help_is_fast(tmp_path: Path) -> None:
    def seconds(code: str) -> float:
        start = time.perf_counter()
        run_python(code, tmp_path)
        return time.perf_counter() - start

    # the least of a few runs, over the bare interpreter: what this program itself adds
    assert min(seconds(HELP) for _ in range(5)) - min(seconds("") for _ in range(5)) < 0.2
