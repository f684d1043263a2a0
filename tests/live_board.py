"""A board whose rails, clocks, memory and heat follow what this process and its children really do.

Power is idle plus a share by their CPU time, seen through a sensor with a lag and 40 mW steps; heat
follows power, raises the throttle alert above a limit and cuts the clock until it is cooler;
MemAvailable goes down with their resident memory. `joules` is the truth behind the sensor.
"""

from __future__ import annotations

import math
import os
import threading
import time
from pathlib import Path
from types import TracebackType

import boards
import numpy as np
import psutil

IDLE_W, LOAD_W = 5.0, 17.0  # of a board that works on one core
TAU_S = 0.3  # the sensor's lag
STEP_MA = 8  # 40 mW at 5 V
EVERY_S = 0.04
COLD_C, COOLER_C, LIMIT_C, HOTTEST_C = 50.0, 85.0, 95.0, 105.0
FREE_BYTES = 12 << 30  # before anything of ours runs


class LiveBoard:
    """An Orin NX 16GB under `root` that lives while it is entered."""

    def __init__(
        self, root: Path, *, heat_c_per_j: float = 0.0, cooling_per_s: float = 0.5
    ) -> None:
        """heat_c_per_j: degrees that a joule above idle adds; cooling_per_s: share of what is above
        COLD_C that goes in a second."""
        board = boards.NX16 | {"gpu_mhz": (306, 306, 918)}
        self.root = boards.make(root, **board)
        self._heat, self._cooling = heat_c_per_j, cooling_per_s
        self._me = psutil.Process()
        self._rss = self._resident()
        self._seen_w, self.temperature_c, self.throttling = IDLE_W, COLD_C, False
        self._times, self._joules = [time.monotonic()], [0.0]
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._live, name="live-board", daemon=True)
        self._show(IDLE_W, 0.0)

    def __enter__(self) -> LiveBoard:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, _: BaseException | None, __: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join()

    def joules(self, begin_s: float, end_s: float) -> float:
        """What was really used between two readings of the monotonic clock."""
        begin, end = np.interp([begin_s, end_s], self._times, self._joules)
        return float(end - begin)

    # ----

    def _live(self) -> None:
        used = self._cpu_seconds()
        while not self._over.wait(EVERY_S):
            now = time.monotonic()
            seconds = now - self._times[-1]
            busy = self._cpu_seconds()
            load = min(1.0, max(0.0, busy - used) / seconds)
            used = busy
            watts = IDLE_W + load * (LOAD_W - IDLE_W) * (0.6 if self.throttling else 1.0)
            self._joules.append(self._joules[-1] + watts * seconds)
            self._times.append(now)
            self._seen_w += (watts - self._seen_w) * (1 - math.exp(-seconds / TAU_S))
            self.temperature_c += (watts - IDLE_W) * seconds * self._heat
            self.temperature_c -= (self.temperature_c - COLD_C) * min(1, self._cooling * seconds)
            self.temperature_c = min(self.temperature_c, HOTTEST_C)
            if self.temperature_c > LIMIT_C:
                self.throttling = True
            elif self.temperature_c < COOLER_C:
                self.throttling = False
            self._show(self._seen_w, load)

    def _show(self, watts: float, load: float) -> None:
        milliamperes = round(watts / 5 * 1000 / STEP_MA) * STEP_MA
        mhz = (612 if self.throttling else 918) if load > 0.2 else 306
        available = FREE_BYTES - max(0, self._resident() - self._rss)
        hwmon, gpu = "sys/class/hwmon/hwmon1", "sys/class/devfreq/17000000.gpu"
        self._write(f"{hwmon}/in1_input", 5000)
        self._write(f"{hwmon}/curr1_input", milliamperes)
        self._write(f"{gpu}/cur_freq", mhz * 1_000_000)
        self._write("sys/class/thermal/thermal_zone1/temp", round(self.temperature_c * 1000))
        self._write("sys/class/thermal/cooling_device1/cur_state", int(self.throttling))
        total = 15656 << 10
        lines = f"MemTotal: {total} kB\nMemFree: 99 kB\nMemAvailable: {available >> 10} kB"
        self._write("proc/meminfo", lines)

    def _write(self, path: str, value: object) -> None:
        """As the kernel does: whoever reads sees the old text or the new one."""
        new = self.root / f"{path}.new"
        new.write_text(f"{value}\n")
        os.replace(new, self.root / path)

    def _processes(self) -> list[psutil.Process]:
        return [self._me, *self._me.children(recursive=True)]

    def _cpu_seconds(self) -> float:
        total = 0.0
        for process in self._processes():
            try:
                times = process.cpu_times()
                total += times.user + times.system
            except psutil.Error:  # it has just ended
                continue
        return total

    def _resident(self) -> int:
        total = 0
        for process in self._processes():
            try:
                total += process.memory_info().rss
            except psutil.Error:
                continue
        return total
