"""Tiles of the linear by device, as data: which form and which sizes a shape gets.

Invariant: a line changes time only, never a bit (the linear is an integer function). No line looks
at M within 1…8 or within 9…16 on Orin, so that a verified row costs there what a drafted one does.
Each table is read from the top; the first line that fits is taken, and the last one fits all.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from edge_runtime.kernels.ops import View


class Tile(NamedTuple):
    """rows: of weights in a program. columns: tokens (mma), or quads of 32 inputs (dot4)."""

    form: Literal["mma", "dot4"]
    rows: int
    columns: int
    warps: int
    stages: int = 3
    step: int = 128  # inputs of a loop step, where the number of groups allows it
    max_registers: int | None = None

    def unroll(self, group_size: int, groups: int) -> int:
        """Groups of a loop step; it divides their number."""
        most = max(1, self.step // group_size)
        return next(u for u in range(most, 0, -1) if groups % u == 0)

    @property
    def ahead(self) -> bool:
        """Whether multipliers are read a step ahead: with less than 4 bytes of them for a thread
        they cannot be copied to shared memory in the background."""
        return self.rows < 64 * self.warps


class Line(NamedTuple):
    """The tile of a view for up to max_rows tokens, on matrices of at least min_outputs rows."""

    view: View
    max_rows: int
    min_outputs: int
    tile: Tile


ANY = 1 << 31

ORIN = (
    Line("w4", 8, 0, Tile("mma", 64, 8, 2)),
    Line("w8", 8, 0, Tile("mma", 64, 8, 2)),
    Line("w4", 16, 0, Tile("mma", 64, 16, 2)),
    Line("w8", 16, 0, Tile("mma", 64, 16, 2)),
    Line("w4", ANY, 0, Tile("mma", 64, 64, 4)),
    Line("w8", ANY, 0, Tile("mma", 64, 64, 4)),
)

HOPPER = (
    Line("w4", 1, 0, Tile("dot4", 4, 32, 4)),
    Line("w8", 1, 0, Tile("dot4", 4, 32, 4)),
    Line("w4", 8, 0, Tile("mma", 32, 8, 1)),
    Line("w8", 8, 0, Tile("mma", 32, 8, 1)),
    Line("w4", 16, 0, Tile("mma", 32, 16, 1)),
    Line("w8", 16, 0, Tile("mma", 32, 16, 1)),
    Line("w4", ANY, 0, Tile("mma", 128, 128, 8)),
    Line("w8", ANY, 0, Tile("mma", 128, 128, 8)),
)

TABLES = {87: ORIN, 90: HOPPER}  # by compute capability; what is not listed takes ORIN


def choose(arch: int, view: View, M: int, N: int, min_columns: int = 8) -> Tile:
    """Return the tile for [M, K] x [N, K] on compute capability `arch` (87 is 8.7)."""
    table = TABLES.get(arch, ORIN)
    tile = next(
        line.tile
        for line in table
        if line.view == view and line.max_rows >= M and line.min_outputs <= N
    )
    if tile.form == "mma" and tile.columns < min_columns:
        return tile._replace(columns=min_columns)
    return tile
