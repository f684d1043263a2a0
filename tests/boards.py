"""Folders that stand for boards: what /proc, /sys and /etc of a Jetson show."""

from __future__ import annotations

from pathlib import Path
from typing import Any

NX16: dict[str, Any] = {
    "model": "NVIDIA Jetson Orin NX Engineering Reference Developer Kit",
    "compatible": ("nvidia,p3768-0000+p3767-0000", "nvidia,p3767-0000", "nvidia,tegra234"),
    "l4t": "36.4.3",
    "memory_mib": 15656,
    "modes": {"MAXN": 0, "10W": 1, "15W": 2, "25W": 3},
    "mode_id": 0,
    "gpu_mhz": (918, 918, 918),
    "cores": "0-7",
}
NX8 = NX16 | {"compatible": (), "memory_mib": 7620, "cores": "0-5"}
NANO_SUPER = {
    "model": "NVIDIA Jetson Orin Nano Engineering Reference Developer Kit Super",
    "compatible": ("nvidia,p3768-0000+p3767-0005-super", "nvidia,tegra234"),
    "l4t": "36.4.4",
    "memory_mib": 7620,
    "modes": {"15W": 0, "25W": 1, "MAXN_SUPER": 2, "7W": 3},
    "mode_id": 2,
    "gpu_mhz": (1020, 1020, 1020),
    "cores": "0-5",
}
NANO = NANO_SUPER | {
    "model": "NVIDIA Jetson Orin Nano Developer Kit",
    "compatible": ("nvidia,p3768-0000+p3767-0005", "nvidia,p3767-0005", "nvidia,tegra234"),
    "l4t": "35.4.1",
    "memory_mib": 7337,
    "modes": {"15W": 0, "7W": 1},
    "mode_id": 0,
    "gpu_mhz": (624, 624, 624),
}
AGX64 = {
    "model": "NVIDIA Jetson AGX Orin Developer Kit",
    "compatible": ("nvidia,p3737-0000+p3701-0005", "nvidia,p3701-0005", "nvidia,tegra234"),
    "l4t": "36.4.0",
    "memory_mib": 62841,
    "modes": {"MAXN": 0, "MODE_15W": 1, "MODE_30W": 2, "MODE_50W": 3},
    "mode_id": 0,
    "gpu_mhz": (1300, 1300, 1300),
    "cores": "0-11",
}
AGX32_KIT = AGX64 | {"compatible": (), "memory_mib": 30697}
AGX32 = AGX32_KIT | {"model": "NVIDIA Jetson AGX Orin", "cores": "0-7"}
XAVIER_NX = {
    "model": "NVIDIA Jetson Xavier NX Developer Kit",
    "compatible": ("nvidia,p3509-0000+p3668-0000", "nvidia,tegra194"),
    "l4t": "35.4.1",
    "memory_mib": 6834,
    "modes": {"MODE_15W_6CORE": 2, "MODE_20W_6CORE": 8},
    "mode_id": 8,
    "gpu_mhz": (1109, 1109, 1109),
    "cores": "0-5",
}
AGX_XAVIER = XAVIER_NX | {
    "model": "Jetson-AGX",
    "compatible": (),
    "memory_mib": 31927,
    "modes": {"MAXN": 0, "MODE_15W": 2},
    "mode_id": 0,
}
THOR = {
    "model": "NVIDIA Jetson AGX Thor Developer Kit",
    "compatible": ("nvidia,p4071-0000+p3834-0008", "nvidia,tegra264"),
    "l4t": "38.2.0",
    "memory_mib": 125772,
    "modes": {"MAXN": 0, "120W": 1},
    "mode_id": 0,
    "gpu_mhz": (1575, 1575, 1575),
    "cores": "0-13",
}
BOARDS = {
    "orin-nx-16gb": NX16,
    "orin-nx-8gb": NX8,
    "orin-nano-8gb": NANO,
    "orin-nano-8gb-super": NANO_SUPER,
    "agx-orin-64gb": AGX64,
    "agx-orin-devkit-32gb": AGX32_KIT,
    "agx-orin-32gb": AGX32,
    "xavier-nx-8gb": XAVIER_NX,
    "agx-xavier-32gb": AGX_XAVIER,
    "thor-t5000": THOR,
}


