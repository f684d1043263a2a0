"""The tokenizer inside a GGUF file -> a tokenizer.json string and a `TextSpec`.

Invariant: the tokenizer splits text as the model's original did. For BPE the split is decided by
`tokenizer.ggml.pre`, so an unknown name there stops the conversion: guessing costs quality quietly.

Two families: "gpt2" is byte-level BPE with explicit merges; "llama" is SentencePiece BPE, whose
merges follow from the scores: the pair whose union has the best score merges first.
SentencePiece's own tie between two overlapping splits of one piece (leftmost first) becomes a
fixed order here, as in every tokenizer.json made from such a model.
"""

from __future__ import annotations

import json
from typing import Any, TypeVar

from edge_runtime.convert.gguf_file import Metadata, optional, shown
from edge_runtime.convert.text_assets import make_text_spec
from edge_runtime.errors import CheckpointError, UnsupportedModel
from edge_runtime.format.spec import TextSpec
from edge_runtime.text.tokenizer import load_tokenizer

T = TypeVar("T", int, float)
Json = dict[str, Any]

_NORMAL, _UNKNOWN, _CONTROL, _USER, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6
_SPACE = "\u2581"  # SentencePiece's visible space

_LLAMA3_PRE = ("llama3", "llama-v3", "llama-bpe")
_QWEN_PRE = ("qwen2", "deepseek-r1-qwen")
_DIGITS_PRE = ("smollm", "starcoder", "refact", "command-r", "codeshell")
_GPT2_PRE = ("gpt-2", "gpt2")


def read_text(
    meta: Metadata, architecture: str, vocab_size: int
) -> tuple[str, TextSpec, list[str]]:
    """Return (tokenizer.json text, TextSpec, warnings). Raises CheckpointError."""
    notes: list[str] = []
    tokens = _strings(meta, "tokenizer.ggml.tokens")
    if len(set(tokens)) != len(tokens):
        raise CheckpointError("GGUF metadata: tokenizer.ggml.tokens has duplicates")
    types = _numbers(meta, "tokenizer.ggml.token_type", int) or [_NORMAL] * len(tokens)
    if len(types) != len(tokens):
        raise CheckpointError(
            f"GGUF metadata: expected one token_type per token, got {len(types)} for {len(tokens)}"
        )
    tokens, types = _without_padding(tokens, types)
    kind = meta.get("tokenizer.ggml.model")
    pre = ""
    if kind == "gpt2":
        pre = _pre_name(meta, architecture, notes)
        body = _byte_level(tokens, _strings(meta, "tokenizer.ggml.merges"), pre)
    elif kind == "llama":
        body = _sentencepiece(meta, tokens, types)
    else:
        raise UnsupportedModel(
            f"GGUF metadata: tokenizer.ggml.model {shown(kind)} is not supported, expected "
            "gpt2 or llama"
        )
    body["added_tokens"] = [
        _added_token(i, token, special=t in (_CONTROL, _UNKNOWN))
        for i, (token, t) in enumerate(zip(tokens, types, strict=True))
        if t in (_CONTROL, _USER, _UNKNOWN)
    ]
    text = json.dumps(body, ensure_ascii=False)
    return text, _text_spec(meta, text, kind, pre, vocab_size), notes


def _without_padding(tokens: list[str], types: list[int]) -> tuple[list[str], list[int]]:
    """Drop the made-up tokens that fill the list up to the embedding's padded row count."""
    end = len(tokens)
    while end and (types[end - 1] == _UNUSED or tokens[end - 1] == f"[PAD{end - 1}]"):
        end -= 1
    return tokens[:end], types[:end]


def _text_spec(meta: Metadata, tokenizer_json: str, kind: str, pre: str, rows: int) -> TextSpec:
    def token(key: str) -> int | None:
        return optional(meta, f"tokenizer.ggml.{key}_token_id", int)

    eos = [i for i in map(token, ("eos", "eot", "eom")) if i is not None]
    add_bos = optional(meta, "tokenizer.ggml.add_bos_token", bool)
    if add_bos is None:
        add_bos = kind == "llama" or pre in _LLAMA3_PRE
    return make_text_spec(
        load_tokenizer(tokenizer_json, "the tokenizer in the GGUF metadata"),
        declared_eos=eos,
        pad_id=token("padding"),
        bos_id=token("bos"),
        add_bos=add_bos,
        chat_template=optional(meta, "tokenizer.chat_template", str) or None,
        vocab_size=rows,
    )


def _pre_name(meta: Metadata, architecture: str, notes: list[str]) -> str:
    pre = optional(meta, "tokenizer.ggml.pre", str) or "default"
    if pre == "default":
        pre = "qwen2" if architecture in ("qwen2", "qwen3") else "gpt-2"
        notes.append(f"the GGUF file does not name its pre-tokenizer: {pre} is assumed")
    if pre not in (*_LLAMA3_PRE, *_QWEN_PRE, *_DIGITS_PRE, *_GPT2_PRE):
        raise UnsupportedModel(
            f"GGUF metadata: pre-tokenizer {shown(pre)} (tokenizer.ggml.pre) is not supported, "
            "expected smollm, llama-bpe, qwen2 or gpt-2",
            "convert from the Hugging Face folder of the model, which has its tokenizer.json",
        )
    return pre


