"""Sources of power readings: file trees per board, stand-ins for libraries, logs."""

from __future__ import annotations

import ctypes
import sys
import types
from pathlib import Path
from typing import Any

import pytest
from tegrastats_fakes import corpus, install_script

from edge_runtime.errors import BackendUnavailable, UsageError
from edge_runtime.power import PowerLogError, PowerUnavailable, open_meter
from edge_runtime.power.ina3221 import Ina3221Source
from edge_runtime.power.jtop import JtopSource
from edge_runtime.power.nvml import NvmlSource
from edge_runtime.power.replay import ReplaySource

DRIVERS = "sys/bus/i2c/drivers"


@pytest.fixture(autouse=True)
def bare_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No tegrastats of this machine's own, no GPU chosen."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr("edge_runtime.power.tegrastats_child._PLACES", ())
    monkeypatch.setattr("edge_runtime.power.nvml.LIBRARY", "no-such-library.so")
    monkeypatch.setitem(sys.modules, "jtop", None)
    return folder


def write(folder: Path, **files: object) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name).write_text(f"{text}\n")
    return folder


def hwmon(folder: Path, rails: dict[str, tuple[int, int]], chip: str = "ina3221") -> Path:
    """A chip as L4T r34 and later show it; rails are (mV, mA), by label."""
    write(folder, name=chip, in7_label="sum of shunt voltages", in4_input=80, curr4_input=9)
    for n, (label, (mv, ma)) in enumerate(rails.items(), 1):
        write(folder, **{f"in{n}_label": label, f"in{n}_input": mv, f"curr{n}_input": ma})
    return folder


def iio(folder: Path, rails: dict[str, int]) -> Path:
    """A chip as L4T r32 shows it; rails are mW."""
    for n, (label, mw) in enumerate(rails.items()):
        write(folder, **{f"rail_name_{n}": label, f"in_power{n}_input": mw})
    return folder


def unreadable(path: Path) -> None:
    """A folder in place of a file: reading it is an OSError, as root too."""
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize("deeper", ["", "hwmon", "device/hwmon"])
def test_orin_nano(tmp_path: Path, deeper: str) -> None:
    device = tmp_path / DRIVERS / "ina3221" / "1-0040"
    rails = {"VDD_IN": (5000, 1100), "VDD_CPU_GPU_CV": (5000, 100), "VDD_SOC": (5000, 250)}
    hwmon(device / deeper / "hwmon3", rails)
    source = Ina3221Source(0.1, tmp_path)
    assert source.probe() == "reads VDD_IN"
    assert source.scope == "module"
    sample = source.read()
    assert sample.total_mw == 5500
    assert sample.rails == {"VDD_IN": 5500, "VDD_CPU_GPU_CV": 500, "VDD_SOC": 1250}


def test_agx_orin_with_channels_that_are_not_connected(tmp_path: Path) -> None:
    driver = tmp_path / DRIVERS / "ina3221"
    first = hwmon(
        driver / "1-0040/hwmon/hwmon1",
        {"VDD_GPU_SOC": (20000, 120), "VDD_CPU_CV": (20000, 20), "VIN_SYS_5V0": (5000, 800)},
    )
    second = hwmon(
        driver / "1-0041/hwmon/hwmon2",
        {"NC": (0, 0), "VDDQ_VDD2_1V8AO": (5000, 60), "NC ": (0, 0)},
    )
    unreadable(second / "in1_input")
    source = Ina3221Source(0.1, tmp_path)
    source.probe()
    assert source.rail == "VDD_GPU_SOC+VDD_CPU_CV+VIN_SYS_5V0"
    sample = source.read()
    assert sample.total_mw == 2400 + 400 + 4000
    assert sample.rails["VDDQ_VDD2_1V8AO"] == 300
    assert "NC" not in sample.rails
    unreadable(second / "curr2_input")  # one channel fails: the others are read
    assert source.read().total_mw == 6800
    unreadable(first / "curr2_input")  # one rail of the total fails: no total
    with pytest.raises(PowerUnavailable, match="cannot be read"):
        source.read()


def test_nano_and_tx2_on_r32(tmp_path: Path) -> None:
    base = tmp_path / DRIVERS / "ina3221x"
    iio(base / "6-0040/iio:device0", {"POM_5V_IN": 2300, "POM_5V_GPU": 100, "POM_5V_CPU": 500})
    source = Ina3221Source(0.1, tmp_path)
    source.probe()
    assert (source.rail, source.scope, source.read().total_mw) == ("POM_5V_IN", "board", 2300)
    other = tmp_path / "other"
    device = iio(other / DRIVERS / "ina3221x/0-0041/iio/iio:device1", {"VDD_IN": 0, "VDD_MUX": 9})
    (device / "in_power0_input").unlink()
    write(device, in_voltage0_input=19000, in_current0_input=200)
    source = Ina3221Source(0.1, other)
    source.probe()
    assert source.read().total_mw == 3800


