"""A measurement in a child process: how it ends is a result, and nothing is left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import psutil
import pytest

from edge_runtime.errors import BitnestError
from edge_runtime.measure import child
from edge_runtime.measure.worker import Job, Way, prompt_of

TEXT = "the cat sat on the mat and the dog sat on the log. "


def job(model: Path, **fields: object) -> Job:
    defaults = {
        "model": str(model), "ways": (Way(mode="w8"), Way(mode="nest", gamma=2)), "text": TEXT,
        "prompt_tokens": 20, "new_tokens": 6, "repeats": 2,
    }  # fmt: skip
    # a test may give any field: their types are not one
    return Job(**(defaults | fields))  # type: ignore[arg-type]


def test_prompts_have_the_length_that_was_asked_for() -> None:
    assert prompt_of([5, 6, 7], 7) == [5, 6, 7, 5, 6, 7, 5]
    assert prompt_of([5, 6, 7], 2) == [5, 6]


def test_runs_in_turns_and_their_phases(tiny_checkpoint: Path) -> None:
    outcome = child.run(job(tiny_checkpoint))
    assert outcome.status == "ok"
    order = [e["way"] for e in outcome.events if e["event"] == "run"]
    assert order == ["w8", "nest γ=2"] * 3  # one turn warms up
    for way in ("w8", "nest γ=2"):
        runs = outcome.runs(way)
        assert len(runs) == 2
        for run in runs:
            names = [name for name, _, _ in run["phases"]]
            assert names[0] == "prefill"
            assert names.count("verify") == run["cycles"]
            assert names.count("draft") == run["drafted"]
            ends = [t for _, started, ended in run["phases"] for t in (started, ended)]
            assert ends == sorted(ends)
            assert run["peak_bytes"] > 0
    assert outcome.opened["planned_bytes"] > 0
    assert outcome.least_available_bytes is not None


def test_what_does_not_fit_is_refused(tiny_checkpoint: Path) -> None:
    outcome = child.run(job(tiny_checkpoint, budget_bytes=1000))
    assert outcome.status == "refused"
    assert "available" in outcome.reason


def test_errors_are_the_users_unless_they_may_be_results(tmp_path: Path) -> None:
    with pytest.raises(BitnestError) as raised:
        child.run(job(tmp_path / "nothing"))
    assert raised.value.exit_code == 5
    assert child.run(job(tmp_path / "nothing"), may_fail=True).status == "refused"


def test_it_is_ended_before_it_takes_what_stays_free(
    tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outcome = child.run(job(tiny_checkpoint), floor_bytes=1 << 60)
    assert (outcome.status, outcome.events) == ("refused", [])
    available = iter([2 << 60, 2 << 60])  # before it starts, and once it runs
    monkeypatch.setattr(child.machine, "available_bytes", lambda: next(available, 1000))
    before = set(psutil.Process().children())  # such as the tracker that multiprocessing keeps
    outcome = child.run(job(tiny_checkpoint, repeats=1000), floor_bytes=1 << 60)
    assert outcome.status == "oom"
    assert set(psutil.Process().children()) <= before


def test_killed_is_out_of_memory(
    tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def worker(body: str) -> None:
        (tmp_path / "fake_worker.py").write_text(textwrap.dedent(body))
        monkeypatch.setattr(child, "WORKER", "fake_worker")
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    worker("import os; os.kill(os.getpid(), 9)")
    outcome = child.run(job(tiny_checkpoint))
    assert (outcome.status, outcome.runs("w8")) == ("oom", [])
    worker("raise SystemExit(77)")
    outcome = child.run(job(tiny_checkpoint))
    assert outcome.status == "refused"
    assert "77" in outcome.crash


def test_no_child_is_left_by_ctrl_c_or_by_the_death_of_the_parent(tiny_checkpoint: Path) -> None:
    program = (
        "from edge_runtime.cli import main; import sys;"
        "main(['profile', sys.argv[1], '--modes', 'w8', '--context', '20', '-n', '300',"
        " '--repeats', '1000', '--backend', 'reference'])"
    )
    for ending in (signal.SIGINT, signal.SIGKILL):
        parent = subprocess.Popen(
            [sys.executable, "-c", program, str(tiny_checkpoint)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        children: list[psutil.Process] = []
        until = time.monotonic() + 60
        while not children and time.monotonic() < until:
            time.sleep(0.05)
            children = psutil.Process(parent.pid).children()
        assert children
        time.sleep(0.5)
        os.kill(parent.pid, ending)
        started = time.monotonic()
        assert parent.wait(10) == (130 if ending == signal.SIGINT else -signal.SIGKILL)
        psutil.wait_procs(children, timeout=5)
        assert not any(p.is_running() and p.status() != "zombie" for p in children)
        assert time.monotonic() - started < 10
