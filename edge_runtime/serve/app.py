"""The server's routes."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from importlib import resources
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from edge_runtime.decode.engine import Engine
from edge_runtime.decode.generation import Generation
from edge_runtime.errors import BitnestError, UsageError, cut
from edge_runtime.serve import guard, openapi, replies, wire
from edge_runtime.serve.answer import Answer
from edge_runtime.serve.grammar import ANY_OBJECT, Grammars
from edge_runtime.serve.metrics import Power, State
from edge_runtime.serve.worker import Event, Job, Worker

BODY_S = 60  # for a request to come in
BODIES = 4  # of the greatest size, that may be here at once
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
    max_connections: int = 256
    max_body_bytes: int = 4 << 20
    queue_s: float = 300.0
    request_s: float = 600.0
    power: Power = field(default_factory=lambda: Power("none"))


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
        self.state = State(self.worker, s.power, s.model, time.monotonic())
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
        limit_s = min(asked.deadline_s or math.inf, self.settings.request_s)
        options |= {
            "max_new_tokens": asked.limit,
            "sampling": asked.sampling(),
            "stop": asked.stops,
            "ignore_eos": bool(asked.ignore_eos),
            "logprobs": asked.num_top,
        }

        def make(engine: Engine) -> Generation:
            end = time.monotonic() + limit_s  # a grammar takes its part of it
            constraint = None if rules is None else self.grammars.of_schema(rules)
            left = max(0.0, end - time.monotonic())
            return engine.generate(prompt, constraint=constraint, deadline_s=left, **options)

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

        async def read() -> bytes:
            return b"".join([part async for part in request.stream()])

        try:
            return await asyncio.wait_for(read(), BODY_S)
        except asyncio.TimeoutError:
            raise HTTPException(408, f"the request did not come within {BODY_S} s") from None
        except ClientDisconnect:
            raise HTTPException(400, "the client left") from None  # nobody reads it

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
            return JSONResponse({"status": "broken"}, 503, {"retry-after": str(guard.RETRY_S)})
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
        BitnestError: guard.of_bitnest,
        HTTPException: guard.of_http,
        Exception: guard.of_bug,
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
    most = settings.max_body_bytes
    app.add_middleware(guard.Intake, most=most, most_of_all=BODIES * most)
    app.add_middleware(guard.Guard, key=settings.key, hosts=settings.hosts)
    return app