def test_thor_with_an_ina238(tmp_path: Path) -> None:
    rails = {"VDD_GPU": (5000, 400), "VDD_CPU_SOC_MSS": (5000, 1000), "VIN_SYS_5V0": (5000, 1000)}
    hwmon(tmp_path / "sys/class/hwmon/hwmon0", rails)
    source = Ina3221Source(0.1, tmp_path)
    source.probe()
    assert (source.scope, source.read().total_mw) == ("module", 12000)
    write(tmp_path / "sys/class/hwmon/hwmon1", name="ina238", power1_input=19_780_000, in1_input=1)
    source = Ina3221Source(0.1, tmp_path)
    source.probe()
    assert (source.rail, source.scope, source.read().total_mw) == ("VIN", "board", 19780)


def test_sysfs_without_power(tmp_path: Path) -> None:
    with pytest.raises(PowerUnavailable, match="no INA3221"):
        Ina3221Source(0.1, tmp_path).probe()
    folder = hwmon(tmp_path / "sys/class/hwmon/hwmon0", {"VDD_CPU": (5000, 1)})
    with pytest.raises(PowerUnavailable, match="no known total among its rails VDD_CPU"):
        Ina3221Source(0.1, tmp_path).probe()
    (folder / "curr1_input").write_text("junk")
    with pytest.raises(PowerUnavailable, match="none of its channels"):
        Ina3221Source(0.1, tmp_path).probe()


class Library:
    """NVML in a class: what each call answers, and whether it refuses."""

    def __init__(self, power: int | None = 250_000, energy: int | None = 7_000) -> None:
        self.answers = {"power": power, "energy": energy}
        self.open = 0

    def nvmlInit_v2(self) -> int:
        self.open += 1
        return 0

    def nvmlShutdown(self) -> int:
        self.open -= 1
        return 0

    def nvmlDeviceGetHandleByIndex_v2(self, number: Any, handle: Any) -> int:
        return 0 if number.value == 0 else 2

    def nvmlDeviceGetHandleByUUID(self, text: Any, handle: Any) -> int:
        return 0 if text.value == b"GPU-1234" else 6

    def nvmlDeviceGetName(self, handle: Any, text: Any, size: Any) -> int:
        text.value = b"A GPU"
        return 0

    def _answer(self, what: str, value: Any, kind: Any) -> int:
        if self.answers[what] is None:
            return 3
        ctypes.cast(value, ctypes.POINTER(kind))[0] = self.answers[what]
        return 0

    def nvmlDeviceGetPowerUsage(self, handle: Any, value: Any) -> int:
        return self._answer("power", value, ctypes.c_uint)

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: Any, value: Any) -> int:
        return self._answer("energy", value, ctypes.c_ulonglong)


def test_nvml_prefers_the_counter(monkeypatch: pytest.MonkeyPatch) -> None:
    library = Library()
    source = NvmlSource(0.1, library)
    assert source.probe() == "reads the energy counter of GPU 0 (A GPU)"
    assert library.open == 0
    assert source.scope == "GPU"
    source._open()
    assert (source.read().energy_mj, source.read().total_mw) == (7_000, 250_000)
    source.stop()
    with pytest.raises(PowerUnavailable, match="closed"):
        source.read()
    source = NvmlSource(0.1, Library(energy=None))
    assert source.probe() == "reads the power of GPU 0 (A GPU)"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-1234,0")
    assert "GPU-1234" in NvmlSource(0.1, library).probe()


def test_nvml_of_orin_initialises_and_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    library = Library(power=None, energy=None)
    with pytest.raises(PowerUnavailable, match="nvmlDeviceGetPowerUsage: error 3"):
        NvmlSource(0.1, library).probe()
    assert library.open == 0
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5")
    with pytest.raises(PowerUnavailable, match="HandleByIndex"):
        NvmlSource(0.1, library).probe()
    with pytest.raises(PowerUnavailable, match="no NVIDIA driver"):
        NvmlSource(0.1).probe()


def fake_jtop(monkeypatch: pytest.MonkeyPatch, power: Any) -> None:
    class Client:
        def __init__(self, interval: float) -> None:
            self.power = power

        def start(self) -> None:
            if self.power is None:
                raise RuntimeError("the jtop.service is not active")

        def close(self) -> None:
            pass

    module = types.ModuleType("jtop")
    module.jtop = Client  # type: ignore[attr-defined]  # a module made here has no attributes
    monkeypatch.setitem(sys.modules, "jtop", module)
    monkeypatch.setattr("edge_runtime.power.jtop.PROBE_S", 0.0)


