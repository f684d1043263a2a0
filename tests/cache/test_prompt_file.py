"""The file of a prompt's cache is whole or not there, whoever is killed and whoever else saves."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from pathlib import Path

SAVE = """
import sys
from pathlib import Path
from edge_runtime.cache import prompt_file
from edge_runtime.kernels.ops import Geometry
import numpy as np, time
class Cache:
    def planes(self, length, layer):
        time.sleep(0.02)
        rng = np.random.default_rng(layer + int(sys.argv[2]))
        return {
            "scale": rng.random((1, 2, length, 2)).astype(np.float16),
            "base": rng.integers(0, 256, (1, 2, length, 2, 8), np.uint8),
            "refine": rng.integers(0, 256, (1, 2, length, 2, 8), np.uint8),
        }
sizes = Geometry(num_layers=40, hidden_size=8, num_heads=2, num_kv_heads=2, head_dim=16,
                 num_tokens=99)
print("begun", flush=True)
prompt_file.save(Path(sys.argv[1]), {"model": "m"}, list(range(90)), Cache(), sizes)
if len(sys.argv) > 3:
    prompt_file.PromptFile(Path(sys.argv[1]), {"model": "m"}, sizes)
print("saved", flush=True)
"""


def start(file: Path, *args: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", SAVE, str(file), *map(str, args)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_a_killed_save_leaves_the_old_file_whole(tmp_path: Path) -> None:
    file = tmp_path / "kept"
    out, err = start(file, 0, "check").communicate(timeout=60)
    assert out.split() == ["begun", "saved"], err
    old = file.read_bytes()
    for wait_s in (0.0, 0.1, 0.3, 0.6):
        with start(file, 1) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == "begun\n"
            time.sleep(wait_s)
            process.send_signal(signal.SIGKILL)
        assert process.returncode == -signal.SIGKILL
        assert file.read_bytes() == old
    left = {path.name for path in tmp_path.iterdir()}
    assert left - {"kept"}
    assert all(re.fullmatch(r"\.kept\.bitnest-[0-9a-f]{8}\.tmp", n) for n in left - {"kept"})
    out, err = start(file, 2, "check").communicate(timeout=60)
    assert out.split() == ["begun", "saved"], err  # what was left behind is no obstacle
    assert file.read_bytes() != old
    assert {path.name for path in tmp_path.iterdir()} == {"kept"}


def test_two_that_save_at_once(tmp_path: Path) -> None:
    file = tmp_path / "kept"
    with start(file, 0, "check") as one:
        assert one.stdout is not None
        assert one.stdout.readline() == "begun\n"
        time.sleep(0.2)
        _, err = start(file, 1).communicate(timeout=60)
        assert "another process is saving there" in err
        assert one.stdout.readline() == "saved\n"
    assert {path.name for path in tmp_path.iterdir()} == {"kept"}
