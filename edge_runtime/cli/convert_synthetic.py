"""`bitnest-edge convert --synthetic`: a checkpoint of random weights in a known shape.

Invariant: it is announced and reported as what it is, here and by whatever runs it later.
"""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from edge_runtime.cli.options import print_document, user_path
from edge_runtime.errors import UsageError

if TYPE_CHECKING:
    from edge_runtime.cli.progress import Progress
    from edge_runtime.convert.synthetic import SyntheticOptions
    from edge_runtime.format.manifest import Manifest
    from edge_runtime.plan.planner import Subject

log = logging.getLogger(__name__)

# options about weights that exist, and about a device: random bits are numpy's
IN_VAIN = ("base", "refine", "bound", "calib", "calib_tokens", "backend")


def run(name: str, out: Path, as_json: bool) -> None:
    """Write a checkpoint in the shape of what `plan` understands by `name`, and report."""
    from edge_runtime.cli import convert
    from edge_runtime.cli.plan_subject import read_subject
    from edge_runtime.cli.progress import seconds_text
    from edge_runtime.convert.synthetic import Synthesis
    from edge_runtime.format.writer import refuse_taken

    options = _options()
    refuse_taken(out)
    subject = read_subject(name, user_path(name))
    started, target = time.perf_counter(), out.absolute()
    _announce(subject, target, options)

    def work(progress: Progress) -> Manifest:
        return Synthesis(subject.spec, subject.name, target, options, progress).run()

    done = convert.measured(convert.run_work(work, target), target, started)
    log.info(
        "%s: %.0f MB in %s, peak memory %.2f GiB, group size %d. Random weights in the shape of "
        "%s: for speed and memory, no model.",
        out,
        done.num_bytes / 1e6,
        seconds_text(done.seconds),
        done.peak_rss_bytes / 2**30,
        done.manifest.group_size,
        subject.name,
    )
    if as_json:
        document = convert.report_document(done, out)
        for name in ("clipped_share", "seconds_per_layer", "backend", "device_peak_bytes"):
            del document[name]  # of weights that were solved
        print_document(document | {"shape": subject.name})


def _options() -> SyntheticOptions:
    """Return the options of the command that is running, which has those of a conversion."""
    from click.core import ParameterSource

    from edge_runtime.convert.synthetic import SyntheticOptions

    context = click.get_current_context()
    for name in IN_VAIN:
        if context.get_parameter_source(name) is not ParameterSource.DEFAULT:
            raise UsageError(f"--{name.replace('_', '-')} has no effect with --synthetic")
    asked = context.params
    group_size = asked["group_size"]
    return SyntheticOptions(
        group_size=None if group_size == "auto" else int(group_size),
        rotate=asked["rotate"],
        seed=asked["seed"],
    )


def _announce(subject: Subject, out: Path, options: SyntheticOptions) -> None:
    from edge_runtime.convert import resources
    from edge_runtime.plan.footprint import usual_group_size

    spec = subject.spec
    G = options.group_size or usual_group_size(spec)
    kind = "none" if options.rotate == "none" else "orthogonal"  # the larger of the rotations
    log.info(
        "Random weights in the shape of %s (%s, %d layers) to %s: needs %.2f GB of disk.",
        subject.name,
        spec.architecture,
        spec.num_layers,
        out,
        resources.checkpoint_bytes(spec, G, kind) / 1e9,
    )
