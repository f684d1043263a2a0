"""How many threads are worth having: cores this process may use, not counting a core twice."""

from __future__ import annotations

import math
import os
from pathlib import Path

import psutil

CGROUP = Path("/sys/fs/cgroup")


def usable_cores(cgroup: Path = CGROUP) -> int:
    """Return physical cores within the process's affinity and its control group's quota."""
    allowed = len(os.sched_getaffinity(0))
    physical = psutil.cpu_count(logical=False) or allowed
    quota = cgroup_quota(cgroup)
    return max(1, min(allowed, physical, allowed if quota is None else math.ceil(quota)))


def cgroup_quota(cgroup: Path) -> float | None:
    """Return the quota in cores (kernel documentation, cgroup-v2 `cpu.max`, and v1), or None."""
    try:
        quota, period = (cgroup / "cpu.max").read_text().split()
    except (OSError, ValueError):
        try:
            quota = (cgroup / "cpu" / "cpu.cfs_quota_us").read_text().strip()
            period = (cgroup / "cpu" / "cpu.cfs_period_us").read_text().strip()
        except OSError:
            return None
    try:
        cores = int(quota) / int(period)
    except (ValueError, ZeroDivisionError):  # "max": no limit
        return None
    return cores if cores > 0 else None
