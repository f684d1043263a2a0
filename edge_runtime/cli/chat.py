"""`bitnest-edge chat`: talk at a terminal, or ask once.

Invariant: with a terminal it converses; without one, or with --once, it answers one message and
ends. stdout holds answers only.
"""

from __future__ import annotations

import sys
from typing import Any

import click

from edge_runtime.cli.generate import prompt_text, read_text, run, split_options
from edge_runtime.cli.model import open_model, run_options
from edge_runtime.cli.options import json_option, model_argument
from edge_runtime.cli.sampling import make_sampling, sampling_options
from edge_runtime.errors import UsageError


@click.command()
@model_argument(required=False)
@click.option("--once", metavar="TEXT", help="Ask this and end; - reads all of stdin.")
@click.option("--system", metavar="TEXT", help="System prompt.  [default: the model's own]")
@sampling_options
@run_options
@json_option
def command(
    model: str | None,
    once: str | None,
    system: str | None,
    new_tokens: int,
    as_json: bool,
    **rest: Any,
) -> None:
    """Talk to a model.

    MODEL is a converted folder or a known name; without it the default small model is used. A known
    model is fetched and converted on first use.

    At a terminal every line is a turn and /help lists the commands. Text that is piped in is read
    to its end and asked as one message. --json needs --once or a pipe.
    """
    shared, sampled = split_options(rest)
    sampling = make_sampling(**sampled)
    text = None
    if once is not None:
        text = prompt_text(None, "-") if once == "-" else prompt_text(once, None)
    elif sys.stdin is None or not sys.stdin.isatty():
        text = read_text("-")
        if not text.strip() and as_json:
            raise UsageError("the prompt is empty", "pipe a message in, or give --once TEXT")
        if not text.strip():
            return  # the end of input: nothing more to say
    elif as_json:
        raise UsageError("--json is for one answer", "add --once TEXT, or pipe the message in")
    options = {"max_new_tokens": new_tokens, "sampling": sampling}
    with open_model(model, shared) as engine:
        if not engine.template.has_template:
            raise UsageError(
                "this model has no chat template", "use plain completion: generate --raw"
            )
        if text is None:
            from edge_runtime.chat.repl import Repl
            from edge_runtime.decode.session import Session

            Repl(Session(engine, system=system), options).run()
            return
        messages = [{"role": "system", "content": system}] if system else []
        run(engine, [*messages, {"role": "user", "content": text}], options, as_json)
