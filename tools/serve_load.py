"""Many clients at once against a running server: every answer whole and its own, and in what time.

    bitnest-edge serve MODEL --port 8080 --max-queue 64
    python tools/serve_load.py http://127.0.0.1:8080 [--clients 64] [--seconds 120] [--prompts 200]

First each prompt is answered at a high temperature with a stop string out of the middle of its own
answer, streamed and whole: the same text, which ends before that string. Then one client asks
alone, then all of them, then one again: a shared machine changes meanwhile. Each asks in a loop for
the answer to a prompt with a mark of its own, streamed or not in turns, greedy: the same prompt has
the same answer whoever asks and whenever. Meanwhile a process of its own, which nothing here can
hold up, asks /health, and for the server's memory. Exit 1: an answer was cut, mixed with another's
or different; a status other than 200 and 429; /health took 100 ms or more; all together got less
than 0.9 of the tokens a second that one got on average.
The last line of stdout is one JSON document.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

try:
    import httpx
except ImportError:
    sys.exit("error: expected httpx, which is not installed: pip install httpx")

NEW_TOKENS = 24
TEXTS = (
    "Write one line about {}.", "用一句话介绍 {}。", "Say {} with three emoji 🚀🙂👨‍👩‍👧.",
    "Wie heißt {} rückwärts?", "Repeat {} twice, then stop.",
)  # fmt: skip
HEALTH_S = 0.1
SHARE = 0.9
HOT: dict[str, Any] = {"temperature": 1.3, "max_tokens": 2 * NEW_TOKENS}


def prompt_of(mark: int) -> str:
    """The prompt with a mark."""
    return TEXTS[mark % len(TEXTS)].format(f"number {mark}")


@dataclass
class Seen:
    """What clients met. answers: text by prompt; waits: seconds to the end of an answer."""

    answers: dict[str, str] = field(default_factory=dict)
    waits: list[float] = field(default_factory=list)
    tokens: int = 0
    busy: int = 0  # answers 429
    wrong: list[str] = field(default_factory=list)


async def post(
    client: httpx.AsyncClient, model: str, prompt: str, stream: bool, **options: Any
) -> tuple[int, str, dict[str, int], bool]:
    """Status, text (what else than 200 says), usage and whether the answer has an end."""
    body = {
        "model": model, "messages": [{"role": "user", "content": prompt}], "stream": stream,
        "stream_options": {"include_usage": True}, **options,
    }  # fmt: skip
    answer = await client.post("/v1/chat/completions", json=body)
    if answer.status_code != 200:
        return answer.status_code, answer.text, {}, False
    return 200, *(joined(answer.text) if stream else whole(answer.json()))


async def ask(client: httpx.AsyncClient, model: str, prompt: str, stream: bool, seen: Seen) -> None:
    """One request, compared with what the prompt was answered before."""
    started = time.perf_counter()
    status, text, usage, ended = await post(
        client, model, prompt, stream, temperature=0, max_tokens=NEW_TOKENS
    )
    if status == 429:
        seen.busy += 1
        await asyncio.sleep(0.5)
        return
    if status != 200:
        seen.wrong.append(f"{status}: {text[:200]}")
        return
    seen.waits.append(time.perf_counter() - started)
    seen.tokens += usage["completion_tokens"]
    if not ended:
        seen.wrong.append(f"cut: {prompt!r}")
    if seen.answers.setdefault(prompt, text) != text:
        seen.wrong.append(f"{prompt!r}: {text!r} and {seen.answers[prompt]!r}")


async def streams(client: httpx.AsyncClient, model: str, prompts: int) -> dict[str, Any]:
    """Each prompt streamed and whole, with a stop string out of its own answer."""
    stopped, wide, wrong = 0, 0, []
    for mark in range(prompts):
        options, prompt = HOT | {"seed": mark}, prompt_of(mark)
        _, text, *_ = await post(client, model, prompt, False, **options)
        stop = text[len(text) // 2 :][:3]
        options |= {"stop": stop} if stop else {}
        wanted = text[: text.find(stop)] if stop else text
        for stream in (False, True):
            _, got, _, ended = await post(client, model, prompt, stream, **options)
            if got != wanted or not ended:
                wrong.append(f"{prompt!r}, stream {stream}, stop {stop!r}: {got!r}, not {wanted!r}")
        stopped += bool(stop)
        wide += not text.isascii()
    return {"prompts": prompts, "stopped": stopped, "beyond_ascii": wide, "wrong": wrong}


def whole(body: dict[str, Any]) -> tuple[str, dict[str, int], bool]:
    """Text, usage and whether it has an end."""
    choice = body["choices"][0]
    return choice["message"]["content"], body["usage"], bool(choice["finish_reason"])


def joined(text: str) -> tuple[str, dict[str, int], bool]:
    """The same of a stream."""
    pieces, usage, ended = [], {"completion_tokens": 0}, False
    for line in text.splitlines():
        if not line.startswith("data: {"):
            continue
        chunk = json.loads(line.removeprefix("data: "))
        usage = chunk.get("usage") or usage
        for choice in chunk["choices"]:
            pieces.append(choice["delta"].get("content", ""))
            ended |= bool(choice["finish_reason"])
    return "".join(pieces), usage, ended and "data: [DONE]" in text


async def clients(
    client: httpx.AsyncClient, model: str, number: int, seconds: float, prompts: int
) -> Seen:
    """Run so many clients for so long, each with a connection; each ends the request it is at."""
    seen, end = Seen(), time.monotonic() + seconds

    async def one(place: int) -> None:
        turn = 0
        while time.monotonic() < end:
            mark = (place + turn * number) % prompts
            await ask(client, model, prompt_of(mark), (place + turn) % 2 == 0, seen)
            turn += 1

    await asyncio.gather(*map(one, range(number)))
    return seen


def ask_health(url: str, told: Connection) -> None:
    """Ask /health ten times a second until something is told, now and then the memory; send both.

    Sent: seconds of each answer, and the server's bytes.
    """
    waits: list[float] = []
    rss: list[int] = []
    with httpx.Client(base_url=url, timeout=60) as client:
        while not told.poll(0.1):
            if len(waits) % 20 == 0:
                gauges = client.get("/metrics", params={"format": "json"}).json()
                rss.append(gauges["rss_bytes"])
            started = time.perf_counter()
            client.get("/health").raise_for_status()
            waits.append(time.perf_counter() - started)
    told.send((waits, rss))


@contextmanager
def watched(url: str) -> Iterator[dict[str, Any]]:
    """Ask /health meanwhile; at the end the document has what it took, and the memory."""
    spawn = multiprocessing.get_context("spawn")
    here, there = spawn.Pipe()
    process = spawn.Process(target=ask_health, args=(url, there), daemon=True)
    process.start()
    there.close()
    document: dict[str, Any] = {}
    yield document
    here.send("end")
    waits, rss = here.recv()
    process.join()
    waits.sort()
    document["rss_mib"] = {"first": rss[0] >> 20, "most": max(rss) >> 20, "last": rss[-1] >> 20}
    document["health_s"] = {
        "asked": len(waits),
        "median": statistics.median(waits),
        "p99": waits[int(0.99 * len(waits))],
        "worst": waits[-1],
    }


async def measure(options: argparse.Namespace) -> dict[str, Any]:
    """One client, then all; the document."""
    # One pool for all: a client of its own costs each 30 ms of this process to make.
    client = httpx.AsyncClient(
        base_url=options.url, timeout=600, limits=httpx.Limits(max_connections=None)
    )
    speeds: dict[str, float] = {}
    found: list[Seen] = []
    async with client:
        model = (await client.get("/v1/models")).json()["data"][0]["id"]
        compared = await streams(client, model, options.prompts)
        with watched(options.url) as watch:
            for name, number, seconds in (
                ("before", 1, options.seconds / 6), ("together", options.clients, options.seconds),
                ("after", 1, options.seconds / 6),
            ):  # fmt: skip
                started = time.monotonic()
                found.append(await clients(client, model, number, seconds, options.prompts))
                speeds[name] = found[-1].tokens / (time.monotonic() - started)
    before, together, after = found
    differing = [
        prompt
        for alone in (before, after)
        for prompt, text in alone.answers.items()
        if together.answers.get(prompt, text) != text
    ]
    times = sorted(together.waits)
    return {
        "clients": options.clients,
        "answers": sum(len(seen.waits) for seen in found),
        "refused_429": together.busy,
        "streams": compared,
        "wrong": sum((seen.wrong for seen in found), differing + compared["wrong"]),
        "tok_s": speeds,
        "of_one_client": 2 * speeds["together"] / (speeds["before"] + speeds["after"]),
        "wait_s": {"median": statistics.median(times), "p95": times[int(0.95 * len(times))]},
        **watch,
    }


def main() -> int:
    """Command line."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("url")
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=120)
    parser.add_argument("--prompts", type=int, default=200)
    document = asyncio.run(measure(parser.parse_args()))
    for line in document["wrong"][:5]:
        print(line, file=sys.stderr)
    print(json.dumps(document, ensure_ascii=False))
    slow = document["of_one_client"] < SHARE or document["health_s"]["worst"] >= HEALTH_S
    return int(bool(document["wrong"]) or slow)


if __name__ == "__main__":
    sys.exit(main())
