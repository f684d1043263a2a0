"""`bitnest-edge eval`: how good a converted model is, and how much of a draft is accepted."""

from __future__ import annotations

import logging
import shlex
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from edge_runtime.cli.eval_options import make_options, task_options
from edge_runtime.cli.model import (
    EngineOptions,
    checkpoint_path,
    open_checkpoint,
    original_source,
)
from edge_runtime.cli.options import (
    backend_option,
    budget_option,
    ctx_option,
    json_option,
    model_argument,
    print_document,
    reserve_option,
    threads_option,
)
from edge_runtime.errors import UsageError

if TYPE_CHECKING:
    from edge_runtime.decode.engine import Engine
    from edge_runtime.evaluate.build import Built, Options
    from edge_runtime.evaluate.data import DataFile
    from edge_runtime.evaluate.resume import Finished
    from edge_runtime.format.reader import Checkpoint

log = logging.getLogger(__name__)


@click.command()
@model_argument()
@task_options
@backend_option
@ctx_option
@budget_option
@reserve_option
@threads_option
@json_option
def command(model: str, files: tuple[Path, ...], as_json: bool, **asked: Any) -> None:
    """Measure how good a model is, and how much of its draft is accepted.

    \b
    ppl         perplexity of texts in windows
    gsm8k       grade-school maths with examples; strict ("#### N") and flexible
    agreement   with the original, over its own answers and over texts: top-1, KL, JS
    acceptance  of drafts, by workload, length, source, KV policy and slot
    jsonl       rows with prompt, input, question or context, and answers

    Data: rows of gsm8k, HumanEval, MBPP, MT-Bench (first turns), ShareGPT-like conversations,
    LongBench-like sets, {"text"}, or plain text. Each value has a 95 % interval over items, views
    are compared in pairs. The table goes to stdout; with --json to stderr.
    """
    from edge_runtime.evaluate import data, report
    from edge_runtime.format.manifest import require_model
    from edge_runtime.format.reader import Checkpoint

    options = make_options(asked)
    checkpoint = Checkpoint(checkpoint_path(model))
    require_model(checkpoint.manifest, "eval")
    read = [data.read(path) for path in files]
    document = evaluate(checkpoint, options, read, asked)
    for line in report.lines(document):
        click.echo(line, err=as_json)
    if as_json:
        print_document(document)


def evaluate(
    checkpoint: Checkpoint, options: Options, files: list[DataFile], asked: dict[str, Any]
) -> dict[str, Any]:
    """Run a task over its items and return the document."""
    from edge_runtime.cli.progress import Progress
    from edge_runtime.evaluate.build import build
    from edge_runtime.evaluate.items import Encoder, run_items
    from edge_runtime.evaluate.resume import Finished
    from edge_runtime.evaluate.views import Views
    from edge_runtime.measure import state

    started = time.perf_counter()
    spec = checkpoint.manifest.spec
    room = spec.max_position if asked["ctx"] == "auto" else asked["ctx"]
    built = build(options, files, Encoder(checkpoint), room)
    context = max(2, built.task.context) if asked["ctx"] == "auto" else asked["ctx"]
    bound = bound_to(checkpoint, options, files, built, asked)
    if spec.rope.kind == "dynamic":  # its tables depend on it
        bound["context"] = context
    opener = Opener(checkpoint, context, options, bound["backend"], asked)
    finished = Finished(asked["resume"], bound)
    try:
        before = len(finished.records)
        with Progress() as progress, Views(opener) as views:
            records = run_items(built.task, views, finished, progress)
    except KeyboardInterrupt:
        if asked["resume"] is not None:
            log.info("%d items are in %s: the same command goes on", *_kept(finished, asked))
        raise
    finally:
        finished.close()
    return {
        "task": options.task,
        "model": _name(checkpoint.path),
        **bound,
        "limit": options.limit,
        **built.facts,
        **built.task.rows(records),
        "items": sum(map(len, records.values())),
        "items_resumed": before,
        "context": context,
        "seconds": round(time.perf_counter() - started, 3),
        "state": state.snapshot() | _libraries(),
    }


