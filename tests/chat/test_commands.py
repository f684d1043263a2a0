"""The commands of a chat, a full context, and what is shown beside an answer."""

from __future__ import annotations

import io
import json
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import boards
import pytest
from chat_tools import Script, make_repl

from edge_runtime import Engine
from edge_runtime.chat import render
from edge_runtime.chat.commands import HELP, LEAVE, NAMES
from edge_runtime.chat.repl import Repl
from edge_runtime.decode.request import Result

Say = Callable[..., str]


@pytest.fixture(scope="module")
def engine(tiny_checkpoint: Path) -> Iterator[Engine]:
    with Engine.open(tiny_checkpoint, ctx=256) as opened:
        yield opened


@pytest.fixture
def type_(capsys: pytest.CaptureFixture[str]) -> Say:
    """Type lines into a chat and return what it said beside answers."""

    def type_(repl: Repl, *typed: str) -> str:
        for line in typed:
            repl._reader = Script(line)
            assert repl._step()
        return capsys.readouterr().err

    return type_


def test_help_names_every_command() -> None:
    for name in (*NAMES, "exit", "quit"):
        assert f"/{name}" in HELP
    assert not set(NAMES) & set(LEAVE)
    assert all(len(line) <= 80 for line in HELP.splitlines())


def test_a_near_miss_is_guessed(engine: Engine, type_: Say) -> None:
    assert "Did you mean /regen?" in type_(make_repl(engine), "/regne")


def test_a_command_in_capitals_is_one(engine: Engine, type_: Say) -> None:
    assert type_(make_repl(engine), "/HELP") == HELP + "\n"
    repl = make_repl(engine)
    repl._reader = Script("/Exit")
    assert not repl._step()


WRONG = (
    "/undo", "/regen", "/set temp -1", "/set heat 1", "/set temp=1", "/think maybe", "/think on",
    "/save", "/save .", "/save /nowhere/x", "/save \0", "/load", "/load .", "/load /nowhere/x",
    "/load /dev/zero", f"/save {'n' * 300}", "/undo it", "/clear all", f"/stats {'x' * 3000}",
)  # fmt: skip


@pytest.mark.parametrize("line", WRONG)
def test_every_error_is_a_line_with_a_hint(engine: Engine, type_: Say, line: str) -> None:
    first, second, *more = type_(make_repl(engine), line).splitlines()
    assert first.startswith("error: ")
    assert second.startswith("hint: ")
    assert not more


def test_a_quoted_path(engine: Engine, type_: Say, tmp_path: Path) -> None:
    path = tmp_path / "my chat.json"
    assert "Saved 0 turns" in type_(make_repl(engine), f"/save '{path}'")
    assert "Loaded 0 turns" in type_(make_repl(engine), f'/load "{path}"')
    assert [p.name for p in tmp_path.iterdir()] == ["my chat.json"]


def test_set(engine: Engine, type_: Say) -> None:
    repl = make_repl(engine)
    said = type_(
        repl, "/set", "/set temp", "/set temp 0.7", "/set --temp", "/set n 3", "/set seed 5"
    )
    assert said.splitlines() == [
        "new-tokens  6", "temp        0.0", "seed        new each time",
        "temp  0.0", "temp  0.7", "temp  0.7", "new-tokens  3", "seed  5",
    ]  # fmt: skip
    said = type_(repl, "hello")
    assert repl.session.last is not None
    assert repl.session.last.new_tokens == 3
    assert "seed 5" in said
    assert type_(repl, "/set seed default") == "seed  new each time\n"
    for line, why in (
        ("/set temp -1", "temperature: expected"),
        ("/set heat 1", "/set: unknown name"),
    ):
        assert f"error: {why}" in type_(repl, line)
    assert repl.settings.values == {"new-tokens": 3, "temp": 0.7, "seed": None}


