"""The command line's entry, without imports of its own: Ctrl-C ends it quietly from the first.

Everything else is in `app.py`.
"""

from __future__ import annotations

import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> None:
    """Enter the program (`bitnest-edge`); leaves through `SystemExit` with the exit code."""
    try:
        from edge_runtime.cli import app

        code = app.run(argv)
    except KeyboardInterrupt:  # while modules were imported, or once more on the way out
        code = 130
    sys.exit(code)
