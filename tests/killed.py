"""What is left of a file that is being written when its process is killed, at every step of it."""

from __future__ import annotations

import os
import shutil
import signal
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any


def at_every_step(work: Callable[[], object]) -> Iterator[int]:
    """Do `work` in children of this process, one killed (-9) before and one after each sync,
    rename and removal, as long as there are more; yield after each of them."""
    step = 0
    while _is_killed(work, step):
        yield step
        step += 1
    assert step > 4, "it was not stopped within the work"


def _is_killed(work: Callable[[], object], step: int) -> bool:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # the child starts no threads
        child = os.fork()
    if not child:
        try:
            _count_down(step)
            work()
        finally:
            os._exit(0)
    _, status = os.waitpid(child, 0)
    if not os.WIFSIGNALED(status):
        return False
    assert os.WTERMSIG(status) == signal.SIGKILL
    return True


def _count_down(step: int) -> None:
    """Make every operation that matters count, and the `step`th the last one."""
    left = step

    def tick() -> None:
        nonlocal left
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        left -= 1

    def counted(whole: Callable[..., Any]) -> Callable[..., Any]:
        def counts(*args: Any, **options: Any) -> Any:
            tick()
            result = whole(*args, **options)
            tick()
            return result

        return counts

    places: list[tuple[Any, str]] = [(os, "fsync"), (shutil, "rmtree")]
    places += [(Path, name) for name in ("replace", "rename", "unlink")]
    for owner, name in places:
        setattr(owner, name, counted(getattr(owner, name)))
