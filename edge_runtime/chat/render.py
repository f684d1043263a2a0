"""What a person sees of an answer: its text as it comes, then one line of figures.

Invariant: on a terminal no control character of a model's text reaches the terminal except newline
and tab; a file or a pipe gets the text as it is. Colour only where `log.use_colour` allows it.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import TYPE_CHECKING, TextIO

from edge_runtime import log

if TYPE_CHECKING:
    from edge_runtime.decode.request import Result, Token

SEPARATOR = " · "
_ENDS = {
    "length": "cut at the limit",
    "cancelled": "stopped",
    "deadline": "cut at the deadline",
}


class TextWriter:
    """Writes pieces of one answer to a stream and ends its last line."""

    def __init__(self, stream: TextIO) -> None:
        """Characters that the stream's encoding lacks are shown as `?`."""
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
        self._stream = stream
        self._live = stream.isatty()
        self.num_chars = 0  # of the text, written so far

    def write(self, text: str) -> None:
        """Show a piece now."""
        self.num_chars += len(text)
        if text:
            self._stream.write(printable(text) if self._live else text)
            self._stream.flush()

    def end(self) -> None:
        """Write the newline that follows every answer."""
        self._stream.write("\n")
        self._stream.flush()


def stream_answer(tokens: Iterator[Token], writer: TextWriter) -> None:
    """Write an answer while it is made."""
    for token in tokens:
        writer.write(token.text)


def finish_answer(result: Result, writer: TextWriter) -> None:
    """Write what a stop left unshown (held back text, half a character), and the newline."""
    writer.write(result.text[writer.num_chars :])
    writer.end()


def printable(text: str) -> str:
    """Replace control characters, which could rewrite a terminal, by their visible symbols."""
    return "".join(c if c in "\n\t" or c.isprintable() else _symbol(c) for c in text)


def _symbol(c: str) -> str:
    code = ord(c)
    if code < 0x20:
        return chr(0x2400 + code)
    if code == 0x7F or 0x80 <= code < 0xA0:
        return "\u2421"
    return c  # unprintable to Python, harmless to a terminal: joiners, unassigned


def figures(result: Result) -> str:
    """Return the line below an answer: size, speeds, drafting, cache, context, what is not real."""
    parts = [f"{result.new_tokens} tok"]
    if result.decode_tok_s:
        parts.append(f"{result.decode_tok_s:.1f} tok/s")
    if result.new_tokens:
        parts.append(f"ttft {result.ttft_s:.2f} s")
    drafted = result.draft.get("drafted", 0)
    cycles = max(1, result.draft.get("cycles", 0))
    if drafted:
        parts.append(f"acc {result.draft['accepted'] / cycles:.1f}/cycle")
    else:
        parts.append("no drafting")
    parts.append(
        f"cached {result.cached_tokens} / new {result.prompt_tokens - result.cached_tokens}"
    )
    parts.append(f"ctx {result.prompt_tokens + result.new_tokens}/{result.context_max}")
    if result.synthetic:
        parts.append("random weights")
    if result.forced:
        parts.append("acceptance declared")
    if result.finish_reason in _ENDS:
        parts.append(_ENDS[result.finish_reason])
    return SEPARATOR.join(parts)


def statistics(result: Result) -> list[str]:
    """Return a few lines about the last answer, for /stats."""
    d, m = result.draft, result.memory
    return [
        f"prompt   {result.prompt_tokens} tokens, {result.cached_tokens} from the cache, "
        f"{result.prefill_tok_s:.1f} tok/s",
        f"answer   {result.new_tokens} tokens in {result.decode_s:.2f} s, ended by "
        f"{result.finish_reason}",
        f"draft    {d.get('accepted', 0)} of {d.get('drafted', 0)} accepted in "
        f"{d.get('cycles', 0)} cycles, {d.get('tokens_per_cycle', 0)} tokens a cycle",
        f"         {result.draft_why}",
        f"backend  {result.backend}: {result.backend_why}",
        f"memory   weights {m.get('weights_bytes', 0) / 2**20:.0f} MiB, KV cache "
        f"{m.get('kv_bytes', 0) / 2**20:.0f} MiB, peak {m.get('peak_bytes', 0) / 2**20:.0f} MiB",
    ]


def dim(text: str, stream: TextIO) -> str:
    """Return text in a quiet colour where colour is welcome."""
    return f"\x1b[2m{text}\x1b[0m" if log.use_colour(stream) else text
