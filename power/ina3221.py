"""INA3221 and INA238 power monitors as the kernel shows them under /sys.

Invariant: nothing here needs root; a channel that cannot be read (a disabled one answers with an
I/O error) is left out of that reading alone; a channel called NC is not connected.

Two layouts. L4T r32: `bus/i2c/drivers/ina3221x/<dev>/iio:device*/`, `rail_name_N`,
`in_powerN_input` in mW, N from 0. Later: `…/<dev>/hwmon/hwmon*/`, `inN_label`, `inN_input` in mV,
`currN_input` in mA, N from 1 to 3 (what follows are shunt voltages and sums). INA238 (Thor's
carrier): `power1_input` in uW.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from edge_runtime.power.rails import TotalRule, total_rule
from edge_runtime.power.source import PolledSource, PowerUnavailable, Sample

_DRIVERS = "sys/bus/i2c/drivers"
_FOLDERS = ("ina3221", "ina3221x", "ina238")
_DEEPEST = 3  # <driver>/<device>/hwmon/hwmon0, and one level more
_CHANNELS = (1, 2, 3)


@dataclass(frozen=True, slots=True)
class Channel:
    """One rail and how to read it: `read` returns mW or raises OSError or ValueError."""

    name: str
    read: Callable[[], int]


def find_channels(root: Path) -> list[Channel]:
    """Return the channels under `root`, each rail once, in a fixed order."""
    found: dict[str, Channel] = {}
    for folder in _candidates(root):
        for channel in (*_iio_channels(folder), *_hwmon_channels(folder)):
            if channel.name.upper() != "NC":
                found.setdefault(channel.name, channel)
    return list(found.values())


def _candidates(root: Path) -> Iterator[Path]:
    for driver in _FOLDERS:
        for device in _subfolders(root / _DRIVERS / driver):
            if "-" in device.name:  # <bus>-<address>; `module` and the like are none
                yield from _below(device, _DEEPEST)
    for folder in _subfolders(root / "sys/class/hwmon"):
        if _text(folder / "name").startswith(("ina3221", "ina238")):
            yield folder


def _below(folder: Path, depth: int) -> Iterator[Path]:
    yield folder
    if depth:
        for inner in _subfolders(folder):
            # links lead back up (subsystem, driver, of_node)
            if not inner.is_symlink():
                yield from _below(inner, depth - 1)


def _subfolders(folder: Path) -> list[Path]:
    try:
        return sorted(path for path in folder.iterdir() if path.is_dir())
    except OSError:
        return []


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def _number(path: Path) -> int:
    return int(path.read_text(encoding="ascii", errors="replace").strip())


def _iio_channels(folder: Path) -> Iterator[Channel]:
    for n in (0, *_CHANNELS):
        if name := _text(folder / f"rail_name_{n}"):
            yield Channel(name, _iio_reader(folder, n))


def _iio_reader(folder: Path, n: int) -> Callable[[], int]:
    power = folder / f"in_power{n}_input"
    if power.exists():
        return lambda: _number(power)
    volts, current = folder / f"in_voltage{n}_input", folder / f"in_current{n}_input"
    return lambda: round(_number(volts) * _number(current) / 1000)


def _hwmon_channels(folder: Path) -> Iterator[Channel]:
    if (folder / "power1_input").exists():
        labels = (folder / f"{kind}_label" for kind in ("power1", "in1", "curr1"))
        name = next(filter(None, map(_text, labels)), "") or _text(folder / "label") or "VIN"
        yield Channel(name, lambda: round(_number(folder / "power1_input") / 1000))
        return
    for n in _CHANNELS:
        if name := _text(folder / f"in{n}_label"):
            yield Channel(name, _hwmon_reader(folder, n))


def _hwmon_reader(folder: Path, n: int) -> Callable[[], int]:
    volts, current = folder / f"in{n}_input", folder / f"curr{n}_input"
    return lambda: round(_number(volts) * _number(current) / 1000)


class Ina3221Source(PolledSource):
    """Power from the chips' files; the rule of the total is that of the first reading."""

    name = "ina3221"

    def __init__(self, interval_s: float, root: Path = Path("/")) -> None:
        super().__init__(interval_s)
        self._root = root
        self._channels: list[Channel] = []
        self._rule: TotalRule | None = None

    def probe(self) -> str:
        """Find the chips and read every channel once."""
        self._channels = find_channels(self._root)
        if not self._channels:
            raise PowerUnavailable(f"no INA3221 or INA238 under {self._root / 'sys'}")
        rails = self._rails()
        if not rails:
            names = ", ".join(channel.name for channel in self._channels)
            raise PowerUnavailable(f"none of its channels can be read ({names})")
        self._rule = total_rule(rails)
        if self._rule is None:
            raise PowerUnavailable(f"no known total among its rails {', '.join(rails)}")
        self.rail, self.scope = self._rule.name, self._rule.scope
        return f"reads {self.rail}"

    def _rails(self) -> dict[str, int]:
        rails = {}
        for channel in self._channels:
            try:
                rails[channel.name] = channel.read()
            except (OSError, ValueError):
                continue
        return rails

    def read(self) -> Sample:
        """Read every channel; the time is the middle of the reading."""
        begin = time.monotonic()
        rails = self._rails()
        total = self._rule.total(rails) if self._rule is not None else None
        if total is None:
            raise PowerUnavailable(f"{self.rail} cannot be read")
        return Sample(time_s=(begin + time.monotonic()) / 2, total_mw=total, rails=rails)
