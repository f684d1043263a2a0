"""Attention of the reference backend: bits equal to a scalar walk over the definition."""

from __future__ import annotations

import numpy as np
import pytest
import scalar_ops as twin
import torch

from edge_runtime.kernels import ops
from edge_runtime.kernels.layout import NEVER, full_from, padded
from edge_runtime.kernels.reference import numeric
from edge_runtime.kernels.reference.ops import ReferenceBackend

F = np.float32


class Layer:
    """One attention layer with `tokens` cached tokens, and the same as plain arrays."""

    def __init__(
        self, heads: int, kv_heads: int, D: int, tokens: int, *, seed: int = 0,
        k_scale: float = 1.0, v_scale: float = 1.0,
    ) -> None:  # fmt: skip
        self.geometry = ops.Geometry(
            num_layers=1, hidden_size=8, num_heads=heads, num_kv_heads=kv_heads, head_dim=D,
            num_tokens=1,
        )  # fmt: skip
        rng = np.random.default_rng(seed)
        table = np.zeros((1, D // 2), F)
        empty = ops.ModelWeights(
            linears={}, embedding=np.zeros((1, 8), np.int8), embedding_scale=np.zeros(1, F),
            cos=table, sin=table,
        )  # fmt: skip
        self.backend = ReferenceBackend(empty, self.geometry)
        self.cache = self.backend.new_cache(padded(tokens, 64))
        self.kv = rng.standard_normal((2, tokens, kv_heads, D)).astype(F)
        self.kv[0] *= F(k_scale)
        self.kv[1] *= F(v_scale)
        self.q = rng.standard_normal((tokens, heads, D)).astype(F)
        self.write()

    def write(self) -> None:
        positions = torch.arange(self.kv.shape[1])
        for kind in (0, 1):
            nested = numeric.kv_nest(torch.from_numpy(self.kv[kind]))
            self.cache.write(0, kind, positions, nested)

    def run(self, positions: list[int], full: list[int] | None = None) -> twin.F32:
        """Attention of rows at `positions`, [M, heads, D]."""
        q = torch.from_numpy(self.q[positions])
        batch = ops.Batch(
            ids=None,
            positions=np.array(positions),
            full_from=np.array(full or [0] * len(positions)),
        )
        registers = {"q": q}
        self.backend.replay((ops.Attention("q", "o", 0),), batch, self.cache, registers)
        return registers["o"].numpy().reshape(q.shape)

    def twin(self, position: int, full: int = 0) -> twin.F32:
        """One row by the scalar definition."""
        g = self.geometry
        nested = [[twin.kv_nest(x) for x in row] for row in self.kv.reshape(-1, *self.kv.shape[2:])]
        T = self.kv.shape[1]
        sides = []
        for kind in (0, 1):
            rows = nested[kind * T : kind * T + position + 1]
            codes = [
                [16 * q4 + (qr if t >= full else 0) for q4, qr, _ in row]
                for t, row in enumerate(rows)
            ]
            scales = [[F(s) for *_, s in row] for row in rows]
            sides.append((np.array(codes), np.array(scales, F)))
        (k, ks), (v, vs) = sides
        group = g.num_heads // g.num_kv_heads
        return np.stack(
            [
                twin.attend_row(
                    self.q[position, h],
                    (k[:, h // group], ks[:, h // group]),
                    (v[:, h // group], vs[:, h // group]),
                    position + 1,
                )
                for h in range(g.num_heads)
            ]
        )


def check(layer: Layer, positions: list[int], full: list[int] | None = None) -> None:
    got = layer.run(positions, full)
    for i, position in enumerate(positions):
        want = layer.twin(position, (full or [0] * len(positions))[i])
        assert got[i].tobytes() == want.tobytes(), (i, position)


SHAPES = [(1, 1, 64), (3, 1, 24), (7, 1, 96), (6, 2, 24), (4, 4, 64)]


@pytest.mark.parametrize("length", [1, 63, 64, 65, 130])
@pytest.mark.parametrize(("heads", "kv_heads", "D"), SHAPES)
def test_bits_of_the_definition(heads: int, kv_heads: int, D: int, length: int) -> None:
    layer = Layer(heads, kv_heads, D, length, seed=length)
    check(layer, [length - 1])
    check(layer, [length - 1], [NEVER])
    check(layer, [length - 1], [full_from(length - 1, 40)])


@pytest.mark.parametrize(
    ("k_scale", "v_scale"), [(1.0, 1e-4), (60.0, 1.0), (1e-8, 1.0), (1.0, 2e5), (1e4, 1e-7)]
)
def test_magnitudes(k_scale: float, v_scale: float) -> None:
    """Small V, one-hot softmax, flat softmax, V and K near the ends of fp16."""
    check(Layer(6, 2, 24, 130, seed=1, k_scale=k_scale, v_scale=v_scale), [129, 70])


def test_close_to_float_attention() -> None:
    layer = Layer(6, 2, 24, 130, seed=2)
    q, (k, v) = layer.q[129].astype(np.float64), layer.kv.astype(np.float64)
    scores = np.einsum("hd,thd->ht", q, k.repeat(3, 1)) / np.sqrt(24)
    p = np.exp(scores - scores.max(-1, keepdims=True))
    want = np.einsum("ht,thd->hd", p / p.sum(-1, keepdims=True), v.repeat(3, 1))
    # K, V and q are quantised to eight bits: about half a percent each
    assert twin.rms_ratio(layer.run([129])[0], want) < 0.02


def test_rows_of_a_batch_are_rows_alone() -> None:
    layer = Layer(6, 2, 24, 200, seed=3)
    positions = [199, 0, 63, 64, 65, 128, 5, 199, 127, 100, 1, 150, 2, 3, 4, 6, 7, 8]
    full = [full_from(p, r) for p, r in zip(positions, [None, 0, 1, 64, 70, 200] * 3, strict=True)]
    got = layer.run(positions, full)
    for i, p in enumerate(positions):
        assert got[i].tobytes() == layer.run([p], [full[i]])[0].tobytes()
    assert len({x.tobytes() for x in got}) > 14  # the policies do make a difference


def test_mixed_policies_against_the_definition() -> None:
    layer = Layer(3, 1, 24, 140, seed=4)
    check(layer, [139, 139, 139, 139, 66], [0, NEVER, 64, 128, 64])


@pytest.mark.parametrize("garbage", [65504.0, float("inf"), float("nan"), -1.0])
def test_what_lies_past_a_row_changes_nothing(garbage: float) -> None:
    layer = Layer(6, 2, 24, 192, seed=5)
    before = layer.run([70, 10])
    cache = layer.cache
    cache.base[:, :, 71:] = 0x77
    cache.refine[:, :, 71:] = 0xF8
    cache.scale[:, :, 71:] = garbage
    assert layer.run([70])[0].tobytes() == before[0].tobytes()
    assert layer.run([70, 10]).tobytes() == before.tobytes()


@pytest.mark.parametrize("kind", [0, 1])
def test_zero_vectors(kind: int) -> None:
    layer = Layer(6, 2, 24, 130, seed=6)
    layer.kv[kind] = 0
    layer.write()
    check(layer, [129, 3])
    if kind == 1:
        assert layer.run([129]).any() == np.False_
    layer.q[:] = 0
    check(layer, [129])
    layer.kv[kind, 64:128, 0] = 1  # one head has one block that is not zero
    layer.write()
    check(layer, [129])


def test_a_hundred_repeats() -> None:
    layer = Layer(6, 2, 24, 130, seed=7)
    rows = [129, 128, 127]
    want = layer.run(rows).tobytes()
    assert all(layer.run(rows).tobytes() == want for _ in range(100))
