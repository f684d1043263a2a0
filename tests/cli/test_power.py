"""`bitnest-edge power`: its documents, its errors, and no child left."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tegrastats_fakes import CORPUS, corpus, expected, fake_on_path, install_script

PROGRAM = [sys.executable, "-c", "from edge_runtime.cli import main; main()"]


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """Every recorded line, with noise between."""
    path = tmp_path / "all.log"
    lines = [row["line"].encode() for row in corpus()]
    path.write_bytes(b"\xff\x00noise\n\n" + b"\r\n".join(lines) + b"\nRAM 12")
    return path


@pytest.fixture
def flag(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return fake_on_path(tmp_path / "bin", monkeypatch)


def is_gone(flag: Path, seconds: float = 10.0) -> bool:
    """Whether the fake has ended, soon."""
    pid = int(flag.with_name(flag.name + ".pid").read_text())
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.05)
    return False


def test_parse(call, log: Path) -> None:
    code, out, err = call("power", "parse", log, "--json")
    assert code == 0
    assert out.count("\n") == 1
    document = json.loads(out)
    rows = corpus()
    found = [[d["total_mw"], d["ram_used_mb"], d["ram_total_mb"]] for d in document["lines"]]
    assert found == [expected(row) for row in rows]
    summary = document["summary"]
    known = [row for row in rows if expected(row)[0] is not None]
    assert (summary["lines"], summary["lines_with_total"]) == (len(rows), len(known))
    assert summary["energy_j"] == pytest.approx(summary["mean_mw"] * summary["duration_s"] / 1000)
    assert "the log mixes boards" in err
    names = {name for line in document["lines"] for name in line["rails"]}
    assert names == set(summary["rails"])
    assert not names & {"NC", "RAM"}


def test_parse_of_stdin_for_people(call) -> None:
    text = "RAM 1/2MB VDD_IN 4000mW/1mW\nRAM 1/2MB VDD_IN 6000mW/1mW\n"
    code, out, err = call("power", "parse", "-", "--interval", "0.5", stdin=text.encode())
    assert (code, err) == (0, "")
    assert "5.000 W" in out
    assert "5.0 J" in out
    assert "2 lines of 0.5 s" in out
    assert "VDD_IN" in out


def test_parse_without_power(call) -> None:
    code, out, _ = call("power", "parse", "-", "--json", stdin=b"RAM 1/2MB GR3D_FREQ 9%\n")
    assert code == 0
    document = json.loads(out)
    assert document["lines"][0]["total_mw"] is None
    assert document["summary"]["mean_mw"] is None
    assert document["summary"]["energy_j"] is None
    code, out, _ = call("power", "parse", "-", stdin=b"RAM 1/2MB\n")
    assert "unknown" in out


def test_what_cannot_be_parsed(call, tmp_path: Path) -> None:
    empty, junk = tmp_path / "empty", tmp_path / "junk"
    empty.touch()
    junk.write_bytes(bytes(range(256)) * 1000)
    for path in (empty, junk, tmp_path, tmp_path / "none", CORPUS.parent, "-"):
        code, out, err = call("power", "parse", path, "--json")
        assert code == 5
        assert out == ""
        assert err.count("error: ") == 1
        assert "hint: " in err
    assert call("power", "parse", "")[0] == 2
    assert call("power", "parse")[0] == 2
    assert call("power", "parse", empty, "--interval", "0")[0] == 2


def test_watch(call, flag: Path) -> None:
    args = ("--power-source", "tegrastats", "--interval", "0.1", "--count", 5, "--json")
    code, out, err = call("power", "watch", *args)
    assert code == 0, err
    document = json.loads(out)
    assert (document["source"], document["rail"], document["scope"]) == (
        "tegrastats",
        "VDD_IN",
        "module",
    )
    assert document["readings"] == 5
    assert document["mean_mw"] == pytest.approx(5000, rel=0.02)
    assert set(document["rails"]) == {"VDD_IN", "VDD_CPU_GPU_CV"}
    assert err.count("5.00 W") >= 5
    assert is_gone(flag)


def test_watch_a_log(call, log: Path) -> None:
    args = ("--power-source", f"replay:{log}", "--interval", "0.05", "--count", 1)
    code, out, err = call("power", "watch", *args)
    assert code == 0, err
    assert "power from replay: VDD_IN (module)" in out
    assert "1 readings" in out


@pytest.mark.parametrize("more", [(), ("--count", 100)])
def test_watch_ends_with_its_source(
    call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: tuple[object, ...]
) -> None:
    folder = tmp_path / "bin"
    line = "RAM 1/2MB VDD_IN 5000mW/5000mW"
    text = f"#!/bin/sh\nfor n in 1 2 3 4; do echo '{line}'; sleep 0.1; done\necho no sensor >&2\n"
    install_script(folder, text + "exit 7\n")
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    args = ("--power-source", "tegrastats", "--interval", "0.1", *more, "--json")
    code, out, err = call("power", "watch", *args)
    assert code == 4
    why = "tegrastats ended (exit code 7): no sensor"
    assert json.loads(out)["notes"] == [why]
    assert f"readings: {why}" in err.splitlines()[-1]


def test_no_child_outlives_a_watch_that_is_killed(tmp_path: Path) -> None:
    folder = tmp_path / "bin"
    line = "RAM 1/2MB VDD_IN 5000mW/5000mW"
    pid = folder / "load.pid"
    text = f"#!/bin/sh\ntrap '' TERM PIPE\necho $$ > {pid}\n"
    install_script(folder, text + f"while :; do echo '{line}'; sleep 0.1; done\n")
    command = [*PROGRAM, "power", "watch", "--power-source", "tegrastats"]
    path = {"PATH": f"{folder}:{os.environ['PATH']}"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=os.environ | path) as process:
        assert process.stdout is not None
        while b"5.00 W" not in process.stdout.readline():
            assert process.poll() is None
        process.kill()
    assert is_gone(folder / "load")


@pytest.mark.parametrize("args", [("--json",), ()])
def test_ctrl_c_ends_watch_with_its_summary(flag: Path, args: tuple[str, ...]) -> None:
    command = [*PROGRAM, "power", "watch", "--power-source", "tegrastats", *args]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        stream = process.stderr if args else process.stdout
        assert stream is not None
        while b"5.00 W" not in stream.readline():
            assert process.poll() is None
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert b"Traceback" not in err
    if args:
        assert json.loads(out.splitlines()[-1])["readings"] >= 1
    else:
        assert b"readings in" in out
    assert is_gone(flag)


def test_watch_without_a_source(call, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("edge_runtime.power.tegrastats_child._PLACES", ())
    code, out, err = call("power", "watch", "--power-source", "tegrastats")
    assert (code, out) == (4, "")
    assert "no tegrastats on PATH" in err
    assert call("power", "watch", "--power-source", "none")[0] == 4
    assert call("power", "watch", "--power-source", "sun")[0] == 2
    assert call("power", "watch", "--power-source", f"replay:{tmp_path}/none")[0] == 5
    assert call("power", "watch", "--count", "0")[0] == 2
