"""The meter over a source: windows, a child that lives and dies, nothing left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from tegrastats_fakes import fake_on_path, install_fake

from edge_runtime.power import Meter, PowerUnavailable, Sample, open_meter
from edge_runtime.power.meter import Window, _step_mw
from edge_runtime.power.source import Emit, Source


@pytest.fixture
def flag(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tegrastats on PATH; work runs while this file is there."""
    return fake_on_path(tmp_path / "bin", monkeypatch)


def child_of(flag: Path) -> int:
    return int(flag.with_name(flag.name + ".pid").read_text())


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def wait_until_gone(pid: int, seconds: float = 10.0) -> bool:
    end = time.monotonic() + seconds
    while is_alive(pid) and time.monotonic() < end:
        time.sleep(0.05)
    return not is_alive(pid)


class Scripted(Source):
    """A source whose samples a test delivers itself."""

    name, rail, scope = "scripted", "VDD_A+VDD_B", "module"

    def probe(self) -> str:
        return "scripted"

    def start(self, emit: Emit) -> None:
        self.emit = emit
        self.send(0.0, 1)

    def send(self, time_s: float, mw: int) -> None:
        rails = {"VDD_A": mw, "VDD_B": mw}
        self.emit(Sample(time_s=time_s, total_mw=2 * mw, rails=rails))

    def stop(self) -> None:
        pass


def test_a_real_child(flag: Path) -> None:
    """3 s of 15 W in steps of 40 mW through a lag of 0.3 s, by a program on PATH."""
    with open_meter("tegrastats") as meter:
        meter.measure_idle(1.0)
        flag.touch()
        with meter.window("work"):
            time.sleep(3.0)
            flag.unlink()
        pid = child_of(flag)
        assert is_alive(pid)
        assert meter.latest().rails["VDD_IN"] > 5000
    assert wait_until_gone(pid)
    assert (meter.source, meter.rail, meter.scope) == ("tegrastats", "VDD_IN", "module")
    energy = meter.energy("work")
    print(energy, meter.lag())
    truth = 15.0 * energy.duration_s
    assert energy.gross_j == pytest.approx(truth, rel=0.06)  # the load of this machine, not ours
    assert meter.idle_mw() == pytest.approx(5000, rel=0.02)
    assert energy.net_j == pytest.approx(energy.gross_j - 5.0 * energy.duration_s, abs=0.5)
    assert meter.energy("idle").samples >= 8


def test_a_child_that_ends_counts_up_to_its_last_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "bin"
    install_fake(folder, lines=20)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    with open_meter("tegrastats") as meter, meter.window("work"):
        time.sleep(3.5)
    assert meter.ended
    assert meter.notes == ["tegrastats ended (exit code 0)"]
    energy = meter.energy("work")
    assert energy.duration_s >= 3.5
    assert energy.covered_s < 2.6
    assert "counted up to the last reading" in energy.note
    assert energy.gross_j == pytest.approx(5.0 * energy.covered_s, rel=0.03)


def test_an_error_stops_at_once(flag: Path) -> None:
    meter = open_meter("tegrastats")

    def interrupted() -> None:
        with meter, meter.window("work"):
            raise KeyboardInterrupt

    begin = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert time.monotonic() - begin < 3.0  # the first reading, and no tail
    assert wait_until_gone(child_of(flag))
    assert meter.energy("work").gross_j is None


def test_no_child_outlives_a_process_that_is_killed(flag: Path) -> None:
    code = """
        import os, signal, time
        from edge_runtime.power import open_meter
        meter = open_meter("tegrastats")
        meter.start()
        os.kill(os.getpid(), signal.SIGKILL)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], timeout=60, check=False)
    assert done.returncode == -signal.SIGKILL
    assert wait_until_gone(child_of(flag))


def test_what_the_child_started_ends_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "bin"
    folder.mkdir()
    program = folder / "tegrastats"
    program.write_text(
        "#!/bin/sh\ntrap '' TERM\n"
        "while true; do echo 'RAM 1/2MB VDD_IN 5mW/5mW'; sleep 0.1; done &\n"
        f"echo $! > {folder}/inner\nwait\n"
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    with open_meter("tegrastats") as meter:
        assert meter.latest().total_mw == 5
    assert wait_until_gone(int((folder / "inner").read_text()))


def test_sum_of_rails_and_late_samples() -> None:
    source = Scripted(0.1)
    meter = Meter(source, [])
    meter.start()
    for n in range(1, 100):
        source.send(n * 0.1, 1000)
    source.send(5.0, 9999)  # older than what is there: dropped
    meter.window("work").add(2.0, 8.0)
    meter.stop(tail=False)
    energy = meter.energy("work")
    assert energy.gross_j == pytest.approx(12.0, rel=0.01)
    assert meter.latest().total_mw == 2000


def test_quantisation_of_a_sum() -> None:
    assert _step_mw({"A": [5000, 5040, 5120, 5200, 5240]}) == 40
    assert _step_mw({"A": [0, 30, 60, 90, 120], "B": [0, 40, 80, 120, 160]}) == 50
    assert _step_mw({"A": [7]}) == 40
    assert _step_mw({"A": [5000, 15000]}) == 40  # two levels tell nothing
    assert _step_mw({"VDD_CPU_CV": [7]}) == 400


def test_many_short_intervals_are_cheap_and_merge() -> None:
    window = Window("draft")
    for n in range(1000):
        window.add(n * 0.01, n * 0.01 + 0.0099)
    assert len(window.spans()) == 1
    for n in range(2000):
        window.add(20 + n * 0.01, 20 + n * 0.01 + 0.003)
    assert len(window.spans()) == 2001
    with window, pytest.raises(ValueError, match="open already"), window:
        pass


def test_intervals_that_come_later_or_overlap() -> None:
    window = Window("prefill")
    for begin, end in ((5, 6), (1, 2), (1.5, 3), (5.5, 5.6)):
        window.add(begin, end)
    assert window.spans() == [(1, 3), (5, 6)]
    with pytest.raises(ValueError, match="ends before"):
        window.add(2, 1)


def test_energy_is_new_when_there_is_something_new() -> None:
    source = Scripted(0.1)
    meter = Meter(source, [])
    meter.start()
    for n in range(1, 100):
        source.send(n * 0.1, 1000)
    meter.window("work").add(2.0, 4.0)
    before = meter.energy("work")
    assert meter.energy("work") == before
    meter.window("work").add(6.0, 8.0)
    assert meter.energy("work").gross_j == pytest.approx(2 * before.gross_j, rel=0.01)


def test_none() -> None:
    with open_meter("none") as meter:
        meter.measure_idle(0.0)
        with meter.window("work"):
            pass
    assert (meter.source, meter.rail, meter.latest(), meter.lag()) == ("none", "", None, None)
    energy = meter.energy("work")
    assert (energy.gross_j, energy.low_j, energy.note) == (None, None, "no power source")
    with pytest.raises(KeyError):
        meter.energy("never")


def test_a_source_that_gives_nothing_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    class Silent(Scripted):
        def start(self, emit: Emit) -> None:
            self.ended = "it went away"

    monkeypatch.setattr("edge_runtime.power.meter.FIRST_SAMPLE_S", 0.1)
    with pytest.raises(PowerUnavailable, match="it went away"):
        Meter(Silent(0.1), []).start()
