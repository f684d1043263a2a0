"""Which board this is, and the state it is in: modes, clocks, temperatures, throttling.

Invariant: looking never fails and starts nothing but `nvpmodel -q` (only on the real root, and only
where its state file cannot be read). What cannot be read is None, never 0. Every path is taken
under `root`, so that a recorded tree stands for a board.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

import msgspec

from edge_runtime.machine import meminfo_bytes, read
from edge_runtime.profiles import load

JETSON = re.compile(r"jetson|orin|xavier|thor|tegra", re.IGNORECASE)
RELEASE = re.compile(r"R(\d+) \(release\), REVISION: ([\d.]+)")
PART = re.compile(r"p\d{4}-\d{4}(?:-super)?")
MODE = re.compile(r"^\s*<\s*POWER_MODEL\s+ID=(\d{1,4})\s+NAME=(\S+?)\s*>", re.MULTILINE)
FAMILIES = (  # what the device tree calls the board -> how its profiles' names begin
    (r"agx orin", "agx-orin-"),
    (r"orin nx", "orin-nx-"),
    (r"orin nano", "orin-nano-"),
    (r"xavier nx", "xavier-nx-"),
    (r"agx xavier|jetson-agx", "agx-xavier-"),
    (r"thor", "thor-"),
)
GPU_NAMES = re.compile(r"gpu|ga10b|gv11b|gp10b|gm20b|gpc")
LEAST_SHARE = 0.7  # of the label's memory that MemTotal shows, even with early firmware
OFF_C = -200.0  # a sensor whose block has no power reads -256
NO_CAP_HZ = 2**31 - 1  # what a cap of -1 reads as


class Clock(msgspec.Struct, frozen=True, kw_only=True):
    """A clock as it is and its bounds in force, MHz. max_mhz is the power mode's cap."""

    now_mhz: float | None = None
    min_mhz: float | None = None
    max_mhz: float | None = None


class Board(msgspec.Struct, frozen=True, kw_only=True):
    """A Jetson and its state; on another machine the profile is "cpu" and all else None."""

    profile: str | None  # name of a device profile; None: a Jetson that none describes
    reason: str  # how the profile was found, or why there is none
    model: str | None = None
    part: str | None = None  # module's part number: p3767-0000
    l4t: str | None = None  # 36.4.7
    memory_total_bytes: int | None = None
    mode: str | None = None  # as nvpmodel names it
    mode_id: int | None = None
    modes: dict[str, int] | None = None  # name -> ID, of /etc/nvpmodel.conf
    cpu_cores: int | None = None  # that are on
    gpu: Clock = Clock()
    emc: Clock = Clock()
    cpu: Clock = Clock()
    temperatures_c: dict[str, float] | None = None
    throttling: tuple[str, ...] | None = None  # throttle alerts in force now
    over_current: dict[str, int] | None = None  # oc1, oc2, oc3: events since boot

    @property
    def is_jetson(self) -> bool:
        """Say whether this is a Jetson at all."""
        return self.profile != "cpu"


def detect(root: Path = Path("/")) -> Board:
    """Recognise the board under `root` and read its state. Never raises."""
    model = read(root / "proc/device-tree/model")
    release = read(root / "etc/nv_tegra_release")
    if reason := why_no_jetson(root, model, release):
        return Board(profile="cpu", reason=f"not a Jetson: {reason}")
    compatible = read(root / "proc/device-tree/compatible") or ""
    total = meminfo_bytes("MemTotal", root)
    modes = _modes(root)
    part, profile, reason = _profile(model or "", compatible, total, modes)
    mode, mode_id = _mode(root, modes)
    return Board(
        profile=profile,
        reason=reason,
        model=model,
        part=part,
        l4t=l4t_release(release),
        memory_total_bytes=total,
        mode=mode,
        mode_id=mode_id,
        modes=modes,
        cpu_cores=_cores_online(root),
        gpu=_gpu_clock(root),
        emc=_emc_clock(root),
        cpu=_cpu_clock(root),
        temperatures_c=temperatures_c(root),
        throttling=throttling(root),
        over_current=over_current(root),
    )


