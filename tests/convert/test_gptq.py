"""The solver on awkward Hessians: dead, duplicate and missing inputs."""

from collections.abc import Callable

import pytest
import torch
from hessians import G, draft, make_hessian, make_weights, target

from edge_runtime.convert import fused
from edge_runtime.convert import quantize as qz
from edge_runtime.convert.gptq import _choose, factor_hessian
from edge_runtime.errors import CheckpointError


def test_dead_column_is_rounded_to_nearest() -> None:
    H = make_hessian(64)
    H[7] = H[:, 7] = 0
    factor = factor_hessian(H)
    assert factor.dead == 1
    W = make_weights(20, 64)
    scales = qz.fit_scales(W, G)
    q4 = qz.solve_base(W, factor, *scales, G, bound=None)
    rtn = qz.solve_base(W, None, *scales, G, method="rtn")
    assert torch.equal(q4[:, 7], rtn[:, 7])
    assert not torch.equal(q4, rtn)


@pytest.mark.parametrize("kind", ["duplicate columns", "one sample", "nothing seen", "tiny"])
def test_singular_hessian(kind: str) -> None:
    H = make_hessian(64)
    if kind == "duplicate columns":
        H[1] = H[0]
        H[:, 1] = H[:, 0]
    elif kind == "one sample":
        x = torch.randn(64, 1, generator=torch.Generator().manual_seed(0))
        H = x @ x.T
    elif kind == "nothing seen":
        H = torch.zeros(64, 64)
    else:
        H *= 1e-30
    factor = factor_hessian(H)
    assert factor.dead == (64 if kind == "nothing seen" else 0)
    W = make_weights(20, 64)
    scales = qz.fit_scales(W, G)
    q4 = qz.solve_base(W, factor, *scales, G)
    qr = qz.solve_refine(W, factor, q4, *scales, G).codes
    rtn = qz.solve_base(W, None, *scales, G, method="rtn")
    if kind == "nothing seen":  # each weight alone: as near as the refinement reaches
        s4 = 16 * scales.mult.double() * scales.row_scale.double()[:, None]
        steps = (W.double() / s4.repeat_interleave(G, 1)).clamp(max=7 + 15 / 32)
        assert float((q4 - steps).abs().max()) <= 17 / 32 + 1e-6
        assert float((q4 + qr / 16 - steps).abs().max()) <= 1 / 16
        return
    unit = H / H.diagonal().mean()
    solved, nearest = (qz.relative_error(W, draft(W, q, scales), unit) for q in (q4, rtn))
    assert solved < nearest
    assert qz.relative_error(W, target(W, q4, qr, scales), unit) < 2e-3


def test_least_damping() -> None:
    H = make_hessian(48)
    assert factor_hessian(H).damping == 0.01
    assert factor_hessian(H, least=0.1).damping == 0.1


def test_damping_is_raised_and_reported() -> None:
    H = make_hessian(48)
    eigenvalues, V = torch.linalg.eigh(H.double())
    eigenvalues[0] = -0.05 * H.diagonal().mean()
    assert factor_hessian((V * eigenvalues) @ V.T).damping == 0.1
    assert factor_hessian(H).damping == 0.01
    with pytest.raises(CheckpointError, match=r"layers\.3\.qkv"):
        factor_hessian(torch.eye(8) - torch.ones(8, 8) * 0.9, name="layers.3.qkv")


@pytest.mark.parametrize("weight", [0.01, 0.0625, 0.5])
def test_choice_of_base_and_code_is_the_best_one_step_away(weight: float) -> None:
    generator = torch.Generator().manual_seed(3)
    wants = torch.rand(4000, generator=generator) * 20 - 10
    drafts = wants + torch.randn(4000, generator=generator) * 0.4
    base, code = torch.empty(2, 4000)
    _choose(drafts, wants, weight, base, code)
    middle = wants + 1 / 32
    near = middle.round().clamp(-8, 7)
    candidates = torch.stack([near - 1, near, near + 1])
    miss = ((middle - candidates).abs() - 0.5).clamp(min=0)
    miss[1] = 0  # beyond the ends of the range both have the same target
    cost = miss.square() + weight * (candidates - drafts).square()
    cost[(candidates < -8) | (candidates > 7)] = torch.inf
    inside = wants.abs() < 7  # at the ends the miss is the range's, whatever the base
    chosen = cost.gather(0, (base - near + 1).long()[None])[0]
    assert float((chosen - cost.amin(0))[inside].max()) < 1e-5
    assert bool((base >= -8).all() and (base <= 7).all())
    refinement = 16 * (code - base)
    assert torch.equal(refinement, refinement.round())
    assert bool((refinement >= torch.where(base == -8, 0, -8)).all() and (refinement <= 7).all())
    reached = (wants - base >= -17 / 32) & (wants - base <= 15 / 32) & (wants > -8)
    assert float((code - wants)[reached].abs().max()) <= 1 / 32 + 1e-6
    assert 0.01 < float((base != near)[inside].double().mean()) < 0.5


def check_fused(compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Call steps that square and round, as if the CPU were a GPU."""

    @fused.Fused
    def steps(x: torch.Tensor, factor: float, out: torch.Tensor) -> None:
        torch.mul(x * x, factor, out=out)
        out.round_()

    monkeypatch.setattr(fused, "DEVICES", ("cpu",))
    x, out = torch.linspace(-9, 9, 1000), torch.empty(2, 1000)
    for row in out:
        steps(x, 0.3, row)
        assert float((row != (x * x * 0.3).round()).double().mean()) < 1e-3
    assert (steps._kernel is not steps._steps) == compiled


@pytest.mark.parametrize("fault", ["no compiler", "wrong"])
def test_what_cannot_be_compiled_is_launched(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def compile_(steps: Callable[..., None], dynamic: bool) -> Callable[..., None]:
        if fault == "no compiler":
            raise RuntimeError("Failed to find C compiler")
        return lambda x, factor, out: out.fill_(1)

    monkeypatch.setattr(torch, "compile", compile_)
    check_fused(False, monkeypatch)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_compiled_steps_are_the_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    with torch.inference_mode():
        check_fused(True, monkeypatch)
