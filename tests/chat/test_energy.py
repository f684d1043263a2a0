"""Joules of turns: from a source that follows the load, and why there are none."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from tegrastats_fakes import fake_on_path

from edge_runtime.chat import energy, render
from edge_runtime.chat.energy import TurnEnergy
from edge_runtime.decode.request import Result
from edge_runtime.errors import UsageError
from edge_runtime.power import PowerUnavailable

IDLE_W, LOAD_W = 5.0, 15.0  # of the fake tegrastats
LOG = "RAM 1/2MB CPU [1%@1] VDD_IN {0}mW/{0}mW VDD_CPU_GPU_CV 40mW/40mW\n"


def test_without_a_source_it_says_why(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(
        energy, "open_meter", lambda name: (_ for _ in ()).throw(PowerUnavailable("no rails here"))
    )
    found = TurnEnergy("auto")
    found.begin()
    assert found.end(0.0, 1.0, 10) is None
    assert found.lines() == ["No joules: no rails here"]
    assert found.last_lines() == ["energy   not measured: no rails here"]
    found.close()
    with pytest.raises(PowerUnavailable):
        TurnEnergy("ina3221")  # one that was named must work


def test_none_and_nonsense() -> None:
    assert TurnEnergy("none").lines() == ["No joules: not asked for"]
    with pytest.raises(UsageError, match="unknown power source"):
        TurnEnergy("coal")


@pytest.mark.slow
def test_a_turns_joules_follow_the_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Idle at 5 W, a turn at 15 W, by a sensor with a lag: what the footer and /power say."""
    load = fake_on_path(tmp_path / "bin", monkeypatch)
    found = TurnEnergy("tegrastats")
    try:
        found.begin()
        assert found.end(time.monotonic(), time.monotonic(), 0) is None
        time.sleep(4.0)  # at the prompt
        found.begin()
        begin = time.monotonic()
        load.touch()
        time.sleep(4.0)
        document = found.end(begin, begin + 0.2, 38)
        load.unlink()
        lines, stats = found.lines(), found.last_lines()
    finally:
        found.close()
    assert document is not None, stats
    assert document["source"] == "tegrastats"
    assert document["rail"] == "VDD_IN"
    assert document["j_per_token"] == document["gross_j"] / 38
    assert document["gross_j"] == pytest.approx(LOAD_W * 3.8, rel=0.15)
    assert document["net_j"] == pytest.approx((LOAD_W - IDLE_W) * 3.8, rel=0.25)
    assert lines[0].startswith("power from tegrastats: VDD_IN")
    assert any(line.startswith("idle ") and line.endswith(" W") for line in lines)
    assert "J decoding" in stats[0]


def test_a_turn_too_short_shows_nothing(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text(LOG.format(4000) * 50)
    found = TurnEnergy(f"replay:{log}")
    try:
        found.begin()
        now = time.monotonic()
        assert found.end(now, now + 0.001, 3) is None
        assert found.last_lines()[0].startswith("energy   ")
        assert "VDD_IN" in found.lines()[0]
    finally:
        found.close()


def test_reading_stops_at_a_prompt_that_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(energy, "WAIT_S", 0.05)
    log = tmp_path / "log"
    log.write_text(LOG.format(4000) * 50)
    found = TurnEnergy(f"replay:{log}")
    try:
        for _ in range(2):
            found.begin()
            meter = found._meter
            assert meter is not None
            assert meter._running
            found.end(time.monotonic(), time.monotonic(), 0)
            deadline = time.monotonic() + 5
            while meter._running and time.monotonic() < deadline:
                time.sleep(0.01)
            assert not meter._running
    finally:
        found.close()


def test_an_old_record_is_begun_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(energy, "RECORD_S", 0.0)
    log = tmp_path / "log"
    log.write_text(LOG.format(4000) * 50)
    found = TurnEnergy(f"replay:{log}")
    try:
        first = found._meter
        found.begin()
        assert found._meter is not first
    finally:
        found.close()


def test_the_footer_names_the_rail() -> None:
    used = {
        "source": "ina3221",
        "rail": "VDD_IN",
        "gross_j": 8.2,
        "net_j": 5.8,
        "j_per_token": 0.41,
    }
    result = Result(new_tokens=21, context_max=64, energy=used)
    assert " · 0.41 J/tok (VDD_IN, net 0.29) · " in render.figures(result)
    result.energy = used | {"net_j": None, "source": "replay"}
    assert " · 0.41 J/tok (VDD_IN of a replayed log) · " in render.figures(result)