def test_jtop(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(PowerUnavailable, match="not installed"):
        JtopSource(0.1).probe()
    rails = {"VDD_GPU_SOC": {"power": 5}, "VDD_CPU_CV": {"power": 6}, "VIN_SYS_5V0": {"power": 7}}
    # its own total adds the branch VDDQ_VDD2_1V8AO
    rails |= {"VDDQ_VDD2_1V8AO": {"power": 1}, "NC": {"power": 0}, "USB": {}}
    fake_jtop(monkeypatch, {"rail": rails, "tot": {"power": 19}})
    source = JtopSource(0.1)
    assert source.probe() == "reads VDD_GPU_SOC+VDD_CPU_CV+VIN_SYS_5V0"
    source._connect()
    assert source.read().total_mw == 18
    for power, reason in ((None, "RuntimeError"), ({}, "no known total"), ({"rail": 3}, "none")):
        fake_jtop(monkeypatch, power)
        with pytest.raises(PowerUnavailable, match=reason):
            JtopSource(0.1).probe()


def log_of(tmp_path: Path, *lines: str) -> Path:
    path = tmp_path / "power.log"
    path.write_text("".join(line + "\n" for line in lines))
    return path


def orin(mw: int, date: str = "") -> str:
    return f"{date}RAM 1/2MB (lfb 1x4MB) VDD_IN {mw}mW/1mW"


def test_replay_starts_over_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("edge_runtime.power.replay.time.monotonic", lambda: now[0])
    source = ReplaySource(log_of(tmp_path, "junk", orin(1000), orin(2000), "RAM 1/2MB", orin(3000)))
    assert "every 1 s (assumed)" in source.probe()
    seen: list[float | None] = []
    for _ in range(6):
        try:
            seen.append(source.read().total_mw)
        except PowerUnavailable:
            seen.append(None)
        now[0] += 1
    assert seen == [1000, 2000, None, 3000, 1000, 2000]
    assert source.notes == [f"{tmp_path / 'power.log'} ended and was started over"]
    now[0] += 1  # held up for a line
    assert source.read().total_mw == 3000


def test_replay_keeps_the_interval_of_the_dates(tmp_path: Path) -> None:
    dates = [f"10-08-2026 04:38:{s:02} " for s in (1, 1, 2, 2, 3)]
    source = ReplaySource(log_of(tmp_path, *(orin(1, date) for date in dates)))
    assert "every 0.5 s (its dates)" in source.probe()


def test_replay_of_what_is_no_log(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "none", log_of(tmp_path, "junk")):
        with pytest.raises(PowerLogError) as error:
            open_meter(f"replay:{path}")
        assert error.value.exit_code == 5
        assert error.value.hint
    with pytest.raises(PowerLogError, match="no line with a known total"):
        open_meter(f"replay:{log_of(tmp_path, 'RAM 1/2MB')}")


def test_auto_says_why_not(tmp_path: Path, bare_path: Path) -> None:
    with pytest.raises(BackendUnavailable) as error:
        open_meter("auto", root=tmp_path)
    assert error.value.exit_code == 4
    for name in ("ina3221: no", "tegrastats: no", "jtop: jetson-stats", "nvml: no NVIDIA"):
        assert name in error.value.message
    hwmon(tmp_path / "sys/class/hwmon/hwmon0", {"VDD_IN": (5000, 1000)})
    meter = open_meter("auto", root=tmp_path)
    assert (meter.source, meter.rail, meter.scope) == ("ina3221", "VDD_IN", "module")
    assert meter.why[0] == "ina3221: reads VDD_IN"
    assert meter.why[1:] == [f"{name}: not tried" for name in ("tegrastats", "jtop", "nvml")]


def test_what_was_asked_for_is_not_replaced(tmp_path: Path) -> None:
    hwmon(tmp_path / "sys/class/hwmon/hwmon0", {"VDD_IN": (5000, 1000)})
    with pytest.raises(PowerUnavailable, match="tegrastats: no tegrastats on PATH"):
        open_meter("tegrastats", root=tmp_path)


@pytest.mark.parametrize("word", ["", "AUTO", "replay", "replay:", "ina"])
def test_unknown_words(word: str) -> None:
    with pytest.raises(UsageError, match="unknown power source"):
        open_meter(word)


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("#!/bin/sh\nexit 3\n", r"ended \(exit code 3\)"),
        ("#!/bin/sh\necho hello\nexec /bin/sleep 60\n", "no line"),
        ("#!/bin/sh\necho 'RAM 1/2MB (lfb 1x4MB)'\n", "no power rails"),
        ("#!/bin/sh\necho 'RAM 1/2MB VDD_CPU 1/1'\n", "no known total among its rails VDD_CPU"),
        ("#!/no/such/shell\n", "cannot be run"),
    ],
)
def test_tegrastats_that_is_of_no_use(
    bare_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, reason: str
) -> None:
    monkeypatch.setattr("edge_runtime.power.tegrastats_child.PROBE_S", 1.0)
    install_script(bare_path, script)
    with pytest.raises(PowerUnavailable, match=reason):
        open_meter("tegrastats")


def test_recorded_lines_name_their_source() -> None:
    assert all(row["source"] for row in corpus())
