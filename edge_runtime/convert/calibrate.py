"""Calibration text to token windows, and the Hessian of a linear's inputs.

Invariant: windows are a function of (text, tokenizer, seed) alone; no window is padded.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from edge_runtime.errors import CheckpointError
from edge_runtime.format.lfs import refuse_pointer

WINDOW = 512
BUNDLED = "bundled"
MAX_FILE_BYTES = 1 << 30

Encode = Callable[[str], list[int]]
EncodeChat = Callable[[list[dict[str, str]]], list[int]] | None


def calibration_documents(file: Path | None) -> list[Any]:
    """Read documents: JSON lines with "text" or "messages", or plain text; None is the bundled set.

    Raises CheckpointError naming the line.
    """
    if file is None:
        bundled = resources.files("edge_runtime.convert").joinpath("calibration.jsonl")
        return [json.loads(line) for line in bundled.read_text("utf-8").split("\n") if line]
    text = calibration_text(file)
    if file.suffix != ".jsonl":
        return [{"text": text}]
    documents = []
    for number, line in enumerate(text.split("\n"), 1):  # splitlines also cuts inside strings
        if not line.strip():
            continue
        try:
            document = json.loads(line)
        except (ValueError, RecursionError) as e:
            raise CheckpointError(f"{file}:{number}: not JSON") from e
        if not _is_document(document):
            raise CheckpointError(
                f'{file}:{number}: expected an object with "text" (a string) or "messages" '
                '(a list of objects with "role" and "content")'
            )
        documents.append(document)
    return documents


def calibration_text(file: Path) -> str:
    """Read a calibration file whole. Raises CheckpointError."""
    if not file.is_file():
        found = ": it is a folder, a pipe or a device" if file.exists() else " not found"
        raise CheckpointError(f"{file}: calibration file{found}")
    if file.stat().st_size > MAX_FILE_BYTES:
        raise CheckpointError(f"{file}: calibration file is larger than 1 GiB")
    try:
        refuse_pointer(file)
        return file.read_text("utf-8")
    except UnicodeDecodeError as e:
        raise CheckpointError(f"{file}: calibration file is not UTF-8 text") from e
    except OSError as e:
        raise CheckpointError(f"{file}: calibration file cannot be read ({e.strerror})") from e


def _is_document(document: Any) -> bool:
    if not isinstance(document, dict):
        return False
    if "text" in document:
        return isinstance(document["text"], str)
    messages = document.get("messages")
    return (
        isinstance(messages, list)
        and len(messages) > 0
        and all(
            isinstance(m, dict)
            and isinstance(m.get("role"), str)
            and isinstance(m.get("content"), str)
            for m in messages
        )
    )


def windows(
    documents: list[Any],
    encode: Encode,
    encode_chat: EncodeChat,
    num_windows: int,
    *,
    length: int = WINDOW,
    seed: int = 0,
) -> list[list[int]]:
    """Join the documents' tokens, shuffled, and cut them into windows of `length` tokens.

    Chats are rendered with the model's template where it has one. Raises CheckpointError when the
    text is too short for a single window.
    """
    order = torch.randperm(len(documents), generator=torch.Generator().manual_seed(seed))
    stream: list[int] = []
    for i in order.tolist():
        stream += _tokens(documents[i], encode, encode_chat)
        if len(stream) >= num_windows * length:
            break
    count = min(num_windows, len(stream) // length)
    if count == 0:
        raise CheckpointError(
            f"calibration text: expected at least {length} tokens, got {len(stream)}",
            "give a longer --calib FILE",
        )
    return [stream[i * length : (i + 1) * length] for i in range(count)]


def _tokens(document: Any, encode: Encode, encode_chat: EncodeChat) -> list[int]:
    if "text" in document:
        return encode(document["text"] + "\n\n")
    messages = document["messages"]
    if encode_chat is not None:
        return encode_chat(messages)
    return encode("\n\n".join(m["content"] for m in messages) + "\n\n")


class HessianSum:
    """XᵀX / rows of the inputs of each linear, fp64-summed fp32 products."""

    def __init__(self) -> None:
        self.by_name: dict[str, Tensor] = {}
        self.rows: dict[str, int] = {}

    def observe(self, name: str, x: Tensor) -> None:
        """Add the rows of x fp32 [L, K]."""
        product = x.T @ x
        if name in self.by_name:
            self.by_name[name] += product
        else:
            self.by_name[name] = product.double()
        self.rows[name] = self.rows.get(name, 0) + x.shape[0]

    def take(self, name: str) -> Tensor:
        """Return the mean Hessian fp32 [K, K] of a linear and forget it."""
        return self.by_name.pop(name).div_(self.rows.pop(name)).float()
