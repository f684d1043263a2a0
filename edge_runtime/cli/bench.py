"""`bitnest-edge bench kernels|decode`: speed against the ceiling of this machine's memory."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from edge_runtime.cli import bench_cuda
from edge_runtime.cli.model import (
    EngineOptions,
    checkpoint_path,
    open_checkpoint,
    open_model,
    options_of_mode,
    original_option,
)
from edge_runtime.cli.options import (
    Parsed,
    Whole,
    backend_option,
    ctx_option,
    draft_option,
    draft_source_option,
    json_option,
    kv_policy_option,
    model_argument,
    print_document,
    threads_option,
)
from edge_runtime.cli.profile import listed
from edge_runtime.decode.declared import Declared, parse_declared
from edge_runtime.errors import UsageError, cut

if TYPE_CHECKING:
    from edge_runtime.decode.engine import Engine

DECODE_CONTEXT = 2048
OTHERS = ("fp16", "w8-kv16", "two-copy")
CURVE = ("0.0", "0.25", "0.5", "0.7", "0.8", "0.9", "0.95", "1.0")


def parse_other(text: str) -> str:
    """Return a mode that has an engine of its own. Raises ValueError."""
    name = "fp16" if text == "fp" else text
    if name not in OTHERS:
        raise ValueError(f"{cut(text)!r} is none of {', '.join(OTHERS)}")
    return name


@click.group()
def command() -> None:
    """Measure speed against what this machine's memory allows."""


@command.command()
@model_argument()
@backend_option
@threads_option
@click.option("--repeats", type=Whole(1, 1000), default=9, show_default=True, metavar="N")
@click.option(
    "--rows",
    type=Parsed("rows", bench_cuda.parse_rows),
    metavar="N,…",
    help="Rows of a pass, 1 to 16.  [default: 1,2,3,4,5,8; cuda: 1,5,8,16]",
)
@click.option(
    "--only",
    type=Parsed("what", bench_cuda.parse_only),
    metavar="WHAT,…",
    help="With --backend cuda: some of linear, attention, small, slice, prefill.",
)
@json_option
def kernels(
    model: str,
    backend: str,
    threads: int | None,
    repeats: int,
    rows: tuple[int, ...] | None,
    only: tuple[str, ...] | None,
    as_json: bool,
) -> None:
    """Time every linear of a model: GB/s and share of the read bandwidth, by rows and view.

    With --backend cuda every op, on random weights of the sizes of MODEL, which then may be all
    that `plan` takes (the name of a known shape): share of the GPU's copy bandwidth, bytes per
    clock of the code for an Orin on 8 multiprocessors, time beside cuBLAS and other libraries.
    """
    if backend == "cuda":
        if threads is not None:
            raise UsageError("--threads is for the other backends: cuda runs on the GPU")
        bench_cuda.kernels(model, rows=rows, only=only, repeats=repeats, as_json=as_json)
        return
    if only is not None:
        raise UsageError("--only is for --backend cuda: the others time linears and whole steps")
    from edge_runtime import bench
    from edge_runtime.cli.progress import Progress

    options = EngineOptions(backend=backend, threads=threads, ctx=64, draft="1")
    with open_model(model, options) as engine, Progress() as progress:
        document = bench.kernels(
            engine, rows=rows or bench.ROWS, repeats=repeats, progress=progress
        )
    if empty := document["empty_step_s"]:
        click.echo(f"a step without its kernels: {empty['median'] * 1e6:.1f} us", err=as_json)
    for line in kernel_lines(document):
        click.echo(line, err=as_json)
    if as_json:
        print_document(document)