def read_number(path: Path) -> int | None:
    """Return the integer of 64 bits that a small file holds; None: unreadable or something else."""
    match = re.fullmatch(r"-?[0-9]{1,19}", read(path) or "")
    return int(match.group()) if match else None


def entries(folder: Path, name: Callable[[str], object] = bool) -> list[Path]:
    """Return a folder's entries whose names are wanted, sorted; none where it is unreadable."""
    try:
        return [folder / entry for entry in sorted(os.listdir(folder)) if name(entry)]
    except OSError:
        return []


def why_no_jetson(root: Path, model: str | None, release: str | None) -> str | None:
    """Say why this is no Jetson; None: it is one.

    A container often hides the device tree and the release file, not the kernel's name.
    """
    kernel = read(root / "proc/sys/kernel/osrelease") or ""
    if release is not None or kernel.endswith("-tegra"):
        return None
    if model is None:
        return "no /proc/device-tree/model and no /etc/nv_tegra_release"
    return None if JETSON.search(model) else f"the device tree says {model!r}"


def l4t_release(text: str | None) -> str | None:
    """Return the release of Linux for Tegra, "36.4.7", from /etc/nv_tegra_release's text."""
    match = RELEASE.search(text or "")
    return f"{match.group(1)}.{match.group(2)}" if match else None


def _profile(
    model: str, compatible: str, total: int | None, modes: dict[str, int] | None
) -> tuple[str | None, str | None, str]:
    """Return the module's part number, its profile and how that was found, or why not."""
    parts = PART.findall(compatible)
    if modes is not None:
        fast = "MAXN_SUPER" in modes
    else:
        fast = "super" in model.lower() or any(part.endswith("-super") for part in parts)
    bare = [part.removesuffix("-super") for part in parts]
    for part in bare:
        for wanted in (f"{part}-super", part) if fast else (part,):
            if name := load.device_of_part(wanted):
                return part, name, f"part number {part}"
    part = bare[-1] if bare else None  # the carrier stands before the module
    family = next((p for words, p in FAMILIES if re.search(words, model, re.IGNORECASE)), None)
    if family is None or total is None:
        lacks = "the device tree" if family is None else "/proc/meminfo"
        seen = f" ({model!r}, part {part})" if model or part else ""
        return part, None, f"no profile fits what {lacks} says{seen}"
    name = _by_memory(family, model, total, fast)
    if name is None:
        return part, None, f"no {family[:-1]} module is known with {total >> 20} MiB"
    return part, name, f"model {model!r} and {total >> 20} MiB of memory"


def _by_memory(family: str, model: str, total: int, fast: bool) -> str | None:
    """Choose among the modules of one name by the memory that their titles say."""
    kit = "developer kit" in model.lower()
    fitting = []
    for name in load.device_names():
        label = re.search(r"(\d+)GB", load.device(name).title) if name.startswith(family) else None
        if label and LEAST_SHARE < total / (int(label.group(1)) << 30) <= 1:
            fitting.append((name.endswith("-super") == fast, ("devkit" in name) == kit, name))
    return max(fitting)[2] if fitting else None


def _modes(root: Path) -> dict[str, int] | None:
    found = MODE.findall(read(root / "etc/nvpmodel.conf") or "")
    return {name: int(number) for number, name in found} or None


def _mode(root: Path, modes: dict[str, int] | None) -> tuple[str | None, int | None]:
    """Return the power mode's name and ID: of the state file, else of `nvpmodel -q`."""
    match = re.search(r"pmode:(\d{1,4})", read(root / "var/lib/nvpmodel/status") or "")
    if match:
        number = int(match.group(1))
        names = [name for name, one in (modes or {}).items() if one == number]
        if names:
            return names[0], number
        return (_query()[0] if root == Path("/") else None), number
    return _query() if root == Path("/") else (None, None)


