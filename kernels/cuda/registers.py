"""Registers of passes on the device: made once for the rows of a chunk, shared by all programs.

Invariant: a register stays where it is as long as this object lives, so that graphs may write to
it; the rows of a pass are the first of it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from edge_runtime.kernels import ops
from edge_runtime.kernels.cuda import sizes
from edge_runtime.kernels.cuda.activations import Activation
from edge_runtime.kernels.cuda.linear import DIGIT_ROWS, Digits
from edge_runtime.kernels.cuda.memory import Block, asking_for
from edge_runtime.kernels.layout import padded

HINT = "free memory of the GPU, or use a smaller model"
Piece = tuple[tuple[int, ...], torch.dtype]


class Registers:
    """By name and width: numbers fp32 [rows, width], and quantised rows. By width alone: sums
    as digits, and the peaks of silu·mul."""

    def __init__(self, group_size: int, device: torch.device, rows: int) -> None:
        """rows: of a pass, at most."""
        self._group_size, self._device, self._rows = group_size, device, rows
        self._tensors: dict[Any, tuple[Tensor, ...]] = {}
        self.num_bytes = 0

    def add(self, program: ops.Program, geometry: ops.Geometry, outputs: dict[str, int]) -> None:
        """Make what a program writes and is not there yet, in one allocation. outputs: of linears.

        Raises BudgetError.
        """
        wanted: dict[Any, list[Piece]] = {}
        for kind, name, width in _written(program, geometry, outputs):
            if kind == "floats":
                wanted[kind, name, width] = [((self._rows, width), torch.float32)]
            else:
                groups = padded(width, self._group_size) // self._group_size
                wanted["quantised", name, width] = [
                    ((self._rows, groups * self._group_size), torch.int8),
                    ((self._rows,), torch.float32),
                    ((self._rows, groups), torch.int32),
                ]
                wanted["digits", groups] = [
                    ((2 * self._rows * padded(groups, sizes.DIGIT_GROUPS),), torch.int8),
                    ((self._rows,), torch.int32),
                ]
            if kind == "silu":
                chunks = -(-width // sizes.SILU_CHUNK)
                wanted["peaks", chunks] = [((self._rows * chunks,), torch.int32)]
        missing = {key: pieces for key, pieces in wanted.items() if key not in self._tensors}
        every = [piece for pieces in missing.values() for piece in pieces]
        size = sum(sizes.piece(math.prod(s) * t.itemsize) for s, t in every)
        with asking_for("the registers of a pass", size, self._device, HINT):
            block = Block(size, self._device)
        for key, pieces in missing.items():
            self._tensors[key] = tuple(block.take(*piece) for piece in pieces)
        self.num_bytes += size

    def floats(self, name: str, width: int, rows: int) -> Tensor:
        """Return fp32 [rows, width]."""
        return self._tensors["floats", name, width][0][:rows]

    def quantised(self, name: str, width: int, rows: int) -> Activation:
        """Return room for quantised rows of `width` numbers."""
        return Activation(*(part[:rows] for part in self._tensors["quantised", name, width]))

    def digits(self, sums: Tensor) -> Digits:
        """Return room for sums int32 [rows, groups] as digits."""
        rows, groups = padded(sums.shape[0], DIGIT_ROWS), sums.shape[1]
        digits, total = self._tensors["digits", groups]
        shape = (2, rows, padded(groups, sizes.DIGIT_GROUPS))
        return Digits(digits[: math.prod(shape)].view(shape), total[:rows])

    def peaks(self, gate_up: Tensor) -> Tensor:
        """Return int32 [rows, chunks] for fp32 [rows, 2F]."""
        rows, chunks = gate_up.shape[0], -(-gate_up.shape[1] // 2 // sizes.SILU_CHUNK)
        return self._tensors["peaks", chunks][0][: rows * chunks].view(rows, chunks)


def _written(
    program: ops.Program, geometry: ops.Geometry, outputs: dict[str, int]
) -> Iterator[tuple[str, str, int]]:
    """Yield kind ("floats", "quantised", "silu"), name and width of what ops write, but logits and
    selected rows, which lie elsewhere."""
    widths: dict[str, int] = {}
    for op in program:
        match op:
            case ops.Embed(out):
                widths[out] = geometry.hidden_size
            case ops.NormQuantise(x, out, _) | ops.Quantise(x, out):
                yield "quantised", out, widths[x]
                continue
            case ops.SiluMulQuantise(x, out):
                yield "silu", out, widths[x] // 2
                continue
            case ops.SelectRows(x, out):
                widths[out] = widths[x]
                continue
            case ops.Linear(_, weight, out):
                if out == "logits":
                    continue
                widths[out] = outputs[weight]
            case ops.RopeKv(_, out) | ops.Attention(_, out):
                widths[out] = geometry.num_heads * geometry.head_dim
        yield "floats", op.out, widths[op.out]
