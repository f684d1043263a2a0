"""`bitnest-edge convert`: a model in, a nested checkpoint out, with what it cost and what it kept.

Invariant: an interrupted conversion leaves its finished parts, and the same command goes on from
there; `convert_model` is also what first use of a known name runs.
"""

from __future__ import annotations

import importlib.util
import logging
import resource
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from edge_runtime.cli.options import Finite, Parsed, Whole, json_option, print_document, user_path
from edge_runtime.errors import (
    BackendUnavailable,
    BitnestError,
    BudgetError,
    CheckpointError,
)
from edge_runtime.paths import FULL

if TYPE_CHECKING:
    from edge_runtime.cli.progress import Progress
    from edge_runtime.convert.pipeline import ConvertOptions
    from edge_runtime.convert.source import Source
    from edge_runtime.format.manifest import Manifest

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Converted:
    """A finished conversion and what it cost."""

    manifest: Manifest
    seconds: float
    peak_rss_bytes: int
    num_bytes: int
    backend: str = "cpu"
    device_peak_bytes: int | None = None  # of the GPU
    layer_seconds: float | None = None  # the median; None where no layer was left to do


def parse_bound(text: str) -> float | None:
    """Return how far, in base steps, the target may miss a weight; None for `none`."""
    if text == "none":
        return None
    try:
        bound = float(text)
    except ValueError:
        bound = -1.0
    if not 0 <= bound < float("inf"):
        raise ValueError(f"{text!r} is not a number of base steps >= 0, nor none")
    return bound


@click.command()
@click.argument("src")
@click.option("-o", "--out", required=True, metavar="DIR", help="Folder to make.")
@click.option(
    "--group-size",
    type=click.Choice(["auto", "128", "64", "32"]),
    default="auto",
    show_default=True,
    help="Weights that share a scale; auto: the largest that divides every input size.",
)
@click.option(
    "--rotate",
    type=click.Choice(["hadamard", "none"]),
    default="hadamard",
    show_default=True,
    help="Rotate the residual stream and the values, so that outliers spread.",
)
@click.option(
    "--base",
    type=click.Choice(["gptq", "rtn"]),
    default="gptq",
    show_default=True,
    help="How the 4-bit base is chosen.",
)
@click.option(
    "--refine",
    type=click.Choice(["gptq", "closed"]),
    default="gptq",
    show_default=True,
    help="How the refinement is chosen: solved with the base fixed, or the paper's closed form.",
)
@click.option(
    "--bound",
    type=Parsed("bound", parse_bound),
    default="0.25",
    show_default=True,
    metavar="F|none",
    help="Base steps by which the target may miss a weight for the draft's sake: small favours the "
    "target's quality, none the draft's.",
)
@click.option(
    "--balance",
    type=Finite(0, 1),
    default=0.5,
    show_default=True,
    metavar="F",
    help="How far the inputs of a feed-forward's second matrix are evened out; 0: neither these "
    "nor keys that stand out.",
)
@click.option(
    "--calib",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Calibration text, or JSON lines with text or messages.  [default: a bundled set]",
)
@click.option(
    "--calib-tokens",
    type=Whole(min=512),
    default=36864,
    show_default=True,
    metavar="N",
    help="Tokens of it to use, in windows of 512.",
)
@click.option(
    "--seed",
    type=Whole(min=0, max=2**31 - 1),
    default=0,
    show_default=True,
    metavar="S",
    help="Seed of the rotations and of the order of the text.",
)
@click.option(
    "--backend",
    type=click.Choice(["auto", "cpu", "cuda"]),
    default="auto",
    show_default=True,
    help="What computes; auto: a GPU that torch can use and that has the memory, else the CPU.",
)
@click.option(
    "--synthetic",
    is_flag=True,
    help="Random weights in the shape of SRC, for speed and memory; SRC is what `plan` takes.",
)
@json_option
def command(
    src: str,
    out: str,
    group_size: str,
    rotate: Any,
    base: Any,
    refine: Any,
    bound: float | None,
    balance: float,
    calib: Path | None,
    calib_tokens: int,
    seed: int,
    backend: str,
    synthetic: bool,
    as_json: bool,
) -> None:
    """Turn a model into a nested checkpoint.

    SRC is a Hugging Face folder, a .gguf file, or a known name, which is fetched first. One layer
    is in memory at a time. After an interruption the same command continues.
    """
    require_torch("conversion")
    if synthetic:
        from edge_runtime.cli import convert_synthetic

        convert_synthetic.run(src, user_path(out), as_json)
        return
    from edge_runtime.cli.model import source_path
    from edge_runtime.convert.pipeline import ConvertOptions
    from edge_runtime.format.writer import refuse_taken

    options = ConvertOptions(
        group_size=None if group_size == "auto" else int(group_size),
        rotate=rotate,
        base=base,
        refine=refine,
        bound=bound,
        balance=balance,
        calibration=calib,
        calibration_tokens=calib_tokens,
        seed=seed,
    )
    folder = user_path(out)
    refuse_taken(folder)
    done = convert_model(source_path(src), folder, options, backend)
    for line in report_lines(done, folder):
        log.info("%s", line)
    if as_json:
        print_document(report_document(done, folder))


def require_torch(what: str) -> None:
    """Raise BackendUnavailable with the install line where torch is missing."""
    if importlib.util.find_spec("torch") is None:
        from edge_runtime.kernels import TORCH_HINT

        raise BackendUnavailable(f"{what} needs torch, which is not installed", TORCH_HINT)


