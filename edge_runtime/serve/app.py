"""The server's routes.

Invariant: headers of an answer are sent when its first event is there, so whatever is wrong with a
request is told by a status; a client that goes away cancels its job within one cycle. Every error,
of the framework too, has the API's shape.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from importlib import resources
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from edge_runtime.decode.engine import Engine
from edge_runtime.decode.generation import Generation
from edge_runtime.decode.request import Result, Token
from edge_runtime.errors import BitnestError, UsageError, cut
from edge_runtime.serve import openapi, replies, wire
from edge_runtime.serve.grammar import ANY_OBJECT, Grammars
from edge_runtime.serve.metrics import Power, State
from edge_runtime.serve.worker import Event, Job, QueueFull, Worker

BODY_S = 60  # for a request to come in
LAST_S = 5.0  # for what still runs when the server ends
LOOPBACK = ("localhost", "127.0.0.1", "[::1]")
PAGE_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
    "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """key: that clients send, None: none is needed; hosts: names that requests may use, None: any;
    limits in bytes and seconds."""

    model: str
    key: str | None = None
    hosts: tuple[str, ...] | None = LOOPBACK
    max_queue: int = 64
    max_body_bytes: int = 4 << 20
    queue_s: float = 300.0
    request_s: float = 600.0
    power: str = "auto"


class QueueTimeout(BitnestError):
    """A request that waited longer than is allowed."""

    http_status = 503


@dataclass
class Server:
    """The routes over one worker."""

    worker: Worker
    settings: Settings
    state: State = field(init=False)
    grammars: Grammars = field(init=False)
    started: int = field(default_factory=lambda: int(time.time()))

    def __post_init__(self) -> None:
        s = self.settings
        self.state = State(self.worker, Power(s.power), s.model, time.monotonic())
        self.grammars = Grammars(self.worker.engine)

    # answers

    async def chat(self, request: Request) -> Response:
        """POST /v1/chat/completions."""
        asked = wire.decode(wire.ChatRequest, await self._body(request))
        self._known(asked.model)
        template = dict(asked.chat_template_kwargs or {})
        if asked.tools:
            template["tools"] = asked.tools
        messages = [message.for_template() for message in asked.messages]
        options: dict[str, Any] = {"template": template}
        form = asked.response_format
        schema = None
        if form is not None and form.type != "text":
            schema = ANY_OBJECT if form.json_schema is None else form.json_schema.schema
        return await self._answer(request, asked, messages, options, schema, chat=True)

    async def completions(self, request: Request) -> Response:
        """POST /v1/completions."""
        asked = wire.decode(wire.CompletionRequest, await self._body(request))
        self._known(asked.model)
        return await self._answer(request, asked, asked.engine_prompt(), {}, None, chat=False)

    async def _answer(
        self, request: Request, asked: Any, prompt: Any, options: dict[str, Any],
        schema: dict[str, Any] | None, *, chat: bool,
    ) -> Response:  # fmt: skip
        rules = None if schema is None else await self.grammars.tried(schema)
        limit_s = self.settings.request_s
        options |= {
            "max_new_tokens": asked.limit,
            "sampling": asked.sampling(),
            "stop": asked.stops,
            "ignore_eos": bool(asked.ignore_eos),
            "logprobs": asked.num_top,
            "deadline_s": min(asked.deadline_s or limit_s, limit_s),
        }

        def make(engine: Engine) -> Generation:
            constraint = None if rules is None else self.grammars.of_schema(rules)
            return engine.generate(prompt, constraint=constraint, **options)

        loop, events = asyncio.get_running_loop(), asyncio.Queue[Event]()

        def emit(event: Event) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody listens
                loop.call_soon_threadsafe(events.put_nowait, event)

        job = Job(make, emit)
        self.worker.submit(job)
        with_usage = asked.stream_options is not None and asked.stream_options.include_usage
        engine = self.worker.engine
        reply = replies.Reply(
            self.settings.model, chat, engine.tokenizer, engine.eos_ids, with_usage=with_usage
        )
        return Answer(job, events, reply, bool(asked.stream), self.settings.queue_s)

    def _known(self, model: str) -> None:
        if model != self.settings.model:
            raise NotHere(
                f"the model {cut(model)!r} is not here: this server has {self.settings.model!r}"
            )

    async def _body(self, request: Request) -> bytes:
        if (
            request.headers.get("content-type", "").split(";")[0].strip().lower()
            != "application/json"
        ):
            raise HTTPException(415, "expected content-type: application/json")
        most, parts, size = self.settings.max_body_bytes, [], 0

        async def read() -> None:
            nonlocal size
            async for part in request.stream():
                size += len(part)
                if size > most:
                    raise HTTPException(413, f"expected a request of at most {most} bytes")
                parts.append(part)

        try:
            await asyncio.wait_for(read(), BODY_S)
        except asyncio.TimeoutError:
            raise HTTPException(408, f"the request did not come within {BODY_S} s") from None
        except ClientDisconnect:
            raise HTTPException(400, "the client left") from None  # nobody reads it
        return b"".join(parts)

    # the rest

    async def models(self, request: Request) -> Response:
        """GET /v1/models, and /v1/models/{model}."""
        entry = {
            "id": self.settings.model, "object": "model", "created": self.started,
            "owned_by": "bitnest-edge", "context_length": self.worker.engine.context,
        }  # fmt: skip
        wanted = request.path_params.get("model")
        if wanted is None:
            return JSONResponse({"object": "list", "data": [entry]})
        self._known(wanted)
        return JSONResponse(entry)

    async def health(self, request: Request) -> Response:
        """GET /health."""
        if not self.worker.alive:
            return JSONResponse({"status": "broken"}, 503)
        return JSONResponse({"status": "ok", "model": self.settings.model})

    async def metrics(self, request: Request) -> Response:
        """GET /metrics, and with ?format=json what the page shows."""
        if request.query_params.get("format") == "json":
            return JSONResponse(self.state.gauges())
        return Response(self.state.prometheus(), media_type=CONTENT_TYPE_LATEST)

    async def document(self, request: Request) -> Response:
        """GET /openapi.json."""
        return JSONResponse(openapi.document(self.settings.key is not None))

    async def page(self, request: Request) -> Response:
        """GET /."""
        text = resources.files("edge_runtime.serve").joinpath("page.html").read_text("utf-8")
        headers = {
            "content-security-policy": PAGE_POLICY,
            "cache-control": "no-cache",
            "x-content-type-options": "nosniff",
            "referrer-policy": "no-referrer",
        }
        return Response(text, media_type="text/html; charset=utf-8", headers=headers)


class NotHere(UsageError):
    """A model that this server does not have."""

    http_status = 404


class Answer(Response):
    """Waits for the job's events and sends them, whole or as a stream; listens for the client's end
    all the while."""

    def __init__(
        self, job: Job, events: asyncio.Queue[Event], reply: replies.Reply, stream: bool,
        queue_s: float,
    ) -> None:  # fmt: skip
        self._job, self._events, self._reply = job, events, reply
        self._stream, self._queue_s = stream, queue_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it. Raises what the job raised before it said anything."""
        sending = asyncio.ensure_future(self._send(send))
        leaving = asyncio.ensure_future(_left(receive))
        try:
            await asyncio.wait((sending, leaving), return_when=asyncio.FIRST_COMPLETED)
            if sending.done():
                sending.result()
        finally:
            self._job.cancel()  # of a job that has ended this does nothing
            for task in (sending, leaving):
                task.cancel()
            await asyncio.gather(sending, leaving, return_exceptions=True)

    async def _send(self, send: Send) -> None:
        try:
            await asyncio.wait_for(self._events.get(), self._queue_s)  # `Begun`
        except asyncio.TimeoutError:
            raise QueueTimeout(
                f"no turn came within {self._queue_s:g} s", "try again later"
            ) from None
        first = await self._events.get()
        if isinstance(first, BitnestError):
            raise first
        await (self._in_chunks if self._stream else self._whole)(first, send)

    async def _whole(self, event: Event, send: Send) -> None:
        while isinstance(event, Token):
            self._reply.add(event)
            event = await self._events.get()
        if isinstance(event, BitnestError):
            raise event
        assert isinstance(event, Result)
        body = replies.dumped(self._reply.whole(event))
        await _begin(send, b"application/json", {b"content-length": str(len(body)).encode()})
        await send({"type": "http.response.body", "body": body})

    async def _in_chunks(self, event: Event, send: Send) -> None:
        await _begin(send, b"text/event-stream; charset=utf-8", {
            b"cache-control": b"no-cache", b"x-accel-buffering": b"no",
        })  # fmt: skip

        async def write(parts: Any) -> None:
            for part in parts:
                await send({"type": "http.response.body", "body": part, "more_body": True})

        await write(self._reply.first())
        said = 0
        while isinstance(event, Token):
            said += len(event.text)
            await write(self._reply.piece(event))
            event = await self._events.get()
        if isinstance(event, BitnestError):
            await write(self._reply.broken(event))
        elif isinstance(event, Result):
            await write(self._reply.last(event, event.text[said:]))
        await send({"type": "http.response.body", "body": b""})


