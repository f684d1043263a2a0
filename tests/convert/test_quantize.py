"""Scales, nested base, boxed refinement: the numeric format of the weights."""

import math
from typing import Literal

import pytest
import torch
from hessians import G, draft, make_hessian, make_weights, target

from edge_runtime.convert import quantize as qz
from edge_runtime.convert.gptq import factor_hessian
from edge_runtime.errors import CheckpointError
from edge_runtime.kernels.layout import group_size_for


def base_scale(scales: qz.Scales, K: int, group: int = G) -> torch.Tensor:
    s4 = 16 * scales.mult.double() * scales.row_scale.double()[:, None]
    return s4.repeat_interleave(group, 1)[:, :K]


def textbook_gptq(
    W: torch.Tensor, H: torch.Tensor, s: torch.Tensor, low: torch.Tensor, high: torch.Tensor
) -> torch.Tensor:
    """GPTQ with the Cholesky factor of the inverse Hessian, one column at a time, fp64."""
    W = W.double().clone()
    H = H.double() + 0.01 * H.diagonal().double().mean() * torch.eye(H.shape[0])
    U = torch.linalg.cholesky(torch.linalg.inv(H), upper=True)
    codes = torch.zeros_like(W)
    for j in range(W.shape[1]):
        codes[:, j] = torch.clamp((W[:, j] / s[:, j]).round(), low[:, j], high[:, j])
        error = (W[:, j] - codes[:, j] * s[:, j]) / U[j, j]
        W[:, j:] -= error[:, None] * U[j, j:]
    return codes


def test_group_size() -> None:
    cases = {(576, 1536): 64, (896, 4864): 128, (960, 2560): 64, (200, 512): 32, (4096, 14336): 128}
    for sizes, expected in cases.items():
        assert group_size_for(iter(sizes)) == expected


def test_scales_map_the_extreme_to_minus_eight() -> None:
    W = make_weights(40, 96)
    mult, row_scale = qz.fit_scales(W, G)
    assert mult.dtype == torch.int16
    assert mult.shape == (40, 3)
    assert row_scale.dtype == torch.float32
    assert torch.equal(mult.int().abs().amax(1), torch.full((40,), 32767, dtype=torch.int32))
    assert bool((row_scale > 0).all())
    assert bool((mult > 0).any())
    assert bool((mult < 0).any())
    t = W.double() / base_scale(qz.Scales(mult, row_scale), 96)
    extreme = t.view(-1, 3, G).amin(2)
    assert torch.allclose(extreme, torch.full_like(extreme, -8), atol=1e-3)
    assert float(t.amax()) < 8.001


def test_zero_groups_and_rows() -> None:
    W = make_weights(6, 96)
    W[1] = 0
    W[2, 32:64] = 0
    factor = factor_hessian(make_hessian(96))
    scales = qz.fit_scales(W, G)
    assert scales.row_scale[1] == 0
    assert scales.mult[1:3, 1].tolist() == [0, 0]
    for method in ("gptq", "rtn"):
        for bound in (0.25, None):
            q4 = qz.solve_base(W, factor, *scales, G, method=method, bound=bound)
            qr = qz.solve_refine(W, factor, q4, *scales, G).codes
            closed = qz.solve_refine(W, None, q4, *scales, G, method="closed").codes
            for codes in (q4, qr, closed, qz.rtn8(W, G).codes):
                assert not codes[1].any()
                assert not codes[2, 32:64].any()
            assert bool(torch.isfinite(target(W, q4, qr, scales)).all())


@pytest.mark.parametrize("scale", [1e-45, 1e-38, 1e-30, 1e-3, 1e30])
def test_scale_of_extreme_rows(scale: float) -> None:
    W = torch.linspace(-1, 1, 64)[None] * scale
    mult, row_scale = qz.fit_scales(W, G)
    assert float(row_scale) == 0 or float(row_scale) >= torch.finfo(torch.float32).tiny
    q4 = qz.solve_base(W, None, mult, row_scale, G, method="rtn")
    assert float(row_scale) == 0 or int(q4.min()) == -8
    assert float(row_scale) != 0 or not q4.any()


