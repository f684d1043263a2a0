"""Power of a GPU through the driver's own library (NVML), called with ctypes.

Invariant: one trial reading decides. On Jetson Orin NVML initialises, counts one device and refuses
every query of power and energy. Where the driver counts energy itself that counter is read: it has
no lag. `CUDA_VISIBLE_DEVICES` says which GPU, else the first; only the GPU counts, not its host.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import time
from typing import Any

from edge_runtime.power.source import Emit, PolledSource, PowerUnavailable, Sample

LIBRARY = "libnvidia-ml.so.1"
_NAME_BYTES = 96
MAX_INTERVAL_S = 0.02  # the counter moves every 0.1 s; when it did is worth knowing


class Nvml:
    """The five calls that are needed. Raises PowerUnavailable with the library's own words."""

    def __init__(self, library: Any = None) -> None:
        try:
            self._library = library or ctypes.CDLL(LIBRARY)
        except OSError:
            raise PowerUnavailable(f"no NVIDIA driver library ({LIBRARY})") from None
        self._call("nvmlInit_v2")

    def _call(self, function: str, *args: object) -> None:
        try:
            code = int(getattr(self._library, function)(*args))
        except AttributeError:
            raise PowerUnavailable(f"{function} is missing from the driver") from None
        if code:
            raise PowerUnavailable(f"{function}: {self._words(code)}")

    def _words(self, code: int) -> str:
        try:
            self._library.nvmlErrorString.restype = ctypes.c_char_p
            text = self._library.nvmlErrorString(code)
        except AttributeError:
            return f"error {code}"
        return text.decode("utf-8", "replace") if text else f"error {code}"

    def device(self, wanted: str) -> ctypes.c_void_p:
        """Return the GPU of that number or UUID."""
        handle = ctypes.c_void_p()
        if wanted.isascii() and wanted.isdigit() and len(wanted) < 6:
            number = ctypes.c_uint(int(wanted))
            self._call("nvmlDeviceGetHandleByIndex_v2", number, ctypes.byref(handle))
        else:
            self._call(
                "nvmlDeviceGetHandleByUUID", ctypes.c_char_p(wanted.encode()), ctypes.byref(handle)
            )
        return handle

    def name(self, handle: ctypes.c_void_p) -> str:
        """Return the GPU's name."""
        text = ctypes.create_string_buffer(_NAME_BYTES)
        self._call("nvmlDeviceGetName", handle, text, ctypes.c_uint(_NAME_BYTES))
        return text.value.decode("utf-8", "replace")

    def power_mw(self, handle: ctypes.c_void_p) -> int:
        """Return the power in mW as the driver averages it."""
        value = ctypes.c_uint()
        self._call("nvmlDeviceGetPowerUsage", handle, ctypes.byref(value))
        return value.value

    def energy_mj(self, handle: ctypes.c_void_p) -> int:
        """Return the energy since the driver was loaded, in mJ."""
        value = ctypes.c_ulonglong()
        self._call("nvmlDeviceGetTotalEnergyConsumption", handle, ctypes.byref(value))
        return value.value

    def close(self) -> None:
        """Give the library back."""
        self._call("nvmlShutdown")


class NvmlSource(PolledSource):
    """Power of one GPU; `library` stands in for the driver's in tests."""

    name = "nvml"
    scope = "GPU"

    def __init__(self, interval_s: float, library: Any = None) -> None:
        super().__init__(min(interval_s, MAX_INTERVAL_S))
        self._given = library
        self._nvml: Nvml | None = None
        self._handle = ctypes.c_void_p()
        self._counts = False
        self._last: tuple[int | None, int] = (None, 0)

    def probe(self) -> str:
        """Read once: the energy counter if there is one, else the power."""
        self._open()
        self.stop()
        return f"reads the {'energy counter' if self._counts else 'power'} of {self.rail}"

    def _open(self) -> None:
        wanted = (os.environ.get("CUDA_VISIBLE_DEVICES") or "0").split(",")[0].strip()
        self._nvml = nvml = Nvml(self._given)
        try:
            self._handle = nvml.device(wanted)
            self.rail = f"GPU {wanted} ({nvml.name(self._handle)})"
            nvml.power_mw(self._handle)
        except PowerUnavailable:
            self.stop()
            raise
        try:
            nvml.energy_mj(self._handle)
            self._counts = True
        except PowerUnavailable:
            self._counts = False

    def start(self, emit: Emit) -> None:
        """Open the library and poll."""
        self._open()
        super().start(emit)

    def stop(self) -> None:
        """End polling and close the library."""
        super().stop()
        nvml, self._nvml = self._nvml, None
        if nvml is not None:
            with contextlib.suppress(PowerUnavailable):
                nvml.close()

    def read(self) -> Sample:
        """Read power, and the energy counter if there is one."""
        nvml = self._nvml
        if nvml is None:
            raise PowerUnavailable("it is closed")
        begin = time.monotonic()
        energy = nvml.energy_mj(self._handle) if self._counts else None
        now = (begin + time.monotonic()) / 2
        if energy is None or energy != self._last[0]:  # a call takes 2 ms; power moves no oftener
            self._last = energy, nvml.power_mw(self._handle)
        power = self._last[1]
        return Sample(time_s=now, total_mw=power, energy_mj=energy, rails={self.rail: power})
