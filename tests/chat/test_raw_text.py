"""What a chat quotes from files is shown at a terminal and not obeyed by it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from chat_tools import make_repl

from edge_runtime import Engine

EVIL, SHOWN = "\x1b]0;PWNED\x07\x1b[2J\x9b31m\rx", "␛]0;PWNED␇␛[2J␡31m␍x"


def test_nothing_of_a_file_reaches_the_terminal_raw(
    tiny_checkpoint: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A saved chat is another's text: its system prompt, its model's name, its messages; so are
    the names of files, and an error that quotes them."""
    document = {
        "format": "bitnest-edge chat",
        "version": 1,
        "model": {"name": EVIL, "sha256": EVIL},
        "system": EVIL,
        "thinking": None,
        "settings": {},
        "messages": [{"role": r, "content": EVIL} for r in ("user", "assistant")],
    }
    (tmp_path / f"{EVIL}.json").write_text(json.dumps(document))
    (tmp_path / EVIL).mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("BITNEST_DEBUG", "1")

    def bug(_: str) -> None:
        raise ValueError(EVIL)

    with Engine.open(tiny_checkpoint, ctx=256) as engine:
        repl = make_repl(
            engine,
            f"/load {EVIL}.json", "/system", "/context", "/power", f"/save {EVIL}",
            f"/save {EVIL}.txt", "hello", "/stats", "/undo", "/undo", f"/set {EVIL} 1",
            f"/think {EVIL}", "/help",
        )  # fmt: skip
        repl._commands._known["help"] = bug
        monkeypatch.setattr(repl.energy, "why", EVIL)
        monkeypatch.setattr(repl._throttle, "look", lambda: [EVIL])
        repl.run()
    said = capsys.readouterr().err
    assert "Loaded 1 turn" in said
    assert f"Saved 1 turn to {SHOWN}.txt" in said
    assert f"another model: {SHOWN}" in said
    assert f"ValueError: {SHOWN}" in said
    assert said.count(SHOWN) >= 7
    assert [c for c in said if not c.isprintable() and c != "\n"] == []