def test_regen_of_a_sampled_answer_differs_and_says_its_seed(engine: Engine, type_: Say) -> None:
    repl = make_repl(engine, temp=2.0, seed=7, new_tokens=12)
    seen = {}
    for line in ("hello", "/regen", "/regen"):
        said = type_(repl, line)
        assert repl.session.last is not None
        seen[repl.session.last.seed] = repl.session.last.text
        assert f"seed {repl.session.last.seed}" in said
        assert repl.session.num_turns == 1
    assert list(seen) == [7, 8, 9]
    assert len(set(seen.values())) == 3
    type_(repl, "hello")  # another message begins with the seed that was given
    assert repl.session.last.seed == 7


def test_regen_of_a_greedy_answer_says_that_it_is_the_same(engine: Engine, type_: Say) -> None:
    repl = make_repl(engine)
    assert "there is no message yet" in type_(repl, "/regen")
    type_(repl, "hello")
    before = list(repl.session.messages)
    assert "the same again" in type_(repl, "/regen")
    assert repl.session.messages == before


def test_undo_says_what_was_taken_back(engine: Engine, type_: Say) -> None:
    repl = make_repl(engine)
    assert "there is no message yet" in type_(repl, "/undo")
    assert "Taken back: \x1b" not in type_(repl, "hel\x1blo", "/undo")
    assert repl.session.messages == []


def test_save_and_load(engine: Engine, type_: Say, tmp_path: Path) -> None:
    repl, path = make_repl(engine, temp=0.5), tmp_path / "chat.json"
    said = type_(repl, "/system be brief", "hello", f"/save {path}")
    assert f"Saved 1 turn to {path}." in said
    saved = json.loads(path.read_text())
    assert saved["model"] == {"name": "tiny", "sha256": "0" * 64}
    assert saved["system"] == "be brief"
    assert saved["settings"] == {"new-tokens": 6, "temp": 0.5, "seed": None}
    assert [m["role"] for m in saved["messages"]] == ["user", "assistant"]

    other = make_repl(engine)
    assert type_(other, f"/load {path}") == "Loaded 1 turn.\n"
    assert other.session.messages == repl.session.messages
    assert other.settings.values == repl.settings.values

    saved["model"]["sha256"] = "1"
    path.write_text(json.dumps(saved))
    assert "another model: tiny" in type_(other, f"/load {path}")


def test_a_load_that_fails_changes_nothing(engine: Engine, type_: Say, tmp_path: Path) -> None:
    repl, path = make_repl(engine), tmp_path / "chat.json"
    type_(repl, "hello", f"/save {path}")
    before = list(repl.session.messages), dict(repl.settings.values)
    whole = json.loads(path.read_text())
    for change in ({"temp": -1}, {"heat": 1}, {"seed": 1.5}):
        (tmp_path / "bad.json").write_text(json.dumps(whole | {"settings": change}))
        said = type_(repl, f"/load {tmp_path / 'bad.json'}")
        assert f"error: {tmp_path / 'bad.json'}: a damaged saved chat" in said
    for line in ("/load", "/save", f"/load {tmp_path}", "/load /nowhere/x", "/save /nowhere/x"):
        assert "error: " in type_(repl, line)
    assert (repl.session.messages, repl.settings.values) == before


def test_think_where_there_is_no_choice(engine: Engine, type_: Say) -> None:
    repl = make_repl(engine)
    assert "does not let thinking be chosen" in type_(repl, "/think")
    assert "enable_thinking" in type_(repl, "/think on")
    assert "expected on, off or auto" in type_(repl, "/think maybe")


def test_think(thinker: Engine, type_: Say, tmp_path: Path) -> None:
    repl, sizes = make_repl(thinker), []
    for word in ("", "on", "off", "auto"):
        assert f"Thinking: {word or 'auto'}." in type_(repl, f"/think {word}")
        type_(repl, "/clear", "hello")
        assert repl.session.last is not None
        sizes.append(repl.session.last.prompt_tokens)
    assert sizes[0] == sizes[1] == sizes[3] < sizes[2]
    type_(repl, "/think off", f"/save {tmp_path / 'chat.json'}", "/think on")
    type_(repl, f"/load {tmp_path / 'chat.json'}")
    assert repl.session.thinking is False


