"""An engine that says what it is told to, at a given pace: what the page is tried with."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

from edge_runtime.decode.request import Result, Token

MARKDOWN = """# Rails

Two **steel** rails, *one* gauge: `1435` mm. 🚆 轨道 <b>not bold</b> <img src=x onerror=alert(1)>

- first
  1. inner
  2. second
- last, with `code`

```python
def gauge(mm: int) -> str:
    return f"{mm} mm <script>alert(1)</script>"
```

The end."""


class Speaking:
    """A generation of fixed pieces, one a pace."""

    def __init__(self, engine: Speaker, pieces: list[str]) -> None:
        self._engine, self._pieces = engine, pieces
        self._stop = threading.Event()
        self.result = Result(finish_reason="cancelled")

    def __iter__(self) -> Iterator[Token]:
        r, began = self.result, time.monotonic()
        r.prompt_tokens = 20
        for i, piece in enumerate(self._pieces):
            if self._stop.wait(self._engine.pace_s):
                return
            if i == self._engine.breaks_after:
                raise RuntimeError("broken on purpose")
            r.text += piece
            r.new_tokens += 1
            yield Token(i + 1, piece)
        r.finish_reason, r.decode_s = "eos", time.monotonic() - began
        r.decode_tok_s = r.new_tokens / max(r.decode_s, 1e-6)
        r.draft = {"drafted": 100, "accepted": 78, "acceptance": 0.78, "tokens_per_cycle": 4.12}
        yield Token(0, "")

    def cancel(self) -> None:
        self._stop.set()


class Speaker:
    """What a worker needs of an engine.

    answers: texts, by the number of the request, the last one again and again; fail: what the next
    request raises; breaks_after: pieces of an answer before a bug ends it.
    """

    context, backend_name, view, num_tokens = 512, "cpu", "nest", 5
    eos_ids: frozenset[int] = frozenset([0])
    tokenizer = SimpleNamespace(
        token_bytes=lambda i, skip_special=True: b"x", is_special=lambda i: i == 0
    )

    def __init__(self, *answers: str) -> None:
        self.answers = list(answers) or [MARKDOWN]
        self.pace_s = 0.002
        self.fail: Exception | None = None
        self.breaks_after = -1
        self.asked: list[Any] = []  # (messages, options)

    def generate(self, prompt: Any, **options: Any) -> Speaking:
        self.asked.append((prompt, options))
        if (fail := self.fail) is not None:
            self.fail = None
            raise fail
        text = self.answers[min(len(self.asked), len(self.answers)) - 1]
        return Speaking(self, [text[i : i + 3] for i in range(0, len(text), 3)])

    def memory(self) -> dict[str, int]:
        return {"weights_bytes": 98 << 20, "kv_bytes": 12 << 20}
