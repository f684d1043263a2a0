"""`bitnest-edge profile`: speed, memory and energy side by side, and the longest context proven."""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from edge_runtime.cli.model import checkpoint_path, original_option
from edge_runtime.cli.options import (
    Parsed,
    Whole,
    backend_option,
    budget_option,
    draft_source_option,
    json_option,
    kv_policy_option,
    model_argument,
    print_document,
    reserve_option,
    threads_option,
    user_path,
)
from edge_runtime.errors import (
    BackendUnavailable,
    BudgetError,
    CheckpointError,
    InternalError,
    UsageError,
    cut,
)
from edge_runtime.paths import not_written

if TYPE_CHECKING:
    from edge_runtime.format.manifest import Manifest
    from edge_runtime.measure.energy import Joules
    from edge_runtime.measure.profile import Wishes

T = TypeVar("T")
MODES = ("fp16", "w8-kv16", "two-copy", "w8", "w4", "nest")  # as `measure.worker` runs them
CONTEXTS = (512, 2048)
MAX_ITEMS = 16
IDLE_S = 3.0  # of quiet, before the first run, for energy net of idle


def listed(what: str, parse: Callable[[str], T]) -> Callable[[str], tuple[T, ...]]:
    """Return a parser of `a,b,c`, each once, in the order given."""

    def parsed(text: str) -> tuple[T, ...]:
        items = tuple(dict.fromkeys(parse(part.strip()) for part in text.split(",")))
        if len(items) > MAX_ITEMS:
            raise ValueError(f"{len(items)} {what}s; at most {MAX_ITEMS} are measured at a time")
        return items

    return parsed


def _mode(text: str) -> str:
    text = "fp16" if text == "fp" else text
    if text not in MODES:
        raise ValueError(f"{cut(text)!r} is no mode; expected some of {','.join(MODES)}")
    return text


def _tokens(text: str) -> int:
    from edge_runtime.decode.arguments import digits

    if (tokens := digits(text)) is None or tokens < 1:
        raise ValueError(f"{cut(text)!r} is not a number of tokens of at least 1")
    return tokens


def _gamma(text: str) -> int | None:
    from edge_runtime.kernels.layout import MAX_GAMMA

    if text == "auto":
        return None
    if not (text.isascii() and text.isdigit() and len(text) < 3 and 1 <= int(text) <= MAX_GAMMA):
        raise ValueError(f"{cut(text)!r} is not auto or a number from 1 to {MAX_GAMMA}")
    return int(text)


@click.command()
@model_argument()
@click.option(
    "--modes",
    type=Parsed("modes", listed("mode", _mode)),
    default="fp16,w8,w4,nest",
    show_default=True,
    metavar="LIST",
    help="Of fp16 (the unquantised model), w8, w4, nest; on cuda also w8-kv16 (w8 over a 16-bit "
    "cache) and two-copy (a draft with planes of its own).",
)
@click.option(
    "--context",
    "contexts",
    type=Parsed("tokens", listed("context", _tokens)),
    metavar="LIST",
    help="Tokens of prompt.  [default: 512,2048, as far as the model goes]",
)
@click.option(
    "--gamma",
    "gammas",
    type=Parsed("numbers", listed("gamma", _gamma)),
    metavar="LIST",
    help="Tokens that nest drafts each cycle: auto or 1 to 7.  [default: auto]",
)
@click.option(
    "-n", "--new-tokens", type=Whole(2, 100_000), default=64, show_default=True,
    metavar="N", help="Tokens to decode in each run.",
)  # fmt: skip
@click.option(
    "--repeats", type=Whole(1, 1000), default=3, show_default=True, metavar="N",
    help="Runs of each row that count; one more warms up.",
)  # fmt: skip
@click.option("--energy", is_flag=True, help="Measure joules as well.")
@click.option(
    "--require-energy", is_flag=True, help="End with code 4 where no joules can be measured."
)
@click.option(
    "--power-source",
    metavar="NAME",
    help="auto, tegrastats, ina3221, jtop, nvml, replay:FILE or none.  [default: auto]",
)
@click.option(
    "--max-context", is_flag=True, help="Prove the longest context by running it, in a process."
)
@click.option(
    "--prompt-file",
    metavar="FILE",
    help="Text whose beginning is the prompt.  [default: text that comes with the program]",
)
@click.option(
    "--out",
    type=Parsed("folder", user_path),
    metavar="DIR",
    help="Write profile.json and report.html there.",
)
@backend_option
@draft_source_option
@kv_policy_option
@budget_option
@reserve_option
@threads_option
@original_option
@json_option
def command(model: str, as_json: bool, **asked: Any) -> None:
    """Measure speed, memory and energy side by side; prove the longest context.

    Each context is run in a process of its own, the modes in turns. The table goes to stdout; with
    --json it goes to stderr and stdout ends with the document.
    """
    from edge_runtime.cli.progress import Progress
    from edge_runtime.measure import report

    _check(asked)
    document = _measure(model, asked, Progress())
    for line in report.lines(document):
        click.echo(line, err=as_json)
    if as_json:
        print_document(document)
    if asked["out"] is not None:
        _write(asked["out"], document)
        click.echo(f"written: {asked['out'] / 'report.html'}", err=True)
    _judge(document, asked["require_energy"])


