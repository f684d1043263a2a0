"""Who may ask, how much, and how an error is told.

Invariant: every error, of the framework too, has the API's shape; one that time cures says when to
come back.
"""

from __future__ import annotations

import hmac
import re

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from edge_runtime.errors import BitnestError
from edge_runtime.serve import replies

RETRY_S = 5  # where nothing better is known
HOST = re.compile(r"(\[[^]]*\]|[^:@\[\]]*)(?::\d*)?")  # RFC 9110, 7.2
ABSOLUTE = re.compile(r"https?://([^/]*)(.*)", re.IGNORECASE)  # RFC 9112, 3.2.2: as to a proxy
CURED = (429, 503)  # statuses of what time cures


class Crowded(BitnestError):
    """No room for another request's body."""

    http_status = 503


def told(status: int, message: str, headers: dict[str, str] | None = None) -> Response:
    """An error's answer."""
    found = {"retry-after": str(RETRY_S)} if status in CURED else {}
    return JSONResponse(
        replies.error_body(status, message), status, headers=found | (headers or {})
    )


def of_bitnest(request: Request, error: Exception) -> Response:
    """Of an expected error."""
    assert isinstance(error, BitnestError)
    status, body = replies.of_error(error)
    headers = {}
    if status in CURED:
        headers["retry-after"] = str(getattr(error, "retry_after_s", RETRY_S))
    return JSONResponse(body, status, headers=headers)


def of_http(request: Request, error: Exception) -> Response:
    """Of the framework's."""
    assert isinstance(error, HTTPException)
    return told(error.status_code, error.detail, dict(error.headers or {}))


def of_bug(request: Request, error: Exception) -> Response:
    """Of anything else: what is inside stays inside."""
    return told(500, f"internal error: {type(error).__name__}")


class Guard:
    """Refuses requests for another host's name, and without the key where one is set. The page and
    `/health` are open: they tell nothing of what was asked."""

    OPEN = ("/", "/health")

    def __init__(self, app: ASGIApp, key: str | None, hosts: tuple[str, ...] | None) -> None:
        self._app, self._key, self._hosts = app, key, hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on, or answer."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        host = headers.get(b"host", b"").decode("latin-1")
        if absolute := ABSOLUTE.fullmatch(scope["path"]):
            host, path = absolute[1], absolute[2] or "/"
            scope = {**scope, "path": path, "raw_path": path.encode()}
        if (refused := self._refused(scope, headers, host)) is not None:
            status, message = refused
            more = {"www-authenticate": "Bearer"} if status == 401 else {}
            await told(status, message, more)(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _refused(
        self, scope: Scope, headers: dict[bytes, bytes], host: str
    ) -> tuple[int, str] | None:
        named = b"host" in headers or scope["http_version"] != "1.0"  # which need not have one
        if self._hosts is not None and named and _name(host) not in self._hosts:
            return 403, "this server answers for this machine's own names only"
        if self._key is None or scope["path"] in self.OPEN:
            return None
        scheme, _, given = headers.get(b"authorization", b"").partition(b" ")
        right = hmac.compare_digest(given.strip(b" "), self._key.encode())
        if right and scheme.lower() == b"bearer":  # RFC 9110, 11.1: in any case
            return None
        return 401, "expected the header `Authorization: Bearer KEY` with this server's key"


def _name(host: str) -> str:
    """Without the port; nothing of what is no name with a port."""
    found = HOST.fullmatch(host)
    return found[1].lower() if found else ""


class Intake:
    """Bounds what comes in: the body of each request, and of all that are here until they are
    answered. Bytes."""

    def __init__(self, app: ASGIApp, most: int, most_of_all: int) -> None:
        self._app, self._most, self._most_of_all = app, most, most_of_all
        self._held = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on; a body beyond the bounds is an error to who reads it."""
        taken = 0

        def give_back() -> None:
            nonlocal taken
            self._held -= taken
            taken = 0

        async def counted() -> Message:
            nonlocal taken
            message = await receive()
            size = len(message.get("body", b""))
            taken += size
            self._held += size
            if taken > self._most:
                raise HTTPException(413, f"expected a request of at most {self._most} bytes")
            if self._held > self._most_of_all:
                give_back()  # now, so that others that come in beside it have its room
                raise Crowded(
                    f"requests that are here hold {self._most_of_all} bytes, which is all there "
                    "is room for", f"try again in {RETRY_S} s",
                )  # fmt: skip
            return message

        try:
            await self._app(scope, counted, send)
        finally:
            give_back()
