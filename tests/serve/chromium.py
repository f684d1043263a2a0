"""A headless Chromium, driven over its DevTools protocol by a pair of pipes.

Source: https://chromedevtools.github.io/devtools-protocol/ and Chromium's flag
"remote-debugging-pipe": JSON messages that end with a zero byte, read from descriptor 3 and written
to 4.
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import itertools
import json
import os
import select
import shutil
import time
from pathlib import Path
from typing import Any

NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
FLAGS = (
    "--headless", "--remote-debugging-pipe", "--no-first-run", "--disable-gpu",
    "--disable-dev-shm-usage", "--disable-extensions", "--disable-background-networking",
    "--force-color-profile=srgb", "--hide-scrollbars", "about:blank",
)  # fmt: skip
WAIT_S = 20.0
KEYS = {"Enter": ("Enter", 13, "\r"), "Escape": ("Escape", 27, ""), "Tab": ("Tab", 9, "")}
SHIFT = 8


class PageError(AssertionError):
    """What a script on the page threw, or what it did not come to in time."""


def find() -> str | None:
    """Path of a browser."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    """A process, and one page in it at a time."""

    def __init__(self, path: str, profile: Path) -> None:
        theirs_in, self._out = _far_pipe()
        self._in, theirs_out = _far_pipe()
        sandbox = ["--no-sandbox"] if os.geteuid() == 0 else []
        self._pid = os.posix_spawn(
            path,
            [path, *sandbox, f"--user-data-dir={profile}", *FLAGS],
            os.environ | {"HOME": str(profile)},
            file_actions=[
                (os.POSIX_SPAWN_DUP2, theirs_in, 3),
                (os.POSIX_SPAWN_DUP2, theirs_out, 4),
                (os.POSIX_SPAWN_OPEN, 2, str(profile / "stderr"), os.O_WRONLY | os.O_CREAT, 0o600),
            ],
        )
        os.close(theirs_in)
        os.close(theirs_out)
        self._numbers, self._read = itertools.count(1), b""
        self.events: list[dict[str, Any]] = []

    def send(self, method: str, session: str | None = None, **params: Any) -> dict[str, Any]:
        """Call a method and return its result; events that come meanwhile are kept."""
        number = next(self._numbers)
        message: dict[str, Any] = {"id": number, "method": method, "params": params}
        if session is not None:
            message["sessionId"] = session
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self._out, data) :]
        while (answer := self._message(method)).get("id") != number:
            self.events.append(answer)
        if "error" in answer:
            raise PageError(f"{method}: {answer['error']['message']}")
        return answer["result"]

    def _message(self, what: str) -> dict[str, Any]:
        end = time.monotonic() + WAIT_S
        while b"\0" not in self._read:
            if not select.select([self._in], [], [], max(0.0, end - time.monotonic()))[0]:
                raise PageError(f"{what}: no answer from the browser in {WAIT_S:g} s")
            if not (piece := os.read(self._in, 1 << 20)):
                raise PageError(f"{what}: the browser has ended")
            self._read += piece
        message, _, self._read = self._read.partition(b"\0")
        return json.loads(message)

    def open(self, url: str, width: int = 1280, height: int = 800) -> Page:
        """A page of its own: nothing stored, no cookies."""
        context = self.send("Target.createBrowserContext")["browserContextId"]
        target = self.send("Target.createTarget", url="about:blank", browserContextId=context)
        attached = self.send("Target.attachToTarget", targetId=target["targetId"], flatten=True)
        page = Page(self, attached["sessionId"], context)
        page.size(width, height)
        for domain in ("Page", "Runtime", "Log", "Network"):
            page.send(f"{domain}.enable")
        page.go(url)
        return page

    def close(self) -> None:
        """End the process."""
        with contextlib.suppress(PageError, OSError):
            self.send("Browser.close")
        os.close(self._out)
        os.close(self._in)
        os.waitpid(self._pid, 0)


class Page:
    """A tab, as a user has it: keys, a size, what it shows."""

    def __init__(self, browser: Browser, session: str, context: str) -> None:
        self._browser, self._session, self._context = browser, session, context

    def send(self, method: str, **params: Any) -> dict[str, Any]:
        """Call a method of this page."""
        return self._browser.send(method, self._session, **params)

    def go(self, url: str) -> None:
        """Load an address and wait for its script."""
        self.send("Page.navigate", url=url)
        self.until(
            f"location.href.startsWith({json.dumps(url)}) && document.readyState==='complete'"
        )

    def js(self, expression: str) -> Any:
        """The value of an expression; a promise is awaited."""
        found = self.send(
            "Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True,
            userGesture=True,
        )  # fmt: skip
        if "exceptionDetails" in found:
            thrown = found["exceptionDetails"]
            raise PageError(thrown.get("exception", {}).get("description") or thrown["text"])
        return found["result"].get("value")

    def until(self, expression: str, wait_s: float = WAIT_S) -> Any:
        """Wait until an expression is true, and return its value."""
        end = time.monotonic() + wait_s
        while not (value := self.js(expression)):
            if time.monotonic() > end:
                raise PageError(f"not within {wait_s:g} s: {expression}")
            time.sleep(0.02)
        return value

    def text(self, selector: str) -> str:
        """What is seen of an element."""
        return self.js(f"document.querySelector({json.dumps(selector)}).innerText")

    def type(self, text: str) -> None:
        """Type into what has the focus."""
        self.send("Input.insertText", text=text)

    def press(self, key: str, *, shift: bool = False) -> None:
        """Press and release a key."""
        name, code, text = KEYS[key]
        both = {"key": name, "code": name, "windowsVirtualKeyCode": code}
        both["modifiers"] = SHIFT if shift else 0
        self.send(
            "Input.dispatchKeyEvent", type="keyDown" if text else "rawKeyDown", text=text, **both
        )
        self.send("Input.dispatchKeyEvent", type="keyUp", **both)

    def click(self, selector: str) -> None:
        """Click with the mouse in the middle of an element, which nothing may cover."""
        what = json.dumps(selector)
        self.js(f"document.querySelector({what}).scrollIntoView({{block: 'center'}})")
        box = self.js(f"document.querySelector({what}).getBoundingClientRect().toJSON()")
        at = {"x": box["x"] + box["width"] / 2, "y": box["y"] + box["height"] / 2}
        for kind in ("mousePressed", "mouseReleased"):
            self.send("Input.dispatchMouseEvent", type=kind, button="left", clickCount=1, **at)

    def size(self, width: int, height: int) -> None:
        """Be a screen of this size, in CSS pixels."""
        self.send(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1,
            mobile=width < 600,
        )  # fmt: skip

    def prefer(self, **features: str) -> None:
        """Media features, such as prefers_color_scheme="dark"."""
        told = [{"name": n.replace("_", "-"), "value": v} for n, v in features.items()]
        self.send("Emulation.setEmulatedMedia", features=told)

    def screenshot(self, path: Path) -> None:
        """What the screen shows, as PNG."""
        path.write_bytes(base64.b64decode(self.send("Page.captureScreenshot")["data"]))

    def tree(self) -> list[tuple[str, str]]:
        """(role, name) of everything that assistive technology is told, in order."""
        nodes = self.send("Accessibility.getFullAXTree")["nodes"]
        value = {n["nodeId"]: n for n in nodes}
        told: list[tuple[str, str]] = []

        def walk(node: dict[str, Any]) -> None:
            if not node.get("ignored"):
                name = node.get("name", {}).get("value", "")  # Chromium 150 ends some in a space
                told.append((node["role"]["value"], name.strip()))
            for child in node.get("childIds", ()):
                if child in value:
                    walk(value[child])

        walk(nodes[0])
        return told

    def faults(self) -> list[str]:
        """What scripts threw and what the policy refused, since the page was opened."""
        found = []
        for event in self._events():
            if event["method"] == "Runtime.exceptionThrown":
                details = event["params"]["exceptionDetails"]
                found.append(details.get("exception", {}).get("description") or details["text"])
            elif (
                event["method"] == "Log.entryAdded"
                and event["params"]["entry"]["source"] != "network"
            ):
                found.append(event["params"]["entry"]["text"])
        return found

    def requests(self) -> list[str]:
        """Every address that was asked for."""
        sent = [e for e in self._events() if e["method"] == "Network.requestWillBeSent"]
        return [e["params"]["request"]["url"] for e in sent]

    def _events(self) -> list[dict[str, Any]]:
        self.js("1")  # takes in what has come
        return [e for e in self._browser.events if e.get("sessionId") == self._session]

    def close(self) -> None:
        """Forget it and all that it stored."""
        self._browser.send("Target.disposeBrowserContext", browserContextId=self._context)


def _far_pipe() -> tuple[int, int]:
    """Ends above 4, so that neither is in the way when they become 3 and 4."""
    near = os.pipe()
    far = tuple(fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in near)
    for end in near:
        os.close(end)
    return far[0], far[1]
