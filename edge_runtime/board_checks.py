"""What keeps a board slower or smaller than it is, in the order in which to fix it.

Invariant: a finding says what, why it matters with a figure, and one thing to do. Nothing is
guessed: a check that cannot read its files finds nothing.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import msgspec

from edge_runtime.machine import read
from edge_runtime.profiles import Board, DeviceProfile, Mode, device
from edge_runtime.profiles.detect import entries

MIB = 2**20
# desktops and display servers, as /proc names them (cut to 15 characters)
DESKTOP = re.compile(
    r"Xorg|Xwayland|gnome-shell|gnome-session-b|gdm-x-session|gdm3|lightdm|lxpanel|kwin.*|plasmashell"
)
# https://github.com/ggml-org/llama.cpp/pull/23732 and forums.developer.nvidia.com/t/347862
NVMAP_FIXED_IN = {
    "35.6.3": "L4T 35.6.4",
    "36.4.7": "L4T 36.5 (JetPack 6.2.2)",
    "38.2.2": "a later L4T 38",
}
LEAST_MEMORY = 0.92  # of the profile's MemTotal; r35 shows 0.96 of what r36 shows
MOUNTS = {  # what a container needs -> what is lost without it
    "dev/nvmap": "the GPU",
    "proc/device-tree/model": "the board's name",
    "etc/nv_tegra_release": "the L4T release",
    "etc/nvpmodel.conf": "the power modes",
    "var/lib/nvpmodel/status": "the power mode in force",
    "sys/class/hwmon": "power and over-current",
    "usr/bin/tegrastats": "tegrastats",
}


class Finding(msgspec.Struct, frozen=True):
    """One thing to fix."""

    name: str
    what: str
    why: str
    fix: str


def findings(board: Board, root: Path = Path("/"), user_id: int | None = None) -> list[Finding]:
    """Return what to fix on a board, first things first; nothing for another machine.

    user_id: of this process, 0 is root; None asks the system.
    """
    if not board.is_jetson:
        return []
    profile = device(board.profile) if board.profile else None
    root_user = (os.geteuid() if user_id is None else user_id) == 0
    found = [
        power_mode(board, profile),
        mode_not_in_force(board, profile),
        throttling_now(board),
        desktop(root, profile),
        zram(root),
        tegrastats_without_rails(board, root, root_user),
        nvmap(board),
        container(root),
        firmware(board, profile),
        clocks(board),
        over_current(board, profile),
    ]
    return [one for one in found if one is not None]


def _work(mode: Mode) -> float:
    return (mode.sm_count or 0) * (mode.gpu_max_mhz or 0.0)


def _rank(mode: Mode) -> tuple[float, float, bool]:
    """Rank modes by what decides decoding, then prefill, then the CPU."""
    return mode.bandwidth_gb_s or 0.0, _work(mode), mode.name.startswith("MAXN")


def power_mode(board: Board, profile: DeviceProfile | None) -> Finding | None:
    """Find a power mode that is not the fastest."""
    if board.mode is None or profile is None or not profile.modes:
        return None
    there = [m for m in profile.modes if board.modes is None or m.name in board.modes]
    now = profile.mode(board.mode)
    best = max(there, key=_rank, default=None)
    if best is None or now is None or _rank(now) >= _rank(best):
        return None
    number = (board.modes or {}).get(best.name, best.id)
    reboot = now.sm_count != best.sm_count or now.cpu_cores != best.cpu_cores
    return Finding(
        "power_mode",
        f"power mode {now.name}, not {best.name}",
        _slower(now, best) + ("; the change asks for a reboot on the terminal" if reboot else ""),
        f"sudo nvpmodel -m {number if number is not None else f'<the ID of {best.name}>'}",
    )


def _slower(now: Mode, best: Mode) -> str:
    parts = []
    if now.bandwidth_gb_s and best.bandwidth_gb_s and now.bandwidth_gb_s < best.bandwidth_gb_s:
        share = now.bandwidth_gb_s / best.bandwidth_gb_s
        parts.append(
            f"memory gives {now.bandwidth_gb_s:g} of {best.bandwidth_gb_s:g} GB/s: decoding at "
            f"{share:.0%} of the speed"
        )
    if 0 < _work(now) < _work(best):
        parts.append(
            f"GPU {now.sm_count} SMs at {now.gpu_max_mhz:g} MHz, not {best.sm_count} at "
            f"{best.gpu_max_mhz:g}: prefill at {_work(now) / _work(best):.0%}"
        )
    if now.cpu_max_mhz and (not best.cpu_max_mhz or now.cpu_max_mhz < best.cpu_max_mhz):
        parts.append(f"CPU capped at {now.cpu_max_mhz:g} MHz")
    return "; ".join(parts) or "clocks are capped; by how much is not known for this board"


def mode_not_in_force(board: Board, profile: DeviceProfile | None) -> Finding | None:
    """Find a mode that was chosen and waits for a reboot: it changes which cores are on."""
    mode = profile.mode(board.mode) if profile and board.mode else None
    if mode is None or mode.cpu_cores is None or board.cpu_cores in (None, mode.cpu_cores):
        return None
    return Finding(
        "mode_not_in_force",
        f"power mode {mode.name} is chosen but not in force",
        f"{board.cpu_cores} CPU cores are on, the mode has {mode.cpu_cores}; the GPU's SMs change "
        "with the same reboot",
        "sudo reboot",
    )


def throttling_now(board: Board) -> Finding | None:
    """Find heat that is slowing the board down right now."""
    if not board.throttling:
        return None
    hottest = max((board.temperatures_c or {}).items(), key=lambda one: one[1], default=None)
    heat = f"the hottest sensor is {hottest[0]} at {hottest[1]:.0f} C; " if hottest else ""
    return Finding(
        "throttling",
        f"throttling now: {', '.join(board.throttling)}",
        heat + "clocks stay below the power mode's until it is cooler",
        "cool the board: sudo jetson_clocks --fan",
    )


def desktop(root: Path, profile: DeviceProfile | None) -> Finding | None:
    """Find a desktop; what it would free is what only its processes hold."""
    freed, running = 0, set()
    for process in entries(root / "proc", str.isdecimal):
        name = read(process / "comm") or ""
        if DESKTOP.fullmatch(name):
            running.add(name)
            pages = re.match(r"\d+ (\d{1,12}) (\d{1,12}) ", read(process / "statm") or "")
            if pages:  # resident, shared
                freed += (int(pages[1]) - int(pages[2])) * os.sysconf("SC_PAGE_SIZE")
    if not running:
        return None
    most = profile.desktop_bytes if profile else None
    said = f"; with all its services up to {most / MIB:.0f} MiB (NVIDIA)" if most else ""
    return Finding(
        "desktop",
        f"a desktop is running ({', '.join(sorted(running))})",
        f"these processes hold {freed / MIB:.0f} MiB that a model could use{said}",
        "sudo systemctl set-default multi-user.target && sudo systemctl isolate multi-user.target",
    )


def zram(root: Path) -> Finding | None:
    """Find swap that lies compressed in the same memory."""
    lines = re.findall(
        r"^\S*/zram\S*\s+\S+\s+(\d{1,15})\s+(\d{1,15})", read(root / "proc/swaps") or "", re.M
    )
    if not lines:
        return None
    size, used = (sum(int(line[i]) for line in lines) / 1024 for i in (0, 1))
    return Finding(
        "zram",
        f"{size:.0f} MiB of swap on zram, {used:.0f} MiB in use",
        "it is kept in the same RAM: no room for weights, and it makes free memory look larger",
        "sudo systemctl disable nvzramconfig && sudo reboot",
    )


def _has_ina3221(root: Path) -> bool:
    names = [read(folder / "name") for folder in entries(root / "sys/class/hwmon")]
    return any(name is not None and name.startswith("ina3221") for name in names)


def tegrastats_without_rails(board: Board, root: Path, root_user: bool) -> Finding | None:
    """Find L4T r35 without root: its tegrastats prints no power."""
    old = (board.l4t or "").startswith("35.")
    if root_user or not old or not (root / "usr/bin/tegrastats").exists():
        return None
    sysfs = _has_ina3221(root)
    return Finding(
        "tegrastats_without_rails",
        "tegrastats prints no power rails: L4T r35 without root",
        "J/token is missing in all of its lines"
        + (
            "; the INA3221 files have the rails without root"
            if sysfs
            else ", and no INA3221 is seen"
        ),
        "use --power-source ina3221" if sysfs else "run the command that measures with sudo",
    )


def nvmap(board: Board) -> Finding | None:
    """Find the releases whose NvMap refuses large allocations."""
    if board.l4t not in NVMAP_FIXED_IN:
        return None
    return Finding(
        "nvmap",
        f"L4T {board.l4t} refuses large GPU allocations while memory is available",
        "NvMapMemAllocInternalTagged error 12 with GBs free: one request of 1 GiB may fail",
        f"update to {NVMAP_FIXED_IN[board.l4t]}; until then before a start: "
        "sync; sudo sysctl -w vm.drop_caches=3",
    )


def container(root: Path) -> Finding | None:
    """Find a container that was started without what a board needs."""
    groups = read(root / "proc/1/cgroup") or ""
    marks = (root / ".dockerenv", root / "run/.containerenv")
    if not any(mark.exists() for mark in marks) and not re.search(
        r"docker|containerd|kubepods|libpod", groups
    ):
        return None
    lost = {path: what for path, what in MOUNTS.items() if not (root / path).exists()}
    if not lost:
        return None
    folders = ["sys" if path.startswith("sys/") else path for path in lost]
    mounts = " ".join(f"-v /{p}:/{p}:ro" for p in folders if not p.startswith(("dev/", "proc/")))
    gpu = "--runtime nvidia " if "dev/nvmap" in lost else ""
    tree = "--security-opt systempaths=unconfined " if "proc/device-tree/model" in lost else ""
    return Finding(
        "container",
        f"a container without {len(lost)} of {len(MOUNTS)} things of the board",
        f"it does not see {', '.join(lost.values())}",
        f"docker run {gpu}{tree}{mounts}".rstrip(),
    )


def firmware(board: Board, profile: DeviceProfile | None) -> Finding | None:
    """Find early QSPI firmware, which keeps memory for itself."""
    wanted, total = profile.memory_total_bytes if profile else None, board.memory_total_bytes
    if wanted is None or total is None or total >= wanted * LEAST_MEMORY:
        return None
    nano = (board.profile or "").startswith("orin-nano")
    return Finding(
        "firmware",
        f"MemTotal is {total / MIB:.0f} MiB, this module shows {wanted / MIB:.0f}",
        f"{(wanted - total) / MIB:.0f} MiB are kept from Linux: early QSPI firmware does that",
        "sudo apt install nvidia-l4t-jetson-orin-nano-qspi-updater && sudo reboot"
        if nano
        else "update the QSPI firmware with NVIDIA's SDK Manager",
    )


def clocks(board: Board) -> Finding | None:
    """Find clocks that follow the load."""
    low, high = board.gpu.min_mhz, board.gpu.max_mhz
    if low is None or high is None or low >= high:
        return None
    return Finding(
        "clocks",
        f"the GPU's clock follows the load: {low:.0f} to {high:.0f} MHz",
        f"a short answer may run at {low / high:.0%} of the clock, and measurements differ",
        "sudo jetson_clocks",
    )


def over_current(board: Board, profile: DeviceProfile | None) -> Finding | None:
    """Find events of the hardware's power guards. OC3 alone is common in MAXN modes."""
    counts = board.over_current or {}
    low, average, instant = (counts.get(f"oc{i}", 0) for i in (1, 2, 3))
    if not low + average + instant:
        return None
    slower = _next_slower(board, profile)
    if low:
        fix = "use a stronger power supply or a shorter cable"
    elif average and slower is not None:
        fix = f"sudo nvpmodel -m {slower}"
    else:
        fix = "nothing, as long as the counters stand still during a measurement"
    return Finding(
        "over_current",
        f"since boot {low} under-voltage, {average} average and {instant} instantaneous "
        "over-current events",
        "each one cuts CPU and GPU clocks for a moment, invisible to tegrastats and INA3221",
        fix,
    )


def _next_slower(board: Board, profile: DeviceProfile | None) -> int | None:
    now = profile.mode(board.mode) if profile and board.mode else None
    if now is None or profile is None:
        return None
    slower = [m for m in profile.modes if m.id is not None and _rank(m) < _rank(now)]
    return max(slower, key=_rank).id if slower else None
