"""`bitnest-edge chat`: talk at a terminal, or ask once.

Invariant: where stdin is a terminal it converses; elsewhere, or with --once, it answers one message
and ends. stdout holds answers only.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import click

from edge_runtime.cli.generate import prompt_text, read_text, run, split_options
from edge_runtime.cli.model import checkpoint_path, open_checkpoint, run_options
from edge_runtime.cli.options import TEXT, json_option, model_argument
from edge_runtime.cli.power import power_source_option
from edge_runtime.cli.sampling import make_sampling, sampling_options
from edge_runtime.errors import UsageError

if TYPE_CHECKING:
    from edge_runtime.chat.settings import Settings
    from edge_runtime.decode.session import Session
    from edge_runtime.format.reader import Checkpoint

log = logging.getLogger(__name__)

HISTORY = "chat-history.jsonl"


@click.command()
@model_argument(required=False)
@click.option("--once", type=TEXT, metavar="TEXT", help="Ask this and end; - reads all of stdin.")
@click.option(
    "--system", type=TEXT, metavar="TEXT", help="System prompt.  [default: the model's own]"
)
@click.option(
    "--think",
    type=click.Choice(["auto", "on", "off"]),
    default="auto",
    show_default=True,
    help="Whether the model thinks first, where its template lets that be chosen.",
)
@sampling_options
@power_source_option
@run_options
@json_option
def command(
    model: str | None,
    once: str | None,
    system: str | None,
    think: str,
    new_tokens: int,
    power_source: str,
    as_json: bool,
    **rest: Any,
) -> None:
    """Talk to a model.

    MODEL is a converted folder or a known name; without it the default small model is used. A known
    model is fetched and converted on first use.

    At a terminal every message is a turn and /help lists the commands. Text that is piped in is
    read to its end and asked as one message. --json needs --once or a pipe.
    """
    shared, sampled = split_options(rest)
    options = turn_options({"new_tokens": new_tokens, **sampled})  # checked before anything loads
    text = _text(once, as_json)
    if text is not None and not text.strip():
        return  # the end of input: nothing more to say
    from edge_runtime.decode import prefix
    from edge_runtime.decode.session import Session
    from edge_runtime.format.reader import Checkpoint

    checkpoint = Checkpoint(checkpoint_path(model))
    with open_checkpoint(checkpoint, shared) as engine:
        if not engine.template.has_template:
            raise UsageError(
                "this model has no chat template", "use plain completion: generate --raw"
            )
        thinking = {"auto": None, "on": True, "off": False}[think]
        session = Session(engine, system=system, thinking=thinking)
        if shared.prompt_cache is not None:
            prefix.begin(engine, shared.prompt_cache, prefix.chat_beginning(session))
        if text is None:
            settings = make_settings({"new_tokens": new_tokens, **sampled})
            _converse(session, settings, checkpoint, power_source)
            return
        messages = [*session.messages, {"role": "user", "content": text}]
        run(engine, messages, options | {"template": session.template}, as_json)


def _text(once: str | None, as_json: bool) -> str | None:
    """Return the one message to ask; None for a conversation at a terminal."""
    if once is not None:
        return prompt_text(None, "-") if once == "-" else prompt_text(once, None)
    if sys.stdin is None or not sys.stdin.isatty():
        text = read_text("-")
        if not text.strip() and as_json:
            raise UsageError("the prompt is empty", "pipe a message in, or give --once TEXT")
        return text
    if as_json:
        raise UsageError("--json is for one answer", "add --once TEXT, or pipe the message in")
    return None


def _converse(
    session: Session, settings: Settings, checkpoint: Checkpoint, power_source: str
) -> None:
    from edge_runtime import machine, paths
    from edge_runtime.chat.commands import LEAVE, NAMES
    from edge_runtime.chat.energy import TurnEnergy
    from edge_runtime.chat.history import HistoryFile
    from edge_runtime.chat.lines import open_reader
    from edge_runtime.chat.repl import Repl, Surroundings
    from edge_runtime.chat.saved import ModelName
    from edge_runtime.chat.throttle import ThrottleWatch

    history = HistoryFile(paths.state_dir() / HISTORY)
    reader, note = open_reader(history, NAMES + LEAVE)
    if note:
        log.warning("%s", note)
    around = Surroundings(
        model=ModelName(checkpoint.path.resolve().name, checkpoint.sha256),
        energy=TurnEnergy(power_source),
        throttle=ThrottleWatch(machine.ROOT),
    )
    Repl(session, settings, reader, around).run()
    if history.why:
        log.warning("what was typed is not kept for the next chat: %s", history.why)


# ---- what /set changes


def turn_options(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of an answer from those of the command line. Raises UsageError."""
    from edge_runtime.decode.arguments import MAX_NEW_TOKENS, whole_number

    sampled = {name.replace("-", "_"): value for name, value in values.items()}
    most = whole_number("new-tokens", sampled.pop("new_tokens"), 1, MAX_NEW_TOKENS)
    return {"max_new_tokens": most, "sampling": make_sampling(**sampled)}


def make_settings(values: Mapping[str, Any]) -> Settings:
    """Return the settings of a chat: the sampling options as they were given."""
    from edge_runtime.chat.settings import Settings

    return Settings({n.replace("_", "-"): v for n, v in values.items()}, _parse, turn_options)


def _parse(name: str, text: str) -> Any:
    """Read a value as the command line reads that option's; no text is its default."""
    param = next(p for p in command.params if p.name == name.replace("-", "_"))
    if not text:
        return command.make_context("chat", [], resilient_parsing=True).params[param.name or ""]
    try:
        return param.type.convert(text, param, None)
    except click.BadParameter as error:
        raise UsageError(f"{name}: {error.message}") from None