def convert_model(
    path: Path, out: Path, options: ConvertOptions, backend: str = "auto"
) -> Converted:
    """Convert with progress on stderr. Raises what `open_source` and `Conversion` raise, and
    BackendUnavailable."""
    from edge_runtime.convert import device as devices
    from edge_runtime.convert.calibrate import calibration_documents
    from edge_runtime.convert.pipeline import Conversion
    from edge_runtime.convert.source import open_source

    if options.calibration is not None:
        calibration_documents(options.calibration)  # refuse a bad file before anything is read
    out = out.absolute()  # "." and ".." have no name that a partial folder could have
    started = time.perf_counter()
    source = open_source(path)
    try:
        for warning in source.warnings:
            log.warning("%s", warning)
        device, why = devices.choose(backend, source.spec, options.calibration_tokens)
        _announce(source, path, out, options, device.type)
        log.info("backend %s: %s", device.type, why)
        layers: list[float] = []

        def work(progress: Progress) -> Manifest:
            conversion = Conversion(source, out, options, progress, device)
            manifest = conversion.run()
            layers.extend(conversion.layer_seconds)
            return manifest

        manifest = run_work(work, out)
    finally:
        source.close()
    return replace(
        measured(manifest, out, started),
        backend=device.type,
        device_peak_bytes=devices.peak_bytes(device),
        layer_seconds=statistics.median(layers) if layers else None,
    )


def measured(manifest: Manifest, out: Path, started: float) -> Converted:
    """Return a conversion that began at `started` (`time.perf_counter`) with what it cost."""
    return Converted(
        manifest=manifest,
        seconds=time.perf_counter() - started,
        peak_rss_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        num_bytes=sum(p.stat().st_size for p in out.iterdir() if p.is_file()),
    )


def _announce(source: Source, path: Path, out: Path, options: ConvertOptions, backend: str) -> None:
    from edge_runtime.convert import resources
    from edge_runtime.plan.footprint import usual_group_size

    spec = source.spec
    G = options.group_size or usual_group_size(spec)
    kind = "none" if options.rotate == "none" else "orthogonal"  # the larger of the rotations
    disk = resources.checkpoint_bytes(spec, G, kind)
    memory = resources.conversion_bytes(spec, options.calibration_tokens)
    of_gpu = ""
    if backend == "cuda":
        memory = resources.host_bytes(spec)
        device = resources.device_bytes(spec, options.calibration_tokens)
        of_gpu = f", and {device / 2**30:.1f} GiB of the GPU's"
    log.info(
        "Converting %s (%s, %d layers) to %s: needs %.2f GB of disk and about %.1f GiB of "
        "memory%s.",
        path.name,
        spec.architecture,
        spec.num_layers,
        out,
        disk / 1e9,
        memory / 2**30,
        of_gpu,
    )


def run_work(work: Callable[[Progress], Manifest], out: Path) -> Manifest:
    """Run a conversion; what the disk refuses is told as an error, an interruption as a promise."""
    from edge_runtime.cli.progress import Progress

    partial = out.with_name(out.name + ".partial")
    try:
        with Progress() as progress:
            return work(progress)
    except KeyboardInterrupt:
        if partial.is_dir():
            log.warning(
                "Stopped. What is finished lies in %s; the same command continues from there.",
                partial,
            )
        raise
    except OSError as error:
        raise _disk_error(error, out, partial) from error


def _disk_error(error: OSError, out: Path, partial: Path) -> BitnestError:
    reason = error.strerror or str(error)
    if error.errno in FULL:
        return BudgetError(
            f"disk: {partial} cannot grow: {reason}",
            "free some space and run the same command again: it continues",
        )
    where = error.filename or partial
    return CheckpointError(f"conversion to {out} failed: {where}: {reason}")


def report_document(done: Converted, out: Path) -> dict[str, object]:
    """Return the fields that `--json` promises."""
    import msgspec

    from edge_runtime.plan.verdict import verdict

    m = done.manifest
    return {
        "out_dir": str(out),
        "bytes": done.num_bytes,
        "seconds": round(done.seconds, 3),
        "seconds_per_layer": done.layer_seconds and round(done.layer_seconds, 3),
        "backend": done.backend,
        "peak_rss_bytes": done.peak_rss_bytes,
        "device_peak_bytes": done.device_peak_bytes,
        "group_size": m.group_size,
        "clipped_share": m.clipped_share,
        "agreement": msgspec.to_builtins(m.agreement),
        "verdict": msgspec.to_builtins(verdict(m)),
        "synthetic": m.synthetic is not None,
    }


def report_lines(done: Converted, out: Path) -> list[str]:
    """Return the report for people."""
    from edge_runtime.cli.progress import seconds_text
    from edge_runtime.plan.verdict import verdict

    m = done.manifest
    of_gpu = done.device_peak_bytes
    gpu = "" if of_gpu is None else f" and {of_gpu / 2**30:.2f} GiB of the GPU's"
    lines = [
        f"{out}: {done.num_bytes / 1e6:.0f} MB in {seconds_text(done.seconds)}, peak memory "
        f"{done.peak_rss_bytes / 2**30:.2f} GiB{gpu}, group size {m.group_size}",
        f"clipped weights: {m.clipped_share:.1%} (8-bit codes that the refinement of their base "
        "code could not reach)",
    ]
    if (a := m.agreement) is not None:
        kind = m.provenance.get("kind")
        what = "the GGUF file, dequantised" if kind == "gguf" else "the source, unquantised"
        lines += [
            f"same next token at {a.positions} held-out positions (original: {what}):",
            f"  target and original  {a.target_original:.3f}   quality of the answers",
            f"  draft and target     {a.draft_target:.3f}   about the acceptance of drafts",
            f"  draft and original   {a.draft_original:.3f}   quality of --view w4",
            f"  plain 8-bit rounding {a.w8_rtn_original:.3f}   what the target is measured against",
        ]
    if (found := verdict(m)) is not None:
        lines.append(found.text)
    return lines
