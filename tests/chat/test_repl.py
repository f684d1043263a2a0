"""The chat loop on a real session: reuse of the prefix, stopping, failing, commands."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from chat_tools import make_repl

from edge_runtime import Engine, Session
from edge_runtime.chat import render
from edge_runtime.chat.interrupt import StopOnInterrupt
from edge_runtime.decode.request import Result, Token
from edge_runtime.errors import NumericError


@pytest.fixture(scope="module")
def engine(tiny_checkpoint: Path) -> Iterator[Engine]:
    with Engine.open(tiny_checkpoint, ctx=256) as opened:
        yield opened


def chat(engine: Engine, *typed: str | type[BaseException], **options: Any) -> Session:
    repl = make_repl(engine, *typed, **options)
    repl.run()
    return repl.session


def test_the_second_turn_reuses_the_first(engine: Engine, capsys) -> None:
    session = chat(engine, "hello", "the world")
    out, err = capsys.readouterr()
    roles = [m["role"] for m in session.messages]
    assert roles == ["user", "assistant"] * 2
    assert out == "".join(m["content"] + "\n" for m in session.messages[1::2])
    assert session.last is not None
    assert session.last.cached_tokens > 0
    assert f"cached {session.last.cached_tokens} / new " in err
    whole = engine.encode_chat(session.messages[:3])
    engine.reuse([0])
    fresh = engine.generate(whole, max_new_tokens=6).complete()
    assert fresh.cached_tokens == 0
    assert fresh.token_ids == session.last.token_ids


def test_a_failure_leaves_the_history(engine: Engine, capsys, monkeypatch) -> None:
    repl = make_repl(engine, new_tokens=4)
    session = repl.session
    repl.turn("hello")
    before = list(session.messages)
    with monkeypatch.context() as patch:
        patch.setattr(
            "edge_runtime.decode.generation.Generation._cycle",
            lambda self: (_ for _ in ()).throw(NumericError("logits hold NaN", "a hint")),
        )
        repl.turn("in the world")
    out, err = capsys.readouterr()
    assert "error: logits hold NaN\nhint: a hint\n" in err
    assert session.messages == before
    assert out.endswith("\n")
    repl.turn("word " * 300)
    assert "the context holds 256" in capsys.readouterr().err
    assert session.messages == before
    repl.turn("and on")
    assert session.messages[:2] == before
    assert len(session.messages) == 4


def test_ctrl_c_keeps_what_was_said(engine: Engine, capsys, monkeypatch) -> None:
    shown = render.TextWriter.write

    def write(self: render.TextWriter, text: str) -> None:
        shown(self, text)
        if self.num_chars > 3:
            os.kill(os.getpid(), signal.SIGINT)
            monkeypatch.setattr(render.TextWriter, "write", shown)

    monkeypatch.setattr(render.TextWriter, "write", write)
    session = chat(engine, "hello", new_tokens=200, ignore_eos=True)
    out, err = capsys.readouterr()
    assert session.last is not None
    assert session.last.finish_reason == "cancelled"
    assert session.last.new_tokens < 200
    assert session.messages[-1] == {"role": "assistant", "content": session.last.text}
    assert out == session.last.text + "\n"
    assert "stopped" in err


def test_a_second_ctrl_c_breaks_off_and_keeps_what_was_said(
    engine: Engine, capsys, monkeypatch
) -> None:
    shown = render.TextWriter.write

    def write(self: render.TextWriter, text: str) -> None:
        shown(self, text)
        if self.num_chars > 3:
            monkeypatch.setattr(render.TextWriter, "write", shown)
            for _ in range(2):
                os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(render.TextWriter, "write", write)
    repl = make_repl(engine, new_tokens=200, ignore_eos=True)
    repl.turn("hello")
    out, err = capsys.readouterr()
    assert "Broken off; what was said is kept." in err
    assert repl.session.messages[-1]["content"] == out.removesuffix("\n")
    repl.turn("the world")  # and the engine is free
    assert repl.session.num_turns == 2


def test_commands(engine: Engine, capsys) -> None:
    session = chat(
        engine, "/help", "/stats", "hello", "/stats", "/system be brief", "/system", "", "  ",
        KeyboardInterrupt, "/clear", "/what", "/exit", "never asked",
    )  # fmt: skip
    _, err = capsys.readouterr()
    for text in ("/clear ", "No answer yet.", "prompt   ", "be brief", "To leave:", "/what"):
        assert text in err
    assert session.messages == [{"role": "system", "content": "be brief"}]


def test_a_slash_alone_does_not_make_a_command(engine: Engine, capsys) -> None:
    typed = ["/usr/bin/env is what?", "/ ", "/2", "/etc/hosts"]
    session = chat(engine, *typed, "/nonsense", "/?")
    assert [m["content"] for m in session.messages[::2]] == typed
    err = capsys.readouterr().err
    assert err.count("Unknown command") == 1
    assert "Unknown command /nonsense." in err


def test_stats_say_what_was_chosen_and_why(engine: Engine, capsys) -> None:
    chat(engine, "hello", "/stats")
    err = capsys.readouterr().err
    for why in (engine.governor.why, f"backend  {engine.backend_name}: {engine.backend_why}"):
        assert why in err


def test_several_lines(engine: Engine, capsys) -> None:
    session = chat(engine, '"""one', "", 'two"""', '"""three"""')
    assert [m["content"] for m in session.messages[::2]] == ["one\n\ntwo", "three"]


def test_a_block_is_never_a_command(engine: Engine, capsys) -> None:
    typed = ['"""/exit"""', '"""', "/system be brief", '"""', '"""  """', '"""/what', 'now"""']
    session = chat(engine, *typed)
    asked = [m["content"] for m in session.messages if m["role"] == "user"]
    assert asked == ["/exit", "/system be brief", "/what\nnow"]
    assert "Unknown" not in capsys.readouterr().err


def test_a_tab_ends_a_command(engine: Engine) -> None:
    session = chat(engine, "/system\tbe \t brief ", " /exit\t", "never asked")
    assert session.messages == [{"role": "system", "content": "be \t brief"}]


def test_the_end_inside_a_message_leaves(engine: Engine) -> None:
    assert chat(engine, '"""one').messages == []


def test_the_second_interrupt_insists() -> None:
    stopped = []
    before = signal.getsignal(signal.SIGINT)
    with StopOnInterrupt(lambda: stopped.append(1)) as interrupt:
        os.kill(os.getpid(), signal.SIGINT)
        assert interrupt.pressed
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert stopped == [1]
    assert signal.getsignal(signal.SIGINT) is before


def test_figures() -> None:
    draft = {"drafted": 40, "accepted": 34, "cycles": 10}
    result = Result(
        new_tokens=128, decode_tok_s=31.24, ttft_s=0.213, draft=dict(draft), cached_tokens=85,
        prompt_tokens=97, context_max=8192, finish_reason="eos",
    )  # fmt: skip
    assert render.figures(result) == (
        "128 tok · 31.2 tok/s · ttft 0.21 s · acc 3.4/cycle · cached 85 / new 12 · ctx 225/8192"
    )
    stopped = Result(prompt_tokens=5, context_max=8, finish_reason="cancelled")
    assert render.figures(stopped) == "0 tok · no drafting · cached 0 / new 5 · ctx 5/8 · stopped"


def test_a_held_back_end_is_shown(capsys) -> None:
    import sys

    writer = render.TextWriter(sys.stdout)
    render.stream_answer(iter([Token(1, "ab"), Token(2, "")]), writer)
    render.finish_answer(Result(text="abc"), writer)
    assert capsys.readouterr().out == "abc\n"