def write(root: Path, path: str, text: str) -> None:
    """Write one file of the tree, its folders included."""
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text(text)


def make(
    root: Path,
    *,
    model: str,
    compatible: tuple[str, ...],
    l4t: str,
    memory_mib: int,
    modes: dict[str, int],
    mode_id: int,
    gpu_mhz: tuple[int, int, int],
    cores: str,
    desktop: bool = False,
    swaps: tuple[str, ...] = (),
    over_current: tuple[int, int, int] = (0, 0, 0),
    throttling: tuple[str, ...] = (),
) -> Path:
    """Build a board under `root` and return it. gpu_mhz: now, least, most."""
    write(root, "proc/device-tree/model", model + "\0")
    write(root, "proc/device-tree/compatible", "".join(name + "\0" for name in compatible))
    major, rest = l4t.split(".", 1)
    write(root, "etc/nv_tegra_release", f"# R{major} (release), REVISION: {rest}, GCID: 1, BOARD\n")
    write(root, "proc/meminfo", f"MemTotal:       {memory_mib * 1024} kB\nMemFree: 1 kB\n")
    lines = [f"< POWER_MODEL ID={number} NAME={name} >" for name, number in modes.items()]
    write(root, "etc/nvpmodel.conf", "\n".join([*lines, "< PM_CONFIG DEFAULT=0 >"]))
    write(root, "var/lib/nvpmodel/status", f"pmode:{mode_id:04d} fmode:quiet\n")
    for name, value in zip(("cur", "min", "max"), gpu_mhz, strict=True):
        write(root, f"sys/class/devfreq/17000000.gpu/{name}_freq", f"{value * 1_000_000}\n")
        write(root, f"sys/devices/system/cpu/cpu0/cpufreq/scaling_{name}_freq", "1984000\n")
    write(root, "sys/devices/system/cpu/online", cores + "\n")
    write(root, "sys/kernel/nvpmodel_clk_cap/emc", "3199000000\n")
    for i, (name, value) in enumerate({"cpu": 51234, "gpu": 49000, "cv0": -256000}.items()):
        write(root, f"sys/class/thermal/thermal_zone{i}/type", f"{name}-thermal\n")
        write(root, f"sys/class/thermal/thermal_zone{i}/temp", f"{value}\n")
    alerts = ("cpu-throttle-alert", "gpu-throttle-alert", "hot-surface-alert", "pwm-fan")
    for i, name in enumerate(alerts):
        on = name in throttling or name in ("hot-surface-alert", "pwm-fan")
        write(root, f"sys/class/thermal/cooling_device{i}/type", name + "\n")
        write(root, f"sys/class/thermal/cooling_device{i}/cur_state", f"{int(on)}\n")
    write(root, "sys/class/hwmon/hwmon1/name", "ina3221\n")
    write(root, "sys/class/hwmon/hwmon1/in1_label", "VDD_IN\n")
    write(root, "sys/class/hwmon/hwmon1/in1_input", "4984\n")
    write(root, "sys/class/hwmon/hwmon1/curr1_input", "1856\n")
    write(root, "sys/class/hwmon/hwmon3/name", "soctherm_oc\n")
    for i, count in enumerate(over_current, start=1):
        write(root, f"sys/class/hwmon/hwmon3/oc{i}_event_cnt", f"{count}\n")
    write(root, "usr/bin/tegrastats", "#!/bin/sh\n")
    header = "Filename\tType\tSize\tUsed\tPriority\n"
    write(root, "proc/swaps", header + "".join(line + "\n" for line in swaps))
    target = "graphical" if desktop else "multi-user"
    (root / "etc/systemd/system").mkdir(parents=True, exist_ok=True)
    (root / "etc/systemd/system/default.target").symlink_to(f"/lib/systemd/system/{target}.target")
    names = {1: "systemd", 812: "Xorg", 1044: "gnome-shell"} if desktop else {1: "systemd"}
    for pid, name in names.items():
        write(root, f"proc/{pid}/comm", name + "\n")
        write(root, f"proc/{pid}/statm", "500000 60000 9000 1 0 1 0\n")
    return root