@command.command()
@model_argument()
@click.option(
    "--prompts",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="JSON lines as of `selftest`.  [default: built-in prompts]",
)
@click.option("--limit", type=Whole(min=1), metavar="N", help="Use the first N prompts.")
@click.option(
    "--context",
    type=Whole(1, 10_000_000),
    metavar="N",
    help="A prompt of N tokens instead, of text that comes with the program.",
)
@click.option(
    "--repeats",
    type=Whole(1, 1000),
    default=3,
    show_default=True,
    metavar="N",
    help="Runs of the prompt of --context.",
)
@click.option(
    "-n",
    "--new-tokens",
    type=Whole(2, 100_000),
    default=128,
    show_default=True,
    metavar="N",
)
@click.option(
    "--accept",
    "accepts",
    type=Parsed("acceptance", parse_declared),
    multiple=True,
    metavar="RATE|LIST",
    help="Nest with declared acceptance, for timing: a rate such as 0.95 of what is drafted, or "
    "tokens per cycle in turns such as 4,4,3; repeatable.",
)
@click.option("--curve", is_flag=True, help="--accept at rates from 0.0 to 1.0.")
@click.option(
    "--also",
    type=Parsed("modes", listed("mode", parse_other)),
    default=(),
    metavar="LIST",
    help="Other engines to compare, beside it in memory: fp16 (the unquantised model); with "
    "--backend cuda w8-kv16 (w8 over a 16-bit cache) and two-copy (a draft with its own planes).",
)
@backend_option
@draft_option
@draft_source_option
@kv_policy_option
@ctx_option
@threads_option
@original_option
@json_option
def decode(
    model: str,
    prompts: Path | None,
    limit: int | None,
    context: int | None,
    repeats: int,
    new_tokens: int,
    accepts: tuple[Declared, ...],
    curve: bool,
    also: tuple[str, ...],
    as_json: bool,
    **shared: Any,
) -> None:
    """Decode prompts as w8, w4 and nest in turns: tok/s, ratio to w8, share of the ceiling.

    With declared acceptance, which needs --draft N, tokens are accepted as declared, whatever the
    target chose: that is the speed of a model whose draft is accepted so often, and no text.
    """
    from edge_runtime import bench
    from edge_runtime.cli.progress import Progress
    from edge_runtime.format.reader import Checkpoint

    if context is not None and (prompts is not None or limit is not None):
        raise UsageError("--context has a prompt of its own: leave out --prompts and --limit")
    if shared["original"] is not None and "fp16" not in also:
        raise UsageError("--original has no effect without --also fp16")
    if curve:
        accepts = (*accepts, *(parse_declared(rate) for rate in CURVE))
    checkpoint = Checkpoint(checkpoint_path(model))
    if shared["ctx"] == "auto":
        wanted = DECODE_CONTEXT if context is None else context + new_tokens
        shared["ctx"] = min(wanted, checkpoint.manifest.spec.max_position)
    options = EngineOptions(**shared)
    with contextlib.ExitStack() as opened:
        engine = opened.enter_context(open_checkpoint(checkpoint, options))
        bench.ways(engine, accepts)  # refuses before more is opened
        ids = _prompts(engine, prompts, limit, context, repeats, new_tokens)
        others = {
            mode: opened.enter_context(open_checkpoint(checkpoint, options_of_mode(mode, options)))
            for mode in also
        }
        progress = opened.enter_context(Progress())
        document = bench.decode(
            engine,
            ids,
            new_tokens=new_tokens,
            accept=tuple(dict.fromkeys(accepts)),
            others=others,
            progress=progress,
        )
    for line in decode_lines(document):
        click.echo(line, err=as_json)
    if as_json:
        print_document(document)


def _prompts(
    engine: Engine,
    file: Path | None,
    limit: int | None,
    context: int | None,
    repeats: int,
    new_tokens: int,
) -> list[list[int]]:
    """Return the ids of what is decoded. Raises UsageError where it does not fit."""
    from edge_runtime.cli.selftest import built_in_prompts, fitting, read_prompts

    if context is None:
        asked = read_prompts(file) if file is not None else built_in_prompts()
        return fitting(engine, asked[:limit], new_tokens, shorten=file is None)
    from edge_runtime.measure.profile import default_text
    from edge_runtime.measure.worker import CHARACTERS, prompt_of

    if context + new_tokens > engine.context:
        raise UsageError(
            f"--context {context} and {new_tokens} new tokens do not fit a context of "
            f"{engine.context}",
            "lower one of them",
        )
    text = default_text()[: CHARACTERS * context]
    return [prompt_of(engine.encode_text(text), context)] * repeats


