"""Inputs of `down` evened out: the layer's function stays, codes of `up` too, and peaks fall."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from edge_runtime.convert import quantize
from edge_runtime.convert.balance import balanced
from edge_runtime.convert.rotate import FusedLayer
from edge_runtime.kernels.reference.numeric import quantise, silu_mul

H, F, ROWS = 48, 70, 200


def layer(*, bias: bool) -> FusedLayer:
    """Random matrices; some rows of `up` are large, one is zero."""
    g = torch.Generator().manual_seed(3)
    gate_up = torch.randn(2 * F, H, generator=g)
    gate_up[F : F + 5] *= 30
    gate_up[F + 9] = 0
    some = torch.randn(2 * F, generator=g)
    some[F + 9] = 0
    return FusedLayer(
        qkv=torch.zeros(1, H), qkv_bias=None, o=torch.zeros(H, 1), o_bias=None, gate_up=gate_up,
        gate_up_bias=some if bias else None, down=torch.randn(H, F, generator=g), down_bias=None,
        q_norm=None, k_norm=None,
    )  # fmt: skip


def inputs(one: FusedLayer, x: torch.Tensor) -> torch.Tensor:
    """What `down` reads."""
    y = torch.nn.functional.linear(x, one.gate_up, one.gate_up_bias)
    return silu_mul(*y.chunk(2, -1))


def rms_error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("power", [0.3, 0.6, 1.0])
def test_the_same_function_with_smaller_peaks(power: float, bias: bool) -> None:
    one, x = layer(bias=bias), torch.randn(ROWS, H, generator=torch.Generator().manual_seed(1))
    before = inputs(one, x)
    even, hessian = balanced(one, before.T @ before / ROWS, power)
    after = inputs(even, x)
    # both matrices are rounded to fp32 once more: 6e-8 each
    assert rms_error(after @ even.down.T, before @ one.down.T) < 1e-6
    assert rms_error(hessian, after.T @ after / ROWS) < 1e-6
    assert torch.equal(even.gate_up[:F], one.gate_up[:F])

    def error(layer_: FusedLayer, a: torch.Tensor) -> float:
        codes, scale = quantise(a)
        return float(((codes * scale[:, None] - a) @ layer_.down.T).norm())

    assert error(even, after) < 0.8 * error(one, before)
    if power == 1:
        live = hessian.diagonal() > 0
        assert int(live.sum()) == F - 1
        assert hessian.diagonal()[live].std() < 1e-3 * hessian.diagonal()[live].mean()


def test_codes_of_up_stay() -> None:
    """A row's scale takes what it is divided by; a power of two changes no bit."""
    one = layer(bias=False)
    diagonal = torch.full((F,), 1.0)
    diagonal[:35] = 4.0**8
    even, _ = balanced(one, torch.diag(diagonal), 0.5)
    factor = one.gate_up[F:] / even.gate_up[F:]
    assert set(factor[~factor.isnan()].log2().round().int().tolist()) == {-2, 2}
    before, after = (quantize.rtn8(w.gate_up, 32).codes for w in (one, even))
    assert torch.equal(before, after)


def test_nothing_where_nothing_is_known() -> None:
    one, zero = layer(bias=False), torch.zeros(F, F)
    assert balanced(one, zero, 0.6) == (one, zero)
    assert balanced(one, torch.eye(F), 0.0)[0] is one
    even, _ = balanced(one, torch.eye(F), 0.6)
    for field in dataclasses.fields(FusedLayer):
        a, b = getattr(one, field.name), getattr(even, field.name)
        assert a is b or torch.equal(a, b)
