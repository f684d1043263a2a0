"""The form of a device profile and of a known model's shape; both are TOML files in this folder.

Invariant: files are strict (an unknown key is an error) and every number in a device file carries
its source in a comment beside it. What is not known is left out and reads as None, never 0.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from edge_runtime.format.spec import ModelSpec


class Mode(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One power mode of a board (`nvpmodel`), or the only one of another machine."""

    name: str  # as nvpmodel prints it: "15W", "MAXN_SUPER"
    id: int | None = None
    default: bool = False
    sm_count: int | None = None  # streaming multiprocessors that are on
    gpu_max_mhz: float | None = None  # None: not capped or not known
    emc_max_mhz: float | None = None
    bandwidth_gb_s: float | None = None  # of memory, GB = 1e9 bytes
    cpu_cores: int | None = None
    cpu_max_mhz: float | None = None
    power_w: float | None = None  # the budget that the mode stands for, not a measurement


class Measured(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Power measured on a board while it decoded: what a prediction of joules rests on."""

    mode: str  # "": the source does not say
    rail: str  # what was read: VDD_IN is the module, VDD_CPU_GPU_CV less than half of it
    decode_mw: float
    idle_mw: float | None = None
    source: str  # who measured what, with which runtime


class DeviceProfile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is known of a device before anything runs on it."""

    name: str  # of the file: orin-nx-16gb
    title: str
    backend: Literal["cuda", "cpu", "none"]  # what this program computes with there
    why_no_backend: str = ""
    compute_capability: str | None = None  # "8.7"
    memory_total_bytes: int | None = None  # MemTotal of the newest L4T seen: less than the label
    system_used_bytes: int | None = None  # taken by the system before this program, headless
    desktop_bytes: int | None = None  # more, with a desktop
    runtime_bytes: int | None = None  # CUDA context, libraries, interpreter
    memory_bus_bits: int | None = None
    read_share: float | None = None  # of the bandwidth that kernels reach in a step
    int8_mac_per_clk_sm: int | None = None  # dense int8 tensor-core products a clock and SM
    part_numbers: tuple[str, ...] = ()  # in /proc/device-tree/compatible: p3767-0000
    total_rails: tuple[str, ...] = ()  # the rails that add up to the total
    total_scope: str = ""  # "module" or "board"
    modes: tuple[Mode, ...] = ()
    measured: tuple[Measured, ...] = ()

    def mode(self, name: str | None = None) -> Mode | None:
        """Return a mode by its name, or the default one; None: no such mode.

        AGX Orin says MODE_30W where the others say 30W: both forms are understood.
        """
        for mode in self.modes:
            if mode.default if name is None else _bare(mode.name) == _bare(name):
                return mode
        return self.modes[0] if self.modes and name is None else None


def _bare(mode: str) -> str:
    return mode.upper().removeprefix("MODE_")


class KnownShape(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A model whose shapes are known, so that it can be planned for without its weights."""

    name: str  # llama-2-7b-32k
    title: str
    source: str  # where the shapes come from
    spec: ModelSpec
