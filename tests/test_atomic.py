"""Files that are there whole or not at all, and what lies beside them is left alone."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import killed
import pytest

from edge_runtime.atomic import PRIVATE, open_regular, whole_file, write_atomic
from edge_runtime.errors import UsageError

HOLDS = """
import sys, time
from pathlib import Path
from edge_runtime.atomic import whole_file
with whole_file(Path(sys.argv[1])) as file:
    file.write(b"half")
    file.flush()
    print("begun", flush=True)
    time.sleep(60)
"""


def holder(path: Path) -> subprocess.Popen[str]:
    """A process in the middle of writing a file."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDS, str(path)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "begun\n"
    return process


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_modes(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        write_atomic(tmp_path / "shared", b"x")
        write_atomic(tmp_path / "private", b"x", PRIVATE)
    finally:
        os.umask(before)
    modes = [stat.S_IMODE((tmp_path / n).stat().st_mode) for n in ("shared", "private")]
    assert modes == [0o640, 0o600]


def _fail(*_: Any) -> None:
    raise KeyboardInterrupt


def test_what_fails_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "f"
    write_atomic(file, b"old")
    monkeypatch.setattr("os.fsync", _fail)
    with pytest.raises(KeyboardInterrupt):
        write_atomic(file, b"new")
    assert file.read_bytes() == b"old"
    assert names(tmp_path) == ["f"]


def test_a_users_files_are_left_alone(tmp_path: Path) -> None:
    others = [
        "f.tmp",
        ".f.tmp",
        ".f.bitnest-.tmp",
        ".f.bitnest-0123456.tmp",
        ".f2.bitnest-01234567.tmp",
    ]
    for name in others:
        (tmp_path / name).write_text("mine")
    write_atomic(tmp_path / "f", b"x")
    assert all((tmp_path / name).read_text() == "mine" for name in others)
    assert names(tmp_path) == sorted(["f", *others])


def test_a_link_stays_one(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    target, link = tmp_path / "folder" / "f", tmp_path / "link"
    link.symlink_to(target)
    for data in (b"new", b"newer"):
        write_atomic(link, data)
        assert link.is_symlink()
        assert target.read_bytes() == data


@pytest.mark.parametrize("link", [False, True])
def test_what_is_no_file_stays_what_it_is(tmp_path: Path, link: bool) -> None:
    """/dev/null is one: root would put a file in its place."""
    pipe, path = tmp_path / "pipe", tmp_path / ("link" if link else "pipe")
    os.mkfifo(pipe)
    if link:
        path.symlink_to(pipe)
    before = names(tmp_path)
    for do in (lambda: write_atomic(path, b"x"), lambda: open_regular(path, os.O_RDONLY)):
        with pytest.raises(OSError, match="not a regular file"):
            do()
    assert stat.S_ISFIFO(pipe.stat().st_mode)
    assert names(tmp_path) == before


def test_what_becomes_another_meanwhile_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, open_ = tmp_path / "f", os.open
    file.write_text("x")

    def late(path: Path, *args: Any) -> int:
        path.unlink()
        os.mkfifo(path)
        return open_(path, *args)

    monkeypatch.setattr(os, "open", late)
    with pytest.raises(OSError, match="not a regular file"):
        open_regular(file, os.O_RDONLY)


@pytest.mark.parametrize("name", ["n" * 255, "ü" * 127, "[a]*?"])
def test_every_name_that_a_file_may_have(tmp_path: Path, name: str) -> None:
    write_atomic(tmp_path / name, b"x")
    with holder(tmp_path / name) as process:
        process.kill()
    assert len(names(tmp_path)) == 2
    write_atomic(tmp_path / name, b"y")
    assert names(tmp_path) == [name]


def test_two_at_once(tmp_path: Path) -> None:
    file = tmp_path / "f"
    with holder(file) as process:
        write_atomic(file, b"mine")  # and leaves the other's alone
        with (
            pytest.raises(UsageError, match="another process is saving"),
            whole_file(file, alone=True),
        ):
            pass
        assert len(names(tmp_path)) == 2
        process.send_signal(signal.SIGKILL)
    assert file.read_bytes() == b"mine"
    with whole_file(file, alone=True) as other:
        other.write(b"after")
    assert file.read_bytes() == b"after"
    assert names(tmp_path) == ["f"]


def test_killed_anywhere_one_of_both_is_there_whole(tmp_path: Path) -> None:
    file, old, new = tmp_path / "f", b"old" * 40_000, b"newer" * 40_000
    seen = set()
    for _ in killed.at_every_step(lambda: write_atomic(file, new)):
        seen.add(found := file.read_bytes() if file.exists() else b"")
        assert found in (b"", old, new)
        write_atomic(file, old)
        assert names(tmp_path) == ["f"]
    assert seen == {b"", old, new}
