"""The page's own functions: pieces of a stream, and Markdown that is safe."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator

import pytest

from .chromium import Browser, Page
from .conftest import Running
from .speaker import MARKDOWN, Speaker

EVENTS = [{"a": "é 🚆 轨道"}, {"b": "two\\n\n lines"}, {"c": ""}]
SPLIT = """(async (text, size) => {
  const all = new TextEncoder().encode(text), got = [];
  const stream = new ReadableStream({ start(c) {
    for (let i = 0; i < all.length; i += size) c.enqueue(all.slice(i, i + size));
    c.close();
  } });
  for await (const data of events(stream)) got.push(data);
  return got;
})"""
# every beginning of a text is shown in turn, as a stream does; the end is as if shown at once
GROWN = """((text) => {
  const grown = el('div'), once = el('div');
  for (let i = 0; i <= text.length; i++) render(grown, text.slice(0, i));
  render(once, text);
  return [grown.innerHTML, once.innerHTML];
})"""


@pytest.fixture(scope="module")
def script(browser: Browser) -> Iterator[Page]:
    """One page for all: nothing here changes it."""
    import tempfile
    from importlib import resources
    from pathlib import Path

    text = resources.files("edge_runtime.serve").joinpath("page.html").read_text("utf-8")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "page.html"
        file.write_text(text)
        page = browser.open(file.as_uri())
        yield page
        page.close()


def markdown(page: Page, text: str) -> str:
    grown, once = page.js(f"{GROWN}({json.dumps(text)})")
    assert grown == once
    return once


@pytest.mark.parametrize("end", ["\n\n", "\r\n\r\n"])
@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_events_in_any_pieces(script: Page, end: str, size: int) -> None:
    told = [json.dumps(event, ensure_ascii=False) for event in EVENTS] + ["[DONE]"]
    text = "".join(f"data: {data}{end}" for data in told) + f": a comment{end}"
    assert script.js(f"{SPLIT}({json.dumps(text)}, {size})") == told


@pytest.mark.parametrize(
    ("text", "html"),
    [
        ("plain\nlines", "<p>plain\nlines</p>"),
        ("one\n\ntwo", "<p>one</p><p>two</p>"),
        ("# Title #\n### Smaller", "<h4>Title</h4><h4>Smaller</h4>"),
        ("#hash", "<p>#hash</p>"),
        ("**bold *and* `x`**", "<p><strong>bold <em>and</em> <code>x</code></strong></p>"),
        ("2 * 3 * 4 and a*b*c", "<p>2 * 3 * 4 and a*b*c</p>"),
        ("``a ` b``", "<p><code>a ` b</code></p>"),
        ("`**not bold**`", "<p><code>**not bold**</code></p>"),
        ("**open", "<p>**open</p>"),
        ("- a\n- b", "<ul><li>a</li><li>b</li></ul>"),
        ("3. a\n4) b", '<ol><li value="3">a</li><li value="4">b</li></ol>'),
        ("- a\n  - b\n    - c\n- d",
         "<ul><li>a<ul><li>b<ul><li>c</li></ul></li></ul></li><li>d</li></ul>"),
        ("- a\n  more\n\n- b", "<ul><li>a\nmore</li><li>b</li></ul>"),
        ("    - deep\n- out", "<ul><li>deep</li><li>out</li></ul>"),
        ("---", "<hr>"),
        ("```py\n<b> *x*\n\n```\nafter", "<pre><code>&lt;b&gt; *x*\n</code></pre><p>after</p>"),
        ("````\n```\n````", "<pre><code>```</code></pre>"),
        ("```\nnot closed", "<pre><code>not closed</code></pre>"),
        ("<think>y</think>so", "<details><summary>Thinking</summary><p>y</p></details><p>so</p>"),
        ("<img src=x onerror=alert(1)>", "<p>&lt;img src=x onerror=alert(1)&gt;</p>"),
        ("[a](javascript:alert(1))", "<p>[a](javascript:alert(1))</p>"),
        ("# <script>alert(1)</script>", "<h4>&lt;script&gt;alert(1)&lt;/script&gt;</h4>"),
    ],
)  # fmt: skip
def test_markdown(script: Page, text: str, html: str) -> None:
    assert markdown(script, text) == html


def test_only_known_elements_come_of_any_text(script: Page) -> None:
    pieces = [
        "<script>",
        "</pre>",
        "`",
        "```",
        "**",
        "*",
        "\n",
        "\n\n",
        "- ",
        "1. ",
        "# ",
        "a",
        "  ",
    ]
    seed, texts = 1, []
    for _ in range(60):
        text = ""
        for _ in range(40):
            seed = seed * 48271 % 0x7FFFFFFF
            text += pieces[seed % len(pieces)]
        texts.append(text)
    for text in texts:
        markdown(script, text)
    tags = script.js(
        f"[...new Set({json.dumps(texts)}.flatMap((text) => {{"
        "const node = el('div'); render(node, text);"
        "return [...node.querySelectorAll('*')].map((e) => e.localName); }))]"
    )
    assert set(tags) <= {"p", "h4", "hr", "ul", "ol", "li", "pre", "code", "strong", "em"}


@pytest.mark.parametrize("text", ["`" * 50_000, "*" * 50_000, "**a " * 20_000, "- " * 30_000,
                                  "<think>" * 20_000, "# " * 30_000, "a*b " * 20_000])  # fmt: skip
def test_long_nonsense_is_quick(script: Page, text: str) -> None:
    seconds = script.js(
        f"(() => {{ const t = {json.dumps(text)}, at = performance.now(); render(el('div'), t);"
        "return (performance.now() - at) / 1000; })()"
    )
    assert seconds < 2


def test_a_script_in_an_answer_does_not_run(
    serve: Callable[..., Running], visit: Callable[..., Page]
) -> None:
    page = visit(serve(Speaker(MARKDOWN)))
    page.js("$('text').value = '<img src=x onerror=alert(1)>'; $('say').requestSubmit()")
    page.until("!running && chat.messages.length")
    assert page.js("document.images.length + document.scripts.length") == 1
    assert "<img src=x onerror=alert(1)>" in page.text(".user")
    assert "<script>alert(1)</script>" in page.text(".assistant pre")
