"""The group: errors, exit codes and the shared option types."""

from __future__ import annotations

import errno
import io
import json
import signal
import subprocess
import sys
import types
from pathlib import Path

import click
import pytest

from edge_runtime import cli, errors
from edge_runtime.cli.app import COMMANDS
from edge_runtime.cli.pull import ProgressLine

PRELUDE = """
import sys, types, click
from edge_runtime import cli
module = types.ModuleType("edge_runtime.cli.pull")
@click.command()
def command():
    {body}
module.command = command
sys.modules["edge_runtime.cli.pull"] = module
cli.main(["pull"])
"""


def run(body: str, **more: object) -> subprocess.CompletedProcess[str]:
    """Run a fresh process whose `pull` command does `body`."""
    code = PRELUDE.format(body=body.replace("\n", "\n    "))
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, **more
    )


def outcome(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: BaseException
) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a command that raises `error`."""

    @click.command()
    def command() -> None:
        raise error

    module = types.ModuleType("edge_runtime.cli.pull")
    module.command = command
    monkeypatch.setitem(sys.modules, "edge_runtime.cli.pull", module)
    return call(capsys, "pull")


def call(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as exit_:
        cli.main(args)
    out, err = capsys.readouterr()
    return exit_.value.code, out, err


def error_types(base: type[Exception]) -> list[type[errors.BitnestError]]:
    return [k for k in vars(errors).values() if isinstance(k, type) and issubclass(k, base)]


@pytest.mark.parametrize("kind", error_types(errors.BitnestError))
def test_an_expected_error_is_two_lines_and_its_code(kind, monkeypatch, capsys) -> None:
    code, out, err = outcome(monkeypatch, capsys, kind("it is 3, expected 4", "make it 4"))
    assert (code, out) == (kind.exit_code, "")
    assert err == "error: it is 3, expected 4\n\nhint: make it 4\n"


def test_without_a_hint_there_is_one_line(monkeypatch, capsys) -> None:
    code, _, err = outcome(monkeypatch, capsys, errors.BudgetError("12 GiB do not fit in 8"))
    assert (code, err) == (3, "error: 12 GiB do not fit in 8\n")


def test_debug_adds_the_traceback(monkeypatch, capsys) -> None:
    monkeypatch.setenv("BITNEST_DEBUG", "1")
    code, _, err = outcome(monkeypatch, capsys, errors.CheckpointError("torn file"))
    assert code == 5
    assert err.startswith("Traceback")
    assert err.endswith("error: torn file\n")


def test_a_bug_is_one_line_and_1(monkeypatch, capsys) -> None:
    code, out, err = outcome(monkeypatch, capsys, ZeroDivisionError("division\nby zero"))
    assert (code, out) == (1, "")
    error, blank, hint = err.splitlines()
    assert error == r"error: a bug in bitnest-edge: ZeroDivisionError: division\nby zero"
    assert (blank, "BITNEST_DEBUG=1" in hint) == ("", True)
    assert outcome(monkeypatch, capsys, KeyError())[2].splitlines()[0].endswith(": KeyError")


def test_a_bug_shows_where_it_is_on_request(monkeypatch, capsys) -> None:
    monkeypatch.setenv("BITNEST_DEBUG", "1")
    code, _, err = outcome(monkeypatch, capsys, ZeroDivisionError("by zero"))
    assert code == 1
    assert "Traceback" in err
    assert "raise error" in err
    assert "ZeroDivisionError: by zero" in err


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (OSError(errno.ENOSPC, "No space left on device", "out"), 3),
        (OSError(errno.EDQUOT, "Disk quota exceeded", "out"), 3),
        (OSError(errno.ENOMEM, "Cannot allocate memory", "out"), 3),
        (PermissionError(errno.EACCES, "Permission denied", "out"), 5),
        (IsADirectoryError(errno.EISDIR, "Is a directory", "out"), 5),
        (OSError(errno.EIO, "Input/output error", "out"), 5),
    ],
)
def test_what_the_system_refuses(error, expected, monkeypatch, capsys) -> None:
    code, out, err = outcome(monkeypatch, capsys, error)
    assert (code, out, err) == (expected, "", f"error: out: {error.strerror}\n")


def test_no_memory_left_is_3(monkeypatch, capsys) -> None:
    assert outcome(monkeypatch, capsys, MemoryError())[0] == 3


@pytest.mark.parametrize("error", [KeyboardInterrupt(), click.Abort()])
def test_an_interrupt_is_130(error, monkeypatch, capsys) -> None:
    assert outcome(monkeypatch, capsys, error) == (130, "", "")


@pytest.mark.parametrize("args", [["nosuch"], ["--nosuch"], ["doctor", "--nosuch"], ["pull"]])
def test_a_usage_mistake_is_2(args, capsys) -> None:
    code, out, err = call(capsys, *args)
    assert (code, out) == (2, "")
    assert "Error:" in err
    assert "Traceback" not in err


def test_what_was_typed_is_quoted_in_part(capsys) -> None:
    for args in (["-n", "9" * 5000], ["--seed", "9" * 4000], ["--backend", "x" * 5000]):
        code, _, err = call(capsys, "generate", "m", "-p", "x", *args)
        assert code == 2
        assert args[0] in err
        assert len(err) < 600


def test_an_error_is_bounded_and_printable() -> None:
    error = errors.CheckpointError("a" * 3000 + "\x1b" + "b" * 3000, "c\n" * 3000)
    assert len(error.message) < 900
    assert error.message.startswith("aaa")
    assert error.message.endswith("bbb")
    assert error.hint.isprintable()


def test_help_lists_every_command(capsys) -> None:
    code, out, _ = call(capsys, "--help")
    assert code == 0
    assert [line.split()[0] for line in out.splitlines() if line[2:].startswith(tuple(COMMANDS))]
    for name in COMMANDS:
        assert f"  {name} " in out


def test_version(capsys) -> None:
    from edge_runtime import __version__

    code, out, _ = call(capsys, "--version")
    assert code == 0
    assert __version__ in out


def test_a_reader_that_leaves_is_no_error() -> None:
    code = PRELUDE.format(body="[click.echo('x' * 100) for _ in range(100000)]")
    child = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    child.stdout.readline()
    child.stdout.close()
    assert child.stderr is not None
    assert child.stderr.read() == ""
    child.stderr.close()
    assert child.wait(60) == 0


def test_another_broken_pipe_is_a_bug() -> None:
    done = run("raise BrokenPipeError('a socket')")
    assert done.returncode == 1
    assert "BrokenPipeError: a socket" in done.stderr
    assert "Traceback" not in done.stderr


def test_ctrl_c_in_a_process() -> None:
    done = run(f"import os\nos.kill(os.getpid(), {int(signal.SIGINT)})\nimport time; time.sleep(9)")
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_ctrl_c_while_modules_are_imported() -> None:
    code = (
        "import sys\nclass Finder:\n    def find_spec(self, name, *_):\n"
        "        if name == 'click': raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, Finder())\nfrom edge_runtime.cli import main\nmain(['--help'])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


@pytest.mark.parametrize("closed", ["<&-", "<&- >&-", "2>&-", "<&- >&- 2>&-"])
def test_streams_that_the_caller_closed(closed: str, tmp_path: Path) -> None:
    report = tmp_path / "report"
    body = (
        "import os, subprocess\n"
        "child = [sys.executable, '-c', 'import os; [os.fstat(n) for n in range(3)]']\n"
        "code = subprocess.run(child).returncode\n"
        f"open({str(report)!r}, 'w').write(f'{{code}} {{sys.stdin.read()!r}}')"
    )
    code = PRELUDE.format(body=body.replace("\n", "\n    "))
    command = f'exec "$0" -c "$1" {closed}'
    done = subprocess.run(
        ["sh", "-c", command, sys.executable, code],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=60,
    )
    assert (done.returncode, report.read_text()) == (0, "0 ''")


# ---- pull


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("stream", "written"),
    [
        (io.StringIO(), "fetching\nchecking\n"),
        (Terminal(), "\rfetching\rfetching  50 %\rchecking      \n"),
    ],
)
def test_the_progress_line(stream: io.StringIO, written: str) -> None:
    line = ProgressLine(stream)
    for step in (("fetching", 0, 0), ("fetching", 1, 2), ("fetching", 1, 2), ("checking", 0, 0)):
        line(*step)
    line.close()
    assert stream.getvalue() == written


@pytest.mark.parametrize("folder", [False, True])
def test_pull_prints_the_path_or_the_document(folder, monkeypatch, tmp_path, capsys) -> None:
    file = tmp_path / "weights.gguf"
    file.write_bytes(b"12345")
    path = tmp_path if folder else file

    def fake(name, *, progress):
        progress("fetching", 0, 0)
        return path

    monkeypatch.setattr("edge_runtime.convert.pull.pull", fake)
    code, out, err = call(capsys, "pull", "default")
    assert (code, out, err) == (0, f"{path}\n", "fetching\n")
    code, out, _ = call(capsys, "pull", "default", "--json")
    assert (code, out.count("\n")) == (0, 1)
    assert json.loads(out) == {"name": "default", "path": str(path), "bytes": 5}


# ---- parsers
