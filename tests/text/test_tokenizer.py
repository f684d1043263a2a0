"""The tokenizer wrapper: bytes are exact, and typed text never becomes a special token."""

from __future__ import annotations

import json
from typing import Any

import pytest
import tiny_models
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from edge_runtime.errors import CheckpointError
from edge_runtime.text.tokenizer import Tokenizer

TEXTS = ["hello world", " the  world\n\ning", "naïve 你好 🤷🏽‍♀️", "\t\r\n", " ", "", "\x00\u200b"]


@pytest.fixture(scope="module")
def bpe() -> Tokenizer:
    return Tokenizer.from_json(tiny_models.tokenizer_json())


def spm_json(**changes: Any) -> str:
    """A SentencePiece-style tokenizer.json (see tiny_models.spm_tokens), merges by hand."""
    tokens, _, types = tiny_models.spm_tokens()
    merges = ["▁ h", "e l", "l o", "▁h el", "▁hel lo", "▁ w", "o r", "l d", "▁w or", "▁wor ld"]
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    to_space = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    from_space = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}
    strip = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
    decoders = [from_space, {"type": "ByteFallback"}, {"type": "Fuse"}, strip]
    prepend = {"type": "Prepend", "prepend": "▁"}
    body = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": i, "content": tokens[i], **flags, "special": True}
            for i, kind in enumerate(types)
            if kind in (2, 3)
        ],
        "normalizer": {"type": "Sequence", "normalizers": [prepend, to_space]},
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": "<unk>",
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": True,
            "byte_fallback": True,
            "ignore_merges": False,
            "vocab": {t: i for i, t in enumerate(tokens)},
            "merges": merges,
        },
    }
    return json.dumps(body | changes)


@pytest.mark.parametrize("source", [tiny_models.tokenizer_json(), spm_json()])
@pytest.mark.parametrize("text", TEXTS)
def test_equals_the_library(source: str, text: str) -> None:
    mine, theirs = Tokenizer.from_json(source), tokenizers.Tokenizer.from_str(source)
    ids = mine.encode(text, allow_special=True)
    assert ids == theirs.encode(text, add_special_tokens=False).ids
    assert mine.decode(ids) == theirs.decode(ids) == text
    assert all(type(i) is int for i in ids)


@given(st.text())
def test_round_trip(text: str) -> None:
    tokenizer = Tokenizer.from_json(tiny_models.tokenizer_json())
    clean = text.encode("utf-8", "replace").decode()
    ids = tokenizer.encode(text, allow_special=False)
    assert tokenizer.decode(ids, skip_special=False) == clean


def test_special_tokens_only_where_allowed(bpe: Tokenizer) -> None:
    text = "hello<|im_end|>\n<|im_start|> world"
    allowed = bpe.encode(text, allow_special=True)
    assert [i for i in allowed if bpe.is_special(i)] == [276, 275]
    plain = bpe.encode(text, allow_special=False)
    assert not any(bpe.is_special(i) for i in plain)
    assert bpe.decode(plain) == text
    assert bpe.decode(allowed) == "hello\n world"
    assert bpe.decode(allowed, skip_special=False) == text
    # and the switch leaves nothing behind
    assert bpe.encode(text, allow_special=True) == allowed


def test_bos_is_never_added_behind_our_back() -> None:
    bos = "<|im_start|>"
    processor = {
        "type": "TemplateProcessing",
        "single": [
            {"SpecialToken": {"id": bos, "type_id": 0}},
            {"Sequence": {"id": "A", "type_id": 0}},
        ],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {bos: {"id": bos, "ids": [275], "tokens": [bos]}},
    }
    body = json.loads(tiny_models.tokenizer_json()) | {"post_processor": processor}
    tokenizer = Tokenizer.from_json(json.dumps(body))
    assert 275 not in tokenizer.encode("hello", allow_special=True)


def test_control_ids_are_special_whatever_their_flag_says() -> None:
    body = json.loads(tiny_models.tokenizer_json())
    for token in body["added_tokens"]:
        token["special"] = False
    tokenizer = Tokenizer.from_json(json.dumps(body), control_ids=[276])
    assert 276 not in tokenizer.encode("<|im_end|>", allow_special=False)
    assert tokenizer.encode("<|im_start|>", allow_special=False) == [275]  # plain added token


def test_a_special_token_that_merges_could_build() -> None:
    """With ignore_merges a whole word that is in the vocabulary becomes its id at once."""
    body = json.loads(tiny_models.tokenizer_json())
    body["model"]["ignore_merges"] = True
    body["pre_tokenizer"]["use_regex"] = False
    tokenizer = Tokenizer.from_json(json.dumps(body))
    ids = tokenizer.encode("<|im_end|>", allow_special=False)
    assert not any(tokenizer.is_special(i) for i in ids)
    assert tokenizer.decode(ids) == "<|im_end|>"


def test_segments_join_before_they_are_split(bpe: Tokenizer) -> None:
    text = "<|im_start|>hello world<|im_end|>\n"
    whole = bpe.encode(text, allow_special=True)
    names = bpe.special_spans(text)
    for cut in range(len(text) + 1):
        if not any(start < cut < end for start, end in names):
            assert bpe.encode_segments([(text[:cut], True), (text[cut:], True)]) == whole
    assert bpe.encode_segments([]) == bpe.encode_segments([("", True), ("", False)]) == []
    # the neighbours of protected text are tokenised with it: "he" + "llo" is one token
    assert bpe.encode_segments([("he", True), ("llo", False)]) == bpe.encode(
        "hello", allow_special=False
    )
    ids = bpe.encode_segments([("<|im_start|>a", True), ("<|im_end|>", False), ("b", True)])
    assert ids == [275, *bpe.encode("a<|im_end|>b", allow_special=False)]


def test_sentencepiece_leading_space() -> None:
    tokenizer = Tokenizer.from_json(spm_json())
    ids = tokenizer.encode("hello world", allow_special=False)
    assert tokenizer.decode(ids) == "hello world"
    assert tokenizer.decode(ids, continues=True) == " hello world"
    assert tokenizer.decode(ids[1:]) == "world"
    assert tokenizer.decode(ids[1:], continues=True) == " world"
    assert tokenizer.strips_leading_space


def test_token_bytes_and_names(bpe: Tokenizer) -> None:
    euro = bpe.encode("€", allow_special=False)
    assert [bpe.token_bytes(i) for i in euro] == [b"\xe2", b"\x82", b"\xac"]
    assert bpe.token_bytes(276) == b""
    assert bpe.token_bytes(276, skip_special=False) == b"<|im_end|>"
    assert bpe.token_bytes(10_000) == b""
    assert bpe.token_id("<|im_end|>") == 276
    assert bpe.token_id("nothing") is None
    assert bpe.num_tokens == 277


def test_unusable_tokenizers_are_refused() -> None:
    for text in ("", "{}", "[1]", "<html>"):
        with pytest.raises(CheckpointError):
            Tokenizer.from_json(text)
    body = json.loads(tiny_models.tokenizer_json()) | {"decoder": {"type": "WordPiece"}}
    body["decoder"] |= {"prefix": "##", "cleanup": True}
    with pytest.raises(CheckpointError, match="WordPiece"):
        Tokenizer.from_json(json.dumps(body))
