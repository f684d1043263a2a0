"""Disk and memory that a conversion needs, checked before it starts.

Invariant: the estimate is an upper bound of what the steps hold at once, in bytes, and is shown.
"""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import NamedTuple

from edge_runtime.convert.calibrate import WINDOW
from edge_runtime.convert.quantize import DEVICE_VALUES
from edge_runtime.errors import BudgetError
from edge_runtime.format.manifest import DTYPES, expected_planes
from edge_runtime.format.spec import ModelSpec
from edge_runtime.plan.footprint import linear_shapes

RUNTIME_BYTES = 1000 << 20  # interpreter, torch and its scratch
DEVICE_RUNTIME_BYTES = 1 << 30  # of the host: libraries of the GPU
SCRATCH_BYTES = 256 << 20  # of the device: cuBLAS's and cuSOLVER's
SOLVER_BYTES = 28  # a weight of a chunk: limits in fp64, or targets, errors, limits and codes


def checkpoint_bytes(spec: ModelSpec, group_size: int, rotation: str) -> int:
    """Bytes of all planes on disk."""
    planes = expected_planes(spec, group_size, rotation)
    return sum(DTYPES[dtype] * math.prod(shape) for _, (dtype, shape) in planes)


class Room(NamedTuple):
    """What is free. host_bytes: None where it cannot be known; device_bytes: None without a device.

    shared: the device has no memory of its own, as on a Jetson; one pool holds both parts.
    """

    host_bytes: int | None
    device_bytes: int | None = None
    shared: bool = False


def conversion_bytes(spec: ModelSpec, calibration_tokens: int) -> int:
    """Peak memory on the CPU: see the pipeline's invariant. Bytes a weight count what a step holds
    at once."""
    sizes = _Sizes(spec, calibration_tokens)
    layer = sizes.layer * 40  # source and fused fp32, codes in three views as fp32 and fp64
    table = sizes.head * 24  # fp32 source and rotated head, codes, planes, one fp32 view for errors
    hessian = sizes.inputs**2 * 8 * 4
    return RUNTIME_BYTES + sizes.states + hessian + max(layer, table)


def host_bytes(spec: ModelSpec) -> int:
    """Peak memory of the host where a device computes."""
    sizes = _Sizes(spec, 0)
    # a table in fp32 beside the file's and its codes; two layers fp32 and their codes and planes
    return RUNTIME_BYTES + DEVICE_RUNTIME_BYTES + max(sizes.head * 9, sizes.layer * 14)


def device_bytes(spec: ModelSpec, calibration_tokens: int) -> int:
    """Peak memory of a device: one layer or the head, its Hessians, the calibration's states."""
    sizes = _Sizes(spec, calibration_tokens)
    rotation = spec.hidden_size**2 * 8 * 2
    fuse = sizes.layer * 8 + sizes.largest * 8 + rotation  # source and fused, and what is joined
    solve = _solving_bytes(sizes.inputs, sizes.largest)
    nest = sizes.layer * 10 + sizes.hessians + max(solve, sizes.largest * 8)
    views = sizes.layer * 10 + sizes.largest * 20 + sizes.window  # fused, codes, a view that runs
    table = sizes.head * 12 + rotation + _solving_bytes(spec.hidden_size, sizes.head)
    return int(1.1 * (SCRATCH_BYTES + sizes.states + max(fuse, nest, views, table)))


def _solving_bytes(num_inputs: int, num_weights: int) -> int:
    """What solving a matrix takes: H fp32 and A, L and a copy of either in fp64 beside the draft's
    factor; then H, pull and coupling of draft and target in fp32 and a chunk."""
    chunk = min(num_weights, DEVICE_VALUES) * SOLVER_BYTES
    return max(num_inputs**2 * 38, num_inputs**2 * 20 + chunk)


class _Sizes:
    """Weights of a layer, of its largest matrix and of the head; bytes of what is seen of text."""

    def __init__(self, spec: ModelSpec, calibration_tokens: int) -> None:
        shapes = linear_shapes(spec)
        layer = [shapes[f"layers.0.{n}"] for n in ("qkv", "o", "gate_up", "down")]
        self.layer = sum(math.prod(shape) for shape in layer)
        self.largest = max(math.prod(shape) for shape in layer)
        self.head = math.prod(shapes["head"])
        self.inputs = max(k for _, k in shapes.values())
        self.hessians = sum(k * k for _, k in layer) * 8
        self.states = (calibration_tokens + 8192) * spec.hidden_size * 4
        window = min(WINDOW, spec.max_position)
        heads = spec.num_heads * window * window * 64  # attention of one window, in fp32 and fp64
        self.window = heads + window * max(n + k for n, k in layer) * 16


def check_memory(spec: ModelSpec, calibration_tokens: int, room: Room) -> None:
    """Refuse a conversion that memory cannot hold. Raises BudgetError with the numbers."""
    if room.device_bytes is None and not room.shared:
        parts = [("memory", conversion_bytes(spec, calibration_tokens), room.host_bytes)]
    else:
        host, device = host_bytes(spec), device_bytes(spec, calibration_tokens)
        parts = [("memory", host, room.host_bytes), ("GPU memory", device, room.device_bytes)]
        if room.shared:
            parts = [("memory shared with the GPU", host + device, room.host_bytes)]
    for what, need, free in parts:
        if free is not None and need > free:
            raise BudgetError(
                f"{what}: conversion needs about {need / 2**30:.1f} GiB, "
                f"{free / 2**30:.1f} GiB are available",
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
