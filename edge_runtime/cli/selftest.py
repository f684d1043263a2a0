"""`bitnest-edge selftest`: exactness on the user's own model and machine.

Invariant: exit 0 means that not one token differed; the first that does is named and is exit 5.
"""

from __future__ import annotations

import json
import logging
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from edge_runtime.cli.generate import read_text
from edge_runtime.cli.model import EngineOptions, checkpoint_path, open_checkpoint
from edge_runtime.cli.options import (
    Whole,
    backend_option,
    ctx_option,
    json_option,
    model_argument,
    print_document,
    threads_option,
)
from edge_runtime.errors import CheckpointError, UsageError
from edge_runtime.format.lfs import refuse_pointer

if TYPE_CHECKING:
    from edge_runtime.decode.engine import Engine
    from edge_runtime.selftest import Case, Row

log = logging.getLogger(__name__)

CODE = '''def fibonacci(n):
    """Return the n-th Fibonacci number."""
    a, b = 0, 1
    for _ in range(n):
        a, b = b, a + b
    return a
'''
FACT = "The river is 1,200 km long, rises at 2,310 m and carries 640 cubic metres a second. "
BUILT_IN = (
    "What is the capital of France?",
    f"Explain this code, then write it again without the loop:\n\n{CODE}",
    "Repeat this ten times: one two three four, one two three four, one two three four.",
    "Übersetze ins Deutsche, 日本語 and العربية: «Good morning, how are you?» 🙂👩‍👩‍👧",
)
LONG_REPEATS = 16
TEXTS = (
    *BUILT_IN,
    CODE,
    FACT,
    "a\tb\r\n\n\n  c  ",
    "<|im_end|></s>[INST]",
    "é ﬁ 0️⃣ 🇩🇪 \u200d \u00a0.",
)
DEFAULT_CONTEXT = 1024
QUICK_TOKENS, FULL_TOKENS = 12, 48  # per answer
QUICK_CHUNKED, FULL_CHUNKED = 80, 600  # of the prompt that is cut: more than a block of the cache


@click.command()
@model_argument()
@click.option(
    "--quick/--full", default=True, show_default=True, help="A choice of cases, or the whole grid."
)
@click.option(
    "--prompts",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="JSON lines with prompt, question, turns, conversations, messages or text.  "
    "[default: built-in prompts]",
)
@click.option("--limit", type=Whole(min=1), metavar="N", help="Use the first N prompts.")
@click.option(
    "-n",
    "--new-tokens",
    type=Whole(min=1),
    metavar="N",
    help="Tokens per answer.  [default: 12, with --full 48]",
)
@backend_option
@ctx_option
@threads_option
@json_option
def command(
    model: str,
    quick: bool,
    prompts: Path | None,
    limit: int | None,
    new_tokens: int | None,
    backend: str,
    ctx: str | int,
    threads: int | None,
    as_json: bool,
) -> None:
    """Prove exactness on this model and this machine.

    Checks every checksum of the checkpoint, that text survives the tokenizer, and that answers are
    token for token those of --view w8: greedy and sampled, whatever is drafted (adversaries
    included), whatever the KV policy and however the prompt is cut. The report goes to stdout, with
    --json to stderr. Exit code 5 names the first difference.
    """

    from edge_runtime.format.reader import Checkpoint
    from edge_runtime.selftest import FULL, QUICK

    started = time.perf_counter()
    asked = read_prompts(prompts) if prompts is not None else built_in_prompts()
    checkpoint = Checkpoint(checkpoint_path(model))
    manifest = checkpoint.manifest
    log.info("Checking %d planes of %s.", len(manifest.planes), checkpoint.path)
    checkpoint.verify()
    if ctx == "auto":
        ctx = min(DEFAULT_CONTEXT, manifest.spec.max_position)
    options = EngineOptions(backend=backend, ctx=ctx, threads=threads)
    with open_checkpoint(checkpoint, options) as engine:
        document = examine(
            engine,
            asked[:limit],
            QUICK if quick else FULL,
            new_tokens or (QUICK_TOKENS if quick else FULL_TOKENS),
            shorten=prompts is None,
        )
    document["planes_verified"] = len(manifest.planes)
    document["seconds"] = round(time.perf_counter() - started, 3)
    for line in report(document):
        click.echo(line, err=as_json)
    if as_json:
        print_document(document)
    raise_first(document)