def read_line(document: dict[str, Any]) -> str:
    """Return the ceiling as a line."""
    read = document["read_gb_s"]
    threads = document["threads"]
    measured = "not measured by this backend"
    if read is not None:
        measured = f"{read['median']:.1f} GB/s ({read['min']:.1f} to {read['max']:.1f})"
    return f"backend {document['backend']}, {threads or '?'} threads; memory read: {measured}"


def kernel_lines(document: dict[str, Any]) -> list[str]:
    """Return the table for people."""
    lines = [
        read_line(document),
        *(["random weights: speed of their shape"] if document["synthetic"] else []),
        f"{'linear':<10}{'view':<6}{'rows':>5}{'ms':>10}{'GB/s':>9}{'of read':>9}",
    ]
    for row in document["rows"]:
        share = row["share_of_read"]
        lines.append(
            f"{row['linear']:<10}{row['view']:<6}{row['rows']:>5}"
            f"{row['seconds']['median'] * 1e3:>10.3f}{row['gb_s']:>9.1f}"
            + (f"{share:>9.0%}" if share is not None else f"{'':>9}")
        )
    lines.append(f"{'step':<10}{'view':<6}{'rows':>5}{'ms':>10}{'of one w8 row':>18}")
    for row in document["steps"]:
        lines.append(
            f"{'':<10}{row['view']:<6}{row['rows']:>5}{row['seconds']['median'] * 1e3:>10.3f}"
            f"{row['of_one_w8_row']:>18.2f}"
        )
    return lines


def decode_lines(document: dict[str, Any]) -> list[str]:
    """Return the table for people: nest by rising tokens per cycle, what is declared marked @."""
    rows = [row for row in document["rows"] if row["mode"] != "nest"]
    nest = [row for row in document["rows"] if row["mode"] == "nest"]
    fp = rows[0]["ratio_to_fp16"] is not None
    lines = [
        read_line(document),
        f"{'mode':<16}{'tok/s':>8}{'range':>17}{'x w8':>8}{'  x fp16' if fp else ''}"
        f"{'ceiling':>9}{'share':>7}{'accepted':>10}{'a cycle':>9}{'prefill':>9}",
    ]
    for row in [*rows, *sorted(nest, key=lambda row: float(row["tokens_per_cycle"]))]:
        speed, most = row["decode_tok_s"], row["ceiling_tok_s"]
        name = row["mode"] if row["accept"] is None else f"{row['mode']} @{row['accept']}"
        ratio = f"{row['ratio_to_fp16']['mean']:>8.2f}" if fp else ""
        lines.append(
            f"{name:<16}{speed['median']:>8.1f}"
            f"{speed['min']:>8.1f} to {speed['max']:>5.1f}{row['ratio_to_w8']['mean']:>8.2f}{ratio}"
            + (f"{most:>9.0f}{row['share_of_ceiling']:>7.0%}" if most else f"{'':>16}")
            + (f"{row['acceptance']:>10.2f}" if row["acceptance"] is not None else f"{'':>10}")
            + f"{row['tokens_per_cycle']:>9.2f}{row['prefill_tok_s']['median']:>9.0f}"
        )
    return lines + _notes(document)


def _notes(document: dict[str, Any]) -> list[str]:
    """Return what has to be known of the table."""
    differing, notes = document["differing"], []
    verdict = ""
    if differing is not None:
        verdict = f"answers of nest that differ from w8: {differing or 'none'}; "
    notes.append(
        f"{document['prompts']} prompts x {document['new_tokens']} tokens; {verdict}"
        f"{document['draft_why']}"
    )
    if any(row["forced"] for row in document["rows"]):
        real = "" if differing is None else "; nest without @ is what this model's target accepts"
        notes.append(f"@: acceptance declared, not measured, for timing alone{real}")
    if document["synthetic"]:
        notes.append("random weights: speed and memory of their shape; no acceptance is a model's")
    if any(r["mode"] == "fp16" and r["backend"] == "reference" for r in document["rows"]):
        notes.append(
            "fp16 is the unquantised model in torch's fp32, not an optimised 16-bit engine"
        )
    return notes
