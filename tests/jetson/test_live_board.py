"""What reads a board follows an engine that runs on it: rails, clocks, memory, heat."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from live_board import FREE_BYTES, IDLE_W, LOAD_W, LiveBoard

from edge_runtime import machine
from edge_runtime.chat import energy as chat_energy
from edge_runtime.chat.throttle import ThrottleWatch
from edge_runtime.cli import main
from edge_runtime.decode.engine import Engine
from edge_runtime.decode.pressure import MemoryPressure, MemoryWatch
from edge_runtime.decode.session import Session
from edge_runtime.measure import energy as measure_energy
from edge_runtime.measure import profile, state
from edge_runtime.power import open_meter
from edge_runtime.profiles import detect

PROMPT = [(7 * i) % 90 + 1 for i in range(40)]
MIB = 1 << 20


@pytest.fixture(scope="module")
def engine(tiny_checkpoint: Path) -> Iterator[Engine]:
    with Engine.open(tiny_checkpoint, backend="cpu", view="w8", ctx=2048, threads=1) as engine:
        yield engine


def decode_for(engine: Engine, seconds: float) -> tuple[float, float]:
    """Decode again and again for a while; return when that began and ended, monotonic."""
    begin = time.monotonic()
    while time.monotonic() < begin + seconds:
        for _ in engine.generate(PROMPT, ignore_eos=True):
            if time.monotonic() >= begin + seconds:
                break
    engine.end_running()
    return begin, time.monotonic()


def test_joules_of_decoding_are_the_boards(engine: Engine, tmp_path: Path) -> None:
    with LiveBoard(tmp_path) as board, open_meter("auto", root=board.root) as meter:
        assert (meter.source, meter.rail, meter.scope) == ("ina3221", "VDD_IN", "module")
        meter.measure_idle(2.0)
        begin, end = decode_for(engine, 3.0)
        meter.window("decode").add(begin, end)
        meter.stop()
        truth = board.joules(begin, end)
        found = meter.energy("decode")
        idle_mw = meter.idle_mw()
    assert found.gross_j == pytest.approx(truth, rel=0.1)
    assert idle_mw is not None
    assert 1000 * IDLE_W <= idle_mw < 0.8 * 1000 * truth / (end - begin)  # what reads works too
    assert found.net_j is not None
    assert 0 < found.net_j < found.gross_j


def test_clocks_follow_the_load(engine: Engine, tmp_path: Path) -> None:
    with LiveBoard(tmp_path) as board:
        clocks: list[float | None] = []
        over = threading.Event()

        def look() -> None:
            while not over.wait(0.02):
                clocks.append(detect(board.root).gpu.now_mhz)

        looking = threading.Thread(target=look)
        looking.start()
        time.sleep(0.5)
        idle = len(clocks)
        end = time.monotonic() + 20
        while 918 not in clocks[idle:] and time.monotonic() < end:
            decode_for(engine, 0.2)
        over.set()
        looking.join()
    assert 306 in clocks[:idle]
    assert 918 in clocks[idle:]


def test_heat_throttles_and_a_chat_tells(engine: Engine, tmp_path: Path) -> None:
    told: list[str] = []
    # too hot in less than a second, on a busy machine too, and cool again as fast
    with LiveBoard(tmp_path, heat_c_per_j=30.0, cooling_per_s=1.0) as board:
        watch = ThrottleWatch(board.root, every_s=0.05)
        assert watch.is_jetson
        assert watch.look() == []
        with watch.during(told.append):
            end = time.monotonic() + 20
            while not told and time.monotonic() < end:
                decode_for(engine, 0.2)
        assert told[0].startswith("throttling: gpu-throttle-alert, gpu at ")
        end = time.monotonic() + 20
        while told[-1] != "throttling is over" and time.monotonic() < end:
            time.sleep(0.05)
            told += watch.look()
        assert told[-1] == "throttling is over"
        assert detect(board.root).throttling == ()


def test_joules_of_a_turn(engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with LiveBoard(tmp_path) as board:
        here = functools.partial(open_meter, root=board.root)
        monkeypatch.setattr(chat_energy, "open_meter", here)
        joules = chat_energy.TurnEnergy("auto")
        try:
            assert joules.has_source
            session = Session(engine)
            time.sleep(0.5)
            joules.begin()
            begin, first, count = time.monotonic(), 0.0, 0
            while time.monotonic() < begin + 4:
                for _ in session.ask("hello the world", ignore_eos=True):
                    count += 1
                    first = first or time.monotonic()
                    if time.monotonic() > begin + 4:
                        break
                session.clear()
            ended = time.monotonic()
            document = joules.end(begin, first, count)
            truth = board.joules(first, ended)
            said = "\n".join(joules.lines())
        finally:
            joules.close()
    assert document is not None
    assert (document["source"], document["rail"]) == ("ina3221", "VDD_IN")
    assert document["gross_j"] == pytest.approx(truth, rel=0.2)  # it does not wait for the lag
    assert document["j_per_token"] == pytest.approx(document["gross_j"] / count)
    assert "power from ina3221: VDD_IN (module)" in said


def test_profile_measures_the_board_it_runs_on(
    tiny_checkpoint: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with LiveBoard(tmp_path) as board:
        here = functools.partial(open_meter, root=board.root)
        monkeypatch.setattr(measure_energy, "open_meter", here)
        look = functools.partial(state.snapshot, board.root)
        monkeypatch.setattr(profile.state, "snapshot", look)
        options = "--modes w8 --context 24 -n 2000 --repeats 40 --backend cpu --threads 1"
        begin = time.monotonic()
        with pytest.raises(SystemExit) as ended:
            main(["profile", str(tiny_checkpoint), *options.split(), "--require-energy", "--json"])
        whole = board.joules(begin, time.monotonic())
    out, err = capsys.readouterr()
    assert ended.value.code == 0, err
    document = json.loads(out.splitlines()[-1])
    assert document["device"] == "orin-nx-16gb"
    energy = document["energy"]
    assert (energy["source"], energy["rail"], energy["scope"]) == ("ina3221", "VDD_IN", "module")
    [row] = document["rows"]
    decode = row["energy"]["decode"]
    assert 0 < decode["gross_j"] < whole
    assert row["j_per_token"] > 0
    watts = decode["gross_j"] / decode["duration_s"]
    assert IDLE_W * 1.2 < watts < LOAD_W * 1.05
    assert any("clocks are not fixed" in line for line in document["warnings"])


HOG = "import sys; data = b'x' * int(sys.argv[1]); print('full', flush=True); sys.stdin.read()"


def test_memory_of_the_board_holds_work_back(engine: Engine, tmp_path: Path) -> None:
    with LiveBoard(tmp_path) as board:
        assert machine.available_bytes(board.root) == pytest.approx(FREE_BYTES, abs=50 * MIB)
        engine.watch = MemoryWatch(FREE_BYTES - 150 * MIB, board.root)
        want = engine.generate(PROMPT, max_new_tokens=8, ignore_eos=True).complete().token_ids
        command = [sys.executable, "-c", HOG, str(250 * MIB)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as hog:
            assert hog.stdout is not None
            assert hog.stdin is not None
            hog.stdout.readline()
            time.sleep(0.5)
            with pytest.raises(MemoryPressure, match="are to stay free"):
                engine.generate(PROMPT)
            hog.stdin.close()
        time.sleep(0.5)
        again = engine.generate(PROMPT, max_new_tokens=8, ignore_eos=True).complete()
    engine.watch = MemoryWatch()
    assert again.token_ids == want
