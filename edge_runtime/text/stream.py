"""Tokens to text while they arrive: whole characters only, and nothing of a stop string.

Invariant: the concatenation of all pieces, `flush` included, equals the full decode cut before the
stop string that is complete first, however the text was split into pieces. A piece never holds
half a character, and never the beginning of what turns out to be a stop string.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import NamedTuple

from edge_runtime.text.tokenizer import Tokenizer


class Piece(NamedTuple):
    """Text that may be shown now, and the stop string that ended the answer, if one did."""

    text: str
    stop: str | None = None


class StopMatcher:
    """Cut a stream of text at the first of several stop strings; hold back what may become one."""

    def __init__(self, stops: Sequence[str] = ()) -> None:
        """`stops` may be empty; empty strings in it are ignored."""
        self._stops = [s for s in stops if s]
        self._held = ""
        self._done = False

    def push(self, text: str) -> Piece:
        """Take more text, return what is now known not to belong to a stop string."""
        if self._done:
            return Piece("")
        self._held += text
        found = [(at + len(s), at, s) for s in self._stops if (at := self._held.find(s)) >= 0]
        if found:
            _, at, stop = min(found)
            self._done = True
            shown, self._held = self._held[:at], ""
            return Piece(shown, stop)
        keep = max((_overlap(self._held, s) for s in self._stops), default=0)
        cut = len(self._held) - keep
        shown, self._held = self._held[:cut], self._held[cut:]
        return Piece(shown)

    def flush(self) -> str:
        """Return what was held back: the stream ended before it became a stop string."""
        shown, self._held = self._held, ""
        return shown


class TextStream:
    """Incremental detokeniser for one answer."""

    def __init__(
        self, tokenizer: Tokenizer, stops: Sequence[str] = (), *, continues: bool = False
    ) -> None:
        """`continues`: text came before (raw completion), so a leading space is kept."""
        self._tokenizer = tokenizer
        self._matcher = StopMatcher(stops)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._strip = tokenizer.strips_leading_space and not continues

    def push(self, token_id: int) -> Piece:
        """Take one token; special tokens add no text."""
        data = self._tokenizer.token_bytes(token_id)
        if self._strip and data:
            data, self._strip = data.removeprefix(b" "), False
        return self._matcher.push(self._decoder.decode(data))

    def flush(self) -> Piece:
        """End the answer: an incomplete character becomes U+FFFD, held text is shown."""
        piece = self._matcher.push(self._decoder.decode(b"", final=True))
        if piece.stop is not None:
            return piece
        return Piece(piece.text + self._matcher.flush())


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a proper beginning of `stop`."""
    for size in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:size]):
            return size
    return 0
