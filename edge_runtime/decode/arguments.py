"""Checks of what a Python program hands to the engine.

Invariant: a value of the wrong kind is a `UsageError` with one line before anything runs, never an
error from somewhere inside.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np

from edge_runtime import paths
from edge_runtime.errors import UsageError, cut
from edge_runtime.plan.footprint import Layout

MAX_THREADS = 256
MAX_NEW_TOKENS = 1 << 24  # that a server or a chat takes; no context is as long
MAX_DIGITS = 18  # of a number that means something


def is_whole(value: object) -> bool:
    """Say whether a value is an int, numpy's included; true is none."""
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def is_number(value: object) -> bool:
    """Say whether a value is an int or a float, numpy's included."""
    return is_whole(value) or isinstance(value, (float, np.floating))


def whole_number(name: str, value: Any, low: int, high: int | None = None) -> int:
    """Return a whole number of at least `low`, at most `high`. Raises UsageError."""
    if not is_whole(value) or value < low or (high is not None and value > high):
        bounds = f"of at least {low}" if high is None else f"from {low} to {high}"
        raise UsageError(f"{name}: expected a whole number {bounds}, got {shown(value)}")
    return int(value)


def quantised_view(value: Any) -> None:
    """Refuse what is no view of a converted model. Raises UsageError."""
    if word("view", value) not in ("nest", "w8", "w4"):
        raise UsageError(
            f"view: expected nest, w8 or w4, got {shown(value)}",
            "view fp runs the unquantised source: bitnest-edge … --view fp --original SRC",
        )


def layout(value: Any, backend: str) -> Layout:
    """Return how a backend is to hold a model. Raises UsageError."""
    names = ("nest", "w8", "two_copies")
    if word("layout", value) not in names:
        raise UsageError(f"layout: expected {', '.join(names)}, got {shown(value)}")
    if value != "nest" and backend != "cuda":
        raise UsageError(f"layout {value} is there on the cuda backend only, not on {backend}")
    return cast(Layout, value)


def thread_count(value: Any) -> int:
    """Return a number of threads. Raises UsageError."""
    return whole_number("threads", value, 1, MAX_THREADS)


def as_float(value: Any) -> float:
    """Return a number as a float; what is beyond a float's range is infinite."""
    try:
        return float(value)
    except OverflowError:
        return float("inf") if value > 0 else float("-inf")


def seconds(name: str, value: Any) -> float:
    """Return a duration of at least 0. Raises UsageError."""
    if not is_number(value) or not value >= 0:
        raise UsageError(f"{name}: expected seconds, at least 0, got {shown(value)}")
    return as_float(value)


def yes_or_no(name: str, value: object) -> bool:
    """Return true or false, numpy's included; nothing else is as good. Raises UsageError."""
    if not isinstance(value, (bool, np.bool_)):
        raise UsageError(f"{name}: expected True or False, got {shown(value)}")
    return bool(value)


def word(name: str, value: object) -> str:
    """Return a text, or a whole number as text. Raises UsageError."""
    if isinstance(value, str):
        return value
    if not is_whole(value):
        raise UsageError(f"{name}: expected text or a whole number, got {shown(value)}")
    return shown(value)


def context(value: Any) -> int | None:
    """Return a context in tokens, or None for auto. Raises UsageError."""
    if isinstance(value, str) and value == "auto":
        return None
    tokens: Any = digits(value) if isinstance(value, str) else value
    if not is_whole(tokens) or tokens < 2:
        raise UsageError(f"context: expected auto or a number >= 2, got {shown(value)}")
    return int(tokens)


def digits(text: str) -> int | None:
    """Return the number that decimal digits spell, None for other text and for absurd lengths."""
    return int(text) if text.isascii() and text.isdigit() and len(text) <= MAX_DIGITS else None


def folder(name: str, value: object) -> Path:
    """Return a path. Raises UsageError."""
    if not isinstance(value, (str, Path)):
        raise UsageError(f"{name}: expected a path, got {shown(value)}")
    return paths.usable(value)


def draft_source(value: Any) -> None:
    """Check a caller's own source of drafts. Raises UsageError."""
    if value is None or (not isinstance(value, type) and callable(getattr(value, "propose", None))):
        return
    raise UsageError(
        "draft_source: expected an object with propose(tokens, start, gamma), got " + shown(value),
        'a source by its name is for Engine.open: draft_source="ngram"',
    )


def texts(name: str, value: object) -> tuple[str, ...]:
    """Return a text, or a sequence of texts, as a tuple. Raises UsageError."""
    found = [value] if isinstance(value, str) else _items(value)
    if found is None or not all(isinstance(text, str) for text in found):
        raise UsageError(f"{name}: expected text or a sequence of texts, got {shown(value)}")
    return tuple(found)


def token_ids(name: str, value: object, num_tokens: int) -> list[int]:
    """Return a sequence of ids below `num_tokens`, at least one. Raises UsageError."""
    found = _items(value)
    if found is None:
        raise UsageError(f"{name}: expected a sequence of ids, got {shown(value)}")
    if not found:
        raise UsageError(f"{name}: expected at least one id, got none")
    for i in found:
        if not is_id(i, num_tokens):
            raise UsageError(f"{name}: expected 0…{num_tokens - 1}, got {shown(i)}")
    return [int(i) for i in found]


def is_id(value: Any, num_tokens: int) -> bool:
    """Say whether a value is the id of a token."""
    return is_whole(value) and 0 <= value < num_tokens


def prompt_items(prompt: object) -> list[Any]:
    """Return the messages, ids or spans of a prompt, all of one kind. Raises UsageError."""
    found = _items(prompt)
    kinds: tuple[Any, ...] = (Mapping, (int, np.integer), (np.ndarray, list, tuple))
    if found is None or not any(all(isinstance(i, kind) for i in found) for kind in kinds):
        raise UsageError(
            "prompt: expected text, messages, token ids, or spans of ids and embedding rows, got "
            + shown(prompt)
        )
    return found


def _items(value: object) -> list[Any] | None:
    """Return what is in a sequence or an array; None for what is neither, and for bytes."""
    if isinstance(value, np.ndarray):
        return list(value) if value.ndim else None
    is_text = isinstance(value, (str, bytes, bytearray))
    return list(value) if isinstance(value, Sequence) and not is_text else None


def shown(value: object) -> str:
    """Return a value as an error message quotes it; of what is long, its type or its size."""
    if isinstance(value, int) and value.bit_length() > 64:
        return f"a number of {value.bit_length()} bits"
    if value is None or is_number(value) or isinstance(value, (bool, str)):
        return cut(repr(value), 40)
    return f"a {type(value).__name__}"
