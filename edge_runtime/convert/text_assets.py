"""What a model's source says about text, whichever kind of source it is: end tokens, BOS, size.

Invariant: every token that ends an answer is in `eos_ids`; a missed one shows as an answer that
never stops, a wrong one as an answer cut short.
"""

from __future__ import annotations

from collections.abc import Iterable

import tokenizers

from edge_runtime.errors import CheckpointError
from edge_runtime.format.spec import TextSpec
from edge_runtime.text.tokenizer import highest_token

# Tokens that end a turn in some chat format. One counts when the model's own template writes it.
_TURN_ENDS = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>", "<|end|>", "</s>")
_DOCUMENT_END = "<|endoftext|>"


def make_text_spec(
    tokenizer: tokenizers.Tokenizer,
    *,
    declared_eos: Iterable[int],
    pad_id: int | None,
    bos_id: int | None,
    add_bos: bool,
    chat_template: str | None,
    vocab_size: int,
) -> TextSpec:
    """Combine the pieces; `declared_eos` in order of trust, its first is the text's eos_token."""
    size = highest_token(tokenizer) + 1
    if size > vocab_size:
        raise CheckpointError(
            f"the tokenizer has {size} tokens, but the embedding only {vocab_size} rows",
            "the tokenizer belongs to another model, or tokens were added without resizing",
        )
    eos = list(declared_eos)
    added = {t.content: i for i, t in tokenizer.get_added_tokens_decoder().items()}
    for token in _TURN_ENDS:
        if token in added and chat_template and token in chat_template:
            eos.append(added[token])
    document_end = added.get(_DOCUMENT_END)
    if document_end is not None and document_end == pad_id:
        eos.append(document_end)  # the next token would begin an unrelated document
    if bos_id is not None and not 0 <= bos_id < vocab_size:
        bos_id = None
    unique = tuple(dict.fromkeys(i for i in eos if 0 <= i < vocab_size))
    return TextSpec(
        eos_ids=unique,
        num_tokens=size,
        bos_id=bos_id,
        add_bos=add_bos and bos_id is not None,
        bos_token=_text(tokenizer, bos_id),
        eos_token=_text(tokenizer, unique[0] if unique else None),
        chat_template=chat_template,
    )


def _text(tokenizer: tokenizers.Tokenizer, token_id: int | None) -> str:
    return (tokenizer.id_to_token(token_id) or "") if token_id is not None else ""
