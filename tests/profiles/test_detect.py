"""Boards are recognised from their trees; what is missing or broken is None and raises nothing."""

from __future__ import annotations

import random
import shutil
import subprocess
from pathlib import Path

import boards
import msgspec
import pytest

from edge_runtime.profiles import Board, Clock, detect, device


@pytest.mark.parametrize("name", boards.BOARDS)
def test_every_board_finds_its_profile(name: str, tmp_path: Path) -> None:
    wanted = boards.BOARDS[name]
    found = detect(boards.make(tmp_path, **wanted))
    assert found.profile == name, found.reason
    assert found.is_jetson
    assert found.l4t == wanted["l4t"]
    assert found.memory_total_bytes == wanted["memory_mib"] << 20
    assert (found.modes, found.mode_id) == (wanted["modes"], wanted["mode_id"])
    assert wanted["modes"][found.mode] == wanted["mode_id"]
    assert device(name).mode(found.mode) is not None


def test_the_state_of_a_board(tmp_path: Path) -> None:
    tree = boards.make(
        tmp_path,
        **boards.NX16 | {"gpu_mhz": (306, 114, 918)},
        over_current=(0, 2, 27390),
        throttling=("gpu-throttle-alert",),
    )
    found = detect(tree)
    assert (found.part, found.cpu_cores) == ("p3767-0000", 8)
    assert found.gpu == Clock(now_mhz=306, min_mhz=114, max_mhz=918)
    assert found.emc == Clock(max_mhz=3199)  # the clock itself is for root only
    assert found.cpu == Clock(now_mhz=1984, min_mhz=1984, max_mhz=1984)
    assert found.temperatures_c == {"cpu": 51.234, "gpu": 49.0}
    assert found.throttling == ("gpu-throttle-alert",)
    assert found.over_current == {"oc1": 0, "oc2": 2, "oc3": 27390}


def test_another_machine_is_the_cpu_and_nothing_else(tmp_path: Path) -> None:
    found = detect(tmp_path)
    assert found == Board(profile="cpu", reason=found.reason)
    assert not found.is_jetson
    assert "not a Jetson" in found.reason


def test_another_arm_board_is_the_cpu(tmp_path: Path) -> None:
    boards.make(tmp_path, **boards.NX16 | {"model": "Raspberry Pi 5 Model B Rev 1.0"})
    (tmp_path / "etc/nv_tegra_release").unlink()
    assert detect(tmp_path).profile == "cpu"


def test_memory_tells_modules_of_one_name_apart(tmp_path: Path) -> None:
    large, small = tmp_path / "large", tmp_path / "small"
    boards.make(large, **boards.NX16 | {"compatible": ()})
    boards.make(small, **boards.NX8)
    assert detect(large).profile == "orin-nx-16gb"
    assert detect(small).profile == "orin-nx-8gb"
    assert "7620 MiB" in detect(small).reason


def test_modes_tell_super_from_the_rest(tmp_path: Path) -> None:
    modes = {"MAXN_SUPER": 0, "10W": 1, "15W": 2, "25W": 3, "40W": 4}
    boards.make(tmp_path, **boards.NX16 | {"modes": modes})
    assert detect(tmp_path).profile == "orin-nx-16gb-super"
    (tmp_path / "etc/nvpmodel.conf").unlink()
    assert detect(tmp_path).profile == "orin-nx-16gb"


def test_early_firmware_still_finds_the_module(tmp_path: Path) -> None:
    boards.make(tmp_path, **boards.NANO | {"compatible": (), "memory_mib": 6480})
    assert detect(tmp_path).profile == "orin-nano-8gb"


def test_an_unknown_module_says_why(tmp_path: Path) -> None:
    boards.make(tmp_path, **boards.NX16 | {"memory_mib": 11000, "compatible": ("p3767-0099",)})
    found = detect(tmp_path)
    assert found.profile is None
    assert found.is_jetson
    assert "11000 MiB" in found.reason
    (tmp_path / "proc/device-tree/model").write_text("NVIDIA Jetson TX2")
    assert "'NVIDIA Jetson TX2'" in detect(tmp_path).reason


def test_a_container_without_the_device_tree_is_still_a_board(tmp_path: Path) -> None:
    boards.write(tmp_path, "proc/sys/kernel/osrelease", "5.15.148-tegra\n")
    found = detect(tmp_path)
    assert (found.profile, found.model, found.is_jetson) == (None, None, True)


@pytest.mark.parametrize("cap", ["-1", "0", "2147483647", "9223372036854775807", "", "x"])
def test_no_cap_is_none(cap: str, tmp_path: Path) -> None:
    boards.make(tmp_path, **boards.NX16)
    boards.write(tmp_path, "sys/kernel/nvpmodel_clk_cap/emc", cap)
    assert detect(tmp_path).emc.max_mhz is None


def test_the_older_paths_of_r35(tmp_path: Path) -> None:
    boards.make(tmp_path, **boards.NANO)
    shutil.move(
        tmp_path / "sys/class/devfreq/17000000.gpu", tmp_path / "sys/class/devfreq/17000000.ga10b"
    )
    boards.write(tmp_path, "sys/class/devfreq/15340000.vic/cur_freq", "1")
    shutil.rmtree(tmp_path / "sys/kernel/nvpmodel_clk_cap")
    boards.write(tmp_path, "sys/kernel/nvpmodel_emc_cap/emc_iso_cap", "2133000000")
    found = detect(tmp_path)
    assert found.gpu.max_mhz == 624
    assert found.emc.max_mhz == 2133


def test_nvpmodel_is_never_started_for_a_tree(tmp_path: Path, monkeypatch) -> None:
    def forbidden(*args: object, **kwargs: object) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setattr(subprocess, "run", forbidden)
    boards.make(tmp_path, **boards.NX16)
    (tmp_path / "var/lib/nvpmodel/status").unlink()
    found = detect(tmp_path)
    assert (found.mode, found.mode_id) == (None, None)


def test_every_file_may_be_missing(tmp_path: Path) -> None:
    tree = boards.make(tmp_path / "whole", **boards.NX16)
    files = sorted(p.relative_to(tree) for p in tree.rglob("*") if p.is_file())
    for path in files:
        kept = (tree / path).read_bytes()
        (tree / path).unlink()
        assert isinstance(detect(tree), Board), path
        (tree / path).mkdir()
        assert isinstance(detect(tree), Board), f"{path} is a folder"
        (tree / path).rmdir()
        (tree / path).write_bytes(kept)


def test_every_file_may_hold_rubbish(tmp_path: Path) -> None:
    tree = boards.make(tmp_path, **boards.NX16, over_current=(1, 2, 3))
    files = sorted(p for p in tree.rglob("*") if p.is_file())
    chance = random.Random(0)
    for _ in range(200):
        path = chance.choice(files)
        digits = str(chance.randrange(10 ** chance.choice([3, 19, 30, 4000]))).encode()
        path.write_bytes(chance.choice([digits, chance.randbytes(chance.randrange(40))]))
        found = detect(tree)
        assert msgspec.json.encode(found)
        assert found.reason
