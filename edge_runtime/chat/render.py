"""What a person sees of an answer: its text as it comes, then one line of figures.

Invariant: on a terminal no control character of a model's text reaches the terminal except newline
and tab; a file or a pipe gets the text as it is. Colour only where `log.use_colour` allows it.
"""

from __future__ import annotations

import io
import shutil
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TextIO

from edge_runtime import log
from edge_runtime.log import NORMAL, QUIET, printable

if TYPE_CHECKING:
    from edge_runtime.decode.request import Result, Token

SEPARATOR = " · "
THINK = ("<think>", "</think>")
_ENDS = {
    "length": "cut at the limit",
    "cancelled": "stopped",
    "deadline": "cut at the deadline",
}


class TextWriter:
    """Writes pieces of one answer to a stream and ends its last line.

    `dims`: what a model thinks, between `<think>` and `</think>`, is quiet where colour is welcome.
    """

    def __init__(self, stream: TextIO, *, dims: bool = False) -> None:
        """Characters that the stream's encoding lacks are shown as `?`."""
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
        self._stream = stream
        self._live = stream.isatty()
        self._dims = dims and log.use_colour(stream)
        self._dim = False
        self._at_start = True  # of a line
        self._lock = threading.RLock()
        self.num_chars = 0  # of the text, written so far

    def write(self, text: str) -> None:
        """Show a piece now."""
        with self._lock:
            self.num_chars += len(text)
            if text:
                self._at_start = text.endswith("\n")
                shown = printable(text) if self._live else text
                self._stream.write(self._dimmed(shown) if self._dims else shown)
                self._stream.flush()

    def end(self) -> None:
        """Write the newline that follows every answer."""
        with self._lock:
            self._stream.write(f"{NORMAL}\n" if self._dim else "\n")
            self._dim, self._at_start = False, True
            self._stream.flush()

    def interject(self, say: Callable[[], None]) -> None:
        """Let something else be said on a line of its own, from whatever thread; at a terminal the
        answer goes on below it."""
        with self._lock:
            if self._live and not self._at_start:
                self._stream.write(f"{NORMAL}\n" if self._dim else "\n")
                self._at_start = True
                self._stream.flush()
            say()
            if self._live and self._dim:
                self._stream.write(QUIET)

    def _dimmed(self, text: str) -> str:
        if THINK[0] in text:
            self._dim = True
            text = text.replace(THINK[0], QUIET + THINK[0])
        if self._dim and THINK[1] in text:
            self._dim = False
            text = text.replace(THINK[1], THINK[1] + NORMAL)
        return text


def stream_answer(tokens: Iterator[Token], writer: TextWriter) -> None:
    """Write an answer while it is made."""
    for token in tokens:
        writer.write(token.text)


def finish_answer(result: Result, writer: TextWriter) -> None:
    """Write what a stop left unshown (held back text, half a character), and the newline."""
    writer.write(result.text[writer.num_chars :])
    writer.end()


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
    if result.energy is not None:
        parts.append(_joules(result.energy))
    parts.append(
        f"cached {result.cached_tokens} / new {result.prompt_tokens - result.cached_tokens}"
    )
    parts.append(f"ctx {result.prompt_tokens + result.new_tokens}/{result.context_max}")
    if result.synthetic:
        parts.append("random weights")
    if result.forced:
        parts.append("acceptance declared")
    if context_is_full(result):
        parts.append("cut: the context is full")
    elif result.finish_reason in _ENDS:
        parts.append(_ENDS[result.finish_reason])
    return SEPARATOR.join(parts)


def context_is_full(result: Result) -> bool:
    """Whether an answer ended because there was no room for more of it."""
    used = result.prompt_tokens + result.new_tokens
    return result.finish_reason == "length" and used >= result.context_max


def _joules(energy: dict[str, Any]) -> str:
    """Return joules a token, gross and net of idle, with the rail; what replays a log says so."""
    each, net = energy["j_per_token"], energy["net_j"]
    rail = energy["rail"] + (" of a replayed log" if energy["source"] == "replay" else "")
    beside = (
        f"{rail}, net {each * net / energy['gross_j']:.2g}"
        if net is not None and energy["gross_j"]
        else rail
    )
    return f"{each:.2g} J/tok ({beside})"


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


def folded(line: str, stream: TextIO) -> str:
    """Return a line of figures, broken between them where a terminal is too narrow for it."""
    if not stream.isatty():
        return line
    width = shutil.get_terminal_size().columns
    rows = [""]
    for part in line.split(SEPARATOR):
        longer = rows[-1] + SEPARATOR + part if rows[-1] else part
        if len(longer) <= width or not rows[-1]:
            rows[-1] = longer
        else:
            rows.append(part)
    return "\n".join(rows)
