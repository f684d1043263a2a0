"""Tiles of the linear by device, as data: which form and which sizes a shape gets.

Invariant: a line changes time only, never a bit (the linear is an integer function). No line looks
at M within 1…8 or within 9…16 on Orin, so that a verified row costs there what a drafted one does.
Each table is read from the top; the first line that fits is taken, and the last one fits all.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:  # planning reads the tables, without numpy
    from edge_runtime.kernels.ops import View


class Tile(NamedTuple):
    """rows: of weights in a program. columns: tokens, or quads of 32 inputs (dot4)."""

    form: Literal["mma", "dot4", "prompt"]
    rows: int
    columns: int
    warps: int
    stages: int = 3
    step: int = 128  # inputs of a loop step, where the number of groups allows it
    max_registers: int | None = None  # with groups of 128; smaller ones would spill
    strips: int = 1  # of a prompt's tokens in a program, each summed before the next: 1 or 2

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
    """The tile of a view for up to max_rows tokens, on matrices of at least min_outputs rows in
    groups of at least min_group."""

    view: View
    max_rows: int
    min_outputs: int
    tile: Tile
    min_group: int = 32


ANY = 1 << 31

# Orin: sm_87 code, timed on 8 multiprocessors of an H200 in bytes per clock and multiprocessor
# (`tools/bench_cuda_linear.py`); an Orin NX needs 13.9 for its pin bandwidth. K = 4096, G = 128.
ORIN = (
    Line("w4", 8, 8192, Tile("mma", 64, 8, 1)),  # N = 22016: 36.9; two warps of 128 rows 36.5
    Line("w4", 8, 0, Tile("mma", 64, 8, 1, 4)),  # N = 4096: 31.4; 3 stages 30.5
    Line("w8", 8, 0, Tile("mma", 64, 8, 1)),  # 22016: 44.8, 4096: 41.4; 4 stages 42.7 and 41.1
    # 22016: 26.9, 4096: 24.8; without the cap on registers 23.7
    Line("w4", 16, 0, Tile("mma", 64, 16, 1, 3, max_registers=160), 64),
    Line("w4", 16, 0, Tile("mma", 64, 16, 2)),  # groups of 32: the line above would spill
    Line("w8", 16, 0, Tile("mma", 128, 16, 2)),  # 22016: 28.8, 4096: 29.2; 64 rows 28.3 and 27.1
    # 11008x4096; 17, 64, 288, 1024 rows, us: w4 109, 213, 870, 3061 (mma 32x32 107, 208, 878,
    # 3088); w8 130, 254, 1088, 3843 in one strip, 243, 1080, 3448 at the last three in two; 128
    # rows of weights in four warps 252, 1135, 3677; the form of few rows (mma 32x32) 168 at 17
    Line("w4", ANY, 0, Tile("prompt", 64, 32, 2), 64),
    Line("w8", 32, 0, Tile("prompt", 64, 32, 2), 64),
    Line("w8", ANY, 0, Tile("prompt", 64, 64, 2, strips=2), 64),
    Line("w4", ANY, 0, Tile("mma", 32, 32, 1)),
    Line("w8", ANY, 0, Tile("mma", 32, 32, 1)),
)

# Hopper: native code on the whole H200, microseconds; K = 4096, G = 128.
HOPPER = (
    # 22016x4096 and 4096x11008, tensor cores behind: one row w4 11.5 and 6.7 (17.1, 18.7), w8 20.6
    # and 11.1 (30.1, 24.5); w8, two rows 22.6 and 12.8 (32.3, 39.0), five 30.3 and 18.2 (31.2,
    # 39.4), eight 37.8 (31.5) and 27.1 (40.1); where they are close, by what a whole pass takes
    Line("w4", 1, 8192, Tile("dot4", 4, 64, 2)),
    Line("w4", 1, 0, Tile("dot4", 4, 128, 2)),
    Line("w8", 1, 8192, Tile("dot4", 2, 64, 2)),
    Line("w8", 2, 8192, Tile("dot4", 4, 64, 1)),
    Line("w8", 3, 0, Tile("dot4", 4, 64, 2)),
    Line("w8", 5, 0, Tile("dot4", 4, 32, 1)),
    Line("w8", 8, 8192, Tile("mma", 64, 8, 2, 3, 256)),
    Line("w8", 8, 0, Tile("dot4", 2, 32, 1)),
    Line("w4", 8, 8192, Tile("mma", 128, 8, 2, 4, 256)),  # 22016: 17.6; step 128 22.9
    Line("w4", 8, 0, Tile("mma", 16, 8, 1, 4, 256)),  # 4096: 9.4; 64 rows 11.1
    Line("w4", 16, 8192, Tile("mma", 128, 16, 2, 3, 256)),  # 22016: 19.4
    Line("w4", 16, 0, Tile("mma", 16, 16, 1, 4, 256)),  # 4096: 11.2
    Line("w8", 16, 8192, Tile("mma", 128, 16, 4, 3, 256)),  # 22016: 35.2
    Line("w8", 16, 0, Tile("mma", 16, 16, 1, 4, 256)),  # 4096: 14.0
    # 11008x4096; 17, 64, 288, 1024 rows, us: w4 30, 21, 60, 166; w8 36, 29, 75, 193
    Line("w4", 512, 0, Tile("prompt", 64, 32, 4, max_registers=128), 64),
    Line("w8", 512, 0, Tile("prompt", 64, 32, 4, max_registers=128), 64),
    Line("w4", ANY, 0, Tile("prompt", 64, 64, 4), 64),  # 1024: 159; 64x128 166, 128x128 173
    Line("w8", ANY, 0, Tile("prompt", 64, 64, 4), 64),  # 1024: 185; 64x128 193, 128x128 196
    Line("w4", ANY, 0, Tile("mma", 64, 32, 4)),
    Line("w8", ANY, 0, Tile("mma", 64, 32, 4)),
)

TABLES = {87: ORIN, 90: HOPPER}  # by compute capability; what is not listed takes ORIN

# Rows of a tile of the planes (`linear.DeviceLinear`). Orin: whole lines in place of 64-byte pieces
# take w8 from 38.2 to 44.8 and w4 from 34.4 to 37.3 at 8 rows. The dp4a form reads plain rows.
ROW_TILES = {87: 64, 90: 1}


def choose(
    arch: int, view: View, M: int, N: int, group_size: int = 128, min_columns: int = 8
) -> Tile:
    """Return the tile for [M, K] x [N, K] on compute capability `arch` (87 is 8.7)."""
    table = TABLES.get(arch, ORIN)
    tile = next(
        line.tile
        for line in table
        if line.view == view
        and line.max_rows >= M
        and line.min_outputs <= N
        and line.min_group <= group_size
    )
    if tile.form == "mma" and tile.columns < min_columns:
        return choose(arch, view, min_columns, N, group_size, min_columns)
    return tile
