"""Streaming: the pieces add up to the full decode, no half character, no beginning of a stop."""

from __future__ import annotations

import json

import pytest
import tiny_models
from hypothesis import given
from hypothesis import strategies as st

from edge_runtime.text.stream import StopMatcher, TextStream
from edge_runtime.text.tokenizer import Tokenizer

BPE = Tokenizer.from_json(tiny_models.tokenizer_json())


def _spm() -> Tokenizer:
    """SentencePiece style, without merges: one token per character or byte."""
    tokens, _, types = tiny_models.spm_tokens()
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    to_space = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    from_space = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}
    strip = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
    prepend = {"type": "Prepend", "prepend": "▁"}
    decoders = [from_space, {"type": "ByteFallback"}, {"type": "Fuse"}, strip]
    model = {"type": "BPE", "vocab": {t: i for i, t in enumerate(tokens)}, "merges": []}
    model |= {"unk_token": "<unk>", "fuse_unk": True, "byte_fallback": True}
    body = {
        "version": "1.0",
        "added_tokens": [
            {"id": i, "content": tokens[i], **flags, "special": True}
            for i, kind in enumerate(types)
            if kind in (2, 3)
        ],
        "normalizer": {"type": "Sequence", "normalizers": [prepend, to_space]},
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": model,
    }
    return Tokenizer.from_json(json.dumps(body))


SPM = _spm()


def _stream(tokenizer: Tokenizer, ids: list[int], *, continues: bool = False) -> list[str]:
    stream = TextStream(tokenizer, continues=continues)
    return [*(stream.push(i).text for i in ids), stream.flush().text]


@pytest.mark.parametrize("tokenizer", [BPE, SPM], ids=["bpe", "spm"])
@pytest.mark.parametrize("continues", [False, True])
@pytest.mark.parametrize(
    "text",
    ["hello world", "  two spaces", "👩‍👩‍👧‍👦 family", "你好。世界", "é", "", " ", "\ufffd real"],
)
def test_concatenation_equals_decode(tokenizer: Tokenizer, continues: bool, text: str) -> None:
    ids = tokenizer.encode(text, allow_special=False)
    pieces = _stream(tokenizer, ids, continues=continues)
    assert "".join(pieces) == tokenizer.decode(ids, continues=continues)
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in pieces)


@pytest.mark.parametrize("tokenizer", [BPE, SPM], ids=["bpe", "spm"])
@given(ids=st.lists(st.integers(0, 280), max_size=40))
def test_concatenation_equals_decode_for_any_tokens(tokenizer: Tokenizer, ids: list[int]) -> None:
    """Also for broken UTF-8, special tokens and ids that do not exist."""
    assert "".join(_stream(tokenizer, ids)) == tokenizer.decode(ids)


def test_incomplete_character_is_held_and_flushed() -> None:
    ids = BPE.encode("€", allow_special=False)
    stream = TextStream(BPE)
    assert [stream.push(i).text for i in ids[:2]] == ["", ""]
    assert stream.flush().text == "\ufffd"
    stream = TextStream(BPE)
    assert [stream.push(i).text for i in ids] == ["", "", "€"]


def test_leading_space_after_a_special_token() -> None:
    ids = SPM.encode("hello", allow_special=False)
    assert "".join(_stream(SPM, [1, *ids])) == "hello"
    assert "".join(_stream(SPM, [1, *ids], continues=True)) == " hello"


def test_long_stop_over_single_characters() -> None:
    matcher = StopMatcher(["DEFGHIJ"])
    shown = ""
    for character in "ABCDEFGHIJKL":
        piece = matcher.push(character)
        shown += piece.text
        assert not shown.endswith("D")
        if piece.stop:
            assert piece.stop == "DEFGHIJ"
            break
    assert shown == "ABC"
    assert matcher.push("more").text == ""
    assert matcher.flush() == ""


def test_held_text_is_flushed_when_the_stop_never_comes() -> None:
    matcher = StopMatcher(["DEFGHIJ"])
    assert matcher.push("ABCDEF").text == "ABC"
    assert matcher.flush() == "DEF"


def test_stream_with_stop_in_the_middle_of_a_token() -> None:
    stream = TextStream(BPE, ["o w"])
    ids = BPE.encode("hello world", allow_special=False)
    pieces = [stream.push(i) for i in ids]
    assert "".join(p.text for p in pieces) == "hell"
    assert [p.stop for p in pieces if p.stop] == ["o w"]


def test_stop_completed_by_the_flush() -> None:
    stream = TextStream(BPE, ["\ufffd"])
    stream.push(BPE.encode("€", allow_special=False)[0])
    assert stream.flush().stop == "\ufffd"


def _cut(text: str, stops: list[str]) -> str:
    """The rule, slowly: grow the text by one character until it ends in a stop string."""
    for end in range(len(text) + 1):
        ending = [s for s in stops if text[:end].endswith(s)]
        if ending:
            return text[: end - max(map(len, ending))]
    return text


@given(
    chunks=st.lists(st.text("ab", max_size=4), max_size=12),
    stops=st.lists(st.text("ab", min_size=1, max_size=5), max_size=3),
)
def test_cut_does_not_depend_on_the_chunks(chunks: list[str], stops: list[str]) -> None:
    matcher = StopMatcher(stops)
    shown, stopped = "", False
    for chunk in chunks:
        piece = matcher.push(chunk)
        shown += piece.text
        stopped = stopped or piece.stop is not None
    shown += matcher.flush()
    expected = _cut("".join(chunks), stops)
    assert shown == expected
    assert stopped == (expected != "".join(chunks))
