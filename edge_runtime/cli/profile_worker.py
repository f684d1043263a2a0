"""The child process of `bitnest-edge profile`: a job on stdin, events as JSON lines on stdout."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from edge_runtime import log
from edge_runtime.errors import BitnestError, BudgetError

PR_SET_PDEATHSIG = 1  # prctl(2)


def emit(event: dict[str, Any]) -> None:
    """Write one event."""
    sys.stdout.write(json.dumps(event, allow_nan=False) + "\n")
    sys.stdout.flush()


def main() -> None:
    """Do the job and leave with the exit code of what went wrong."""
    _end_with_parent()
    log.configure(-1)
    from edge_runtime.measure import worker

    job = msgspec.convert(json.load(sys.stdin), worker.Job)
    try:
        with _engine(job) as engine:
            worker.run(engine, job, emit)
    except BitnestError as error:
        _fail(error, out_of_memory=False)
    except MemoryError:
        _fail(BudgetError("out of memory"), out_of_memory=True)
    except KeyboardInterrupt:
        sys.exit(130)


def _fail(error: BitnestError, *, out_of_memory: bool) -> None:
    emit(
        {
            "event": "error",
            "exit_code": error.exit_code,
            "message": error.message,
            "hint": error.hint,
            "out_of_memory": out_of_memory,
        }
    )
    sys.exit(error.exit_code)


@contextlib.contextmanager
def _engine(job: Any) -> Iterator[Any]:
    from edge_runtime.cli.model import EngineOptions, open_model, options_of_mode

    options = EngineOptions(
        backend=job.backend,
        draft_source=job.draft_source,
        kv_policy=job.kv_policy,
        ctx=job.context,
        budget=job.budget_bytes,
        reserve=job.reserve_bytes,
        threads=job.threads,
        original=job.original,
    )
    mode = job.ways[0].mode if job.ways else "nest"
    with open_model(job.model, options_of_mode(mode, options)) as engine:
        yield engine


def _end_with_parent() -> None:
    """Die with the parent, and before it where memory runs out (Linux; elsewhere neither)."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")
    if os.getppid() == 1:  # it was gone before we asked
        sys.exit(1)


if __name__ == "__main__":
    main()
