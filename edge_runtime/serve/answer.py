"""One answer over HTTP: whole, or as a stream of events.

Invariant: headers are sent when the first event is there, so whatever is wrong with a request is
told by a status; a client that goes away cancels its job within one cycle.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from edge_runtime.decode.request import Result, Token
from edge_runtime.errors import BitnestError
from edge_runtime.serve import replies
from edge_runtime.serve.worker import Begun, Event, Job


class QueueTimeout(BitnestError):
    """A request that waited longer than is allowed."""

    http_status = 503


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
            first = await asyncio.wait_for(self._events.get(), self._queue_s)
        except asyncio.TimeoutError:
            raise QueueTimeout(
                f"no turn came within {self._queue_s:g} s", "try again later"
            ) from None
        if isinstance(first, Begun):
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