def _check(asked: dict[str, Any]) -> None:
    """Refuse what would be asked for in vain."""
    energy = asked["energy"] or asked["require_energy"]
    vain = {
        "--power-source": asked["power_source"] is not None and not energy,
        "--gamma": asked["gammas"] is not None and not {"nest", "two-copy"} & {*asked["modes"]},
        "--original": asked["original"] is not None and "fp16" not in asked["modes"],
    }
    needs = {"--power-source": "--energy", "--gamma": "nest in --modes", "--original": "fp16"}
    for option, in_vain in vain.items():
        if in_vain:
            raise UsageError(f"{option} has no effect without {needs[option]}")


def _judge(document: dict[str, Any], require_energy: bool) -> None:
    """Leave with an error where nothing was measured, or not what had to be."""
    rows = document["rows"]
    if document["crashes"]:
        raise InternalError("; ".join(document["crashes"]), "report it with the command you gave")
    if not any(row["status"] == "ok" for row in rows):
        raise BudgetError(f"nothing could be measured: {rows[0]['reason']}")
    if require_energy and not any(row["j_per_token"] is not None for row in rows):
        raise BackendUnavailable(
            "no run was long enough for the power sensor",
            "decode more: -n 512, or --repeats 10; each row says how long it must be",
        )


def _measure(model: str, asked: dict[str, Any], progress: Any) -> dict[str, Any]:
    from edge_runtime.format.reader import Checkpoint
    from edge_runtime.measure import profile

    path = checkpoint_path(model)
    manifest = Checkpoint(path).manifest
    out = asked["out"]
    if out is not None:
        _make_folder(out)
    wishes = _wishes(path, asked, manifest)
    name = path.name.encode("utf-8", "replace").decode()
    synthetic = manifest.synthetic is not None
    document: dict[str, Any] = {"model": name, "synthetic": synthetic}
    document |= {"device": None, "energy": None}
    with _meter(asked) as (joules, why):
        if joules is not None:
            joules.measure_idle(IDLE_S)
        with progress:
            document |= profile.measure(wishes, energy=joules, progress=progress)
        if joules is not None:
            joules.stop()
            document["warnings"] += profile.add_energy(document["rows"], joules)
            document["energy"] = joules.summary()
            if document["energy"]["source"] == "replay":
                document["warnings"].append("joules are those of a log, not of this machine")
        elif asked["energy"] or asked["require_energy"]:
            document["energy"] = {"source": None, "why": why}
    document["device"] = document["state"]["board"]["profile"]
    document["max_context"] = _proof(wishes, manifest) if asked["max_context"] else None
    return document


def _wishes(path: Path, asked: dict[str, Any], manifest: Manifest) -> Wishes:
    from edge_runtime.measure.profile import Wishes
    from edge_runtime.measure.worker import Job

    longest = manifest.spec.max_position - asked["new_tokens"]
    contexts = asked["contexts"]
    if contexts is None:
        contexts = tuple(c for c in CONTEXTS if c <= longest) or (longest,)
    if longest < 1:
        raise UsageError(
            f"-n {asked['new_tokens']}: this model was made for {manifest.spec.max_position} "
            "positions, prompt and answer together"
        )
    for context in contexts:
        if context > longest:
            raise UsageError(
                f"--context {context} and {asked['new_tokens']} new tokens: this model was made "
                f"for {manifest.spec.max_position} positions",
                f"--context {longest} is the longest",
            )
    job = Job(
        model=str(path.absolute()),
        text=_text(asked["prompt_file"]),
        new_tokens=asked["new_tokens"],
        repeats=asked["repeats"],
        backend=asked["backend"],
        kv_policy=asked["kv_policy"],
        draft_source=asked["draft_source"],
        budget_bytes=asked["budget"],
        reserve_bytes=asked["reserve"] or 0,
        threads=asked["threads"],
        original=asked["original"],
    )
    gammas = asked["gammas"] or (None,)
    return Wishes(job=job, modes=asked["modes"], contexts=contexts, gammas=gammas)


def _text(file: str | None) -> str:
    if file is None:
        from edge_runtime.measure.profile import default_text

        return default_text()
    from edge_runtime.cli.generate import read_text

    text = read_text(file)
    if not text.strip():
        raise CheckpointError(f"{file}: there is no text in it")
    return text


@contextlib.contextmanager
def _meter(asked: dict[str, Any]) -> Iterator[tuple[Joules | None, str]]:
    """Yield a meter that runs, or None and why there is none."""
    if not (asked["energy"] or asked["require_energy"]):
        yield None, ""
        return
    from edge_runtime.measure.energy import Joules
    from edge_runtime.power import PowerUnavailable

    try:
        joules = Joules(asked["power_source"] or "auto")
    except PowerUnavailable as error:
        if asked["require_energy"]:
            raise
        yield None, error.message
        return
    with joules:
        yield joules, ""


def _proof(wishes: Wishes, manifest: Manifest) -> dict[str, Any]:
    from edge_runtime.measure import longest

    return longest.find(wishes, manifest)


def _make_folder(out: Path) -> None:
    """Make the folder and prove that it can be written to, before anything is measured."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=out):
            pass
    except OSError as error:
        raise not_written(out, error, "give another --out DIR") from None


def _write(out: Path, document: dict[str, Any]) -> None:
    from edge_runtime.atomic import write_atomic
    from edge_runtime.measure import html

    text = json.dumps(document, indent=1, ensure_ascii=False, allow_nan=False)
    try:
        write_atomic(out / "profile.json", text.encode("utf-8", "replace"))
        write_atomic(out / "report.html", html.page(document).encode("utf-8", "replace"))
    except OSError as error:
        raise not_written(out, error, "give another --out DIR") from None
