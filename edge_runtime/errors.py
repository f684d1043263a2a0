"""The errors a user can meet.

Invariant: every error a user causes, or the world around the program causes, is a `BitnestError`
with one line that says what, expected and got, an optional hint, an exit code (for the command
line) and an HTTP status (for a server). Anything else that escapes is a bug in this program; only
the command line turns it into an `InternalError`.
"""

from __future__ import annotations

from itertools import takewhile

MAX_CHARS = 800  # of a message or a hint


def cut(text: str, limit: int = 60) -> str:
    """Return text as a message quotes it: of what is long, the beginning."""
    return text if len(text) <= limit else text[: limit - 3] + "..."


def cut_apart(one: str, other: str, limit: int = 20) -> tuple[str, str]:
    """Return two different texts, each cut to a limit; where they begin alike, what differs of
    them (two hashes that share their first digits must not look the same)."""
    at = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))
    start = 0 if at < limit - 3 else at - limit // 2
    first, second = (("..." if start else "") + cut(text[start:], limit) for text in (one, other))
    return first, second


class BitnestError(Exception):
    """Base of all expected errors. `message` is one line, `hint` says what to do next."""

    exit_code = 2
    http_status = 400

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(_bounded(message))
        self.message = _bounded(message)
        self.hint = _bounded(hint)


def _bounded(text: str) -> str:
    """Names quoted from a broken file may hold anything, terminal escapes and a novel included."""
    if len(text) > MAX_CHARS:
        text = text[: MAX_CHARS // 2] + " … " + text[-MAX_CHARS // 4 :]
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


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
