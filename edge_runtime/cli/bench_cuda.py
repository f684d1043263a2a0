"""`bench kernels MODEL --backend cuda`: the CUDA ops for the sizes of a model.

Invariant: weights are random and none are read, so a known shape by its name is enough.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from edge_runtime.cli.options import print_document, user_path
from edge_runtime.errors import cut

if TYPE_CHECKING:
    from edge_runtime.kernels.cuda.timing.entry import Sizes
    from edge_runtime.plan.planner import Subject

WHAT = ("linear", "attention", "small", "slice", "prefill")
MAX_ROWS = 16  # of a pass that decodes; prompts are what `prefill` times
MAX_TOKENS = 32768  # in the cache that attention reads


def parse_rows(text: str) -> tuple[int, ...]:
    """Return numbers of rows, rising: `1,5,8`."""
    parts = text.split(",")
    if not all(p.isascii() and p.isdigit() and 1 <= int(p[:4]) <= MAX_ROWS for p in parts):
        raise ValueError(f"{cut(text)!r} is no list of numbers from 1 to {MAX_ROWS}, as in 1,5,8")
    return tuple(sorted({int(p) for p in parts}))


def parse_only(text: str) -> tuple[str, ...]:
    """Return what to measure: `linear,slice`."""
    parts = tuple(p.strip() for p in text.split(","))
    if unknown := [p for p in parts if p not in WHAT]:
        raise ValueError(f"{cut(unknown[0])!r} is none of {', '.join(WHAT)}")
    return parts


def kernels(
    model: str,
    *,
    rows: tuple[int, ...] | None,
    only: tuple[str, ...] | None,
    repeats: int,
    as_json: bool,
) -> None:
    """Measure, print a line as each figure comes, and the document.

    Raises BackendUnavailable without a GPU or Triton, BudgetError where inputs do not fit the GPU.
    """
    from edge_runtime.cli.plan_subject import read_subject
    from edge_runtime.kernels import cuda
    from edge_runtime.kernels.cuda.timing import text

    subject = read_subject(model, user_path(model))
    cuda.require_gpu()
    from edge_runtime.kernels.cuda.timing import report

    def show(lines: list[str]) -> None:
        for line in lines:
            click.echo(line, err=as_json)

    document: dict[str, Any] = report.measure(
        sizes_of(subject, rows),
        only=only or WHAT,
        turns=repeats,
        head=lambda found: show([f"{subject.name}, backend cuda", *text.head_lines(found)]),
        told=lambda row: show([text.line(row)]),
    )
    show(text.slice_lines(document))
    if as_json:
        head = {"model": subject.name, "backend": "cuda", "synthetic": subject.synthetic}
        print_document({**head, **document})


def sizes_of(subject: Subject, rows: tuple[int, ...] | None) -> Sizes:
    """Return what of a model decides the time of its ops: fused linears, heads, vocabulary."""
    from edge_runtime.kernels.cuda.timing.entry import ROWS, Sizes
    from edge_runtime.plan.footprint import linear_shapes, usual_group_size

    spec = subject.spec
    shapes = linear_shapes(spec)
    of_a_layer = {role: shapes[f"layers.0.{role}"] for role in ("qkv", "o", "gate_up", "down")}
    return Sizes(
        linears={**of_a_layer, "head": shapes["head"]},
        hidden=spec.hidden_size,
        inner=spec.intermediate_size,
        vocabulary=spec.vocab_size,
        heads=spec.num_heads,
        kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        group_size=subject.group_size or usual_group_size(spec),
        tokens=min(MAX_TOKENS, spec.max_position),
        rows=rows or ROWS,
        qk_norm=spec.qk_norm,
        qkv_bias=spec.qkv_bias,
    )
