"""A converted model runs where torch is not installed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

# a module that is None in sys.modules raises ImportError when it is imported
ENTER = (
    "import sys; sys.modules['torch'] = None; sys.modules['transformers'] = None; "
    "from edge_runtime.cli import main; main(sys.argv[1:])"
)


@pytest.mark.parametrize(
    "args",
    [
        ("generate", "MODEL", "-p", "hello", "-n", "8", "--temp", "0.8", "--seed", "1"),
        ("chat", "MODEL", "--once", "hello"),
        ("bench", "decode", "MODEL", "-n", "4", "--limit", "1"),
        ("doctor",),
    ],
)
def test_commands(tiny_checkpoint: Path, args: tuple[str, ...]) -> None:
    command = [str(tiny_checkpoint) if a == "MODEL" else a for a in args]
    done = subprocess.run([sys.executable, "-c", ENTER, *command], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
