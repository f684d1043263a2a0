"""The errors a user can meet.

Invariant: every error a user causes, or the world around the program causes, is a `BitnestError`
with one line that says what, expected and got, an optional hint, an exit code (for the command
line) and an HTTP status (for a server). Anything else that escapes is a bug in this program; only
the command line turns it into an `InternalError`.
"""

from __future__ import annotations


class BitnestError(Exception):
    """Base of all expected errors. `message` is one line, `hint` says what to do next."""

    exit_code = 2
    http_status = 400

    def __init__(self, message: str, hint: str = "") -> None:
        # Names quoted from a broken file may hold anything, terminal escapes included.
        message = "".join(c if c.isprintable() else repr(c)[1:-1] for c in message)
        super().__init__(message)
        self.message = message
        self.hint = hint


class InternalError(BitnestError):
    """A bug in this program, as one line for its user."""

    exit_code = 1
    http_status = 500


class UsageError(BitnestError):
    """A request that makes no sense: a wrong flag, an empty prompt, an impossible value."""


class ContextError(BitnestError):
    """A prompt, or prompt plus answer, that is longer than the context that was allocated."""

    exit_code = 3


class BudgetError(BitnestError):
    """Something does not fit in memory or on disk; the message carries the numbers."""

    exit_code = 3
    http_status = 503


class BackendUnavailable(BitnestError):
    """A backend, an extra or hardware that is not there; the message keeps the reason."""

    exit_code = 4
    http_status = 501


class CheckpointError(BitnestError):
    """A model file that is broken, incomplete, of an unknown version, or not a model at all."""

    exit_code = 5


class UnsupportedModel(CheckpointError):
    """A model that is well-formed but of an architecture or option this runtime does not run."""


class DownloadError(BitnestError):
    """A file that could not be fetched or whose checksum is wrong."""

    exit_code = 5
    http_status = 502


class NumericError(BitnestError):
    """NaN or infinity where the contract allows none, e.g. in logits."""

    exit_code = 5
    http_status = 500