async def _begin(send: Send, kind: bytes, more: Mapping[bytes, bytes]) -> None:
    headers = [(b"content-type", kind), *more.items()]
    await send({"type": "http.response.start", "status": 200, "headers": headers})


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


# errors, and who may ask


def _of_bitnest(request: Request, error: Exception) -> Response:
    assert isinstance(error, BitnestError)
    status, body = replies.of_error(error)
    headers = {}
    if isinstance(error, QueueFull):
        headers["retry-after"] = str(error.retry_after_s)
    return JSONResponse(body, status, headers=headers)


def _of_http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    body = replies.error_body(error.status_code, error.detail)
    return JSONResponse(body, error.status_code, headers=dict(error.headers or {}))


def _of_bug(request: Request, error: Exception) -> Response:
    message = f"internal error: {type(error).__name__}"
    return JSONResponse(replies.error_body(500, message), 500)


class Guard:
    """Refuses requests for another host's name, and without the key where one is set. The page and
    `/health` are open: they tell nothing of what was asked."""

    OPEN = ("/", "/health")

    def __init__(self, app: ASGIApp, settings: Settings) -> None:
        self._app, self._settings = app, settings

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on, or answer."""
        if scope["type"] == "http" and (refused := self._refused(scope)) is not None:
            status, message = refused
            headers = {"www-authenticate": "Bearer"} if status == 401 else {}
            answer = JSONResponse(replies.error_body(status, message), status, headers=headers)
            await answer(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _refused(self, scope: Scope) -> tuple[int, str] | None:
        headers = dict(scope["headers"])
        hosts, key = self._settings.hosts, self._settings.key
        host = headers.get(b"host", b"").decode("latin-1")
        if hosts is not None and _name(host) not in hosts:
            return 403, "this server answers for this machine's own names only"
        if key is None or scope["path"] in self.OPEN:
            return None
        given = headers.get(b"authorization", b"")
        if hmac.compare_digest(given, b"Bearer " + key.encode()):
            return None
        return 401, "expected the header `Authorization: Bearer KEY` with this server's key"


def _name(host: str) -> str:
    """Without the port."""
    if host.startswith("["):
        return host[: host.find("]") + 1].lower()
    return host.split(":")[0].lower()


def make_app(worker: Worker, settings: Settings) -> Starlette:
    """The application; its lifespan starts the worker and lets admitted requests end."""
    server = Server(worker, settings)

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        await asyncio.to_thread(server.grammars.start)
        worker.start()
        server.state.power.start()
        try:
            yield
        finally:
            # what was admitted has ended by now, or is given up: uvicorn's drain is over
            await asyncio.to_thread(worker.stop, drain=False, timeout_s=LAST_S)
            server.grammars.stop()
            server.state.power.stop()

    handlers: dict[Any, Callable[[Request, Exception], Response | Awaitable[Response]]] = {
        BitnestError: _of_bitnest,
        HTTPException: _of_http,
        Exception: _of_bug,
    }
    app = Starlette(
        routes=[
            Route("/", server.page),
            Route("/v1/chat/completions", server.chat, methods=["POST"]),
            Route("/v1/completions", server.completions, methods=["POST"]),
            Route("/v1/models", server.models),
            Route("/v1/models/{model:path}", server.models),
            Route("/health", server.health),
            Route("/metrics", server.metrics),
            Route("/openapi.json", server.document),
        ],
        exception_handlers=handlers,
        lifespan=lifespan,
    )
    app.add_middleware(Guard, settings=settings)
    return app
