"""What doctor finds on a board: each state alone, the order of all, and nothing on a good one."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import boards
import pytest

from edge_runtime import doctor
from edge_runtime.board_checks import Finding, findings
from edge_runtime.profiles import detect

ZRAM = ("/dev/zram0 partition 1000000 2048 5", "/dev/zram1 partition 1000000 0 5")


def found(root: Path, user_id: int = 1000, **board: Any) -> list[Finding]:
    """Build a board and return what is found on it."""
    boards.make(root, **board)
    return findings(detect(root), root, user_id)


def only(root: Path, name: str, user_id: int = 1000, **board: Any) -> Finding:
    """Return the one finding of a board that has nothing else wrong."""
    [one] = found(root, user_id, **board)
    assert one.name == name
    return one


@pytest.mark.parametrize("name", ["orin-nx-16gb", "orin-nano-8gb-super", "agx-orin-64gb"])
def test_a_board_as_it_should_be(name: str, tmp_path: Path) -> None:
    assert found(tmp_path, **boards.BOARDS[name]) == []


def test_another_machine_has_no_findings(tmp_path: Path) -> None:
    boards.write(tmp_path, "proc/swaps", "Filename\n" + ZRAM[0])
    assert findings(detect(tmp_path), tmp_path) == []


def test_a_slow_power_mode(tmp_path: Path) -> None:
    one = only(tmp_path, "power_mode", **boards.NX16 | {"mode_id": 1, "cores": "0-3"})
    assert one.what == "power mode 10W, not MAXN"
    assert "68.3 of 102.4 GB/s: decoding at 67%" in one.why
    assert "GPU 4 SMs at 612 MHz, not 8 at 918: prefill at 33%" in one.why
    assert one.fix == "sudo nvpmodel -m 0"


def test_the_fastest_mode_is_not_the_one_of_the_highest_id(tmp_path: Path) -> None:
    one = only(tmp_path, "power_mode", **boards.NANO_SUPER | {"mode_id": 3, "cores": "0-3"})
    assert "not MAXN_SUPER" in one.what
    assert one.fix == "sudo nvpmodel -m 2"


def test_ids_are_those_of_the_board(tmp_path: Path) -> None:
    modes = {"10W": 5, "MAXN": 7}
    one = only(
        tmp_path, "power_mode", **boards.NX16 | {"modes": modes, "mode_id": 5, "cores": "0-3"}
    )
    assert one.fix == "sudo nvpmodel -m 7"


def test_a_mode_that_waits_for_a_reboot(tmp_path: Path) -> None:
    one = only(tmp_path, "mode_not_in_force", **boards.NX16 | {"cores": "0-3"})
    assert "4 CPU cores are on, the mode has 8" in one.why
    assert one.fix == "sudo reboot"


def test_throttling(tmp_path: Path) -> None:
    one = only(tmp_path, "throttling", **boards.NX16, throttling=("gpu-throttle-alert",))
    assert "gpu-throttle-alert" in one.what
    assert "cpu at 51 C" in one.why


def test_a_desktop(tmp_path: Path) -> None:
    one = only(tmp_path, "desktop", **boards.NX16, desktop=True)
    assert "Xorg, gnome-shell" in one.what
    assert "865 MiB" in one.why
    assert "multi-user.target" in one.fix


def test_swap_on_zram(tmp_path: Path) -> None:
    one = only(tmp_path, "zram", **boards.NX16, swaps=ZRAM)
    assert one.what == "1953 MiB of swap on zram, 2 MiB in use"
    other = found(tmp_path / "disk", **boards.NX16, swaps=("/dev/nvme0n1p3 partition 9 0 -2",))
    assert other == []


def test_tegrastats_of_r35_without_root(tmp_path: Path) -> None:
    one = only(tmp_path, "tegrastats_without_rails", **boards.NANO)
    assert "--power-source ina3221" in one.fix
    assert findings(detect(tmp_path), tmp_path, user_id=0) == []
    (tmp_path / "sys/class/hwmon/hwmon1/name").write_text("other")
    [one] = findings(detect(tmp_path), tmp_path, user_id=1000)
    assert "sudo" in one.fix


@pytest.mark.parametrize("release", ["35.6.3", "36.4.7", "38.2.2"])
def test_releases_that_refuse_large_allocations(release: str, tmp_path: Path) -> None:
    one = only(tmp_path, "nvmap", user_id=0, **boards.NX16 | {"l4t": release})
    assert release in one.what
    assert "error 12" in one.why


def test_a_container(tmp_path: Path) -> None:
    boards.write(tmp_path, ".dockerenv", "")
    one = only(tmp_path, "container", **boards.NX16)
    assert "the GPU" in one.why
    assert "--runtime nvidia" in one.fix
    boards.write(tmp_path, "dev/nvmap", "")
    assert findings(detect(tmp_path), tmp_path, 1000) == []
    (tmp_path / "var/lib/nvpmodel/status").unlink()
    (tmp_path / "usr/bin/tegrastats").unlink()
    [one] = findings(detect(tmp_path), tmp_path, 1000)
    assert "-v /var/lib/nvpmodel/status:/var/lib/nvpmodel/status:ro" in one.fix
    assert "-v /usr/bin/tegrastats:/usr/bin/tegrastats:ro" in one.fix


def test_early_firmware(tmp_path: Path) -> None:
    one = only(tmp_path, "firmware", user_id=0, **boards.NANO | {"memory_mib": 6450})
    assert one.what == "MemTotal is 6450 MiB, this module shows 7620"
    assert "1170 MiB" in one.why
    assert "qspi" in one.fix


def test_clocks_that_follow_the_load(tmp_path: Path) -> None:
    one = only(tmp_path, "clocks", **boards.NX16 | {"gpu_mhz": (306, 306, 918)})
    assert "306 to 918 MHz" in one.what
    assert one.fix == "sudo jetson_clocks"


@pytest.mark.parametrize(
    ("counts", "words"),
    [((3, 0, 0), "supply"), ((0, 5, 0), "nvpmodel -m 3"), ((0, 0, 27390), "nothing")],
)
def test_over_current(counts: tuple[int, int, int], words: str, tmp_path: Path) -> None:
    one = only(tmp_path, "over_current", **boards.NX16, over_current=counts)
    assert str(max(counts)) in one.what
    assert words in one.fix


def test_all_at_once_come_in_order(tmp_path: Path) -> None:
    boards.write(tmp_path, ".dockerenv", "")
    spoilt = boards.NANO | {"mode_id": 1, "l4t": "35.6.3", "memory_mib": 6450}
    names = [
        one.name
        for one in found(
            tmp_path,
            **spoilt | {"gpu_mhz": (114, 114, 408)},
            desktop=True,
            swaps=ZRAM,
            over_current=(1, 1, 1),
            throttling=("cpu-throttle-alert",),
        )
    ]
    assert names == [
        "power_mode",
        "mode_not_in_force",
        "throttling",
        "desktop",
        "zram",
        "tegrastats_without_rails",
        "nvmap",
        "container",
        "firmware",
        "clocks",
        "over_current",
    ]


def test_a_board_of_no_profile_is_still_examined(tmp_path: Path) -> None:
    unknown = boards.NX16 | {"model": "NVIDIA Jetson TX2", "compatible": (), "memory_mib": 7850}
    assert only(tmp_path, "zram", **unknown, swaps=ZRAM)


def test_doctor_shows_board_and_findings(tmp_path: Path) -> None:
    boards.make(tmp_path, **boards.NX16 | {"mode_id": 1, "cores": "0-3"}, swaps=ZRAM)
    document = doctor.examine(tmp_path)
    assert json.loads(json.dumps(document, allow_nan=False)) == document
    assert document["device"]["profile"] == "orin-nx-16gb"
    assert [one["name"] for one in document["findings"]] == ["power_mode", "zram"]
    text = "\n".join(doctor.describe(document))
    assert "orin-nx-16gb (part number p3767-0000)" in text
    assert "power mode 10W, GPU 918 of 918 MHz, memory cap 3199 MHz, 4 CPU cores on" in text
    assert text.index(" 1. power mode 10W") < text.index(" 2. 1953 MiB of swap on zram")


def test_doctor_elsewhere_shows_neither(tmp_path: Path) -> None:
    document = doctor.examine(tmp_path)
    assert document["device"]["profile"] == "cpu"
    text = "\n".join(doctor.describe(document))
    assert "to fix" not in text
    assert "+ profile" not in text


def test_the_source_of_power_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def open_meter(source: str, *, root: Path) -> SimpleNamespace:
        asked.append((source, root))
        return SimpleNamespace(source="ina3221", rail="VDD_IN", scope="module")

    monkeypatch.setitem(sys.modules, "edge_runtime.power", SimpleNamespace(open_meter=open_meter))
    found = doctor.power(tmp_path)
    assert asked == [("ina3221", tmp_path)]  # nothing of this machine stands in for a tree
    assert found == {"source": "ina3221", "rail": "VDD_IN", "scope": "module", "reason": None}
    assert doctor._power_line(found) == "+ power         ina3221, VDD_IN (module)"


def test_rubbish_in_any_file_is_no_error(tmp_path: Path) -> None:
    root = boards.make(tmp_path, **boards.NANO, desktop=True, swaps=ZRAM)
    boards.write(root, ".dockerenv", "")
    files = sorted(p for p in root.rglob("*") if p.is_file())
    chance = random.Random(0)
    for _ in range(200):
        path = chance.choice(files)
        text = path.read_bytes()
        digits = bytes(chance.choice(b"0123456789-:, ") for _ in range(chance.choice([3, 5000])))
        path.write_bytes(chance.choice([text * 2, text[: len(text) // 2], digits, b"", b"\xff\0"]))
        for one in findings(detect(root), root, 1000):
            assert all((one.name, one.what, one.why, one.fix))