def _query() -> tuple[str | None, int | None]:
    import subprocess  # not needed elsewhere, and `plan` is in a hurry

    try:
        done = subprocess.run(
            ["nvpmodel", "-q"], capture_output=True, text=True, timeout=5, check=False
        )
    except (OSError, ValueError, subprocess.SubprocessError):
        return None, None
    match = re.search(r"NV Power Mode:\s*(\S+)(?:\s+(\d{1,4}))?", done.stdout)
    if not match:
        return None, None
    return match.group(1), int(match.group(2)) if match.group(2) else None


def _cores_online(root: Path) -> int | None:
    ranges = re.findall(
        r"(\d{1,4})(?:-(\d{1,4}))?", read(root / "sys/devices/system/cpu/online") or ""
    )
    return sum(int(last or first) - int(first) + 1 for first, last in ranges) or None


def _mhz(hertz: int | None) -> float | None:
    """Return MHz; None for no clock and for no cap, which newer kernels write as 2^63 - 1."""
    if hertz is None or hertz == NO_CAP_HZ or not 0 < hertz < 1e10:
        return None
    return hertz / 1e6


def _gpu_clock(root: Path) -> Clock:
    folders = entries(root / "sys/class/devfreq", GPU_NAMES.search)
    for folder in [*folders, root / "sys/devices/platform/17000000.gpu/devfreq_dev"]:
        now, low, high = (
            _mhz(read_number(folder / f"{name}_freq")) for name in ("cur", "min", "max")
        )
        if now is not None or high is not None:
            return Clock(now_mhz=now, min_mhz=low, max_mhz=high)
    return Clock()


def _emc_clock(root: Path) -> Clock:
    """Return the memory's clock (readable with root only) and its cap; no cap reads as None."""
    caps = ("nvpmodel_clk_cap/emc", "nvpmodel_emc_cap/emc_iso_cap")
    cap = next((n for c in caps if (n := read_number(root / "sys/kernel" / c)) is not None), None)
    now = read_number(root / "sys/kernel/debug/bpmp/debug/clk/emc/rate")
    return Clock(now_mhz=_mhz(now), max_mhz=_mhz(cap))


def _cpu_clock(root: Path) -> Clock:
    """Return the fastest core's clock and the bounds over all cores."""
    cores = entries(root / "sys/devices/system/cpu", re.compile(r"cpu\d+$").match)
    read_all = {
        name: [n for c in cores if (n := read_number(c / f"cpufreq/scaling_{name}_freq"))]
        for name in ("cur", "min", "max")
    }
    now, low, high = (max(values) / 1e3 if values else None for values in read_all.values())
    return Clock(now_mhz=now, min_mhz=low, max_mhz=high)


def temperatures_c(root: Path) -> dict[str, float] | None:
    """Return degrees by sensor, without those that are off and the PMIC's constant."""
    found = {}
    for zone in entries(root / "sys/class/thermal", lambda n: n.startswith("thermal_zone")):
        name, value = read(zone / "type"), read_number(zone / "temp")
        if name and value is not None and value / 1000 > OFF_C and not name.startswith("PMIC"):
            found[re.sub(r"-therm(al)?$", "", name)] = value / 1000
    return found or None


def throttling(root: Path) -> tuple[str, ...] | None:
    """Return the alerts in force. Fans, cpufreq and hot-surface-alert take no speed away."""
    states = {}
    for device in entries(root / "sys/class/thermal", lambda n: n.startswith("cooling_device")):
        name, state = read(device / "type") or "", read_number(device / "cur_state")
        if name.endswith("-throttle-alert") and state is not None:
            states[name] = state
    return tuple(name for name, state in states.items() if state > 0) if states else None


def over_current(root: Path) -> dict[str, int] | None:
    """Return events of the hardware's power guards since boot; None where they are not counted."""
    for folder in entries(root / "sys/class/hwmon"):
        if read(folder / "name") == "soctherm_oc":
            counts = {f"oc{i}": read_number(folder / f"oc{i}_event_cnt") for i in (1, 2, 3)}
            return {name: n for name, n in counts.items() if n is not None} or None
    return None
