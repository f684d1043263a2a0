"""Options that several commands share, each defined once, and the parsers behind them.

Invariant: the parsers are pure (they take text and raise ValueError or UsageError with the whole
reason) and the click types only wrap them. What a command receives is checked for form, not for
sense: whether a budget is enough, or a backend is there, the layer that owns it says.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import click

from edge_runtime import paths
from edge_runtime.errors import UsageError, cut

F = TypeVar("F", bound=Callable[..., Any])
Decorator = Callable[[F], F]
Auto = Literal["auto"]

_SIZE = re.compile(r"(\d+(?:\.\d+)?|\.\d+)\s*(?:([kmgt])(i?b)?|b)?", re.IGNORECASE)
MOST = 10**9  # rows, readings, seconds: where no option says less; what waits takes no more
_POWERS = {"k": 1, "m": 2, "g": 3, "t": 4}


def parse_size(text: str) -> int:
    """Return bytes: `512M`, `3GiB`, `7.5G` count in powers of 1024, `8GB` in powers of 1000."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ValueError(
            f"{cut(text)!r} is not a size; write 512M, 7.5G, 3GiB, 8GB or a count of bytes"
        )
    number, unit, suffix = match.groups()
    base = 1000 if suffix is not None and suffix.lower() == "b" else 1024
    if len(number) > 20:
        raise ValueError(f"{text[:20]!r}… is not a size that any machine has")
    size = Decimal(number) * (base ** _POWERS[unit.lower()] if unit else 1)
    if not unit and size != int(size):
        raise ValueError(f"{text!r} is not a whole number of bytes; did you mean {number}G?")
    return int(size)


def parse_text(text: str) -> str:
    """Return text for a model; arguments may hold any bytes, a model reads UTF-8."""
    return decoded(os.fsencode(text))


def decoded(data: bytes, encoding: str = "utf-8") -> str:
    """Return the text of bytes. Raises ValueError."""
    try:
        return data.decode(encoding)
    except UnicodeDecodeError as error:
        byte = data[error.start]
        raise ValueError(f"expected UTF-8 text, got byte 0x{byte:02x} at {error.start}") from None


def user_path(text: str) -> Path:
    """Return a path that a user wrote, `~` expanded. Raises UsageError if it cannot be one."""
    return paths.usable(os.path.expanduser(text))


def checked_draft(text: str) -> str:
    """Return the text if the engine understands it: `auto`, `off` or a number of tokens."""
    from edge_runtime.decode.draft import parse_gamma

    parse_gamma(text)
    return text


def checked_kv_policy(text: str) -> str:
    """Return the text if the engine understands it: `auto`, `kv8`, `kv4` or `recent:N`."""
    from edge_runtime.cache.policy import parse_policy

    parse_policy(text)
    return text


def parse_ctx(text: str) -> int | Auto:
    """Return the context to allocate in tokens, or `auto`."""
    if text == "auto":
        return "auto"
    from edge_runtime.decode.arguments import digits

    if (tokens := digits(text)) is None or tokens < 1:
        raise ValueError(f"{cut(text)!r} is not a number of tokens of at least 1, nor auto")
    return tokens


def parse_threads(text: str) -> int:
    """Return a number of threads."""
    from edge_runtime.decode.arguments import MAX_THREADS, digits

    if (count := digits(text)) is None or not 1 <= count <= MAX_THREADS:
        raise ValueError(f"{cut(text)!r} is not a number of threads from 1 to {MAX_THREADS}")
    return count


def parse_float(text: str) -> float:
    """Return a number that is neither NaN nor infinite."""
    try:
        number = float(text)
    except ValueError:
        raise ValueError(f"{cut(text)!r} is not a valid float") from None
    if not math.isfinite(number):
        raise ValueError(f"{cut(text)!r} is not a finite number")
    return number


if TYPE_CHECKING:  # a generic in click's types; at run time only in its later versions
    _ParamType = click.ParamType[object]
else:
    _ParamType = click.ParamType


class Parsed(_ParamType):
    """A click type around one of the parsers above."""

    def __init__(self, name: str, parse: Callable[[str], object]) -> None:
        self.name = name
        self._parse = parse

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> object:
        """Parse text; a value that a default already gave its type passes."""
        if not isinstance(value, str):
            return value
        try:
            return self._parse(value)
        except (ValueError, UsageError) as error:
            self.fail(str(error), param, ctx)


def _at_most(
    of: click.IntRange | click.FloatRange,
    number: Any,
    param: click.Parameter | None,
    ctx: click.Context | None,
) -> Any:
    """Return a number that is at most MOST where its type sets no upper limit."""
    if of.max is None and number > MOST:
        of.fail(f"expected at most {MOST}, got {cut(str(number), 20)}", param, ctx)
    return number


