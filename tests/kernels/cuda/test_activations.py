"""Quantisers, norm and silu·mul in Triton: bits equal to the reference, whatever the row holds."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from triton_devices import DEVICES, device_of

from edge_runtime.kernels.layout import padded
from edge_runtime.kernels.reference import numeric

SIZES = [1, 31, 32, 33, 100, 576, 960, 1025]
TINY = np.float32(2.0**-100)


def special_rows(K: int, seed: int = 0) -> torch.Tensor:
    """Rows that a quantiser may trip over, fp32 [rows, K]."""
    rng = np.random.default_rng(seed)
    normal = rng.standard_normal(K)
    ties = (np.arange(K) % 127) + 0.5
    ties[0] = 127  # codes are the numbers themselves, halfway between integers
    rows = [
        normal, np.zeros(K), -np.zeros(K), normal * 1e-3, normal * 1e-40, normal * 1e-30,
        np.full(K, TINY), np.full(K, np.nextafter(TINY, np.float32(0))), normal * 1e19,
        normal * 3e37, np.full(K, -3.4e38), ties, -ties,
        np.where(np.arange(K) == K - 1, 1e4, normal),
    ]  # fmt: skip
    return torch.from_numpy(np.stack(rows).astype(np.float32))


def broken_rows(K: int) -> torch.Tensor:
    """NaN and infinity at the first, a middle and the last place."""
    rows = special_rows(K)[:1].repeat(9, 1)
    for i, value in enumerate((float("nan"), float("inf"), float("-inf"))):
        for j, at in enumerate((0, K // 2, K - 1)):
            rows[3 * i + j, at] = value
    return rows


def poisoned(rows: int, K: int, G: int, device: str) -> Any:
    from edge_runtime.kernels.cuda import activations

    out = activations.new_activation(rows + 1, K, G, device)
    out.codes.fill_(99)
    out.scale.fill_(99.0)
    out.sums.fill_(99)
    return out


def check(out: Any, want: tuple[torch.Tensor, torch.Tensor], K: int, G: int) -> None:
    """Codes, scale and sums of all rows but the last, which must be as they were."""
    codes, scale, sums = out.codes.cpu(), out.scale.cpu(), out.sums.cpu()
    M, Kp = want[0].shape[0], padded(K, G)
    assert (codes[M:] == 99).all()
    assert (scale[M:] == 99).all()
    assert (sums[M:] == 99).all()
    assert torch.equal(scale[:M].view(torch.int32), want[1].view(torch.int32))
    assert torch.equal(codes[:M, :K].float(), want[0] + 0.0)
    assert (codes[:M, K:] == 0).all()
    grouped = codes[:M].view(M, Kp // G, G)
    assert torch.equal(sums[:M], grouped.sum(-1, dtype=torch.int32))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("G", [32, 64, 128])
@pytest.mark.parametrize("K", SIZES)
def test_quantise(K: int, G: int, device: str) -> None:
    device_of(device)
    from edge_runtime.kernels.cuda import activations

    x = special_rows(K)
    out = poisoned(len(x), K, G, device)
    activations.quantise(x.to(device), G, out)
    check(out, numeric.quantise(x), K, G)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("eps", [1e-5, 1e-6])
@pytest.mark.parametrize("K", SIZES)
def test_norm_quantise(K: int, eps: float, device: str) -> None:
    device_of(device)
    from edge_runtime.kernels.cuda import activations

    x = special_rows(K, 1)
    out = poisoned(len(x), K, 64, device)
    activations.norm_quantise(x.to(device), eps, 64, out)
    check(out, numeric.quantise(numeric.rms_norm(x, eps)), K, 64)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("K", SIZES)
def test_silu_mul_quantise(K: int, in_place: bool, device: str) -> None:
    device_of(device)
    from edge_runtime.kernels.cuda import activations

    rng = np.random.default_rng(2)
    spread = np.array([0.1, 1, 5, 30, 100, 1e-20, 1e10])[:, None]
    gate = (rng.standard_normal((7, K)) * spread).astype(np.float32)
    gate[:, ::7] = np.array([0, -0.0, -87, -87.00001, -86.99999, 88, -104])[:, None]
    gate, up = torch.from_numpy(gate), special_rows(K, 3)[:7]
    x = torch.cat((gate, up), 1)
    out = poisoned(7, K, 128, device)
    on_device = x.to(device)
    room = activations.new_silu_room(on_device, in_place=in_place)
    activations.silu_mul_quantise(on_device, 128, out, room)
    check(out, numeric.quantise(numeric.silu_mul(gate, up)), K, 128)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("K", [33, 1100])
def test_what_is_not_finite_gives_a_nan_scale_and_no_codes(K: int, device: str) -> None:
    device_of(device)
    from edge_runtime.kernels.cuda import activations

    x = broken_rows(K).to(device)
    ones = torch.ones_like(x)
    for out in (
        activations.quantise(x, 32),
        activations.norm_quantise(x, 1e-6, 32),
        activations.silu_mul_quantise(torch.cat((ones, x), 1), 32),
    ):
        assert torch.isnan(out.scale).all()
        assert (out.codes == 0).all()
        assert (out.sums == 0).all()


@pytest.mark.parametrize("device", DEVICES)
def test_a_row_does_not_depend_on_its_neighbours(device: str) -> None:
    device_of(device)
    from edge_runtime.kernels.cuda import activations

    x = special_rows(960, 5).repeat(3, 1)[:37].to(device)
    many = activations.norm_quantise(x, 1e-6, 64)
    for i in range(0, 37, 9):
        one = activations.norm_quantise(x[i : i + 1].contiguous(), 1e-6, 64)
        assert torch.equal(one.codes[0], many.codes[i])
        assert torch.equal(one.scale[0], many.scale[i])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("H", [1, 576, 1025])
def test_embedding(H: int, device: str) -> None:
    device_of(device)
    from edge_runtime.kernels.cuda import embedding

    rng = np.random.default_rng(0)
    table = torch.from_numpy(rng.integers(-127, 128, (50, H), dtype=np.int8))
    scale = torch.from_numpy(rng.standard_normal(50).astype(np.float32))
    ids = torch.tensor([0, 49, 7, 7, 13])
    want = table[ids].float() * scale[ids][:, None]
    table, scale = table.to(device), scale.to(device)
    for dtype in (torch.int32, torch.int64):
        out = torch.full((6, H), 99.0, device=device)
        embedding.embed(ids.to(dtype).to(device), table, scale, out=out[:5])
        assert torch.equal(out[:5].cpu(), want)
        assert (out[5] == 99).all()
    rows = torch.from_numpy(rng.standard_normal((5, H)).astype(np.float32))
    mixed = torch.tensor([0, -1, 7, -1, 50], device=device)
    out = embedding.embed(mixed, table, scale, rows.to(device)).cpu()
    assert torch.equal(out[[1, 3]], rows[[1, 3]])
    assert torch.equal(out[[0, 2]], want[[0, 2]])
    assert torch.isnan(out[4]).all()  # outside the table
    assert torch.isnan(embedding.embed(mixed, table, scale)[1]).all()  # no rows were given
