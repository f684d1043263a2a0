"""Disk and memory that a conversion needs, checked before it starts.

Invariant: the estimate is an upper bound of what the steps hold at once, in bytes, and is shown.
"""

from __future__ import annotations

import math
import shutil
from pathlib import Path

import psutil

from edge_runtime.errors import BudgetError
from edge_runtime.format.manifest import DTYPES, expected_planes
from edge_runtime.format.spec import ModelSpec
from edge_runtime.plan.footprint import linear_shapes

RUNTIME_BYTES = 1000 << 20  # interpreter, torch and its scratch


def checkpoint_bytes(spec: ModelSpec, group_size: int, rotation: str) -> int:
    """Bytes of all planes on disk."""
    planes = expected_planes(spec, group_size, rotation)
    return sum(DTYPES[dtype] * math.prod(shape) for _, (dtype, shape) in planes)


def conversion_bytes(spec: ModelSpec, calibration_tokens: int) -> int:
    """Peak memory: see the pipeline's invariant. Bytes a weight count what a step holds at once."""
    shapes = linear_shapes(spec)
    head = math.prod(shapes["head"])
    one = sum(math.prod(shapes[f"layers.0.{n}"]) for n in ("qkv", "o", "gate_up", "down"))
    largest_input = max(k for _, k in shapes.values())
    states = (calibration_tokens + 8192) * spec.hidden_size * 4
    layer = one * 40  # source and fused fp32, codes in three views as fp32 and fp64
    table = head * 24  # fp32 source and rotated head, codes, planes, one fp32 view for the errors
    hessian = largest_input**2 * 8 * 4
    return RUNTIME_BYTES + states + hessian + max(layer, table)


def check(
    spec: ModelSpec, group_size: int, rotation: str, calibration_tokens: int, out: Path
) -> None:
    """Refuse a conversion that cannot end. Raises BudgetError with the numbers."""
    check_disk(spec, group_size, rotation, out)
    memory = conversion_bytes(spec, calibration_tokens)
    available = psutil.virtual_memory().available
    if memory > available:
        raise BudgetError(
            f"memory: conversion needs about {memory / 2**30:.1f} GiB, "
            f"{available / 2**30:.1f} GiB are available",
            "lower --calib-tokens, close other programs, or convert on a larger machine",
        )


def check_disk(spec: ModelSpec, group_size: int, rotation: str, out: Path) -> None:
    """Refuse a checkpoint that the disk has no room for. Raises BudgetError with the numbers."""
    folder = next(p for p in (out.absolute(), *out.absolute().parents) if p.exists())
    partial = out.with_name(out.name + ".partial")  # of a run that is continued
    written = sum(file.stat().st_size for file in partial.glob("*.safetensors"))
    need = max(0, checkpoint_bytes(spec, group_size, rotation) - written)
    free = shutil.disk_usage(folder).free
    if need > free:
        raise BudgetError(
            f"disk: the converted model takes {need / 1e9:.2f} GB, {folder} has "
            f"{free / 1e9:.2f} GB free",
            "choose another -o DIR or free some space",
        )
