"""Weights on the device, brought there one linear at a time.

Invariant: while they come, the device holds no more than in the end, and the host one linear: the
pages of its file are given back after each. The head, mostly the largest, comes first.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from edge_runtime.kernels import ops
from edge_runtime.kernels.cuda import sizes
from edge_runtime.kernels.cuda.linear import DeviceLinear
from edge_runtime.kernels.cuda.memory import Block, asking_for

BLOCK_BYTES = 256 << 20  # of several linears: one huge allocation may fail where pieces fit
COPIED_BYTES = 16 << 20  # of a table, at a time: what its copy takes on the host
HINT = "free memory of the GPU, or use a smaller model"
DRAFT_PARTS = ("base", "mult", "scale", "mult_rows")  # of `sizes.linear`: what the w4 view reads


@dataclass(frozen=True, slots=True)
class DeviceWeights:
    """All of `ops.ModelWeights` on one device; num_bytes: of all of it."""

    linears: dict[str, DeviceLinear]
    embedding: Tensor
    embedding_scale: Tensor
    cos: Tensor
    sin: Tensor
    head_norms: dict[str, Tensor]
    num_bytes: int

    @property
    def group_size(self) -> int:
        """G, of all linears."""
        return next(iter(self.linears.values())).group_size


def load(weights: ops.ModelWeights, device: torch.device, arch: int) -> DeviceWeights:
    """Copy weights to a device; arch: for whose tiles. Raises BudgetError."""
    needed = {name: _linear_bytes(weights.linears[name], arch) for name in weights.linears}
    small = _small(weights)
    rest = sum(sizes.piece(array.nbytes) for array in small.values())
    total = sum(needed.values()) + rest
    linears: dict[str, DeviceLinear] = {}
    with asking_for("the weights", total, device, HINT):
        for names in _blocks(dict(reversed(needed.items()))):
            block = Block(sum(needed[name] for name in names), device)
            for name in names:
                linears[name] = _put_linear(block, weights.linears[name], arch)
                weights.release()
        block = Block(rest, device)
        put = {name: _put_array(block, array) for name, array in small.items()}
        weights.release()
    tables = {name: put.pop(name) for name in _TABLES}
    return DeviceWeights(linears=linears, head_norms=put, num_bytes=total, **tables)


def load_draft(
    weights: ops.ModelWeights, target: DeviceWeights, device: torch.device, arch: int
) -> tuple[dict[str, DeviceLinear], int]:
    """Copy the base planes of all linears, with scales of their own, beside a target whose biases
    they share; return them and their bytes. Raises BudgetError."""
    needed = {
        name: sum(_linear_sizes(weights.linears[name], arch)[part] for part in DRAFT_PARTS)
        for name in weights.linears
    }
    draft: dict[str, DeviceLinear] = {}
    with asking_for("the draft's copy of the weights", sum(needed.values()), device, HINT):
        for names in _blocks(needed):
            block = Block(sum(needed[name] for name in names), device)
            for name in names:
                draft[name] = _put_draft(block, weights.linears[name], target.linears[name], arch)
                weights.release()
    return draft, sum(needed.values())


_TABLES = ("embedding", "embedding_scale", "cos", "sin")


def _small(weights: ops.ModelWeights) -> dict[str, NDArray[Any]]:
    """All that is no linear: tables under their fields' names, head norms under their own."""
    return {name: getattr(weights, name) for name in _TABLES} | weights.head_norms


def _linear_bytes(w: ops.LinearWeights, arch: int) -> int:
    return sum(_linear_sizes(w, arch).values())


def _linear_sizes(w: ops.LinearWeights, arch: int) -> dict[str, int]:
    N, half = w.base.shape
    return sizes.linear(N, 2 * half, w.group_size, arch, bias=w.bias is not None)


def _blocks(needed: dict[str, int]) -> Iterator[list[str]]:
    """Cut a list of names into blocks of at most BLOCK_BYTES, or one name."""
    names: list[str] = []
    size = 0
    for name, more in needed.items():
        if names and size + more > BLOCK_BYTES:
            yield names
            names, size = [], 0
        names.append(name)
        size += more
    yield names


def _put_linear(block: Block, w: ops.LinearWeights, arch: int) -> DeviceLinear:
    host = DeviceLinear.from_weights(
        w, "cpu", row_tile=sizes.row_tile(arch), dot4=sizes.by_row(arch)
    )
    tensors: dict[str, Any] = {
        field.name: block.put(value)
        for field in dataclasses.fields(host)
        if isinstance(value := getattr(host, field.name), Tensor)
    }
    return dataclasses.replace(host, **tensors)


def _put_draft(block: Block, w: ops.LinearWeights, target: DeviceLinear, arch: int) -> DeviceLinear:
    """A linear that only the w4 view can read: its refinement is never looked at."""
    base_alone = dataclasses.replace(w, refine=w.refine[:0], bias=None)
    host = DeviceLinear.from_weights(
        base_alone, "cpu", row_tile=sizes.row_tile(arch), dot4=sizes.by_row(arch)
    )
    base = block.put(host.base)
    return dataclasses.replace(
        host,
        base=base,
        refine=base,
        mult=block.put(host.mult),
        scale=block.put(host.scale),
        bias=target.bias,
        mult_rows=None if host.mult_rows is None else block.put(host.mult_rows),
    )


def _put_array(block: Block, array: NDArray[Any]) -> Tensor:
    """Copy an array, which may lie in a file that is mapped, a piece at a time."""
    dtype = torch.from_numpy(np.empty(0, array.dtype)).dtype
    target = block.take(array.shape, dtype)
    rows = max(1, COPIED_BYTES // max(1, array.nbytes // max(1, len(array))))
    for first in range(0, len(array), rows):
        part = np.array(array[first : first + rows])
        target[first : first + rows].copy_(torch.from_numpy(part))
    return target
