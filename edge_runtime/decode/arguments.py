"""Checks of what a Python program hands to the engine.

Invariant: a value of the wrong kind is a `UsageError` with one line before anything runs, never an
error from somewhere inside.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from edge_runtime.errors import UsageError


def is_whole(value: object) -> bool:
    """Say whether a value is an int, numpy's included; true is none."""
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def is_number(value: object) -> bool:
    """Say whether a value is an int or a float, numpy's included."""
    return is_whole(value) or isinstance(value, (float, np.floating))


def whole_number(name: str, value: Any, low: int) -> int:
    """Return a whole number of at least `low`. Raises UsageError."""
    if not is_whole(value) or value < low:
        raise UsageError(f"{name}: expected a whole number of at least {low}, got {shown(value)}")
    return int(value)


def seconds(name: str, value: Any) -> float:
    """Return a duration of at least 0. Raises UsageError."""
    if not is_number(value) or not value >= 0:
        raise UsageError(f"{name}: expected seconds, at least 0, got {shown(value)}")
    return float(value)


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
    """Return a value as an error message quotes it; of what is long, its type."""
    if value is None or is_number(value) or isinstance(value, (bool, str)):
        text = repr(value)
        return text if len(text) <= 40 else text[:37] + "..."
    return f"a {type(value).__name__}"
