"""Sockets, connections and the end of the server: what the application does not see.

Invariant: the port is taken before the model is loaded; the number of connections is bounded, and
each either asks within a time or is closed; at the end of a drain what is not answered is told so.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
from typing import Any

import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from edge_runtime.errors import BitnestError
from edge_runtime.serve import guard, replies
from edge_runtime.serve.app import Settings, make_app
from edge_runtime.serve.worker import Worker

log = logging.getLogger(__name__)

HEAD_S = 20  # for the head of a request
KEEP_S = 30  # between two requests of a connection
WRITE_S = 60  # for a client to take what is sent
LAST_S = 5  # for errors to be told after a drain
MISSING = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)  # of a machine without IPv6, for localhost


def bind(host: str, port: int) -> list[socket.socket]:
    """Take a port on every address of a host, without listening yet. Raises BitnestError."""
    found: list[socket.socket] = []
    try:
        for family, kind, protocol, _, where in socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        ):
            try:
                found.append(_bound(family, kind, protocol, where, found))
            except OSError as error:
                if error.errno not in MISSING or not found:
                    raise
    except (OSError, UnicodeError) as error:  # of getaddrinfo too
        for one in found:
            one.close()
        raise _cannot(f"{host} port {port}", error) from None
    return found


def _cannot(where: str, error: Exception) -> BitnestError:
    why = getattr(error, "strerror", None) or str(error)
    return BitnestError(
        f"cannot listen on {where}: {why}", "is another server there? --port takes another"
    )


def _bound(
    family: int, kind: int, protocol: int, where: tuple[Any, ...], before: list[socket.socket]
) -> socket.socket:
    one = socket.socket(family, kind, protocol)
    try:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            one.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        # port 0: that which the first address was given
        port = before[0].getsockname()[1] if before else where[1]
        one.bind((where[0], port, *where[2:]))
    except OSError:
        one.close()
        raise
    return one


class Protocol(H11Protocol):
    """A connection. Beyond `limit_concurrency` of them a request is answered 503, but for /health;
    beyond twice as many they are closed."""

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self._most = self.limit_concurrency or 1
        self.limit_concurrency = None  # uvicorn's own answer is no JSON
        self._timer: asyncio.TimerHandle | None = None
        self._stuck: asyncio.TimerHandle | None = None

    # uvicorn's own protocol takes a Transport where asyncio's says BaseTransport
    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Wait for the head of a request."""
        super().connection_made(transport)
        if len(self.connections) > 2 * self._most:
            transport.abort()
        elif len(self.connections) > self._most:
            self.app = crowded(self.app)
        self._watch()

    def data_received(self, data: bytes) -> None:
        """Take what came."""
        super().data_received(data)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget it."""
        super().connection_lost(exc)
        for timer in (self._timer, self._stuck):
            if timer is not None:
                timer.cancel()

    def pause_writing(self) -> None:
        """The client takes nothing: for a time."""
        super().pause_writing()
        self._stuck = self.loop.call_later(WRITE_S, self.transport.abort)

    def resume_writing(self) -> None:
        """It does."""
        super().resume_writing()
        if self._stuck is not None:
            self._stuck.cancel()

    def send_400_response(self, msg: str) -> None:
        """Answer what is no HTTP."""
        log.debug("no HTTP request from %s", self.client)
        body = replies.dumped(replies.error_body(400, msg))
        self.transport.write(
            b"HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\nconnection: close\r\n"
            b"content-length: %d\r\n\r\n%b" % (len(body), body)
        )
        self.transport.close()

    def _unsupported_upgrade_warning(self) -> None:
        """An upgrade is not done, as HTTP lets a server choose; uvicorn advises to install one."""

    @property
    def _asked(self) -> bool:
        return not getattr(self.cycle, "response_complete", True)

    def _watch(self) -> None:
        if self._asked and self._timer is not None:
            self._timer.cancel()
            self._timer = None
        elif not self._asked and self._timer is None:
            self._timer = self.loop.call_later(HEAD_S, self._waited)

    def _waited(self) -> None:
        self._timer = None
        if not self._asked:
            self.transport.close()


def crowded(app: ASGIApp) -> ASGIApp:
    """Answer 503 in place of an application, and close the connection; /health is asked."""

    async def refuse(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] != "/health":
            message = "there are too many connections"
            await guard.told(503, message, {"connection": "close"})(scope, receive, send)
        else:
            await app(scope, receive, send)

    return refuse


class HttpServer(uvicorn.Server):
    """Runs until it is told to end; then what was admitted has `drain_s` to be answered."""

    def __init__(self, worker: Worker, settings: Settings, drain_s: int) -> None:
        self.worker, self.name, self.drain_s = worker, settings.model, drain_s
        super().__init__(
            uvicorn.Config(
                make_app(worker, settings),
                http=Protocol,
                ws="none",
                limit_concurrency=settings.max_connections,
                log_config=None,
                log_level="error",  # clients can cause its warnings, as many as they like
                access_log=False,
                server_header=False,
                timeout_graceful_shutdown=drain_s + LAST_S,
                timeout_keep_alive=KEEP_S,
                lifespan="on",
            )
        )

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, and say where. Raises BitnestError."""
        where = [one.getsockname()[:2] for one in sockets or []]
        shown = [f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host, port in where]
        try:
            await super().startup(sockets)
        except OSError as error:  # of two that were loading at once one was first
            await self.lifespan.shutdown()
            raise _cannot(", ".join(shown), error) from None
        for one in shown:
            log.info("%s at http://%s/ (API: /v1)", self.name, one)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Drain."""
        end = asyncio.get_running_loop().call_later(self.drain_s, self.worker.give_up)
        await super().shutdown(sockets)
        end.cancel()
