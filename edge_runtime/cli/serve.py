"""`bitnest-edge serve`: an OpenAI-compatible server and a page.

Invariant: it listens on this machine alone unless told otherwise, elsewhere never without a key.
A first SIGINT or SIGTERM lets admitted requests end.
"""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import os
import signal
from pathlib import Path
from typing import Any

import click

from edge_runtime.cli.generate import split_options
from edge_runtime.cli.model import checkpoint_path, open_checkpoint, run_options
from edge_runtime.cli.options import Finite, Whole, model_argument, user_path
from edge_runtime.cli.power import power_source_option
from edge_runtime.errors import BackendUnavailable, CheckpointError, UsageError, cut

log = logging.getLogger(__name__)

KEY_VARIABLE = "BITNEST_EDGE_API_KEY"
# as in `Settings`
LIMITS = ("max_queue", "max_connections", "queue_s", "request_s", "max_body_bytes")
MIN_KEY_CHARS, MAX_KEY_BYTES = 8, 4096


@click.command()
@model_argument()
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option(
    "--port",
    type=Whole(0, 65535),
    default=8080,
    show_default=True,
    help="Port; 0: any that is free.",
)
@click.option(
    "--api-key-file",
    metavar="F",
    help=f"File with the key that clients send.  [default: {KEY_VARIABLE}, else none]",
)
@click.option(
    "--name", metavar="NAME", help="Name of the model for clients.  [default: its folder's]"
)
@click.option(
    "--max-queue",
    type=Whole(0, 10000),
    default=64,
    show_default=True,
    help="Requests that may wait; more are answered 429.",
)
@click.option(
    "--max-connections",
    type=Whole(1, 10000),
    default=256,
    show_default=True,
    help="Connections; requests of more are answered 503.",
)
@click.option(
    "--queue-seconds",
    "queue_s",
    type=Finite(min=0, min_open=True),
    default=300.0,
    show_default=True,
    help="How long a request may wait.",
)
@click.option(
    "--request-seconds",
    "request_s",
    type=Finite(min=0, min_open=True),
    default=600.0,
    show_default=True,
    help="How long an answer may take; it is cut then.",
)
@click.option(
    "--max-body",
    "max_body_bytes",
    type=Whole(1024, 1 << 30),
    default=4 << 20,
    show_default=True,
    help="Bytes of a request.",
)
@click.option(
    "--drain-seconds",
    type=Whole(0),
    default=60,
    show_default=True,
    help="How long a stop waits for requests that were admitted.",
)
@power_source_option
@run_options
def command(
    model: str,
    host: str,
    port: int,
    api_key_file: str | None,
    name: str | None,
    drain_seconds: int,
    power_source: str,
    **rest: Any,
) -> None:
    """Serve a model on /v1/chat/completions, /v1/completions and /v1/models, and a page at /.

    MODEL is a converted folder, or a known name. /metrics is for Prometheus, /health for whoever
    watches. One request runs at a time, the others wait in order.
    """
    try:
        from edge_runtime.serve.app import LOOPBACK, Settings
        from edge_runtime.serve.listen import HttpServer, bind
        from edge_runtime.serve.metrics import Power
        from edge_runtime.serve.worker import Worker
    except ImportError as error:
        raise BackendUnavailable(
            f"serve needs {error.name}, which is not installed",
            "pip install 'bitnest-edge[serve]'",
        ) from None
    from edge_runtime.decode import prefix
    from edge_runtime.format.reader import Checkpoint

    key, local = api_key(api_key_file), is_loopback(host)
    if key is None and not local:
        raise UsageError(
            f"--host {host}: expected a key, since others can reach this address, got none",
            f"--api-key-file F, or the variable {KEY_VARIABLE}; or leave --host at 127.0.0.1",
        )
    limits = {option: rest.pop(option) for option in LIMITS}
    shared, _ = split_options(rest, makes_cache=False)
    path = checkpoint_path(model)
    name = path.resolve().name if name is None else name
    if not name or not name.isprintable():
        raise UsageError(
            f"the model's name for clients: expected printable characters, got {cut(name)!r}",
            "--name NAME gives another than its folder's",
        )
    hosts = (*LOOPBACK, f"[{host}]" if ":" in host else host.lower()) if local else None
    # before a model is loaded for minutes
    settings = Settings(model=name, key=key, hosts=hosts, power=Power(power_source), **limits)
    sockets = bind(host, port)
    with contextlib.ExitStack() as held:
        for one in sockets:
            held.enter_context(one)
        engine = held.enter_context(open_checkpoint(Checkpoint(path), shared))
        if shared.prompt_cache is not None:
            prefix.load(engine, shared.prompt_cache)
        server = HttpServer(Worker(engine, settings.max_queue), settings, drain_seconds)
        # uvicorn has its own handlers while it runs, and sends itself the signal again at its end
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        server.run(sockets)


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach an address."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def api_key(file: str | None) -> str | None:
    """Return the key of a file or of the environment. Raises CheckpointError, UsageError."""
    if file is None:
        text = os.environ.get(KEY_VARIABLE)
        if text is None:
            return None
        where = KEY_VARIABLE
    else:
        text, where = _read(user_path(file)), file
    key = text.strip()
    if len(key) < MIN_KEY_CHARS or not key.isascii() or not key.isprintable() or " " in key:
        raise UsageError(
            f"{where}: expected a key of at least {MIN_KEY_CHARS} printable ASCII characters in "
            "one line",
            "make one: python3 -c 'import secrets; print(secrets.token_urlsafe())' > key",
        )
    return key


def _read(path: Path) -> str:
    try:
        with path.open("rb") as stream:
            data = stream.read(MAX_KEY_BYTES + 1)
    except OSError as error:
        raise CheckpointError(f"cannot read the key from {path}: {error.strerror}") from None
    if len(data) > MAX_KEY_BYTES:
        raise CheckpointError(f"{path}: expected a key of at most {MAX_KEY_BYTES} bytes")
    return data.decode("latin-1")