class Whole(click.IntRange):
    """A whole number within limits; without an upper one it is at most MOST."""

    name = "whole number"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Parse text as a number."""
        return int(_at_most(self, super().convert(value, param, ctx), param, ctx))


class Finite(click.FloatRange):
    """A number within limits, at most MOST without an upper one; click's own range lets NaN pass,
    and infinity where it is open."""

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        """Parse text as a number."""
        FLOAT.convert(value, param, ctx)  # refuses what is not finite
        return float(_at_most(self, super().convert(value, param, ctx), param, ctx))


TEXT = Parsed("text", parse_text)
SIZE = Parsed("size", parse_size)
FLOAT = Parsed("float", parse_float)
DRAFT = Parsed("draft", checked_draft)
THREADS = Parsed("threads", parse_threads)
CTX = Parsed("tokens", parse_ctx)
KV_POLICY = Parsed("policy", checked_kv_policy)


def model_argument(required: bool = True) -> Callable[[F], F]:
    """`MODEL`: a checkpoint folder or a known name, as text in `model` (None when left out)."""
    return click.argument("model", required=required)


_backend_option = click.option(
    "--backend",
    type=click.Choice(["auto", "reference", "cpu", "cuda"]),
    default="auto",
    show_default=True,
    help="What computes.",
)


def _use_kernels(ctx: click.Context, param: click.Parameter, value: str | None) -> None:
    """Take machine code from a folder, in this process and in those that it starts."""
    if value is not None:
        from edge_runtime import kernels

        kernels.use_folder(user_path(value), "--kernels")


_kernels_option = click.option(
    "--kernels",
    metavar="FOLDER",
    expose_value=False,
    callback=_use_kernels,
    help="Machine code for the cuda backend, as `kernels save` makes it.  "
    "[default: what Triton compiles]",
)


def backend_option(command: F) -> F:
    """Add --backend, and --kernels, which the cuda backend takes."""
    return _backend_option(_kernels_option(command))


view_option = click.option(
    "--view",
    type=click.Choice(["nest", "w8", "w4", "fp"]),
    default="nest",
    show_default=True,
    help="nest drafts with the base plane and verifies with both; w8 decodes the target and w4 the "
    "base one token at a time; fp runs the unquantised model.",
)
draft_option = click.option(
    "--draft",
    type=DRAFT,
    default="auto",
    show_default=True,
    metavar="auto|off|N",
    help="Tokens drafted before each verification.",
)
draft_source_option = click.option(
    "--draft-source",
    type=click.Choice(["auto", "base", "ngram", "both"]),
    default="auto",
    show_default=True,
    help="Where drafts come from: the base plane, look-up in the text so far, or both.",
)
kv_policy_option = click.option(
    "--kv-policy",
    type=KV_POLICY,
    default="auto",
    show_default=True,
    metavar="auto|kv8|kv4|recent:N",
    help="What drafting reads of the KV cache; verification always reads all of it.",
)
ctx_option = click.option(
    "--ctx",
    type=CTX,
    default="auto",
    show_default=True,
    metavar="auto|N",
    help="Context to allocate, in tokens.",
)
budget_option = click.option(
    "--budget",
    type=SIZE,
    metavar="SIZE",
    help="Memory the program may use, e.g. 512M, 3GiB, 7.5G.  [default: what is free]",
)
reserve_option = click.option(
    "--reserve", type=SIZE, metavar="SIZE", help="Memory to leave to everything else."
)
threads_option = click.option(
    "--threads",
    type=THREADS,
    metavar="N",
    help="CPU threads, at most 256.  [default: one per core that this process may use]",
)
prompt_cache_option = click.option(
    "--prompt-cache",
    type=Parsed("file", user_path),
    metavar="FILE",
    help="Begin with the KV cache kept there instead of computing it; generate and chat make the "
    "file where there is none.",
)
json_option = click.option(
    "--json", "as_json", is_flag=True, help="Print one JSON document as the last line of stdout."
)


def engine_options(command: F) -> F:
    """Add the options of every command that runs a model, in this order."""
    options = (
        backend_option,
        view_option,
        draft_option,
        draft_source_option,
        kv_policy_option,
        ctx_option,
        budget_option,
        reserve_option,
        threads_option,
    )
    for option in reversed(options):
        command = option(command)
    return command


def print_document(document: object) -> None:
    """Print what `--json` promises: one line of strict JSON on stdout. NaN is our mistake."""
    click.echo(json.dumps(document, ensure_ascii=False, allow_nan=False))
