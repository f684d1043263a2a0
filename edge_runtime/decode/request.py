"""What goes into a generation and what comes out of it.

Invariant: everything here is plain data; field names of `Result` are those of the command line's
JSON document.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from edge_runtime.decode.arguments import is_id, shown
from edge_runtime.decode.logprobs import LogProbs
from edge_runtime.errors import UsageError

FinishReason = Literal["eos", "stop", "length", "cancelled", "deadline"]
Span = Sequence[int] | npt.NDArray[np.float32]
Key = int | bytes  # what stands at a position: a token id, or the hash of an embedding row
ROW = -1  # an embedding row in a list of ids
MAX_ROW_VALUE = 2.0**48  # in an embedding row: rotated and squared, its sums stay finite in fp32


@dataclass(frozen=True, slots=True)
class Token:
    """One emitted token. `text` may be empty while a character is incomplete or held back;
    `logprobs` is there where it was asked for."""

    id: int
    text: str
    logprobs: LogProbs | None = None


@dataclass(slots=True)
class DraftStats:
    """Counts over one generation. A cycle is one verification (or one plain step)."""

    cycles: int = 0
    drafted: int = 0
    accepted: int = 0
    emitted: int = 0  # by cycles; the first token comes with the prompt

    def as_dict(self) -> dict[str, float | int]:
        """Return the fields of the JSON document."""
        cycles = max(1, self.cycles)
        return {
            "gamma_mean": round(self.drafted / cycles, 3),
            "drafted": self.drafted,
            "accepted": self.accepted,
            "acceptance": round(self.accepted / self.drafted, 4) if self.drafted else 0.0,
            "cycles": self.cycles,
            "tokens_per_cycle": round(self.emitted / cycles, 3),
        }


@dataclass(slots=True)
class Result:
    """A finished generation."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    prompt_tokens: int = 0
    cached_tokens: int = 0  # of the prompt, found in the cache
    new_tokens: int = 0
    finish_reason: FinishReason = "length"
    late: bool = False  # a deadline cut it short
    ttft_s: float = 0.0
    prefill_tok_s: float = 0.0
    decode_tok_s: float = 0.0
    decode_s: float = 0.0
    backend: str = ""
    backend_why: str = ""
    view: str = ""
    kv_policy: str = ""
    context_max: int = 0
    draft: dict[str, float | int] = field(default_factory=dict)
    draft_why: str = ""
    seed: int = 0
    memory: dict[str, int] = field(default_factory=dict)
    energy: dict[str, Any] | None = None
    synthetic: bool = False  # of random weights
    forced: bool = False  # what was accepted was declared, for timing alone: no text


class Prompt:
    """Spans flattened: ids with ROW where an embedding row stands, and a key per position."""

    def __init__(self, spans: Sequence[Span], hidden_size: int, vocab_size: int) -> None:
        """Check ids and rows. Raises UsageError."""
        self.ids: list[int] = []
        self.keys: list[Key] = []
        self._rows: dict[int, npt.NDArray[np.float32]] = {}
        for number, span in enumerate(spans):
            if isinstance(span, np.ndarray):
                self._add_rows(span, hidden_size, number)
                continue
            for token in span:
                if not is_id(token, vocab_size):
                    raise UsageError(
                        f"span {number}: expected token ids in 0…{vocab_size - 1}, got "
                        + shown(token)
                    )
                self.ids.append(int(token))
                self.keys.append(int(token))
        if not self.ids:
            raise UsageError("the prompt is empty", "give at least one token of text")

    def _add_rows(self, rows: npt.NDArray[np.float32], hidden_size: int, number: int) -> None:
        if rows.ndim != 2 or rows.shape[1] != hidden_size or rows.dtype.kind not in "fiu":
            raise UsageError(
                f"span {number}: expected embedding rows [n, {hidden_size}] of numbers, got "
                f"{list(rows.shape)} {rows.dtype}"
            )
        with np.errstate(over="ignore"):  # of a wider type: infinite then
            wide = rows.astype(np.float64)
        if not (np.abs(wide) <= MAX_ROW_VALUE).all():
            raise UsageError(
                f"span {number}: embedding rows hold NaN, infinity or a number beyond ±2^48"
            )
        for row in np.ascontiguousarray(wide, dtype=np.float32):
            self._rows[len(self.ids)] = row
            self.ids.append(ROW)
            self.keys.append(hashlib.blake2b(row.tobytes(), digest_size=16).digest())

    def __len__(self) -> int:
        """Positions."""
        return len(self.ids)

    def parts(self, start: int) -> list[tuple[int, list[int] | npt.NDArray[np.float32]]]:
        """Cut [start, end) into (position, ids or rows) pieces of one kind each."""
        found: list[tuple[int, list[int] | npt.NDArray[np.float32]]] = []
        at = start
        while at < len(self.ids):
            end = at
            is_row = self.ids[at] == ROW
            while end < len(self.ids) and (self.ids[end] == ROW) == is_row:
                end += 1
            if is_row:
                found.append((at, np.stack([self._rows[i] for i in range(at, end)])))
            else:
                found.append((at, self.ids[at:end]))
            at = end
        return found