def test_power_and_stats_say_why_there_are_no_joules(engine: Engine, type_: Say) -> None:
    repl = make_repl(engine)
    assert type_(repl, "/power") == "No joules: not asked for\n"
    said = type_(repl, "hello", "/stats")
    assert "J/tok" not in said
    assert "energy   not measured: not asked for" in said


def test_context_adds_up(engine: Engine, type_: Say) -> None:
    repl = make_repl(engine)
    assert "context  0 of 256" in type_(repl, "/context")
    said = type_(repl, "/system be brief", "hello", "the world", "/context")
    rows = [line.split() for line in said.splitlines()]
    used = next(int(r[1]) for r in rows if r[0] == "context")
    parts = [int(r[1]) for r in rows if r[0] == "system"]
    parts += [int(r[2]) for r in rows if r[0] == "turn"]
    assert len(parts) == 3
    assert sum(parts) == used == repl.session.num_tokens()


# ---- a full context


def fill(repl: Repl, type_: Say) -> None:
    while repl.session.num_tokens("word " * 10) + 32 <= repl.session.engine.context:
        type_(repl, "word " * 10)


@pytest.mark.parametrize("answer", ["", "s", "no", "d"])
def test_a_full_context_is_a_choice(engine: Engine, type_: Say, answer: str) -> None:
    repl = make_repl(engine, new_tokens=40, ignore_eos=True)
    fill(repl, type_)
    before = list(repl.session.messages)
    script = Script("word " * 10, answer)
    repl._reader = script
    repl._step()
    said = type_(repl)
    assert "The context is full: this prompt has " in said
    assert len(script.questions) == 1
    if answer == "d":
        after = repl.session.messages
        assert after[-2]["content"] == "word " * 10
        kept = after[:-2]
        assert len(kept) < len(before)
        assert before[len(before) - len(kept) :] == kept
        assert repl.session.last is not None
        assert repl.session.last.new_tokens == 40  # there was room for it
    else:
        assert "Not sent." in said
        assert repl.session.messages == before


@pytest.mark.parametrize("pressed", [KeyboardInterrupt, EOFError])
def test_no_answer_to_the_choice_sends_nothing(
    engine: Engine, type_: Say, pressed: type[BaseException]
) -> None:
    repl = make_repl(engine, new_tokens=40, ignore_eos=True)
    fill(repl, type_)
    before = list(repl.session.messages)
    repl._reader = Script("word " * 10, pressed)
    assert repl._step()
    assert "Not sent." in type_(repl)
    assert repl.session.messages == before


def test_a_drop_that_fails_leaves_every_turn(
    engine: Engine, type_: Say, monkeypatch: pytest.MonkeyPatch
) -> None:
    repl = make_repl(engine, new_tokens=40, ignore_eos=True)
    fill(repl, type_)
    before = list(repl.session.messages)
    monkeypatch.setattr(
        "edge_runtime.decode.generation.Generation._cycle",
        lambda self: (_ for _ in ()).throw(RuntimeError("no such luck")),
    )
    repl._reader = Script("word " * 10, "d")
    assert repl._step()
    assert "error: a bug in bitnest-edge: RuntimeError: no such luck" in type_(repl)
    assert repl.session.messages == before


def test_a_chat_loaded_that_is_longer_than_the_context(
    engine: Engine, type_: Say, tmp_path: Path
) -> None:
    repl, path = make_repl(engine, new_tokens=40, ignore_eos=True), tmp_path / "chat.json"
    type_(repl, "hello", f"/save {path}")
    saved = json.loads(path.read_text())
    path.write_text(json.dumps(saved | {"messages": saved["messages"] * 30}))
    said = type_(repl, f"/load {path}")
    assert "Loaded 30 turns." in said
    assert "more than the context holds" in said
    assert re.search(r"of 256 tokens, \d{3,}%; \d+ too many", type_(repl, "/context"))
    repl._reader = Script("the world", "d")
    assert repl._step()
    assert "oldest turns" in type_(repl)
    assert 2 <= repl.session.num_turns < 30
    assert repl.session.messages[-2]["content"] == "the world"


