"""`bitnest-edge kernels save`: CUDA kernels as machine code, for boards without Triton.

Invariant: no GPU is needed and no weights are read.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from edge_runtime.cli.options import Whole, json_option, print_document, user_path
from edge_runtime.errors import UsageError

if TYPE_CHECKING:
    from edge_runtime.format.spec import ModelSpec
    from edge_runtime.kernels.cuda.record import Subject

ARCHES = (80, 86, 87, 89, 90)


@click.group()
def command() -> None:
    """Compile the CUDA kernels of a model into a folder, for machines without Triton."""


@command.command()
@click.argument("model")
@click.option(
    "-o", "--out", required=True, metavar="FOLDER", help="Where to write; made if it is not there."
)
@click.option(
    "--arch",
    type=click.Choice([str(n) for n in ARCHES]),
    default="87",
    show_default=True,
    help="Compute capability without its point: 87 is an Orin.",
)
@click.option(
    "--jobs",
    type=Whole(1, 256),
    default=1,
    show_default=True,
    metavar="N",
    help="Processes that compile.",
)
@click.option(
    "--baseline",
    is_flag=True,
    help="With what the unquantised model in 16 bits and w8-kv16 launch, to compare.",
)
@json_option
def save(model: str, out: str, arch: str, jobs: int, baseline: bool, as_json: bool) -> None:
    """Compile all that an engine of MODEL launches: a converted folder, or a shape by its name.

    Needs Triton and torch, and no GPU. On the board: --kernels FOLDER, or BITNEST_EDGE_KERNELS.
    """
    from edge_runtime.cli.progress import Progress
    from edge_runtime.kernels.cuda import require_triton, saved

    require_triton()
    folder = user_path(out)
    _refuse_other(folder, saved.INDEX)
    folder.mkdir(parents=True, exist_ok=True)  # before the work, so that a bad path is said now
    name, spec, subjects = _subjects(model)
    from edge_runtime.kernels.cuda import record

    started = time.perf_counter()
    wanted = [s for one in subjects for s in record.engine_signatures(one, int(arch))]
    if baseline:
        from edge_runtime.convert import half
        from edge_runtime.kernels.cuda.record_half import baseline_signatures

        plain = half.blank(msgspec.structs.replace(spec, num_layers=1), spec.max_position)
        wanted += baseline_signatures(subjects[0], plain, int(arch))
    signatures = list(dict.fromkeys(wanted))
    with Progress() as progress:
        index = record.save(
            signatures,
            folder,
            arch=int(arch),
            facts={"model": name, "max_context": subjects[0].max_context},
            jobs=jobs,
            told=progress,
        )
    document = {
        "folder": str(folder),
        "model": name,
        "arch": index["arch"],
        "launches": len(index["launches"]),
        "kernels": len(index["code"]),
        "bytes": sum(path.stat().st_size for path in folder.iterdir()),
        "seconds": time.perf_counter() - started,
        "triton": index["triton"],
    }
    click.echo(_line(document), err=as_json)
    if as_json:
        print_document(document)


def _refuse_other(folder: Path, index: str) -> None:
    """Raise UsageError for a folder that holds something else: a folder of before is replaced."""
    if not folder.exists():
        return
    if not folder.is_dir():
        raise UsageError(f"{folder}: expected a folder, got a file")
    if any(folder.iterdir()) and not (folder / index).is_file():
        raise UsageError(f"{folder} holds other files", "give a folder that is empty or not there")


def _subjects(model: str) -> tuple[str, ModelSpec, list[Subject]]:
    """Return a model's name and spec, and what is to be compiled for it."""
    from edge_runtime.cli.model import checkpoint_path
    from edge_runtime.cli.plan_subject import read_subject
    from edge_runtime.format.manifest import MANIFEST, read_manifest
    from edge_runtime.model import launches
    from edge_runtime.plan.footprint import usual_group_size
    from edge_runtime.profiles import shape_names

    path = user_path(model)
    if (path / MANIFEST).is_file() or (not path.exists() and model not in shape_names()):
        folder = checkpoint_path(model)
        manifest = read_manifest(folder)
        return folder.absolute().name, manifest.spec, launches.of_checkpoint(manifest)
    subject = read_subject(model, path)
    group_size = subject.group_size or usual_group_size(subject.spec)
    return subject.name, subject.spec, launches.of_shape(subject.spec, group_size)


def _line(document: dict[str, Any]) -> str:
    return (
        f"{document['folder']}: {document['kernels']} kernels for sm_{document['arch']} "
        f"({document['launches']} kinds of launches) of {document['model']}, "
        f"{document['bytes'] / 2**20:.1f} MiB, made in {document['seconds']:.0f} s"
    )
