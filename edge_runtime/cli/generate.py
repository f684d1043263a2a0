"""`bitnest-edge generate`: one prompt, one completion.

Invariant: stdout holds the answer and a newline, or with --json the document alone; the figures,
and why an answer ended early, are on stderr. Ctrl-C stops the answer, shows what there is, and is
130.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from edge_runtime.cli.model import EngineOptions, open_model, run_options
from edge_runtime.cli.options import (
    TEXT,
    Finite,
    decoded,
    json_option,
    model_argument,
    print_document,
    user_path,
)
from edge_runtime.cli.sampling import make_sampling, sampling_options
from edge_runtime.errors import CheckpointError, UsageError

if TYPE_CHECKING:
    from edge_runtime.decode.engine import Engine, PromptLike

log = logging.getLogger(__name__)

MAX_PROMPT_BYTES = 64 << 20
_ENGINE_FIELDS = frozenset(field.name for field in dataclasses.fields(EngineOptions))


@click.command()
@model_argument()
@click.option("-p", "--prompt", type=TEXT, metavar="TEXT", help="The prompt.")
@click.option("--file", metavar="F", help="Read the prompt from a file; - is stdin.")
@sampling_options
@click.option(
    "--stop", multiple=True, type=TEXT, metavar="S", help="End before this text; repeatable."
)
@click.option("--ignore-eos", is_flag=True, help="Go on after the model's end token.")
@click.option("--raw", is_flag=True, help="Plain completion, without the chat template.")
@click.option(
    "--deadline",
    type=Finite(min=0, min_open=True),
    metavar="SECONDS",
    help="Return what is there after this time.",
)
@run_options
@json_option
def command(
    model: str,
    prompt: str | None,
    file: str | None,
    new_tokens: int,
    stop: tuple[str, ...],
    ignore_eos: bool,
    raw: bool,
    deadline: float | None,
    as_json: bool,
    **rest: Any,
) -> None:
    """Complete one prompt.

    MODEL is a converted folder, or a known name, which is fetched and converted on first use. The
    prompt is a user's message unless --raw is given. A final newline of a file is not part of it.
    """
    text = prompt_text(prompt, file)
    shared, sampled = split_options(rest)
    sampling = make_sampling(**sampled)
    with open_model(model, shared) as engine:
        options = {
            "max_new_tokens": new_tokens,
            "sampling": sampling,
            "stop": stop,
            "ignore_eos": ignore_eos,
            "deadline_s": deadline,
        }
        asked = as_prompt(engine, text, raw)
        with prompt_cache(engine, shared.prompt_cache, asked):
            run(engine, asked, options, as_json)


@contextlib.contextmanager
def prompt_cache(engine: Engine, file: Path | None, prompt: Any) -> Iterator[None]:
    """Answer with the prompt's cache of a file, or keep it there after the answer."""
    if file is None:
        yield
        return
    from edge_runtime.decode import prefix

    text = isinstance(prompt, str)
    ids = engine.encode_text(prompt) if text else engine.encode_chat(prompt)
    if file.exists():
        prefix.check_ids(prefix.load(engine, file), ids)
    else:
        prefix.check(engine, file)
    yield
    if engine.prefix is None and engine.holds(ids):
        prefix.save(engine, file, ids)
    elif engine.prefix is None:
        log.warning("the prompt was not read to its end: it is not kept in %s", file)


def split_options(
    rest: dict[str, Any], *, makes_cache: bool = True
) -> tuple[EngineOptions, dict[str, Any]]:
    """Divide what two option groups delivered into the engine's and the sampling's.

    Raises UsageError, CheckpointError for a prompt's cache that can be neither used nor, with
    `makes_cache`, made.
    """
    engine = {name: value for name, value in rest.items() if name in _ENGINE_FIELDS}
    sampled = {name: value for name, value in rest.items() if name not in _ENGINE_FIELDS}
    options = EngineOptions(**engine)
    if options.prompt_cache is not None:
        from edge_runtime.cache import prompt_file

        prompt_file.check(options.prompt_cache, made=makes_cache)
    return options, sampled


def prompt_text(prompt: str | None, file: str | None) -> str:
    """Return the prompt. Raises UsageError for none or two, CheckpointError for a bad file."""
    if (prompt is None) == (file is None):
        raise UsageError(
            "expected one prompt, got " + ("none" if prompt is None else "two"),
            "give -p TEXT, or --file F (--file - reads stdin)",
        )
    text = read_text(file) if file is not None else prompt
    assert text is not None
    if not text.strip():
        raise UsageError("the prompt is empty", "give at least one word")
    return text


def read_text(file: str) -> str:
    """Read UTF-8 text, `-` from stdin: CRLF becomes newline, one final newline is dropped."""
    name = "stdin" if file == "-" else file
    try:
        if file == "-" and sys.stdin is None:
            data = b""
        elif file == "-":
            data = sys.stdin.buffer.read(MAX_PROMPT_BYTES + 1)
        else:
            with user_path(file).open("rb") as stream:
                data = stream.read(MAX_PROMPT_BYTES + 1)
    except OSError as error:
        raise CheckpointError(f"cannot read the prompt from {name}: {error.strerror}") from None
    if len(data) > MAX_PROMPT_BYTES:
        raise CheckpointError(f"{name}: expected a prompt of at most {MAX_PROMPT_BYTES} bytes")
    try:
        text = decoded(data, "utf-8-sig")
    except ValueError as error:
        raise CheckpointError(f"{name}: {error}") from None
    return text.replace("\r\n", "\n").removesuffix("\n")


def as_prompt(engine: Engine, text: str, raw: bool) -> PromptLike:
    """Return a user's message, or the text itself with --raw or without a chat template."""
    if not raw and not engine.template.has_template:
        log.warning("this model has no chat template: the prompt is completed as it is")
        raw = True
    return text if raw else [{"role": "user", "content": text}]


def run(engine: Engine, prompt: PromptLike, options: dict[str, Any], as_json: bool) -> None:
    """Generate, show, report; exits with 130 when Ctrl-C stopped it."""
    from edge_runtime.chat import render
    from edge_runtime.chat.interrupt import StopOnInterrupt

    generation = engine.generate(prompt, **options)
    with StopOnInterrupt(generation.cancel) as interrupt:
        if as_json:
            result = generation.complete()
        else:
            writer = render.TextWriter(sys.stdout)
            render.stream_answer(generation, writer)
            result = generation.result
            render.finish_answer(result, writer)
    if as_json:
        print_document(dataclasses.asdict(result))
    report = render.figures(result)
    if options["sampling"].temperature > 0:
        report += f"{render.SEPARATOR}seed {result.seed}"
    log.info("%s", report, extra={"quiet": True})
    if interrupt.pressed:
        raise KeyboardInterrupt
