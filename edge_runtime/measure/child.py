"""A measurement in a process of its own: what it takes is its own, and its death is a result.

Invariant: a child ends with its parent, is the first that the kernel kills for want of memory, and
is ended by its parent when it takes what was to stay free. `Child.run` never leaves one behind.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from edge_runtime import machine
from edge_runtime.errors import BitnestError, BudgetError
from edge_runtime.measure.worker import Job

LOOK_EVERY_S = 0.05
Status = Literal["ok", "oom", "refused"]
Event = dict[str, Any]
WORKER = "edge_runtime.cli.profile_worker"


@dataclass(slots=True)
class Outcome:
    """How a child ended."""

    status: Status
    reason: str = ""
    hint: str = ""
    crash: str = ""  # of the program, not for want of memory
    events: list[Event] = field(default_factory=list)
    least_available_bytes: int | None = None  # of the machine, while it ran

    @property
    def opened(self) -> Event:
        """What it said of its engine; empty if it did not get so far."""
        return next((e for e in self.events if e["event"] == "open"), {})

    def runs(self, way: str) -> list[Event]:
        """Counted runs of one way."""
        return [e for e in self.events if e["event"] == "run" and e["way"] == way and e["counted"]]


def run(
    job: Job,
    *,
    floor_bytes: int = 0,
    on_event: Callable[[Event], None] = lambda event: None,
    may_fail: bool = False,
) -> Outcome:
    """Run a job to its end.

    floor_bytes: of available memory; below it the child is ended and the status is oom. may_fail:
    any error of the child is a reason for `refused`; else errors other than BudgetError are raised.
    """
    outcome = Outcome("ok")
    available = machine.available_bytes()
    if available is not None and available < floor_bytes:
        outcome.status = "refused"
        outcome.reason = (
            f"{available / 2**20:.0f} MiB are available and {floor_bytes / 2**20:.0f} MiB are to "
            "stay free"
        )
        return outcome
    environment = os.environ | {"PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", WORKER] if sys.version_info >= (3, 11) else
        [sys.executable, "-m", WORKER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environment,
    )  # fmt: skip
    try:
        _talk(process, job, floor_bytes, outcome, on_event)
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                stream.close()
    _judge(process.returncode, outcome, may_fail)
    return outcome


def _talk(
    process: subprocess.Popen[bytes],
    job: Job,
    floor_bytes: int,
    outcome: Outcome,
    on_event: Callable[[Event], None],
) -> None:
    """Hand the job over, then read lines and watch memory until the child ends."""
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        # in ASCII: a folder's name may be no UTF-8
        process.stdin.write(json.dumps(msgspec.to_builtins(job)).encode())
        process.stdin.close()
    except BrokenPipeError:
        pass  # it died at once; its exit code says how
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        rest = b""
        while True:
            if selector.select(LOOK_EVERY_S):
                data = os.read(process.stdout.fileno(), 1 << 20)
                if not data:
                    process.wait()
                    return
                *lines, rest = (rest + data).split(b"\n")
                for line in lines:
                    event = json.loads(line)
                    outcome.events.append(event)
                    on_event(event)
            available = machine.available_bytes()
            if available is None:
                continue
            least = outcome.least_available_bytes
            outcome.least_available_bytes = available if least is None else min(least, available)
            if available < floor_bytes:
                outcome.status = "oom"
                outcome.reason = (
                    f"ended with {available / 2**20:.0f} MiB left, before it took the "
                    f"{floor_bytes / 2**20:.0f} MiB that stay free"
                )
                process.kill()
                return


def _judge(code: int, outcome: Outcome, may_fail: bool) -> None:
    """Turn an exit code and the last event into a status. Raises what is no result."""
    if outcome.status == "oom" or code == 0:
        return
    last = outcome.events[-1] if outcome.events else {}
    if last.get("event") == "error":
        outcome.reason, outcome.hint = last["message"], last["hint"]
        if last["exit_code"] == BudgetError.exit_code or may_fail:
            outcome.status = "oom" if last.get("out_of_memory") else "refused"
            return
        error = BitnestError(outcome.reason, outcome.hint)
        error.exit_code = last["exit_code"]
        raise error
    if code in (-signal.SIGKILL, 128 + signal.SIGKILL):
        outcome.status, outcome.reason = "oom", "killed by the kernel for want of memory"
        return
    if code in (-signal.SIGINT, 130):
        raise KeyboardInterrupt
    outcome.status = "refused"
    outcome.crash = outcome.reason = f"the measuring process ended with {code} and said nothing"