def _byte_level(tokens: list[str], merges: list[str], pre: str) -> Json:
    pairs = [merge.split(" ", 1) for merge in merges]
    vocab = {token: i for i, token in enumerate(tokens)}
    for pair in pairs:
        if len(pair) != 2 or any(p not in vocab for p in pair) or "".join(pair) not in vocab:
            raise CheckpointError(
                f"GGUF metadata: merge {shown(' '.join(pair))} is not of the tokens"
            )
    byte_level: Json = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False}
    split_bytes = byte_level | {"use_regex": False}
    if pre in _DIGITS_PRE:
        steps = [{"type": "Digits", "individual_digits": True}, byte_level | {"use_regex": True}]
    elif pre in _GPT2_PRE:
        steps = [byte_level | {"use_regex": True}]
    else:
        pattern = _word_pattern(digits="{1,3}" if pre in _LLAMA3_PRE else "")
        steps = [_split(pattern), split_bytes]
    return _tokenizer_json(
        model={"vocab": vocab, "merges": pairs, "ignore_merges": pre in _LLAMA3_PRE},
        normalizer={"type": "NFC"} if pre in _QWEN_PRE else None,
        pre_tokenizer={"type": "Sequence", "pretokenizers": steps},
        decoder=split_bytes,
    )


def _word_pattern(digits: str) -> str:
    """Build the splitting expression of the Llama 3 and Qwen 2 tokenizers.

    They differ only in how many digits stay together. In order: contractions; letters with one
    leading mark; digits; marks with a leading space and their line ends; line ends; spaces but the
    last before a word; spaces.
    """
    parts = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)",
        r"[^\r\n\p{L}\p{N}]?\p{L}+",
        r"\p{N}" + digits,
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
    return "|".join(parts)


def _split(pattern: str) -> Json:
    return {
        "type": "Split",
        "pattern": {"Regex": pattern},
        "behavior": "Isolated",
        "invert": False,
    }


def _sentencepiece(meta: Metadata, tokens: list[str], types: list[int]) -> Json:
    if meta.get("tokenizer.ggml.precompiled_charsmap"):
        raise UnsupportedModel(
            "GGUF metadata: a SentencePiece tokenizer with its own normaliser "
            "(tokenizer.ggml.precompiled_charsmap) is not supported",
            "convert from the Hugging Face folder of the model",
        )
    if optional(meta, "tokenizer.ggml.remove_extra_whitespaces", bool):
        raise UnsupportedModel(
            "GGUF metadata: tokenizer.ggml.remove_extra_whitespaces must be false",
            "convert from the Hugging Face folder of the model",
        )
    scores = _numbers(meta, "tokenizer.ggml.scores", float)
    if len(scores) < len(tokens):
        raise CheckpointError("GGUF metadata: expected one tokenizer.ggml.scores per token")
    prefix = optional(meta, "tokenizer.ggml.add_space_prefix", bool) is not False
    unknown = next((tokens[i] for i, t in enumerate(types) if t == _UNKNOWN), None)
    to_space: Json = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
    from_space: Json = {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "}
    decoders: list[Json] = [from_space, {"type": "ByteFallback"}, {"type": "Fuse"}]
    normalizers = [to_space]
    if prefix:
        normalizers.insert(0, {"type": "Prepend", "prepend": _SPACE})
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return _tokenizer_json(
        model={
            "vocab": {token: i for i, token in enumerate(tokens)},
            "merges": _merges_from_scores(tokens, types, scores),
            "unk_token": unknown,
            "fuse_unk": True,
            "byte_fallback": _BYTE in types,
        },
        normalizer={"type": "Sequence", "normalizers": normalizers},
        pre_tokenizer=None,
        decoder={"type": "Sequence", "decoders": decoders},
    )


def _merges_from_scores(
    tokens: list[str], types: list[int], scores: list[float]
) -> list[list[str]]:
    """Every way to build a piece from two pieces, best score first."""
    pieces = {t: i for i, t in enumerate(tokens) if types[i] in (_NORMAL, _USER, _UNUSED)}
    ranked: list[tuple[float, int, int, int, str, str]] = []
    for piece, i in pieces.items():
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in pieces and right in pieces:
                order = (-scores[i], -len(left), pieces[left], pieces[right])
                ranked.append((*order, left, right))
    ranked.sort(key=lambda row: row[:4])
    return [[row[4], row[5]] for row in ranked]


def _tokenizer_json(*, model: Json, normalizer: Any, pre_tokenizer: Any, decoder: Any) -> Json:
    defaults: Json = {"type": "BPE", "dropout": None, "unk_token": None, "fuse_unk": False}
    defaults |= {"continuing_subword_prefix": None, "end_of_word_suffix": None}
    defaults |= {"byte_fallback": False, "ignore_merges": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "normalizer": normalizer,
        "pre_tokenizer": pre_tokenizer,
        "post_processor": None,
        "decoder": decoder,
        "model": defaults | model,
    }


def _added_token(token_id: int, content: str, *, special: bool) -> Json:
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return {"id": token_id, "content": content, **flags, "special": special}


def _strings(meta: Metadata, key: str) -> list[str]:
    value = meta.get(key)
    if not isinstance(value, list) or not all(isinstance(v, str) for v in value):
        raise CheckpointError(f"GGUF metadata: {key} is missing or not a list of strings")
    return value


def _numbers(meta: Metadata, key: str, kind: type[T]) -> list[T]:
    values = optional(meta, key, list) or []
    wrong = next((v for v in values if type(v) is not kind), None)
    if wrong is not None:
        raise CheckpointError(
            f"GGUF metadata: {key} must be a list of {kind.__name__}, got {shown(wrong)} in it"
        )
    return values