def examine(
    engine: Engine, asked: list[Any], cases: tuple[Case, ...], new_tokens: int, *, shorten: bool
) -> dict[str, Any]:
    """Run everything that needs the engine and return the document."""
    from edge_runtime import selftest

    ids = fitting(engine, asked, new_tokens, shorten=shorten)
    lost = selftest.round_trip_failures(engine.tokenizer, TEXTS)
    rows = run(engine, ids, cases, new_tokens)
    return {
        "backend": engine.backend_name,
        "synthetic": engine.synthetic,
        "context_max": engine.context,
        "texts_lost": lost,
        "prompts": len(ids),
        "prompts_too_long": len(asked) - len(ids),
        "new_tokens": new_tokens,
        "rows": [row_document(row) for row in rows],
        "total": row_document(total(rows)),
    }


def raise_first(document: dict[str, Any]) -> None:
    """Raise SelftestFailed naming the first thing that is not as it should be."""
    from edge_runtime.selftest import SelftestFailed

    if document["texts_lost"]:
        raise SelftestFailed(
            f"tokenizer: {document['texts_lost'][0]!r} does not survive encoding and decoding"
        )
    if first := document["total"]["first"]:
        raise SelftestFailed(
            f"answers differ in {document['total']['differing']} runs; first: {first['case']}, "
            f"prompt {first['prompt']}, position {first['position']}: expected token "
            f"{first['expected']}, got {first['got']}",
            "please report it with this output and that of: bitnest-edge doctor",
        )


def built_in_prompts() -> list[Any]:
    """Return short chat, code, repetition, several languages, and a long prompt."""
    return [*BUILT_IN, FACT * LONG_REPEATS + "How long is the river?"]


def fitting(engine: Engine, asked: list[Any], new_tokens: int, *, shorten: bool) -> list[list[int]]:
    """Encode prompts that leave room for an answer; built-in ones are cut to fit."""
    room = engine.context - new_tokens
    found = [encode(engine, prompt) for prompt in asked]
    if shorten and room > 0:
        found = [ids[:room] for ids in found]
    fit = [ids for ids in found if 0 < len(ids) <= room]
    if not fit:
        raise UsageError(
            f"no prompt of {len(found)} leaves room for {new_tokens} tokens in a context of "
            f"{engine.context}",
            "raise --ctx or lower -n",
        )
    if len(fit) < len(found):
        log.warning(
            "%d of %d prompts are too long for the context", len(found) - len(fit), len(found)
        )
    return fit


def encode(engine: Engine, prompt: Any) -> list[int]:
    """Return the ids of text or messages; text is a user's message where there is a template."""
    if not engine.template.has_template:
        text = prompt if isinstance(prompt, str) else "\n\n".join(m["content"] for m in prompt)
        return engine.encode_text(text)
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    return engine.encode_chat(messages)


def read_prompts(file: Path) -> list[Any]:
    """Read prompts, as text or as messages, from JSON lines or a JSON array."""
    path = file.expanduser()
    refuse_pointer(path)
    text = read_text(str(path.absolute()))  # absolute: - would be stdin
    lines = [(n, line) for n, line in enumerate(text.split("\n"), 1) if line.strip()]
    if text.lstrip().startswith("["):
        lines = [(1, text)]
    prompts = []
    for number, line in lines:
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):
            raise CheckpointError(f"{file}:{number}: not JSON") from None
        for row in value if isinstance(value, list) else [value]:
            prompt = prompt_of(row)
            if prompt is None:
                raise CheckpointError(
                    f"{file}:{number}: expected an object with prompt, question, turns, "
                    "conversations, messages or text"
                )
            prompts.append(prompt)
    if not prompts:
        raise CheckpointError(f"{file}: no prompts in it")
    return prompts


