"""Memory of this machine as the kernel counts it now, limits of the control group included.

Invariant: reading never fails; what cannot be read is None, never 0. `available_bytes` is
MemAvailable, not MemFree: the page cache can be had back. Sources: the kernel's
Documentation: filesystems/proc.rst, admin-guide/cgroup-v1/memory.rst, admin-guide/cgroup-v2.rst,
accounting/psi.rst.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path("/")
_UNLIMITED = 1 << 60  # version 1 writes a huge number for no limit


def read(path: Path) -> str | None:
    """Return the text of a small file of the kernel, or None."""
    try:
        return path.read_bytes().decode("utf-8", "replace").strip("\0 \t\r\n")
    except OSError:
        return None


def meminfo_bytes(field: str, root: Path = ROOT) -> int | None:
    """Return one field of /proc/meminfo, e.g. MemTotal."""
    found = re.search(rf"^{field}:\s+(\d+) kB", read(root / "proc/meminfo") or "", re.MULTILINE)
    return int(found.group(1)) * 1024 if found else None


def total_bytes(root: Path = ROOT) -> int | None:
    """Memory that this process could ever have."""
    total = meminfo_bytes("MemTotal", root)
    limits = [limit for limit, _ in _limits(root)]
    return min([total, *limits]) if total is not None else min(limits, default=None)


def available_bytes(root: Path = ROOT) -> int | None:
    """Memory that this process can have now: of the machine, and within its control groups."""
    available = meminfo_bytes("MemAvailable", root)
    rooms = [max(0, limit - used) for limit, used in _limits(root)]
    return min([available, *rooms]) if available is not None else min(rooms, default=None)


def stalled_percent(root: Path = ROOT) -> float | None:
    """Share of the last 10 s in which every task waited for memory (PSI); None without PSI."""
    found = re.search(r"^full avg10=([\d.]+)", read(root / "proc/pressure/memory") or "", re.M)
    return float(found.group(1)) if found else None


def _limits(root: Path) -> Iterator[tuple[int, int]]:
    """Limit and use in bytes of this process's control groups, those above included."""
    for line in (read(root / "proc/self/cgroup") or "").splitlines():
        number, controllers, path = [*line.split(":", 2), "", ""][:3]
        if controllers == "memory":
            base, names = root / "sys/fs/cgroup/memory", ("limit_in_bytes", "usage_in_bytes")
        elif number == "0" and not controllers:
            base, names = root / "sys/fs/cgroup", ("max", "current")
        else:
            continue
        folder = base / path.lstrip("/")
        while True:
            limit, used = (_number(folder / f"memory.{name}") for name in names)
            if limit is not None and used is not None and limit < _UNLIMITED:
                yield limit, max(0, used - _reclaimable(folder))
            if folder == base or base not in folder.parents:
                break
            folder = folder.parent


def _number(path: Path) -> int | None:
    text = read(path) or ""
    return int(text) if text.isdecimal() else None


def _reclaimable(folder: Path) -> int:
    """Bytes of files that the kernel drops when it needs them."""
    stat = read(folder / "memory.stat") or ""
    found = re.findall(r"^(?:total_)?inactive_file (\d+)", stat, re.MULTILINE)
    return max(map(int, found), default=0)  # version 1 counts groups below in total_ alone


def reset_peak() -> bool:
    """Let the peak of this process's memory start anew; False where the kernel does not allow it.

    Source: Documentation/filesystems/proc.rst, clear_refs.
    """
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def peak_bytes() -> int | None:
    """Peak resident memory of this process since it began, or since `reset_peak`."""
    found = re.search(r"^VmHWM:\s+(\d+) kB", read(Path("/proc/self/status")) or "", re.MULTILINE)
    return int(found.group(1)) * 1024 if found else None
