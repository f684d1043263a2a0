"""The page without a mouse, without eyes, small and large, light and dark."""

from __future__ import annotations

from collections.abc import Callable
from importlib import resources
from pathlib import Path

from .chromium import Page
from .conftest import Running
from .speaker import MARKDOWN, Speaker

Serve = Callable[..., Running]
Visit = Callable[..., Page]
LONG = "x" * 300 + "\n\n```\n" + "y" * 300 + "\n```\n\n" + MARKDOWN
RULES = """axe.run(document, { resultTypes: ['violations'] }).then((found) =>
  found.violations.flatMap((v) => v.nodes.map((n) => `${v.id}: ${n.html.slice(0, 200)}`)))"""


def answered(page: Page) -> None:
    page.js("$('text').focus()")
    page.type("Tell me of rails.")
    page.press("Enter")
    page.until("!running && chat.messages.length")
    page.js("$('gauges').open = true")


def test_axe(serve: Serve, visit: Visit) -> None:
    axe = resources.files("axe_core_python").joinpath("axe.min.js").read_text("utf-8")
    page = visit(serve(Speaker()))
    page.js(axe + ";0")
    assert page.js(RULES) == []
    answered(page)
    page.js("fail('Something failed.', '', 'Do something', () => 0)")
    for width in (1280, 390):
        page.size(width, 844)
        for scheme in ("light", "dark"):
            page.prefer(prefers_color_scheme=scheme)
            assert page.js(RULES) == []
            for dialog in ("settings", "lock"):
                page.js(f"$('{dialog}').showModal()")
                assert page.js(RULES) == []
                page.js(f"$('{dialog}').close()")


def test_nothing_is_wider_than_the_screen(serve: Serve, visit: Visit) -> None:
    page = visit(serve(Speaker(LONG)))
    answered(page)
    page.js("fail('z'.repeat(300), '', 'Do something', () => 0)")
    right = "Math.max(...[...document.querySelectorAll('body *')].filter((e) => !e.closest('svg'))"
    right += ".map((e) => e.getBoundingClientRect().right))"
    for width in (320, 360, 390, 768, 1280, 1920):
        page.size(width, 700)
        page.js("$('gauges').open = true")
        assert page.js("document.documentElement.scrollWidth") == width
        assert page.js(right) <= width + 0.5
        page.js("$('settings').showModal()")
        assert page.js("$('settings').scrollWidth <= $('settings').clientWidth")
        page.js("$('settings').close()")


def test_tab_reaches_everything_and_shows_where(serve: Serve, visit: Visit) -> None:
    page = visit(serve(Speaker()))
    answered(page)
    page.js("document.activeElement.blur(); scrollTo(0, 0)")
    page.js("getSelection().removeAllRanges(); document.body.tabIndex = -1; document.body.focus()")
    reached = []
    for _ in range(8):
        page.press("Tab")
        reached.append(page.js("document.activeElement.id || document.activeElement.innerText"))
        style = "getComputedStyle(document.activeElement)"
        assert page.js(f"{style}.outlineStyle === 'solid' && {style}.outlineWidth === '3px'")
        box = page.js("document.activeElement.getBoundingClientRect().toJSON()")
        assert box["top"] >= 0 and box["bottom"] <= 800, reached[-1]  # noqa: PT018
    copy = ["Copy"] if page.js("Boolean(navigator.clipboard)") else []
    wanted = [
        "Skip to the message",
        "new",
        "open-settings",
        "Gauges",
        "Regenerate",
        *copy,
        "text",
        "send",
    ]
    assert reached[: len(wanted)] == wanted
    page.js("$('open-settings').focus()")
    page.press("Enter")
    page.until("$('settings').open && document.activeElement.id === 'system'")
    page.press("Escape")
    page.until("!$('settings').open && document.activeElement.id === 'open-settings'")


def test_what_is_told_to_a_screen_reader(serve: Serve, visit: Visit) -> None:
    speaker = Speaker()
    speaker.pace_s = 0.01
    page = visit(serve(speaker))
    page.js("globalThis.told = []; new MutationObserver(() => told.push($('said').textContent))"
            ".observe($('said'), { childList: true })")  # fmt: skip
    answered(page)
    page.until("told.length > 1")
    assert page.js("told") == ["Answering.", MARKDOWN]  # once, and whole
    told = page.tree()
    roles = [role for role, _ in told]
    landmarks = [role for role in roles if role in ("banner", "complementary", "main")]
    assert landmarks == ["banner", "complementary", "main"]
    headings = [name for role, name in told if role == "heading"]
    assert headings == ["bitnest-edge", "Gauges", "Conversation", "You", "tiny", "Rails"]
    assert ("textbox", "Message") in told
    assert roles.count("alert") == 1
    named = [name for role, name in told if role in ("button", "textbox", "link", "spinbutton")]
    assert all(named)
    page.js("$('settings').showModal()")
    fields = [name for role, name in page.tree() if role in ("textbox", "spinbutton")]
    assert fields == ["System prompt", "Temperature", "Top p", "Tokens at most", "Seed"]


def test_motion_stops_where_it_is_not_wanted(serve: Serve, visit: Visit) -> None:
    speaker = Speaker()
    speaker.pace_s = 30
    page = visit(serve(speaker))
    page.js("$('text').value = 'x'; $('say').requestSubmit()")
    style = "getComputedStyle(document.querySelector('.assistant > div'), '::before').animationName"
    assert page.js(style) == "blink"
    page.prefer(prefers_reduced_motion="reduce")
    assert page.js(style) == "none"
    page.press("Escape")
    page.until("!running")


def test_the_file_is_small_and_by_itself() -> None:
    text = resources.files("edge_runtime.serve").joinpath("page.html").read_text("utf-8")
    assert len(text.encode()) < 34 << 10
    for word in ("innerHTML", "eval(", "http:", "https:", "import(", "src=", "insertAdjacentHTML"):
        assert word not in text.replace("http://www.w3.org/2000/svg", ""), word
    assert Path(str(resources.files("edge_runtime.serve"))).is_dir()