@pytest.mark.parametrize("K", [96, 200])
def test_free_base_is_textbook_gptq(K: int) -> None:
    W, H = make_weights(50, K), make_hessian(K)
    scales = qz.fit_scales(W, G)
    s4 = base_scale(scales, K)
    low = torch.full_like(s4, -8)
    q4 = qz.solve_base(W, factor_hessian(H), *scales, G, bound=None)
    # fp32 against fp64: a value at a rounding boundary may go the other way and drag a few along
    agree = (q4[:, :K] == textbook_gptq(W, H, s4, low, low + 15)).double().mean()
    assert float(agree) > 0.995


def test_refinement_is_textbook_gptq_in_its_box() -> None:
    W, H = make_weights(50, 96), make_hessian(96)
    factor = factor_hessian(H)
    scales = qz.fit_scales(W, G)
    q4 = qz.solve_base(W, factor, *scales, G)
    s4 = base_scale(scales, 96)
    low = torch.where(q4 == -8, 0.0, -8.0).double()
    expected = textbook_gptq(W - q4 * s4, H, s4 / 16, low, torch.full_like(low, 7))
    got = qz.solve_refine(W, factor, q4, *scales, G, sweeps=0)
    assert float((got.codes == expected).double().mean()) > 0.995
    assert 0 < got.clipped < 0.5


def test_every_sweep_lowers_the_error() -> None:
    """Coordinate descent never makes base or target worse, and its codes keep their limits."""
    W, H = make_weights(50, 200), make_hessian(200)
    factor, scales = factor_hessian(H), qz.fit_scales(W, G)
    damped = H + factor.damping * H.diagonal().mean() * torch.eye(200)
    base_errors, target_errors = [], []
    for sweeps in (0, 1, 2, 4):
        q4 = qz.solve_base(W, factor, *scales, G, sweeps=sweeps)
        draft = qz.dequantize(16 * q4.short(), *scales, G, 200)
        base_errors.append(qz.relative_error(W, draft, damped))
        fixed = qz.solve_base(W, factor, *scales, G, sweeps=0)
        qr = qz.solve_refine(W, factor, fixed, *scales, G, sweeps=sweeps).codes
        assert bool(((qr >= 0) | (fixed != -8)).all())
        target = qz.dequantize(16 * fixed.short() + qr, *scales, G, 200)
        target_errors.append(qz.relative_error(W, target, damped))
    for errors in (base_errors, target_errors):
        assert errors == sorted(errors, reverse=True)
        assert errors[-1] < 0.95 * errors[0]


def test_bound_trades_target_for_draft() -> None:
    W, H = make_weights(64, 256), make_hessian(256, samples=2000)
    factor, scales = factor_hessian(H), qz.fit_scales(W, 64)
    drafts, targets, clipped = [], [], []
    for bound in (0.05, 0.15, 0.3, 0.6):
        q4 = qz.solve_base(W, factor, *scales, 64, bound=bound)
        refined = qz.solve_refine(W, factor, q4, *scales, 64)
        drafts.append(qz.relative_error(W, draft(W, q4, scales, 64), H))
        targets.append(qz.relative_error(W, target(W, q4, refined.codes, scales, 64), H))
        clipped.append(refined.clipped)
    assert drafts == sorted(drafts, reverse=True)
    assert targets == sorted(targets)
    assert clipped == sorted(clipped)
    assert clipped[0] < 0.02 < clipped[-1]


def test_bound_zero_is_round_to_nearest() -> None:
    W, factor = make_weights(20, 64), factor_hessian(make_hessian(64))
    scales = qz.fit_scales(W, G)
    bounded = qz.solve_base(W, factor, *scales, G, bound=0)
    assert torch.equal(bounded, qz.solve_base(W, None, *scales, G, method="rtn"))


def test_order_of_errors() -> None:
    """In the Hessian's norm: free < bounded < rtn drafts; solved < closed targets; near W8."""
    W, H = make_weights(96, 256), make_hessian(256, samples=2000)
    factor = factor_hessian(H)
    scales = qz.fit_scales(W, 64)
    free = qz.solve_base(W, factor, *scales, 64, bound=None)
    bounded = qz.solve_base(W, factor, *scales, 64)
    rtn = qz.solve_base(W, factor, *scales, 64, method="rtn")
    errors = [qz.relative_error(W, draft(W, q, scales, 64), H) for q in (free, bounded, rtn)]
    assert errors[0] < errors[1] < errors[2]

    def target_error(q4: torch.Tensor, method: Literal["gptq", "closed"]) -> float:
        qr = qz.solve_refine(W, factor, q4, *scales, 64, method=method).codes
        return qz.relative_error(W, target(W, q4, qr, scales, 64), H)

    for q4 in (free, bounded, rtn):
        assert target_error(q4, "gptq") < target_error(q4, "closed")
    assert target_error(bounded, "gptq") < target_error(free, "gptq") < errors[0]
    plain = qz.rtn8(W, 64)
    yardstick = qz.relative_error(W, qz.dequantize(*plain, 64, 256), H)
    assert target_error(bounded, "gptq") < 10 * yardstick


