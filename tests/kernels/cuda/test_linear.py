"""The dual-plane linear in Triton: bits equal to the reference for every M, tile, form and size."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from random_weights import random_linear
from triton_devices import DEVICES, device_of

from edge_runtime.kernels import ops, pack
from edge_runtime.kernels.cuda import linear as cuda
from edge_runtime.kernels.cuda.tiles import ANY, HOPPER, ORIN, Tile, choose
from edge_runtime.kernels.reference.linear import ExactLinear

pytest.importorskip("triton")
F = np.float32
SMALL = Tile("mma", 32, 8, 1)
WIDE = Tile("mma", 32, 16, 2)
DOT4 = Tile("dot4", 4, 8, 1)
PROMPT = Tile("prompt", 32, 32, 1)
STRIPS = Tile("prompt", 32, 64, 2, strips=2)


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    return device_of(request.param)


def activation(rng: np.random.Generator, M: int, Kp: int) -> tuple[torch.Tensor, torch.Tensor]:
    codes = torch.from_numpy(rng.integers(-127, 128, (M, Kp), dtype=np.int8))
    return codes, torch.from_numpy(rng.uniform(0.01, 2, M).astype(F))


def run(
    w: ops.LinearWeights, view: ops.View, codes: torch.Tensor, scale: torch.Tensor, device: str,
    tile: Tile | None = None, residual: torch.Tensor | None = None, row_tile: int = 1,
) -> torch.Tensor:  # fmt: skip
    """The launcher, into a poisoned output with a guard row behind it."""
    M, N = codes.shape[0], len(w.scale)
    if tile is not None and tile.form == "mma":
        from edge_runtime.kernels.cuda.launch import triton_columns

        tile = tile._replace(columns=max(tile.columns, triton_columns()))
    on = codes.to(device)
    out = torch.full((M + 1, N), float("nan"), device=device)
    weight = cuda.DeviceLinear.from_weights(w, device, row_tile=row_tile, dot4=True)
    y = cuda.linear(
        on, scale.to(device), cuda.group_sums(on, w.group_size), weight, view, out=out[:M],
        residual=None if residual is None else residual.to(device), tile=tile,
    )  # fmt: skip
    assert y.data_ptr() == out.data_ptr()
    assert out[M].isnan().all()
    return y.cpu()


def check(
    w: ops.LinearWeights, view: ops.View, M: int, device: str, tile: Tile | None = None,
    *, with_residual: bool = False,
) -> None:  # fmt: skip
    rng = np.random.default_rng(M)
    codes, scale = activation(rng, M, 2 * w.base.shape[1])
    want = ExactLinear.from_weights(w, view)(codes.float(), scale)
    residual = torch.randn(want.shape) if with_residual else None
    got = run(w, view, codes, scale, device, tile, residual)
    want = want if residual is None else want + residual
    assert torch.equal(got.view(torch.int32), want.view(torch.int32))


def case(N: int, K: int, G: int, *, bias: bool = False, seed: int = 0) -> ops.LinearWeights:
    return random_linear(np.random.default_rng(seed), N, K, G, bias=bias)


@pytest.mark.parametrize("view", ["w4", "w8"])
@pytest.mark.parametrize("tile", [SMALL, DOT4])
@pytest.mark.parametrize(("N", "K", "G"), [
    (1, 576, 64), (15, 960, 64), (17, 576, 64), (100, 256, 128), (32, 384, 128), (17, 96, 32),
    (33, 200, 32),
])  # fmt: skip
def test_one_row(N: int, K: int, G: int, tile: Tile, view: ops.View, device: str) -> None:
    check(case(N, K, G), view, 1, device, tile)


@pytest.mark.parametrize("view", ["w4", "w8"])
@pytest.mark.parametrize("M", range(2, 9))
def test_few_rows_without_tensor_cores(M: int, view: ops.View, device: str) -> None:
    for tile in (DOT4, DOT4._replace(rows=2)):
        N = 2 * tile.rows + M % 2  # whole programs alone, or a part of one
        check(case(N, 320, 64, bias=True), view, M, device, tile, with_residual=True)


@pytest.mark.parametrize("view", ["w4", "w8"])
@pytest.mark.parametrize("rows", [2, 4])
def test_whole_steps_without_tensor_cores(rows: int, view: ops.View, device: str) -> None:
    """Several groups a step and several steps, none of them in part, as of 4,096 inputs."""
    for M, quads in ((1, 8), (3, 16)):
        tile = DOT4._replace(rows=rows, columns=quads)
        check(case(2 * rows, 1024, 128), view, M, device, tile)


@pytest.mark.parametrize("view", ["w4", "w8"])
@pytest.mark.parametrize("M", [2, 3, 4, 5, 6, 7, 8, 9, 11, 13, 15, 16, 17, 33])
def test_rows(M: int, view: ops.View, device: str) -> None:
    check(case(33, 320, 64), view, M, device, WIDE)


@pytest.mark.parametrize("view", ["w4", "w8"])
@pytest.mark.parametrize("M", [1, 16, 70])
@pytest.mark.parametrize("G", [32, 64, 128])
def test_the_tables_own_tile(G: int, M: int, view: ops.View, device: str) -> None:
    check(case(70, 256, G), view, M, device)


@pytest.mark.parametrize("tile", [SMALL, DOT4])
@pytest.mark.parametrize("with_residual", [False, True])
def test_bias_and_residual(with_residual: bool, tile: Tile, device: str) -> None:
    check(case(19, 128, 64, bias=True), "w8", 1, device, tile, with_residual=with_residual)


@pytest.mark.parametrize("view", ["w4", "w8"])
@pytest.mark.parametrize("tile", [PROMPT, STRIPS])
@pytest.mark.parametrize(("N", "K", "G", "M", "row_tile"), [
    (1, 576, 64, 17, 1), (70, 300, 128, 33, 64), (33, 2112, 64, 65, 16), (40, 4352, 128, 20, 1),
])  # fmt: skip
def test_prompt(
    N: int, K: int, G: int, M: int, row_tile: int, tile: Tile, view: ops.View, device: str
) -> None:
    """More groups than a step of the correction takes, and fewer; odd sizes; bias and residual."""
    w = case(N, K, G, bias=True)
    codes, scale = activation(np.random.default_rng(0), M, 2 * w.base.shape[1])
    residual = torch.randn(M, N)
    want = ExactLinear.from_weights(w, view)(codes.float(), scale) + residual
    got = run(w, view, codes, scale, device, tile, residual, row_tile=row_tile)
    assert torch.equal(got, want)


@pytest.mark.parametrize(("M", "groups"), [(1, 1), (17, 9), (130, 33)])
def test_sums_as_digits(M: int, groups: int, device: str) -> None:
    sums = torch.randint(-16256, 16257, (M, groups), dtype=torch.int32)
    sums[0, 0], sums[-1, -1] = -16256, 16256
    room = cuda.new_digits(M + 128, groups, device)
    for tensor in room:
        tensor.fill_(99)
    found = cuda.digits_of(sums.to(device), room)
    assert found.digits is room.digits
    low, high = found.digits.cpu().int()
    assert torch.equal((128 * high + low)[:M, :groups], sums)
    for digit in (low, high):
        assert not digit[M:].any()
        assert not digit[:, groups:].any()
    total = found.total.cpu()
    assert torch.equal(total[:M], sums.sum(1, dtype=torch.int32))
    assert not total[M:].any()


@pytest.mark.parametrize("view", ["w4", "w8"])
@pytest.mark.parametrize("row_tile", [16, 64])
@pytest.mark.parametrize(("N", "K", "G"), [(1, 576, 64), (70, 256, 128), (64, 160, 32)])
def test_planes_in_tiles(
    N: int, K: int, G: int, row_tile: int, view: ops.View, device: str
) -> None:
    w = case(N, K, G)
    codes, scale = activation(np.random.default_rng(0), 3, 2 * w.base.shape[1])
    want = ExactLinear.from_weights(w, view)(codes.float(), scale)
    for tile in (SMALL, Tile("mma", 64, 8, 1)):
        assert torch.equal(run(w, view, codes, scale, device, tile, row_tile=row_tile), want)


def test_the_residual_may_be_the_output(device: str) -> None:
    w = case(19, 128, 64)
    codes, scale = activation(np.random.default_rng(0), 3, 128)
    x = torch.randn(3, 19)
    want = ExactLinear.from_weights(w, "w8")(codes.float(), scale) + x
    on, stream = codes.to(device), x.clone().to(device)
    weight = cuda.DeviceLinear.from_weights(w, device, dot4=True)
    cuda.linear(
        on, scale.to(device), cuda.group_sums(on, 64), weight, "w8", out=stream, residual=stream
    )
    assert torch.equal(stream.cpu(), want)


@pytest.mark.parametrize("tile", [SMALL, DOT4, Tile("mma", 32, 64, 4), STRIPS])
@pytest.mark.parametrize("G", [32, 64, 128])
@pytest.mark.parametrize("view", ["w4", "w8"])
def test_every_pair_of_nibbles_at_the_largest_numbers(
    view: ops.View, G: int, tile: Tile, device: str
) -> None:
    """All 256 byte pairs, the illegal ones too, times ±127 and multipliers of ±32767."""
    if tile.form == "prompt" and G == 32:
        pytest.skip("groups of 32 have no prompt form")
    base = (np.arange(256)[None] // 16 + np.arange(16)[:, None]) % 16 - 8
    refine = np.broadcast_to(np.arange(256) % 16 - 8, (16, 256))
    mult = np.where(np.arange(16 * (256 // G)) % 3 == 0, -32767, 32767).reshape(16, -1)
    w = dataclasses.replace(
        case(16, 256, G),
        base=pack.pack_base(base.astype(np.int8), G),
        refine=pack.pack_refine(refine.astype(np.int8), G),
        mult=mult.astype(np.int16),
    )
    codes = torch.full((3, 256), 127, dtype=torch.int8)
    codes[1] = -127
    codes[2, ::2] = 0
    want = ExactLinear.from_weights(w, view)(codes.float(), torch.ones(3))
    got = run(w, view, codes, torch.ones(3), device, tile)
    assert torch.equal(got, want)


@pytest.mark.parametrize("tile", [SMALL, DOT4, PROMPT])
def test_sums_past_32_bits_are_rounded_once(tile: Tile, device: str) -> None:
    """Against integers of any size: one code and one activation, so that only the sum is large."""
    w = dataclasses.replace(
        case(4, 4096, 128),
        base=pack.pack_base(np.full((4, 4096), -8, np.int8), 128),
        refine=pack.pack_refine(np.zeros((4, 4096), np.int8), 128),
        mult=np.array([[32767], [-32767], [32765], [1]], np.int16).repeat(32, 1),
        scale=np.array([1, 0.5, -1, 1e-3], F),
    )
    codes = torch.full((1, 4096), 127, dtype=torch.int8)
    codes[0, 0] = 126
    got = run(w, "w8", codes, torch.tensor([3.0]), device, tile)
    total = [-128 * (126 + 127 * 4095) * int(m) for m in w.mult[:, 0]]
    want = (np.array([F(t) for t in total], F) * F(3)) * w.scale
    assert abs(total[0]) > 2**40
    assert np.array_equal(got.numpy()[0], want)


@pytest.mark.parametrize("tile", [SMALL, DOT4, PROMPT])
def test_zero_groups_and_zero_rows(tile: Tile, device: str) -> None:
    w = case(16, 256, 64)
    w.mult[:, 1] = 0
    w.mult[3] = 0
    check(w, "w8", 1, device, tile)
    zero = torch.zeros(1, 256, dtype=torch.int8)
    got = run(w, "w8", zero, torch.zeros(1), device, tile)
    assert torch.equal(got.abs(), torch.zeros(1, 16))


def test_not_a_number_is_passed_on(device: str) -> None:
    codes = torch.zeros(2, 64, dtype=torch.int8)
    got = run(case(5, 64, 64), "w8", codes, torch.tensor([float("nan"), 1.0]), device)
    assert got[0].isnan().all()
    assert not got[1].isnan().any()


def test_bits_do_not_depend_on_tile_rows_or_neighbours(device: str) -> None:
    w = case(40, 256, 64, bias=True)
    codes, scale = activation(np.random.default_rng(1), 20, 256)
    tiles = [
        SMALL, WIDE, Tile("mma", 16, 16, 1, 2), Tile("mma", 64, 8, 2, 4, step=256),
        Tile("mma", 64, 64, 4),
    ]  # fmt: skip
    whole = run(w, "w8", codes, scale, device, Tile("mma", 64, 32, 4))
    for tile in tiles:
        for lo, hi in ((0, 1), (3, 8), (4, 20)):
            part = run(w, "w8", codes[lo:hi], scale[lo:hi], device, tile)
            assert torch.equal(part, whole[lo:hi]), tile
    assert torch.equal(run(w, "w8", codes[7:8], scale[7:8], device, DOT4), whole[7:8])


def test_the_draft_does_not_read_the_refinement(device: str) -> None:
    w = case(17, 128, 64)
    other = dataclasses.replace(w, refine=w.refine ^ np.uint8(0xA5))
    codes, scale = activation(np.random.default_rng(1), 2, 128)
    both = [run(v, "w4", codes, scale, device, SMALL) for v in (w, other)]
    assert torch.equal(*both)


@pytest.mark.slow
def test_a_hundred_runs(device: str) -> None:
    if device == "cpu":  # a race needs programs that run together
        pytest.skip("the interpreter runs one program at a time")
    w = case(1000, 960, 64)
    codes, scale = activation(np.random.default_rng(1), 8, 960)
    first = run(w, "w8", codes, scale, device)
    assert all(torch.equal(run(w, "w8", codes, scale, device), first) for _ in range(100))


def bytes_of(words: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return words.view(np.int8).reshape(-1, 4).astype(np.int32)


@pytest.mark.parametrize(
    "form", ["w8_codes", "w4_codes", "w8_word_codes", "w4_word_codes", "dot4", "multiply_add"]
)
def test_assembly_equals_its_twin(form: str, device: str) -> None:
    """On all byte pairs and on random words. The interpreter runs the twin against numpy."""
    from unpack_probes import probe

    rng = np.random.default_rng(0)
    base, refine = (a.astype(np.uint8).ravel() for a in np.mgrid[:256, :256])
    a, b = rng.integers(-(2**31), 2**31, (2, 65536)).astype(np.int32)
    c = rng.integers(-(2**62), 2**62, 65536)
    w8, w4 = [base << 4 | refine & 15, base & 240 | refine >> 4], [base << 4, base & 240]
    want: dict[str, list[Any]] = {
        "w8_codes": w8,
        "w4_codes": w4,
        "w8_word_codes": w8,
        "w4_word_codes": w4,
        "dot4": [np.einsum("nb,nb->n", bytes_of(a), bytes_of(b))],
        "multiply_add": [a.astype(np.int64) * b + c],
    }
    tensors = [torch.from_numpy(t.copy()).to(device) for t in (base, refine, a, b, c)]
    for assembly in [False] if device == "cpu" else [False, True]:
        for got, right in zip(probe(form, tensors, assembly), want[form], strict=True):
            assert np.array_equal(got.cpu().numpy().view(right.dtype), right), assembly


def test_tables() -> None:
    for table in (ORIN, HOPPER):
        for view in ("w4", "w8"):
            last = [line for line in table if line.view == view][-1]
            assert (last.max_rows, last.min_outputs) == (ANY, 0), "a shape without a tile"
    for view in ("w4", "w8"):
        tiles = {choose(87, view, M, 4096) for M in range(1, 9)}
        assert len(tiles) == 1, "on Orin eight rows cost what one does"
        assert choose(87, view, 1, 4096, min_columns=16).columns == 16
        assert choose(53, view, 1, 4096) == choose(87, view, 1, 4096)