def test_a_message_longer_than_the_context_is_refused(engine: Engine, type_: Say) -> None:
    repl = make_repl(engine)
    for before in ("", "hello"):  # to drop a turn would not help
        said = type_(repl, before, "word " * 300)
        assert "the context holds 256" in said
        assert "oldest" not in said
    assert repl.session.num_turns == 1


def test_an_answer_that_fills_the_context_says_so(engine: Engine, type_: Say) -> None:
    repl = make_repl(engine, new_tokens=4000, ignore_eos=True)
    assert "cut: the context is full" in type_(repl, "hello")


# ---- beside an answer


def test_throttling_is_told_while_an_answer_is_made(
    engine: Engine, type_: Say, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    board = boards.make(tmp_path, **boards.NX16)
    repl = make_repl(engine, root=board, new_tokens=60, ignore_eos=True)
    shown = render.TextWriter.write
    said: list[str] = []

    def write(self: render.TextWriter, text: str) -> None:
        shown(self, text)
        if not said and self.num_chars > 3:
            alert = "sys/class/thermal/cooling_device1/cur_state"
            boards.write(board, alert, "1\n")
            for _ in range(500):  # the answer waits here until it is told
                if said:
                    break
                time.sleep(0.01)

    monkeypatch.setattr(render.TextWriter, "write", write)
    monkeypatch.setattr(repl, "say", lambda text, **_: said.append(text))
    repl.turn("hello")
    assert said[0].startswith("throttling: gpu-throttle-alert")
    assert "tok/s" in said[1]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_what_is_said_beside_has_a_line_of_its_own() -> None:
    stream = Terminal()
    writer = render.TextWriter(stream)
    writer.write("half a line")
    writer.interject(lambda: stream.write("[hot]\n"))
    writer.write(", the rest\n")
    writer.interject(lambda: stream.write("[cool]\n"))
    writer.write("end")
    writer.end()
    assert stream.getvalue() == "half a line\n[hot]\n, the rest\n[cool]\nend\n"
    pipe = io.StringIO()
    writer = render.TextWriter(pipe)
    writer.write("half")
    writer.interject(lambda: None)
    writer.write(" a line")
    assert pipe.getvalue() == "half a line"


def test_thinking_is_quiet_in_colour(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    stream = Terminal()
    writer = render.TextWriter(stream, dims=True)
    for piece in ("<think>", "\nhm", "\n</think>", "\n\nYes"):
        writer.write(piece)
    writer.end()
    assert stream.getvalue() == "\x1b[2m<think>\nhm\n</think>\x1b[0m\n\nYes\n"
    stopped, plain = Terminal(), io.StringIO()
    for stream in (stopped, plain):
        writer = render.TextWriter(stream, dims=True)
        writer.write("<think>hm")
        writer.end()
    assert stopped.getvalue() == "\x1b[2m<think>hm\x1b[0m\n"
    assert plain.getvalue() == "<think>hm\n"


def test_markdown_passes_as_it_is() -> None:
    text = "# A\n\n| a | b |\n|---|---|\n| **1** | `x` |\n\n```python\nif x:\n\ty = 1\n```\n"
    stream = Terminal()
    writer = render.TextWriter(stream)
    for character in text:
        writer.write(character)
    assert stream.getvalue() == text


def test_figures_fold_at_a_narrow_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    line = render.figures(Result(new_tokens=12, decode_tok_s=3.5, context_max=4096))
    rows = render.folded(line, Terminal()).splitlines()
    assert all(len(row) <= 20 for row in rows)
    assert render.SEPARATOR.join(rows) == line
    assert render.folded(line, io.StringIO()) == line
