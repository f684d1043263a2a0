"""The floating-point ops of the reference backend: bits equal to numpy twins of the formulas."""

from __future__ import annotations

import hypothesis
import numpy as np
import pytest
import scalar_ops as twin
import torch
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from torch import Tensor

from edge_runtime.kernels.reference import numeric
from edge_runtime.model.load import quantise_rows

F = np.float32
SIZES = (1, 31, 32, 33, 64, 100, 576, 960)
finite = st.floats(-(2.0**60), 2.0**60, width=32)


def random_rows(rows: int, n: int, seed: int = 0, scale: float = 1.0) -> twin.F32:
    x = np.random.default_rng(seed).standard_normal((rows, n)) * scale
    return x.astype(F)


def same_bits(got: Tensor | twin.F32, want: twin.F32) -> bool:
    got = np.asarray(got)
    return got.dtype == np.asarray(want).dtype and got.tobytes() == np.asarray(want).tobytes()


# ---- exp


def test_exp_is_accurate_and_never_denormal() -> None:
    x = np.concatenate(
        [np.linspace(-87, 0, 400_001), -np.logspace(-45, 1.9, 5000)], dtype=F, casting="same_kind"
    )
    got = numeric.exp_nonpositive(torch.from_numpy(x)).numpy()
    # one rounding of the last addition and the polynomial's own 0.1 ulp, plus the reduction
    assert twin.ulps(got, np.exp(x.astype(np.float64))) < 1.5
    assert got.min() >= np.finfo(F).tiny
    assert got.max() == 1.0
    assert same_bits(got, twin.exp(x))


def test_exp_ends() -> None:
    below = np.nextafter(F(-87), F(-100))
    x = torch.tensor([0.0, -0.0, -87.0, float(below), -1e30, -torch.inf, -1e-45])
    got = numeric.exp_nonpositive(x).tolist()
    assert got[:2] == [1.0, 1.0]
    assert got[2] > 0
    assert got[3:] == [0.0, 0.0, 0.0, 1.0]


def test_exp_is_monotone_across_every_reduction_boundary() -> None:
    edges = (-(np.arange(125) + 0.5) * np.log(2)).astype(F)
    steps = np.arange(-40, 41, dtype=np.int32)
    x = np.sort((edges.view(np.int32)[:, None] + steps).view(F).ravel())
    y = numeric.exp_nonpositive(torch.from_numpy(x)).numpy()
    # neighbouring reductions may disagree by the function's own error, never by more
    assert (np.diff(y) >= -2 * np.spacing(y[1:])).all()


# ---- sums


@pytest.mark.parametrize("n", SIZES)
def test_lane_sum_order(n: int) -> None:
    rng = np.random.default_rng(n)
    x = (rng.standard_normal((5, n)) * 10.0 ** rng.integers(-6, 6, (5, n))).astype(F)
    want = np.array([twin.lane_sum(row) for row in x])
    assert same_bits(numeric.lane_sum(torch.from_numpy(x)), want)
    assert same_bits(numeric.lane_sum(torch.from_numpy(x[2:3])), want[2:3])


# ---- the int8 quantiser


def check_quantise(x: twin.F32) -> None:
    codes, scale = numeric.quantise(torch.from_numpy(x))
    host_codes, host_scale = quantise_rows(x)  # the embedding's quantiser is the same function
    for i, row in enumerate(x):
        want, want_scale = twin.quantise(row)
        assert np.array_equal(codes[i].numpy(), want)
        assert same_bits(scale[i], want_scale)
        assert np.array_equal(host_codes[i], want)
        assert same_bits(host_scale[i], want_scale)
    assert codes.abs().max() <= 127


@pytest.mark.parametrize("scale", [1e-6, 1.0, 6e4, 2.0**-110, 2.0**-99, 1e30])
@pytest.mark.parametrize("n", [1, 33, 576])
def test_quantise_bits(n: int, scale: float) -> None:
    check_quantise(random_rows(7, n, n, scale))


@hypothesis.given(hnp.arrays(F, st.tuples(st.integers(1, 3), st.integers(1, 9)), elements=finite))
def test_quantise_any(x: twin.F32) -> None:
    check_quantise(x)


def test_quantise_near_every_tie() -> None:
    """Where a reciprocal, or a product by 1/127, in place of a division shows."""
    peaks = np.random.default_rng(0).uniform(0.5, 2, 300).astype(F)
    ties = ((np.arange(127) + 0.5) / 127).astype(F)
    x = np.concatenate([peaks[:, None], peaks[:, None] * ties], axis=1)
    for step in (0, -1, 1):
        x[:, 1:] = (x[:, 1:].view(np.int32) + step).view(F)
        check_quantise(x)
    inverse = F(1) / peaks * F(127)
    assert (np.rint(x * inverse[:, None]) != np.rint(x * (F(127) / peaks)[:, None])).any()


def test_quantise_special_vectors() -> None:
    tiny = F(2.0**-100)
    rows = [
        [0.0, 0.0, -0.0, 0.0],
        [np.nextafter(tiny, F(0)), 0.0, 0.0, 0.0],
        [tiny, -tiny, tiny / 2, 0.0],
        [-127.0, 127.0, 0.5, 1.5],  # halves to even: 0 and 2
        [127.0, -2.5, 3.5, -0.5],
        [-3.0, 2.9999, 1e-3, 0.0],
    ]
    x = np.array(rows, F)
    check_quantise(x)
    codes, scale = numeric.quantise(torch.from_numpy(x))
    assert codes[:2].abs().sum() == 0
    assert scale[:2].tolist() == [0.0, 0.0]
    assert codes[3].tolist() == [-127, 127, 0, 2]
    assert codes[4].tolist() == [127, -2, 4, 0]
    assert codes[5, 0] == -127


