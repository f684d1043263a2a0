"""Inputs of `down` evened out: the layer's function stays, codes of `up` too, and peaks fall."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from random_weights import random_spec

from edge_runtime.convert import quantize
from edge_runtime.convert.balance import balanced, balanced_keys
from edge_runtime.convert.rotate import FusedLayer
from edge_runtime.format.spec import ModelSpec
from edge_runtime.kernels.reference.numeric import quantise, rms_norm, silu_mul

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


# ---- keys


def attention_layer(spec: ModelSpec, planted: float = 1.0) -> FusedLayer:
    """Random matrices; the keys of pairs 1 and 4 of KV head 1 are `planted` times as large and the
    queries that meet them as small, or those of the norms of all heads."""
    g = torch.Generator().manual_seed(5)
    D, group = spec.head_dim, spec.group
    dims = torch.tensor([1, 4, 1 + D // 2, 4 + D // 2])
    q = torch.randn(spec.num_heads, D, spec.hidden_size, generator=g)
    k = torch.randn(spec.num_kv_heads, D, spec.hidden_size, generator=g)
    v = torch.randn(spec.num_kv_heads, D, spec.hidden_size, generator=g)
    bias = torch.randn(spec.num_heads + 2 * spec.num_kv_heads, D, generator=g)
    norms = torch.ones(2, D)
    if spec.qk_norm:
        norms[0, dims] /= planted
        norms[1, dims] *= planted
    else:
        heads = slice(group, 2 * group)  # those of KV head 1
        q[heads, dims] /= planted
        bias[heads, dims] /= planted
        k[1, dims] *= planted
        bias[spec.num_heads + 1, dims] *= planted
    none = torch.zeros(1, 1)
    return FusedLayer(
        qkv=torch.cat([q, k, v]).flatten(0, 1), qkv_bias=bias.ravel() if spec.qkv_bias else None,
        o=none, o_bias=None, gate_up=none, gate_up_bias=None, down=none, down_bias=None,
        q_norm=norms[0] if spec.qk_norm else None, k_norm=norms[1] if spec.qk_norm else None,
    )  # fmt: skip


KINDS = {
    "plain": random_spec(num_heads=6, num_kv_heads=3, head_dim=10, hidden_size=40),
    "biases": random_spec(num_heads=6, num_kv_heads=3, head_dim=10, hidden_size=40, qkv_bias=True),
    "norms": random_spec(
        architecture="qwen3", num_heads=6, num_kv_heads=3, head_dim=10, hidden_size=40, qk_norm=True
    ),
}


def products(spec: ModelSpec, one: FusedLayer, x: torch.Tensor) -> torch.Tensor:
    """q · k of every row with every other, per query head, without RoPE (which turns pairs)."""
    y = torch.nn.functional.linear(x, one.qkv, one.qkv_bias).unflatten(1, (-1, spec.head_dim))
    q, k, _ = y.split([spec.num_heads, spec.num_kv_heads, spec.num_kv_heads], 1)
    if one.q_norm is not None and one.k_norm is not None:
        q, k = rms_norm(q, 1e-6) * one.q_norm, rms_norm(k, 1e-6) * one.k_norm
    return torch.einsum("mhd,nhd->hmn", q, k.repeat_interleave(spec.group, 1))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("planted", [4.0, 16.0])
def test_outliers_in_keys_are_taken_back_to_the_bit(kind: str, planted: float) -> None:
    spec = KINDS[kind]
    usual, with_outliers = attention_layer(spec), attention_layer(spec, planted)
    even = balanced_keys(with_outliers, torch.eye(spec.hidden_size), spec)
    for name in ("qkv", "qkv_bias", "q_norm", "k_norm"):
        a, b = getattr(usual, name), getattr(even, name)
        assert (a is b is None) or torch.equal(a, b), name
    x = torch.randn(7, spec.hidden_size, generator=torch.Generator().manual_seed(2))
    # the products of outliers are the same numbers, added in the same order
    assert torch.equal(products(spec, even, x), products(spec, with_outliers, x))


@pytest.mark.parametrize("kind", KINDS)
def test_keys_without_outliers_stay(kind: str) -> None:
    spec = KINDS[kind]
    one = attention_layer(spec, 2.0)  # not enough to matter
    even = balanced_keys(one, torch.eye(spec.hidden_size), spec)
    for field in dataclasses.fields(FusedLayer):
        a, b = getattr(one, field.name), getattr(even, field.name)
        assert a is b or torch.equal(a, b)


def test_dead_keys_and_queries() -> None:
    spec = KINDS["plain"]
    one = attention_layer(spec)
    one.qkv[3] = one.qkv[8] = 0  # a pair of query head 0
    one.qkv[13] = one.qkv[18] = 0  # and of the other head of its group
    even = balanced_keys(one, torch.eye(spec.hidden_size), spec)
    assert torch.equal(even.qkv, one.qkv)
    assert torch.equal(balanced_keys(one, torch.zeros(40, 40), spec).qkv, one.qkv)