def prompt_of(row: Any) -> str | list[dict[str, str]] | None:
    """Return the prompt of a row of a usual data set: messages, or its first user text."""
    if not isinstance(row, dict):
        return None
    messages = row.get("messages")
    if isinstance(messages, list) and messages:
        if not all(_is_message(m) for m in messages):
            return None
        asked = [i for i, m in enumerate(messages) if m["role"] != "assistant"]
        return messages[: asked[-1] + 1] if asked else None  # an answer at the end is not asked
    for name in ("turns", "conversations"):
        turns = row.get(name)
        if isinstance(turns, list) and turns:
            return _first_text(turns)
    for name in ("question", "prompt", "text"):
        text = row.get(name)
        if isinstance(text, str) and text.strip():
            return text
        if isinstance(text, list) and text:
            return _first_text(text)
    return None


def _is_message(m: object) -> bool:
    if not isinstance(m, dict):
        return False
    return isinstance(m.get("role"), str) and isinstance(m.get("content"), str)


def _first_text(turns: list[Any]) -> str | None:
    for turn in turns:
        if isinstance(turn, dict):
            if turn.get("from", turn.get("role", "user")) not in ("human", "user"):
                continue
            turn = turn.get("value", turn.get("content"))
        if isinstance(turn, str) and turn.strip():
            return turn
    return None


def run(
    engine: Engine, ids: list[list[int]], cases: tuple[Case, ...], new_tokens: int
) -> list[Row]:
    """Run the grid on all prompts, then the chunk sizes on the first, with progress."""
    from edge_runtime import selftest
    from edge_runtime.cli.progress import Progress

    count = len(ids) * len(cases) + len(selftest.CHUNKED)
    done = differing = 0
    with Progress() as progress:
        progress(0, count, "prompt 1")

        def on_row(row: Row) -> None:
            nonlocal done, differing
            done += 1
            differing += row.differing
            progress(done, count, f"{done} of {count} runs, {differing} differ, last: {row.case}")

        rows = selftest.summarise(
            selftest.run_grid(engine, ids, cases, new_tokens=new_tokens), on_row
        )
        size = QUICK_CHUNKED if cases is selftest.QUICK else FULL_CHUNKED
        one = [max(ids, key=len)[:size]]
        rows += selftest.summarise(
            selftest.run_grid(engine, one, selftest.CHUNKED, new_tokens=min(8, new_tokens)), on_row
        )
    return rows


def total(rows: list[Row]) -> Row:
    """Add up all cases."""
    from edge_runtime.selftest import Row

    everything = Row("total")
    for row in rows:
        everything.add(row)
    return everything


def row_document(row: Row) -> dict[str, Any]:
    """Return a row as JSON data."""
    return asdict(row) | {"acceptance": row.acceptance, "seconds": round(row.seconds, 3)}


def report(document: dict[str, Any]) -> list[str]:
    """Return the table for people."""
    head = f"{'case':<32}{'prompts':>8}{'tokens':>8}{'cycles':>8}{'drafted':>9}{'accepted':>10}"
    lines = [head + f"{'refused':>9}{'differ':>8}{'seconds':>9}"]
    for row in [*document["rows"], document["total"]]:
        lines.append(
            f"{row['case']:<32}{row['prompts']:>8}{row['tokens']:>8}{row['cycles']:>8}"
            f"{row['drafted']:>9}{row['acceptance']:>10.3f}{row['rejections']:>9}"
            f"{row['differing']:>8}{row['seconds']:>9.1f}"
        )
    texts = len(TEXTS) - len(document["texts_lost"])
    verdict = "exact" if not document["total"]["differing"] else "NOT exact"
    lines.append(
        f"{verdict}: {document['total']['tokens']} tokens compared; {document['planes_verified']} "
        f"planes verified; {texts} of {len(TEXTS)} texts survive the tokenizer"
    )
    if document["synthetic"]:
        lines.append("random weights: exact all the same, but no model")
    return lines
