"""What must be recorded with a number, and when it makes numbers incomparable.

Invariant: reading changes nothing and never fails; what cannot be read is None.
"""

from __future__ import annotations

import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import msgspec

import edge_runtime
from edge_runtime import __version__, machine
from edge_runtime.profiles.detect import detect

BUSY_LOAD = 0.35  # runnable processes a core, before anything of ours runs


def snapshot(root: Path = machine.ROOT) -> dict[str, Any]:
    """Read versions, the board's mode and clocks, temperatures, load and memory, now."""
    return {
        "version": __version__,
        "commit": _commit(),
        "python": platform.python_version(),
        "system": platform.platform(),
        "cores": len(os.sched_getaffinity(0)),
        "load": os.getloadavg()[0],
        "memory_total_bytes": machine.total_bytes(root),
        "memory_available_bytes": machine.available_bytes(root),
        "board": msgspec.to_builtins(detect(root)),
    }


def _commit() -> str | None:
    """Return the commit of a checkout that this runs from, `+` if something in it is changed."""
    folder = Path(edge_runtime.__file__).resolve().parent.parent
    if not ((folder / ".git").exists() and (folder / "pyproject.toml").exists()):
        return None  # installed, perhaps into a checkout of something else
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), "describe", "--always", "--dirty=+", "--exclude=*"],
            capture_output=True,
            text=True,
            timeout=5,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None


def warnings(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """Return what makes numbers between two snapshots hard to compare with others."""
    found: list[str] = []
    load, cores = before["load"], before["cores"]
    if load > BUSY_LOAD * cores:
        found.append(
            f"other work was running: load {load:.1f} on {cores} cores before the first run"
        )
    return found + _board_warnings(before["board"], after["board"])


def _board_warnings(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    if before["model"] is None:
        return []
    found = []
    mode = before["mode"]
    if mode is None:
        found.append("the power mode could not be read: compare with nothing")
    elif not mode.upper().startswith("MAXN"):
        found.append(f"power mode {mode}, not MAXN: the board can do more")
    if after["mode"] != mode:
        found.append(f"the power mode changed while measuring: {mode} to {after['mode']}")
    gpu = before["gpu"]
    if (
        gpu["min_mhz"] is not None
        and gpu["max_mhz"] is not None
        and gpu["min_mhz"] < gpu["max_mhz"]
    ):
        found.append("clocks are not fixed (sudo jetson_clocks): they follow the load")
    if after["throttling"]:
        found.append(f"throttling: {', '.join(after['throttling'])}")
    for name, count in (after["over_current"] or {}).items():
        risen = count - (before["over_current"] or {}).get(name, 0)
        if risen:
            found.append(f"over-current counter {name} rose by {risen}")
    return found
