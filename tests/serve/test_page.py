"""The page in a real browser: a conversation, what is kept of it, and what goes wrong."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from edge_runtime.errors import ContextError
from edge_runtime.serve.metrics import Power
from edge_runtime.serve.worker import Job

from .chromium import Page
from .conftest import MODEL, Running
from .speaker import MARKDOWN, Speaker

Serve = Callable[..., Running]
Visit = Callable[..., Page]
BOARD = (
    "RAM 6185/7620MB (lfb 8x2MB) CPU [15%@729] GR3D_FREQ 63%@[621] cpu@53.9C soc1@50.5C "
    "VDD_IN {mw}mW/{mw}mW VDD_CPU_GPU_CV 40mW/40mW\n"
)


@pytest.fixture
def speaker() -> Speaker:
    return Speaker(MARKDOWN, "The second answer.", "The third.")


@pytest.fixture
def page(speaker: Speaker, serve: Serve, visit: Visit) -> Page:
    return visit(serve(speaker))


def say(page: Page, text: str) -> None:
    """Type and send it; the answer has begun then."""
    page.js("$('text').focus()")
    page.type(text)
    page.press("Enter")
    page.until("running")


def ask(page: Page, text: str) -> str:
    """The whole answer, as it is kept."""
    say(page, text)
    page.until("!running")
    return page.js("chat.messages.at(-1).content")


def test_a_model_answers(running: Running, visit: Visit) -> None:
    page = visit(running)
    page.js("$('temperature').value = '0'; $('max_tokens').value = '40'")
    answer = ask(page, "hello world")
    body = {
        "model": MODEL, "temperature": 0, "top_p": 0.95, "max_tokens": 40,
        "messages": [{"role": "user", "content": "hello world"}],
    }  # fmt: skip
    with running.client() as client:
        whole = client.post("/v1/chat/completions", json=body).json()
    assert answer == whole["choices"][0]["message"]["content"]
    assert f"{whole['usage']['completion_tokens']} tokens" in page.text(".note")
    page.until(f"$('g-context').innerText.startsWith('{whole['usage']['total_tokens']} of 256')")
    assert all(url.startswith((running.url, "data:")) for url in page.requests())


def test_it_streams_and_stops(page: Page, speaker: Speaker) -> None:
    speaker.pace_s = 0.05
    say(page, "go on")
    assert page.text("#send") == "Stop"
    lengths = [page.until(f"document.querySelector('.assistant').innerText.length > {n} && "
                          "document.querySelector('.assistant').innerText.length")
               for n in (5, 15, 25)]  # fmt: skip
    assert lengths == sorted(set(lengths))
    page.press("Escape")
    page.until("!running", 1)
    kept = page.js("chat.messages.at(-1).content")
    assert 20 < len(kept) < len(MARKDOWN)
    assert MARKDOWN.startswith(kept)
    assert "stopped" in page.text(".note")
    assert page.text("#send") == "Send"
    page.until("gauges.latest.busy === false", 5)
    assert page.text("#error") == ""
    assert page.text("#g-context") == "unknown\ntold again after a whole answer"


def test_stop_before_the_first_word(page: Page, speaker: Speaker) -> None:
    speaker.pace_s = 30
    say(page, "never mind")
    page.click("#send")
    page.until("!running", 1)
    assert page.js("chat.messages.length") == 0
    assert page.js("$('text').value") == "never mind"
    page.until("gauges.latest.busy === false", 5)


def test_regenerate_asks_the_same_again(page: Page, speaker: Speaker) -> None:
    ask(page, "first")
    page.click(".note button")
    page.until("!running && chat.messages.at(-1).content === 'The second answer.'")
    assert speaker.asked[0][0] == speaker.asked[1][0] == [{"role": "user", "content": "first"}]
    ask(page, "more")
    roles = [m["role"] for m in speaker.asked[2][0]]
    assert roles == ["user", "assistant", "user"]
    assert page.js("document.querySelectorAll('article').length") == 4
    page.js("document.querySelector('.note button').focus()")
    page.press("Enter")  # by key: the focus is not lost with the button
    page.until("!running && chat.messages.length === 4")
    assert page.js("document.activeElement.id") == "send"
    assert len(speaker.asked) == 4


def test_shift_enter_begins_a_line(page: Page, speaker: Speaker) -> None:
    page.js("$('text').focus()")
    page.type("one")
    page.press("Enter", shift=True)
    page.type("two")
    assert page.js("$('text').value") == "one\ntwo"
    page.press("Enter")
    page.until("!running && chat.messages.length")
    assert speaker.asked[0][0][0]["content"] == "one\ntwo"


def test_settings_are_asked_for_and_kept(page: Page, speaker: Speaker, serve: Serve) -> None:
    page.click("#open-settings")
    for name, value in (("system", "Be brief."), ("temperature", "0.25"), ("top_p", "0.5"),
                        ("max_tokens", "99"), ("seed", "7")):  # fmt: skip
        page.js(f"$('{name}').focus(); $('{name}').select()")
        page.type(value)
    page.click("#options button.main")
    ask(page, "hello")
    messages, options = speaker.asked[0]
    assert messages[0] == {"role": "system", "content": "Be brief."}
    sampling = options["sampling"]
    assert (sampling.temperature, sampling.top_p, sampling.seed) == (0.25, 0.5, 7)
    assert options["max_new_tokens"] == 99
    page.send("Page.reload")
    page.until("document.readyState === 'complete' && gauges.latest")
    assert page.js("$('system').value + $('seed').value") == "Be brief.7"
    page.js("$('top_p').value = '2'")
    page.js("$('text').focus()")
    page.type("not sent")
    page.press("Enter")
    page.until("$('settings').open")
    assert page.js("$('text').value") == "not sent"
    assert len(speaker.asked) == 1


def test_what_is_kept(page: Page, speaker: Speaker) -> None:
    ask(page, "keep this")
    shown = page.text("#log")
    page.send("Page.reload")
    page.until("document.readyState === 'complete' && gauges.latest")
    assert page.text("#log") == shown
    page.click("#new")
    assert page.js("chat.messages.length + document.querySelectorAll('article').length") == 0
    page.click("#log .note button")
    assert page.text("#log") == shown
    page.js("chat.messages = Array(100).fill().flatMap((_, i) => [{role: 'user', content: 'q' + i},"
            "{role: 'assistant', content: 'x'.repeat(9000)}]); keepChat()")  # fmt: skip
    kept = page.js("JSON.parse(localStorage.getItem(CHAT))")
    assert sum(len(m["content"]) for m in kept["messages"]) <= 400_000
    assert kept["messages"][0]["role"] == "user"
    assert kept["messages"][-2]["content"] == "q99"
    assert kept["cut"] is True
    page.click("#open-settings")
    page.click("#forget")
    assert page.js("localStorage.length + sessionStorage.length") == 0


def test_gauges_move(speaker: Speaker, serve: Serve, visit: Visit, tmp_path: Path) -> None:
    log = tmp_path / "board.log"
    log.write_text("".join(BOARD.format(mw=8000 + 40 * i) for i in range(200)))
    speaker.pace_s = 0.03
    page = visit(serve(speaker, power=Power(f"replay:{log}")), width=390, height=844)
    page.click("summary")
    assert page.js("$('g-speed').innerText") == "unknown\nno answer yet"
    page.until("$('g-power').innerText.includes('W')")
    watts = page.js("gauges.latest.watts")
    say(page, "how fast")
    page.until("$('g-speed').innerText.includes('tok/s\\nnow')")
    assert 5 < float(page.text("#g-speed").split()[0]) < 40
    page.until("$('g-queue').innerText.includes('being answered')")
    assert page.until(f"gauges.latest.watts !== {watts}")
    page.until("$('g-energy').innerText.includes('J/token\\nVDD_IN')")
    joules, tokens = page.js("gauges.work.joules"), page.js("gauges.work.tokens")
    assert joules / tokens == pytest.approx(float(page.text("#g-energy").split()[0]), rel=0.2)
    page.until("!running && $('g-acceptance').innerText.startsWith('78 %')")
    assert page.text("#g-temperature").startswith("53.9 °C")
    assert "tok/s" in page.text("#brief")


def test_gauges_rest_while_nobody_looks(page: Page) -> None:
    page.js(
        "Object.defineProperty(document, 'hidden', { get: () => globalThis.away }); away = true;"
        "document.dispatchEvent(new Event('visibilitychange'))"
    )
    before = page.js("new Promise((then) => setTimeout(() => then(gauges.latest.uptime_s), 300))")
    after = page.js("new Promise((then) => setTimeout(() => then(gauges.latest.uptime_s), 1500))")
    assert after == before
    page.js("away = false; document.dispatchEvent(new Event('visibilitychange'))")
    page.until(f"gauges.latest.uptime_s > {before}", 3)


def test_what_is_unknown_is_said(page: Page) -> None:
    for name in ("power", "energy", "temperature"):
        assert page.text(f"#g-{name}") == "unknown\nno sensor found"
    assert page.text("#g-acceptance") == "unknown\nno answer yet"


def test_a_full_queue(speaker: Speaker, serve: Serve, visit: Visit) -> None:
    running = serve(speaker, max_queue=0)
    running.worker._mean_s = 1.0
    page = visit(running)
    speaker.pace_s = 60.0  # another's answer, which leaves no room
    other = Job(lambda engine: engine.generate("x"), lambda event: None)
    running.worker.submit(other)
    while not running.worker.busy:
        time.sleep(0.01)
    say(page, "is there room?")
    page.until("!running && $('error').innerText")
    assert "try again in" in page.text("#error")
    assert page.js("$('text').value") == "is there room?"
    assert page.js("chat.messages.length") == 0
    page.until("$('error').innerText.includes('room now')")
    other.cancel()


def test_a_full_context(page: Page, speaker: Speaker) -> None:
    ask(page, "first")
    speaker.fail = ContextError("600 tokens do not fit 512", "shorten it")
    say(page, "second")
    page.until("!running && $('error').innerText")
    assert page.text("#error").startswith("600 tokens do not fit 512 (shorten it)")
    assert page.js("chat.messages.length") == 2
    page.click("#error button")
    page.until("!running && chat.messages.at(-1).content.startsWith('The third')")
    assert [m["content"] for m in speaker.asked[-1][0]] == ["second"]
    assert "Older messages were not kept." in page.text("#log")
    assert page.js("$('text').value") == ""


def test_a_server_that_goes_and_comes_back(page: Page, speaker: Speaker) -> None:
    down = {"offline": True, "latency": 0, "downloadThroughput": 0, "uploadThroughput": 0}
    page.send("Network.emulateNetworkConditions", **down)
    page.until("$('link').innerText === 'no answer'")
    assert page.text("#g-memory") == page.text("#g-speed") == "unknown\nno answer"
    page.js("$('text').focus()")
    page.type("anyone?")
    page.press("Enter")
    page.until("!running && $('error').innerText.includes('does not answer')")
    assert page.js("$('text').value") == "anyone?"
    page.send("Network.emulateNetworkConditions", **(down | {"offline": False}))
    page.until("$('link').innerText === 'connected' && !$('error').innerText")
    page.press("Enter")
    page.until("!running && chat.messages.length === 2")


def test_an_answer_that_breaks_off(page: Page, speaker: Speaker) -> None:
    speaker.breaks_after = 10
    answer = ask(page, "try")
    assert answer
    assert MARKDOWN.startswith(answer)
    assert "cut off" in page.text(".note")
    assert "internal error" in page.text("#error")


def test_a_key(speaker: Speaker, serve: Serve, visit: Visit) -> None:
    page = visit(serve(speaker, key="correct-horse"))
    assert page.text("#lock-name") == "This server wants its key"
    page.type("wrong-horse")
    page.press("Enter")
    page.until("$('lock').open && $('lock-name').innerText.includes('another')")
    page.type("correct-horse")
    page.press("Enter")
    page.until("$('link').innerText === 'connected'")
    assert ask(page, "hello") == MARKDOWN
    assert page.js("sessionStorage.getItem(KEY)") == "correct-horse"
    assert "horse" not in page.js("JSON.stringify(localStorage)")
