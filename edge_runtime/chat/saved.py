"""A conversation in a file: messages, system prompt, settings, and which model it was held with.

Invariant: a file is written whole or not at all, over nothing but an earlier one of its kind, and
readable by its owner alone; what is read is checked entirely before anything of it is used.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

import msgspec

from edge_runtime.atomic import PRIVATE, open_regular, write_atomic
from edge_runtime.errors import CheckpointError, UsageError, cut
from edge_runtime.paths import not_written

FORMAT = "bitnest-edge chat"
VERSION = 1
MAX_BYTES = 64 << 20


class Turn(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One message."""

    role: Literal["user", "assistant"]
    content: str


class ModelName(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A model: the name of its folder, and the sha256 of its manifest, which hashes the rest."""

    name: str
    sha256: str


class SavedChat(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The document."""

    format: str = FORMAT
    version: int = VERSION
    model: ModelName
    system: str | None
    thinking: bool | None
    settings: dict[str, int | float | None]
    messages: list[Turn]


def save(path: Path, chat: SavedChat) -> None:
    """Write a chat. Raises UsageError for a file that is something else, and for no place."""
    if path.exists():
        try:
            load(path)
        except CheckpointError as error:
            raise UsageError(
                f"{path} is there and is no saved chat: it is left as it is", "give another name"
            ) from error
    text = msgspec.json.format(msgspec.json.encode(chat), indent=1) + b"\n"
    try:
        write_atomic(path, text, PRIVATE)
    except OSError as error:
        hint = "give a file in a folder that is there and is yours"
        raise not_written(path, error, hint) from None


def load(path: Path) -> SavedChat:
    """Read a chat. Raises CheckpointError for what is none, with the reason."""
    hint = "expected a file that /save wrote"
    try:
        if path.is_dir():
            raise CheckpointError(f"{path}: it is a folder", hint)
        with open(open_regular(path, os.O_RDONLY), "rb") as stream:
            data = stream.read(MAX_BYTES + 1)
    except FileNotFoundError:
        raise CheckpointError(f"{path}: there is no such file", hint) from None
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}", hint) from None
    if len(data) > MAX_BYTES:
        raise CheckpointError(f"{path}: expected at most {MAX_BYTES} bytes", hint)
    try:
        head = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CheckpointError(f"{path}: not a saved chat: not JSON ({error})", hint) from None
    if not isinstance(head, dict) or head.get("format") != FORMAT:
        raise CheckpointError(f'{path}: not a saved chat: no "format": "{FORMAT}"', hint)
    version = head.get("version")
    if version != VERSION:
        newer = isinstance(version, int) and version > VERSION
        raise CheckpointError(
            f"{path}: expected version {VERSION} of a saved chat, got {cut(repr(version))}",
            "a newer bitnest-edge wrote it" if newer else hint,
        )
    try:
        chat = msgspec.json.decode(data, type=SavedChat)
    except msgspec.ValidationError as error:
        raise CheckpointError(f"{path}: a damaged saved chat: {error}", hint) from None
    _check_order(chat, path)
    return chat


def _check_order(chat: SavedChat, path: Path) -> None:
    """Templates refuse other orders, some of them only turns later."""
    for number, turn in enumerate(chat.messages):
        expected = ("user", "assistant")[number % 2]
        if turn.role != expected:
            raise CheckpointError(
                f"{path}: a damaged saved chat: message {number}: expected one of the {expected}, "
                f"got {turn.role}"
            )
    if len(chat.messages) % 2:
        raise CheckpointError(f"{path}: a damaged saved chat: the last message has no answer")