def _kept(finished: Finished, asked: dict[str, Any]) -> tuple[int, str]:
    return len(finished.records), shlex.quote(str(asked["resume"]))


def bound_to(
    checkpoint: Checkpoint,
    options: Options,
    files: list[DataFile],
    built: Built,
    asked: dict[str, Any],
) -> dict[str, Any]:
    """Return what finished items depend on: model, original, backend, task, data, options."""
    import hashlib

    from edge_runtime import __version__, kernels
    from edge_runtime.evaluate.build import identity
    from edge_runtime.format.manifest import MANIFEST

    manifest = checkpoint.manifest
    spec = manifest.spec
    backend, _ = kernels.choose_backend(
        asked["backend"], spec.head_dim, spec.num_heads // spec.num_kv_heads
    )
    found = {
        "version": __version__,
        "model_sha256": hashlib.sha256((checkpoint.path / MANIFEST).read_bytes()).hexdigest(),
        "backend": backend,
        "original": None,
        **identity(options, files, built),
    }
    needs_original = options.task == "agreement" or any(
        v.name in ("fp", "w8a8") for v in options.views
    )
    if needs_original:
        from edge_runtime.cli.convert import require_torch

        require_torch("comparing with the original")
        source = original_source(manifest, asked["original"])
        try:
            kept = {k: v for k, v in source.provenance.items() if k != "path"}  # it may be moved
            found["original"] = kept
            found["original_backend"] = "cuda" if backend == "cuda" else "reference"
        finally:
            source.close()
    elif asked["original"] is not None:
        raise UsageError("--original: of no effect without fp or w8a8 in --views")
    return found


class Opener:
    """Opens the engines of a run: of the checkpoint, of its original, of plain W8A8."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        context: int,
        options: Options,
        backend: str,
        asked: dict[str, Any],
    ) -> None:
        """context: to allocate in each engine, in tokens."""
        from edge_runtime.kernels.layout import kv_stored_per_token_bytes

        self._checkpoint, self._context, self._asked = checkpoint, context, asked
        self._backend = backend
        spec = checkpoint.manifest.spec
        more = sum(v.opened_as == "nest" for v in options.views) - 1
        self._more_bytes = (
            max(0, more)
            * self._context
            * kv_stored_per_token_bytes(spec.num_layers, spec.num_kv_heads, spec.head_dim, backend)
        )

    def __call__(self, name: str) -> Engine:
        """Open nest, fp, w8a8 or w4a16."""
        asked = self._asked
        if name == "w4a16":
            from edge_runtime.cli.convert import require_torch
            from edge_runtime.evaluate.original import w4a16_engine

            require_torch("view w4a16")
            return w4a16_engine(self._checkpoint, self._context)
        if name == "w8a8":
            from edge_runtime.evaluate.original import w8a8_engine

            source = original_source(self._checkpoint.manifest, asked["original"])
            try:
                return w8a8_engine(self._checkpoint, source, self._context, asked["threads"])
            finally:
                source.close()
        backend = asked["backend"]
        if name == "fp":  # the native kernels are for planes alone
            backend = "auto" if self._backend == "cuda" else "reference"
        options = EngineOptions(
            backend=backend,
            view=name,
            ctx=self._context,
            budget=self._budget(),
            reserve=asked["reserve"],
            threads=asked["threads"] if name == "nest" else None,
            original=asked["original"],
        )
        return open_checkpoint(self._checkpoint, options)

    def _budget(self) -> int | None:
        """What is left of a budget for one view: others over the same weights have caches too."""
        budget: int | None = self._asked["budget"]
        return None if budget is None else max(0, budget - self._more_bytes)


def _name(path: Path) -> str:
    return path.absolute().name.encode("utf-8", "replace").decode()


def _libraries() -> dict[str, str]:
    """Versions of what computes, of the libraries that are loaded."""
    found = {}
    for name in ("numpy", "torch", "triton", "tokenizers"):
        if name in sys.modules:
            found[name] = str(getattr(sys.modules[name], "__version__", "unknown"))
    return {"libraries": found}  # type: ignore[dict-item]