def test_weight_half_way_never_wraps() -> None:
    """w = (k + ½) · s4: the refinement is +7 (clipped from +8) or -8 of the next base code."""
    W = torch.zeros(1, 32)
    W[0, 0] = -8.0
    W[0, 1:16] = torch.arange(-7, 8) - 0.5
    scales = qz.Scales(torch.tensor([[16384]], dtype=torch.int16), torch.tensor([2.0**-18]))
    factor = factor_hessian(torch.eye(32))
    q4 = qz.solve_base(W, None, *scales, G, method="rtn")
    for method in ("gptq", "closed"):
        qr, clipped = qz.solve_refine(W, factor, q4, *scales, G, method=method)
        residual = W[0] - q4[0]
        half = residual[1:16]
        assert bool((half.abs() == 0.5).all())
        assert torch.equal(qr[0, 1:16], torch.where(half > 0, 7, -8).to(torch.int8))
        assert clipped == int((half > 0).sum()) / 32
        error = (W - target(W, q4, qr, scales)).abs().max()
        assert float(error) <= 1 / 16


def test_box_below_the_lowest_base_code() -> None:
    W, H = make_weights(64, 96, seed=5), make_hessian(96)
    factor = factor_hessian(H)
    scales = qz.fit_scales(W, G)
    q4 = qz.solve_base(W, factor, *scales, G)
    assert bool((q4 == -8).any())
    for method in ("gptq", "closed"):
        qr = qz.solve_refine(W, factor, q4, *scales, G, method=method).codes
        assert qr.dtype == torch.int8
        assert int(qr.min()) >= -8
        assert int(qr.max()) <= 7
        assert int(qr[q4 == -8].min()) >= 0
        code = 16 * q4.short() + qr
        assert int(code.min()) >= -128
        assert int(code.max()) <= 119


def test_closed_form_is_equation_nine() -> None:
    W = make_weights(32, 64)
    scales = qz.fit_scales(W, G)
    q4 = qz.solve_base(W, factor_hessian(make_hessian(64)), *scales, G, bound=None)
    s4 = base_scale(scales, 64)
    free = ((W - q4 * s4) / (s4 / 16)).round()
    expected = torch.where(q4 == -8, free.clamp(0, 7), free.clamp(-8, 7))
    got = qz.solve_refine(W, None, q4, *scales, G, method="closed")
    assert torch.equal(got.codes, expected.to(torch.int8))
    assert got.clipped == float((free != expected).double().mean())


def test_padding_is_zero_and_changes_nothing() -> None:
    W, H = make_weights(10, 200), make_hessian(200)
    scales = qz.fit_scales(W, G)
    assert scales.mult.shape == (10, 7)
    q4 = qz.solve_base(W, factor_hessian(H), *scales, G)
    qr = qz.solve_refine(W, factor_hessian(H), q4, *scales, G).codes
    plain = qz.rtn8(W, G)
    for codes in (q4, qr, plain.codes):
        assert codes.shape == (10, 224)
        assert not codes[:, 200:].any()
    assert target(W, q4, qr, scales).shape == (10, 200)
    padded = qz.fit_scales(torch.nn.functional.pad(W, (0, 24)), G)
    assert torch.equal(scales.mult, padded.mult)


def test_plain_w8() -> None:
    W = make_weights(16, 96)
    codes, mult, row_scale = qz.rtn8(W, G)
    assert int(codes.min()) >= -127
    assert bool((mult > 0).all())
    assert torch.equal(codes.view(-1, 3, G).abs().amax(2), torch.full((16, 3), 127))
    step = mult.double() * row_scale.double()[:, None]
    error = (W - qz.dequantize(codes, mult, row_scale, G, 96, torch.float64)).abs()
    assert bool((error <= step.repeat_interleave(G, 1) * 0.503).all())


