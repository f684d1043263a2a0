"""Text to token ids and back, on the `tokenizers` library.

Invariant: text is made of bytes. `token_bytes` gives each token's own bytes, and both `decode` and
the streaming decoder are their concatenation, so a stream can never differ from a full decode.

Two kinds of vocabulary are understood, those of every llama and qwen model: byte-level BPE (each
character of a token stands for a byte) and SentencePiece BPE (U+2581 is a space, <0xNN> a byte).
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterable, Sequence
from functools import cached_property, lru_cache
from typing import Any

import tokenizers

from edge_runtime.errors import CheckpointError, ContextError

_SPACE = "\u2581"
_NORMALISED = 3  # bytes of text to one that a Unicode normal form leaves, at most
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Tokenizer:
    """Built by `from_json`. Safe to share between threads."""

    def __init__(self, tokenizer_json: str, control_ids: Iterable[int] = ()) -> None:
        """Parse a tokenizer.json; `control_ids` are special whatever their flag says."""
        self._inner = load_tokenizer(tokenizer_json, "tokenizer.json")
        self._inner.no_truncation()
        self._inner.no_padding()
        added = self._inner.get_added_tokens_decoder()
        for token_id in control_ids:
            if token_id in added and not added[token_id].special:
                self._inner.add_special_tokens(
                    [tokenizers.AddedToken(added[token_id].content, special=True, normalized=False)]
                )
        decoder = self._inner.decoder
        parts = _decoder_parts(json.loads(decoder.__getstate__()) if decoder else None)
        self._added = self._inner.get_added_tokens_decoder()
        self._special = {t.content: i for i, t in self._added.items() if t.special}
        self._special_ids = frozenset(self._special.values())
        self._byte_level = _is_byte_level(parts)
        self._strips_space = not self._byte_level and _strips_space(parts)
        self._lock = threading.Lock()
        names = sorted(self._special, key=len, reverse=True)
        self._special_pattern = re.compile("|".join(map(re.escape, names)) or r"(?!)")
        self.num_tokens = (
            max(self._inner.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        )

    @classmethod
    def from_json(cls, tokenizer_json: str, control_ids: Iterable[int] = ()) -> Tokenizer:
        """Build from the text of a tokenizer.json. Raises CheckpointError when it is not one."""
        return cls(tokenizer_json, control_ids)

    def encode(self, text: str, *, allow_special: bool) -> list[int]:
        """Return the ids of `text`; BOS is never added.

        With `allow_special` the names of special tokens become those tokens, as in a rendered chat
        template. Without it they are ordinary text, as everything that a user typed must be: no id
        of the result is then special.
        """
        text = text.encode("utf-8", "replace").decode("utf-8")  # a lone surrogate is not text
        ids = self._encode(text, allow_special)
        if not allow_special and not self._special_ids.isdisjoint(ids):
            return self._encode_broken_up(text)
        return ids

    def encode_segments(self, segments: Sequence[tuple[str, bool]]) -> list[int]:
        """Encode text of which only some may name special tokens.

        Each segment is (text, names special tokens). Segments are joined before they are split at
        the special tokens that are allowed, so the result equals `encode` of the joined text where
        every name of a special token lies within one segment that may name it.
        """
        ids: list[int] = []
        plain = ""
        skip_space = False
        for text, allowed in segments:
            at = 0
            for match in self._special_pattern.finditer(text) if allowed else ():
                token_id = self._special[match[0]]
                plain += text[at : match.start()]
                plain = plain.lstrip() if skip_space else plain
                plain = plain.rstrip() if self._added[token_id].lstrip else plain
                ids += self.encode(plain, allow_special=False) if plain else []
                ids.append(token_id)
                skip_space = self._added[token_id].rstrip
                plain, at = "", match.end()
            plain += text[at:]
        plain = plain.lstrip() if skip_space else plain
        return ids + (self.encode(plain, allow_special=False) if plain else [])

    def decode(
        self, ids: Iterable[int], *, skip_special: bool = True, continues: bool = False
    ) -> str:
        """Return the text of `ids`; bytes that are not UTF-8 become U+FFFD.

        `continues` says that text came before: SentencePiece's leading space is then kept.
        """
        data = b"".join(self.token_bytes(i, skip_special=skip_special) for i in ids)
        if self._strips_space and not continues:
            data = data.removeprefix(b" ")
        return data.decode("utf-8", "replace")

    def token_bytes(self, token_id: int, *, skip_special: bool = True) -> bytes:
        """Return the bytes one token adds to a text; b"" for a special token or an unused id."""
        if token_id in self._special_ids and skip_special:
            return b""
        if token_id in self._added:
            return self._added[token_id].content.encode()
        token = self._inner.id_to_token(token_id)
        if token is None:
            return b""
        if self._byte_level:
            table = _byte_of_character()
            if all(c in table for c in token):
                return bytes(table[c] for c in token)
            return token.encode()
        byte = _BYTE_TOKEN.fullmatch(token)
        return bytes([int(byte[1], 16)]) if byte else token.replace(_SPACE, " ").encode()

    @cached_property
    def longest_bytes(self) -> int:
        """Bytes of text that one token stands for, at most."""
        names = self._inner.get_vocab(with_added_tokens=False)
        plain = max((len(n) if self._byte_level else len(n.encode()) for n in names), default=1)
        added = max((len(t.content.encode()) for t in self._added.values()), default=1)
        return max(plain, added) * (_NORMALISED if self._inner.normalizer else 1)

    def check_fits(self, text: str, context: int) -> None:
        """Refuse text that is longer than any that `context` tokens can spell, before it is
        encoded. Raises ContextError."""
        if len(text) > context and (size := len(text.encode("utf-8", "replace"))) > (
            most := context * self.longest_bytes
        ):
            raise ContextError(
                f"the prompt has {size} bytes, the context holds {context} tokens, which are "
                f"{most} bytes at most",
                "shorten the prompt",
            )

    @property
    def strips_leading_space(self) -> bool:
        """Whether a text's first space is an artefact of the vocabulary (SentencePiece)."""
        return self._strips_space

    def is_special(self, token_id: int) -> bool:
        """Whether a token is a marker rather than text."""
        return token_id in self._special_ids

    def token_id(self, token: str) -> int | None:
        """Return the id of a token by its name, or None."""
        token_id: int | None = self._inner.token_to_id(token)
        return token_id

    def special_spans(self, text: str) -> list[tuple[int, int]]:
        """Return where `text` spells the name of a special token, as (start, end)."""
        return [match.span() for match in self._special_pattern.finditer(text)]

    def _encode(self, text: str, allow_special: bool) -> list[int]:
        with self._lock:  # the switch belongs to the shared tokenizer, not to the call
            self._inner.encode_special_tokens = not allow_special
            # as a batch: that lets other threads run meanwhile
            [encoding] = self._inner.encode_batch([text], add_special_tokens=False)
        return [int(i) for i in encoding.ids]

    def _encode_broken_up(self, text: str) -> list[int]:
        """Encode text whose pieces merge into a special token: cut its name after one character."""
        ids: list[int] = []
        at = 0
        for start, _ in self.special_spans(text):
            ids += self._encode(text[at : start + 1], False)
            at = start + 1
        ids += self._encode(text[at:], False)
        return [i for i in ids if i not in self._special_ids]


