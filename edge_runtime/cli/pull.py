"""`bitnest-edge pull`: fetch a known model into the cache and print its path."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TextIO

import click

from edge_runtime.cli.options import json_option, print_document


class ProgressLine:
    """Shows `what` and a percentage on one line of a terminal; elsewhere each `what` once."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._live = self._stream.isatty()
        self._shown = ""  # what the terminal's line says
        self._what = ""

    def __call__(self, what: str, done: int, total: int) -> None:
        """Show `done` of `total`; a total of 0 is unknown."""
        if self._live:
            text = f"{what}  {100 * done // total} %" if total else what
            if text != self._shown:
                padding = " " * max(0, len(self._shown) - len(text))
                self._stream.write(f"\r{text}{padding}")
                self._shown = text
        elif what != self._what:
            self._stream.write(f"{what}\n")
        self._what = what
        self._stream.flush()

    def close(self) -> None:
        """Leave the line, so that the next output starts on its own."""
        if self._live and self._shown:
            self._stream.write("\n")
            self._stream.flush()


@click.command()
@click.argument("name")
@json_option
def command(name: str, as_json: bool) -> None:
    """Fetch a known model and print its path.

    NAME is a known model, e.g. `default`, or a repository of the Hugging Face Hub, e.g. org/name.
    What is already there and whole is not fetched again; a checksum is verified.
    """
    from edge_runtime.convert.pull import pull

    progress = ProgressLine()
    try:
        path = pull(name, progress=progress)
    finally:
        progress.close()
    if as_json:
        print_document({"name": name, "path": str(path), "bytes": _size(path)})
    else:
        click.echo(str(path))


def _size(path: Path) -> int:
    files = [path] if path.is_file() else [p for p in path.rglob("*") if p.is_file()]
    return sum(p.stat().st_size for p in files)
