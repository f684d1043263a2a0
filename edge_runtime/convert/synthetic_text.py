"""A tokenizer for a checkpoint without a model: text is its bytes, other ids are numbers.

Invariant: all ids below the size of the vocabulary exist. A prompt has one token a byte; an id that
is no byte reads as a space and its number, so nobody takes an answer for language.
"""

from __future__ import annotations

import json
from typing import Any

from edge_runtime.errors import UsageError
from edge_runtime.format.spec import TextSpec

START, END = "<|im_start|>", "<|im_end|>"
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LEAST = 256 + 2


def byte_tokenizer(vocab_size: int) -> tuple[TextSpec, str]:
    """Return what the program must know of text, and a tokenizer.json of so many ids: the bytes,
    numbers, and the two marks of a turn, which come last."""
    if vocab_size < LEAST:
        raise UsageError(f"vocabulary: expected at least {LEAST} ids, got {vocab_size}")
    tokens = [*_alphabet(), *(f"Ġ{i}" for i in range(256, vocab_size - 2)), START, END]
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    byte_level: dict[str, Any] = {
        "type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": True
    }  # fmt: skip
    body = {
        "version": "1.0",
        "added_tokens": [
            {"id": tokens.index(t), "content": t, **flags, "special": True} for t in (START, END)
        ],
        "pre_tokenizer": byte_level,
        "decoder": byte_level,
        "model": {"type": "BPE", "vocab": {t: i for i, t in enumerate(tokens)}, "merges": []},
    }
    text = TextSpec(
        eos_ids=(vocab_size - 1,), num_tokens=vocab_size, eos_token=END, chat_template=TEMPLATE
    )
    return text, json.dumps(body, ensure_ascii=False)


def _alphabet() -> list[str]:
    """Byte-level BPE's characters in the order of the bytes: printable Latin-1 stands for itself,
    the others begin at U+0100."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(b) if b in printable else chr(next(others)) for b in range(256)]
