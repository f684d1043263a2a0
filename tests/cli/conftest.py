"""The command line run in this process, as every test of a command needs it."""

from __future__ import annotations

import io
from collections.abc import Callable

import pytest

from edge_runtime import cli

Call = Callable[..., tuple[int, str, str]]


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Call:
    """Run a command line and return exit code, stdout and stderr; neither stream is a terminal."""

    def call(*args: object, stdin: bytes = b"") -> tuple[int, str, str]:
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(stdin), encoding="utf-8"))
        with pytest.raises(SystemExit) as exit_:
            cli.main([str(a) for a in args])
        out, err = capsys.readouterr()
        assert "Traceback" not in err
        assert "\x1b" not in err  # on stdout a random model may say anything
        return exit_.value.code, out, err

    return call