def test_dequantize_is_exact() -> None:
    code = torch.tensor([[-128, 119, 1, 0]], dtype=torch.int16)
    row_scale = torch.tensor([1 / 3])
    mult = torch.tensor([[-32767, 5]], dtype=torch.int16)
    got = qz.dequantize(code, mult, row_scale, 2, 4, torch.float64)
    S = float(row_scale[0])
    assert got.tolist() == [[128 * 32767 * S, -119 * 32767 * S, 5 * S, 0]]
    assert qz.dequantize(code.to(torch.int8), mult, row_scale, 2, 3).dtype == torch.float32


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_non_finite_values_name_the_tensor(bad: float) -> None:
    W = make_weights(5, 64)
    scales = qz.fit_scales(W, G)
    W[3, 9] = bad
    calls = (
        lambda: qz.fit_scales(W, G, name="layers.1.o"),
        lambda: qz.rtn8(W, G, name="layers.1.o"),
        lambda: qz.solve_base(W, None, *scales, G, method="rtn", name="layers.1.o"),
    )
    for call in calls:
        with pytest.raises(CheckpointError, match=r"layers\.1\.o.*\[3, 9\]"):
            call()
    H = make_hessian(64)
    H[2, 2] = bad
    with pytest.raises(CheckpointError, match="head"):
        factor_hessian(H, name="head")


def test_row_chunks_and_repeats_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    W, H = make_weights(300, 64), make_hessian(64)
    factor = factor_hessian(H)
    scales = qz.fit_scales(W, G)

    def solve() -> tuple[torch.Tensor, torch.Tensor]:
        q4 = qz.solve_base(W, factor, *scales, G)
        return q4, qz.solve_refine(W, factor, q4, *scales, G).codes

    first, again = solve(), solve()
    assert torch.equal(first[0], again[0])
    assert torch.equal(first[1], again[1])
    monkeypatch.setattr(qz, "_CHUNK_VALUES", 1)
    monkeypatch.setattr(qz, "_CHUNK_ROWS", 7)
    assert torch.equal(qz.fit_scales(W, G).mult, scales.mult)
    pieces = solve()
    # another number of rows may round a product's last bit differently, so not bit for bit
    assert float((pieces[0] == first[0]).double().mean()) > 0.998
    assert float((pieces[1] == first[1]).double().mean()) > 0.99


def test_codes_do_not_depend_on_threads_or_grad_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(qz, "_CHUNK_VALUES", 1)
    monkeypatch.setattr(qz, "_CHUNK_ROWS", 64)
    W, H = make_weights(300, 96), make_hessian(96)
    factor = factor_hessian(H)

    def solve() -> list[torch.Tensor]:
        scales = qz.fit_scales(W, G)
        q4 = qz.solve_base(W, factor, *scales, G)
        qr = qz.solve_refine(W, factor, q4, *scales, G).codes
        return [*scales, q4, qr, target(W, q4, qr, scales), qz.rtn8(W, G).codes]

    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = solve()
        torch.set_num_threads(3)
        many = solve()
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(threads)
    with torch.inference_mode():
        inference = solve()
    assert all(torch.equal(a, b) for a, b in zip(one, many, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(one, inference, strict=True))


def test_inputs_are_left_alone() -> None:
    """Also fp64 ones, which need no copy to compute with."""
    W, H = make_weights(20, 64).double(), make_hessian(64).double()
    kept_W, kept_H = W.clone(), H.clone()
    factor = factor_hessian(H)
    scales = qz.fit_scales(W, G)
    q4 = qz.solve_base(W, factor, *scales, G)
    kept_q4 = q4.clone()
    qr = qz.solve_refine(W, factor, q4, *scales, G).codes
    qz.solve_refine(W, None, q4, *scales, G, method="closed")
    qz.relative_error(W, target(W, q4, qr, scales), H)
    for value, kept in ((W, kept_W), (H, kept_H), (q4, kept_q4)):
        assert torch.equal(value, kept)


def test_relative_error_of_nothing() -> None:
    zero = torch.zeros(3, 8)
    assert qz.relative_error(zero, zero, torch.eye(8)) == 0
    assert qz.relative_error(zero, zero + 1, torch.eye(8)) == math.inf
    W = make_weights(3, 8)
    assert qz.relative_error(W, zero, torch.eye(8)) == pytest.approx(1)
    assert qz.relative_error(W, W, torch.eye(8)) == 0