# ---- norm, silu, rope, Hadamard


@pytest.mark.parametrize("n", SIZES)
def test_rms_norm_bits(n: int) -> None:
    for scale, eps in ((1.0, 1e-5), (3e3, 1e-6), (1e-4, 1e-5)):
        x = random_rows(3, n, n, scale)
        want = np.stack([twin.rms_norm(row, eps) for row in x])
        assert same_bits(numeric.rms_norm(torch.from_numpy(x), eps), want)
    assert numeric.rms_norm(torch.zeros(1, n), 1e-5).abs().max() == 0


def test_silu_mul_bits_and_accuracy() -> None:
    g = np.concatenate([np.linspace(-100, 100, 20_001), [0.0, -0.0]]).astype(F)
    u = random_rows(1, len(g), 5)[0]
    got = numeric.silu_mul(torch.from_numpy(g), torch.from_numpy(u)).numpy()
    assert same_bits(got, twin.silu_mul(g, u))
    wide = g.astype(np.float64)
    exact = wide / (1 + np.exp(-wide)) * u
    # five roundings in a row; where exp is cut off (g < -87) the result is 0 instead of < 1e-36
    assert twin.rms_ratio(got, exact) < 1e-7


@pytest.mark.parametrize("D", [2, 24, 64, 96])
def test_rope_bits(D: int) -> None:
    x = random_rows(6, D, D).reshape(2, 3, D)
    angle = random_rows(2, D // 2, 1)
    cos, sin = np.cos(angle), np.sin(angle)
    got = numeric.rope(*(torch.from_numpy(t) for t in (x, cos, sin)))
    for m in range(2):
        for h in range(3):
            assert same_bits(got[m, h], twin.rope(x[m, h], cos[m], sin[m]))


@pytest.mark.parametrize("D", [1, 2, 16, 64, 128, 256])
def test_hadamard_is_orthonormal(D: int) -> None:
    H = numeric.hadamard(torch.eye(D)).double()
    # entries are ±1/√D rounded once
    assert torch.allclose(H @ H.T, torch.eye(D, dtype=torch.float64), atol=2e-7)
    assert same_bits(H.abs(), torch.full((D, D), float(F(1) / np.sqrt(F(D)))).double())
    x = torch.from_numpy(random_rows(3, D))
    assert twin.rms_ratio(numeric.hadamard(numeric.hadamard(x)), x) < 1e-6
    assert twin.rms_ratio(numeric.hadamard(x), x.double() @ H) < 1e-6


# ---- nesting of K and V


def check_nest(x: twin.F32) -> None:
    q4, qr, scale = (t.numpy() for t in numeric.kv_nest(torch.from_numpy(x)))
    for i, row in enumerate(x):
        want = twin.kv_nest(row)
        assert np.array_equal(q4[i], want[0])
        assert np.array_equal(qr[i], want[1])
        assert same_bits(scale[i], want[2])


@pytest.mark.parametrize("magnitude", [1e-9, 3e-7, 1e-4, 1.0, 50.0, 6e4, 4e5])
@pytest.mark.parametrize("D", [1, 24, 64])
def test_kv_nest_bits(D: int, magnitude: float) -> None:
    x = random_rows(9, D, D, magnitude)
    check_nest(x)
    q4, qr, scale = numeric.kv_nest(torch.from_numpy(x))
    saturated = bool((scale == 65504).any())  # then, and only then, a code may leave the range
    assert int(q4.min()) >= (-8 if saturated else -7)
    assert int(q4.max()) <= 7
    assert int(qr.min()) >= -8
    assert int(qr.max()) <= 7
    assert torch.isfinite(scale).all()


@hypothesis.given(
    hnp.arrays(
        F,
        st.tuples(st.integers(1, 2), st.integers(1, 8)),
        elements=st.floats(width=32, allow_nan=False, allow_infinity=False),
    )
)
def test_kv_nest_any_finite_vector(x: twin.F32) -> None:
    check_nest(x)


def test_kv_nest_scale_is_the_smallest_half_that_covers() -> None:
    x = torch.from_numpy(np.exp2(np.linspace(-30, 15, 3001)).astype(F))[:, None]
    _, _, scale = numeric.kv_nest(x)
    peak = (x[:, 0] / 7.4375).numpy()
    half = scale.numpy()
    assert (half.astype(F) >= peak).all()
    assert (np.nextafter(half, np.float16(0)).astype(F) < peak).all()


def test_kv_nest_reconstructs_and_repeats() -> None:
    x = torch.from_numpy(random_rows(50, 64, 3))
    q4, qr, scale = numeric.kv_nest(x)
    wide = scale.float()[:, None]
    back = (16 * q4 + qr) * (wide / 16)
    # half a step of s/16, a whole one where q_r = +8 is clipped to 7; half a step of s of the base
    assert ((back - x).abs() <= wide / 16 * 1.001).all()
    assert ((q4 * wide - x).abs() <= wide / 2 * 1.001).all()
    assert twin.rms_ratio(back, x) < 0.02
    again = numeric.kv_nest(torch.cat([q4, torch.full_like(q4[:, :1], 7.4375)], 1) * wide)
    assert torch.equal(again[0][:, :-1], q4)
    assert torch.equal(again[1][:, :-1], torch.zeros_like(qr))
    zero = numeric.kv_nest(torch.zeros(2, 8))
    assert all(bool((part == 0).all()) for part in zero)
