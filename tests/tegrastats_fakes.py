"""tegrastats as tests need it: lines of real boards, and a program that stands in for it."""

from __future__ import annotations

import csv
import os
import stat
import sys
from pathlib import Path

import pytest

CORPUS = Path(__file__).parent / "fixtures" / "power" / "tegrastats.tsv"

# prints a step in its own time: idle until the flag file is there, then load until it is gone
_PROGRAM = """#!{python}
import math, os, sys, time
interval = int(sys.argv[sys.argv.index("--interval") + 1]) / 1000
tau, idle, load, flag = {tau}, {idle}, {load}, {flag!r}
open({flag!r} + ".pid", "w").write(str(os.getpid()))
level, last, due = idle, time.monotonic(), time.monotonic()
for n in range({lines}):
    due += interval
    time.sleep(max(0, due - time.monotonic()))
    now = time.monotonic()
    aim = load if os.path.exists(flag) else idle
    level += (aim - level) * (1 - math.exp(-(now - last) / tau))
    last = now
    mw = round(level / 40) * 40
    print(f"RAM 6185/7620MB (lfb 8x2MB) CPU [15%@729] EMC_FREQ 43%@2133 GR3D_FREQ 63%@[621] "
          f"cpu@53.9C VDD_IN {{mw}}mW/{{mw}}mW VDD_CPU_GPU_CV 40mW/40mW", flush=True)
"""


def corpus(path: Path = CORPUS) -> list[dict[str, str]]:
    """Rows of recorded lines with what they say."""
    with path.open(newline="") as stream:
        return list(csv.DictReader(stream, delimiter="\t", quoting=csv.QUOTE_NONE))


def expected(row: dict[str, str]) -> list[int | None]:
    """Total in mW, RAM used and in all in MB."""
    names = ("expected_total_mW", "expected_ram_used_MB", "expected_ram_total_MB")
    return [int(row[name]) if row[name] else None for name in names]


def install_script(folder: Path, text: str) -> Path:
    """Put a program called tegrastats into a folder for PATH."""
    folder.mkdir(exist_ok=True)
    program = folder / "tegrastats"
    program.write_text(text)
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    return program


def install_fake(
    folder: Path, *, idle: int = 5000, load: int = 15000, tau: float = 0.3, lines: int = 10**9
) -> Path:
    """Put a tegrastats into a folder that shows load while the file returned is there."""
    flag = folder / "load"
    text = _PROGRAM.format(
        python=sys.executable, tau=tau, idle=idle, load=load, flag=str(flag), lines=lines
    )
    install_script(folder, text)
    return flag


def fake_on_path(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """`install_fake`, first on PATH."""
    flag = install_fake(folder)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return flag