@lru_cache(maxsize=1)
def _byte_of_character() -> dict[str, int]:
    """Byte-level BPE's alphabet: printable Latin-1 stands for itself, other bytes from U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in set(printable)]
    table = {chr(b): b for b in printable}
    return table | {chr(0x100 + n): b for n, b in enumerate(others)}


def load_tokenizer(tokenizer_json: str, where: str) -> tokenizers.Tokenizer:
    """Parse a tokenizer.json into the library's object. Raises CheckpointError naming `where`."""
    try:
        return tokenizers.Tokenizer.from_str(tokenizer_json)
    except Exception as error:  # the library raises nothing more specific than this class
        reason = " ".join(str(error).split())[:200]
        raise CheckpointError(
            f"{where} is not a usable tokenizer: {reason}",
            "it may be damaged, or newer than the installed tokenizers package",
        ) from None


def highest_token(tokenizer: tokenizers.Tokenizer) -> int:
    """Return the highest token id in use, -1 without any; there may be holes below it."""
    return max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)


def _decoder_parts(decoder: Any) -> list[dict[str, Any]]:
    if not isinstance(decoder, dict):
        return []
    return decoder["decoders"] if decoder.get("type") == "Sequence" else [decoder]


def _is_byte_level(parts: list[dict[str, Any]]) -> bool:
    kinds = [part.get("type") for part in parts]
    if "ByteLevel" in kinds:
        return True
    if "ByteFallback" in kinds or "Metaspace" in kinds:
        return False
    raise CheckpointError(
        f"tokenizer.json: decoder {kinds or None} is not supported, expected byte-level BPE or "
        "SentencePiece BPE with byte fallback"
    )


def _strips_space(parts: list[dict[str, Any]]) -> bool:
    for part in parts:
        if part.get("type") == "Strip" and part.get("start", 0) > 0:
            return True
        if part.get("type") == "Metaspace":
            scheme = part.get("prepend_scheme", "always")
            return bool(scheme != "never" and part.get("add_prefix_space", True))
    return False
