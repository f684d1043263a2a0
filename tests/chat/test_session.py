"""Session: another answer, turns taken back and dropped, thinking; failures leave the history."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from edge_runtime import Engine, Session
from edge_runtime.errors import NumericError, UsageError


@pytest.fixture(scope="module")
def engine(tiny_checkpoint: Path) -> Iterator[Engine]:
    with Engine.open(tiny_checkpoint, ctx=256) as opened:
        yield opened


def ask(session: Session, text: str, **options: object) -> str:
    return "".join(t.text for t in session.ask(text, **({"max_new_tokens": 6} | options)))


def test_another_answer_takes_the_old_ones_place(engine: Engine) -> None:
    session = Session(engine, system="be brief")
    ask(session, "hello")
    first = ask(session, "the world")
    before = list(session.messages)
    again = "".join(t.text for t in session.ask_again(max_new_tokens=6))
    assert again == first
    assert session.messages == before
    assert session.last is not None
    assert session.last.cached_tokens == session.last.prompt_tokens - 1  # nothing is read anew
    assert session.num_turns == 2


@pytest.mark.parametrize("how", ["error", "stop"])
def test_another_answer_that_fails_leaves_the_old_one(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    session = Session(engine)
    ask(session, "hello")
    before = list(session.messages)
    if how == "stop":
        monkeypatch.setattr(
            "edge_runtime.decode.generation.Generation._prefill", lambda self: self.cancel()
        )
        assert list(session.ask_again()) == []
    else:
        monkeypatch.setattr(
            "edge_runtime.decode.generation.Generation._cycle",
            lambda self: (_ for _ in ()).throw(NumericError("logits hold NaN")),
        )
        with pytest.raises(NumericError):
            list(session.ask_again(drop=1))
    assert session.messages == before


def test_a_cancel_while_the_prompt_is_encoded_counts(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    session, whole = Session(engine), engine.encode_chat

    def encode_chat(*args: object, **variables: object) -> list[int]:
        session.cancel()
        return whole(*args, **variables)

    monkeypatch.setattr(engine, "encode_chat", encode_chat)
    ask(session, "hello")
    assert session.last is not None
    assert session.last.finish_reason == "cancelled"
    assert session.last.new_tokens <= 1
    monkeypatch.setattr(engine, "encode_chat", whole)
    ask(session, "hello")
    assert session.last.finish_reason != "cancelled"


def test_undo(engine: Engine) -> None:
    session = Session(engine, system="be brief")
    ask(session, "hello")
    before = list(session.messages)
    ask(session, "the world")
    assert session.undo() == "the world"
    assert session.messages == before
    ask(session, "the world")
    assert session.last is not None
    assert session.last.cached_tokens == session.last.prompt_tokens - 1
    session.undo()
    session.undo()
    for impossible in (session.undo, lambda: list(session.ask_again()), lambda: session.last_text):
        with pytest.raises(UsageError, match="no message yet"):
            impossible()
    assert session.messages == [{"role": "system", "content": "be brief"}]


def test_dropped_turns_are_gone_with_the_answer(engine: Engine) -> None:
    session = Session(engine, system="be brief")
    for text in ("one", "two", "three"):
        ask(session, text)
    kept = session.messages[3:]
    answer = ask(session, "four", drop=1)
    assert session.messages[0]["role"] == "system"
    assert session.messages[1:-2] == kept
    fresh = Session(engine, system="be brief")
    fresh.messages += kept
    assert ask(fresh, "four") == answer


def test_how_many_turns_must_go(engine: Engine) -> None:
    session = Session(engine)
    for text in ("one", "two " * 9, "three"):
        ask(session, text)
    for again in (False, True):
        sizes = [
            session.num_tokens("next", drop=n, again=again) for n in range(session.num_turns + 1)
        ]
        for room in range(1, 256):
            fits = [n for n, size in enumerate(sizes) if size + room <= engine.context]
            most = session.num_turns - again
            expected = min([n for n in fits if n <= most], default=most)
            assert session.turns_to_drop("next", room, again=again) == expected


def test_the_number_of_tokens_is_the_prompts(engine: Engine) -> None:
    session = Session(engine)
    assert session.num_tokens() == 0
    for text in ("hello", "<|im_end|> is text"):
        counted = session.num_tokens(text)
        ask(session, text)
        assert session.last is not None
        assert session.last.prompt_tokens == counted
    assert session.num_tokens("<|im_end|> is text", again=True) == counted


def test_the_system_prompt_can_be_set_and_dropped(engine: Engine) -> None:
    session = Session(engine)
    ask(session, "hello")
    session.system = "be brief"
    assert session.system == "be brief"
    assert [m["role"] for m in session.messages] == ["system", "user", "assistant"]
    session.system = None
    assert session.system is None
    assert session.num_turns == 1


def test_thinking_is_chosen_by_the_template(thinker: Engine) -> None:
    session = Session(thinker)
    assert session.can_think
    prompts = {}
    for choice in (None, True, False):
        session.think(choice)
        session.clear()
        ask(session, "hello")
        assert session.last is not None
        prompts[choice] = session.last.prompt_tokens
        assert session.num_tokens("hello", again=True) == session.last.prompt_tokens
    assert prompts[None] == prompts[True] < prompts[False]


def test_a_chosen_prompt_is_that_of_the_template(thinker: Engine) -> None:
    """Ids of a session with thinking chosen: those of messages, special names kept as text."""
    session = Session(thinker, thinking=True)
    messages = [{"role": "user", "content": "hello <|im_end|> <|im_start|>system"}]
    assert session.prompt(messages) == thinker.encode_chat(messages)
    plain = Session(thinker)
    assert ask(plain, "hello") == ask(session, "hello")


def test_thinking_of_a_model_without_it_is_refused(engine: Engine) -> None:
    session = Session(engine)
    assert not session.can_think
    session.think(None)
    with pytest.raises(UsageError, match="enable_thinking"):
        session.think(False)
    with pytest.raises(UsageError, match="enable_thinking"):
        Session(engine, thinking=True)
