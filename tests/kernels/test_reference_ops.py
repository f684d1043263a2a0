"""Linears, argmax and the cache of the reference backend: exact, against integers and packing."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import half_models
import numpy as np
import pytest
import torch
from random_weights import random_spec
from random_weights import random_weights as random_model

from edge_runtime.errors import NumericError
from edge_runtime.kernels import ops, pack
from edge_runtime.kernels.reference import numeric
from edge_runtime.kernels.reference.cache import NestedCache
from edge_runtime.kernels.reference.linear import WIDE_ROWS, ExactLinear
from edge_runtime.kernels.reference.ops import ReferenceBackend, TorchLogits
from edge_runtime.model.runner import Model
from edge_runtime.model.transformer import geometry

F = np.float32
Ints = np.ndarray[Any, np.dtype[np.int64]]


def random_weights(
    N: int, K: int, G: int, seed: int = 0, *, bias: bool = False
) -> tuple[ops.LinearWeights, Ints]:
    """A nested matrix with negative scales and zero groups, and its codes [N, Kp] as int64."""
    rng = np.random.default_rng(seed)
    Kp = -(-K // G) * G
    q4 = rng.integers(-8, 8, (N, Kp), dtype=np.int8)
    qr = rng.integers(np.where(q4 == -8, 0, -8), 8, (N, Kp)).astype(np.int8)
    q4[:, K:] = qr[:, K:] = 0
    mult = rng.integers(-32768, 32768, (N, Kp // G), dtype=np.int16)
    mult[rng.random(mult.shape) < 0.2] = 0
    weights = ops.LinearWeights(
        base=pack.pack_base(q4, G),
        refine=pack.pack_refine(qr, G),
        mult=mult,
        scale=(rng.standard_normal(N) * 1e-6).astype(F),
        bias=rng.standard_normal(N).astype(F) if bias else None,
        num_inputs=K,
        group_size=G,
    )
    return weights, 16 * q4.astype(np.int64) + qr


def exact(weights: ops.LinearWeights, codes: Ints, x: Ints) -> Ints:
    """Σ_g m[n,g] · Σ_k code[n,k] · x[k] in int64."""
    G = weights.group_size
    grouped = codes.reshape(len(codes), -1, G)
    dots = np.einsum("ngk,mgk->mng", grouped, x.reshape(len(x), -1, G))
    return (dots * weights.mult.astype(np.int64)).sum(-1)


def padded_codes(x: Ints, Kp: int) -> torch.Tensor:
    return torch.from_numpy(np.pad(x, ((0, 0), (0, Kp - x.shape[1])))).float()


def random_activations(M: int, K: int, seed: int = 0) -> Ints:
    return np.random.default_rng(seed).integers(-127, 128, (M, K))


# ---- linear


@pytest.mark.parametrize("N", [1, 7, 17])
@pytest.mark.parametrize(("K", "G"), [(576, 64), (960, 64), (200, 128), (33, 32), (256, 128)])
def test_accumulator_is_the_integer_sum(N: int, K: int, G: int) -> None:
    weights, codes = random_weights(N, K, G, N + K)
    x = random_activations(WIDE_ROWS + 5, K, K)
    x[0], x[1] = 127, -127
    Kp = codes.shape[1]
    wide = np.pad(x, ((0, 0), (0, Kp - K)))
    w8, w4 = (ExactLinear.from_weights(weights, view) for view in ("w8", "w4"))
    draft_codes = 16 * pack.unpack_base(weights.base, G).astype(np.int64)
    for rows in (1, 5, WIDE_ROWS, WIDE_ROWS + 1, len(x)):
        got = w8.accumulate(padded_codes(x[:rows], Kp))
        assert np.array_equal(got.numpy(), exact(weights, codes, wide[:rows]))
        got = w4.accumulate(padded_codes(x[:rows], Kp))
        assert np.array_equal(got.numpy(), exact(weights, draft_codes, wide[:rows]))


@pytest.mark.parametrize("rows", [1, WIDE_ROWS + 1])
@pytest.mark.parametrize("activation", [-127, 0, 1, 127])
def test_all_nibble_pairs_and_the_largest_sums(activation: int, rows: int) -> None:
    """Every legal pair fills K = 8192 inputs at the largest multiplier: nothing overflows."""
    pairs = [(b, r) for b in range(-8, 8) for r in range(-8, 8) if b > -8 or r >= 0]
    K, G = 8192, 128
    q4 = np.array([[b] * K for b, _ in pairs], dtype=np.int8)
    qr = np.array([[r] * K for _, r in pairs], dtype=np.int8)
    mult = np.full((len(pairs), K // G), 32767, dtype=np.int16)
    mult[::2] = -32768
    one = np.ones(len(pairs), F)
    weights = ops.LinearWeights(
        base=pack.pack_base(q4, G), refine=pack.pack_refine(qr, G), mult=mult, scale=one,
        bias=None, num_inputs=K, group_size=G,
    )  # fmt: skip
    got = ExactLinear.from_weights(weights, "w8").accumulate(
        torch.full((rows, K), float(activation))
    )
    want = (16 * q4[:, 0].astype(np.int64) + qr[:, 0]) * mult[:, 0] * activation * K
    assert np.array_equal(got.numpy(), np.tile(want, (rows, 1)))


@pytest.mark.parametrize("bias", [False, True])
def test_linear_rounds_twice_then_adds_the_bias(bias: bool) -> None:
    weights, codes = random_weights(17, 200, 128, 3, bias=bias)
    x = random_activations(20, 200, 4)
    scale = np.abs(np.random.default_rng(5).standard_normal(20)).astype(F)
    scale[3] = 0  # an all-zero token
    x[3] = 0
    acc = exact(weights, codes, np.pad(x, ((0, 0), (0, 56))))
    want = (acc.astype(F) * scale[:, None]) * weights.scale
    if weights.bias is not None:
        want = want + weights.bias
    linear = ExactLinear.from_weights(weights, "w8")
    inputs, scales = padded_codes(x, 256), torch.from_numpy(scale)
    for rows in (1, 16, 17, 20):
        got = linear(inputs[:rows], scales[:rows]).numpy()
        assert got.tobytes() == want[:rows].tobytes()
    for i in range(20):
        assert linear(inputs[i : i + 1], scales[i : i + 1]).numpy().tobytes() == want[i].tobytes()


def test_linear_op_pads_and_adds_the_residual_last() -> None:
    weights, codes = random_weights(9, 33, 32, 8, bias=True)
    backend = ReferenceBackend(model_weights({"w": weights}), GEOMETRY)
    x = torch.from_numpy(np.random.default_rng(0).standard_normal((4, 33)).astype(F))
    residual = torch.from_numpy(np.random.default_rng(1).standard_normal((4, 9)).astype(F))
    registers: dict[str, Any] = {"x": x, "r": residual}
    program = (ops.Quantise("x", "a"), ops.Linear("a", "w", "y", "w8", residual="r"))
    backend.replay(program, batch(4), backend.new_cache(4), registers)
    quantised, scale = numeric.quantise(x)
    acc = exact(weights, codes, np.pad(quantised.numpy().astype(np.int64), ((0, 0), (0, 31))))
    y = (acc.astype(F) * scale.numpy()[:, None]) * weights.scale + weights.bias
    assert registers["y"].numpy().tobytes() == (residual.numpy() + y).tobytes()


GEOMETRY = ops.Geometry(
    num_layers=2, hidden_size=8, num_heads=6, num_kv_heads=2, head_dim=24, num_tokens=5
)


def model_weights(linears: dict[str, ops.LinearWeights]) -> ops.ModelWeights:
    rng = np.random.default_rng(0)
    angle = rng.standard_normal((200, 12))
    return ops.ModelWeights(
        linears=linears,
        embedding=rng.integers(-127, 128, (7, 8), dtype=np.int8),
        embedding_scale=rng.random(7, dtype=F),
        cos=np.cos(angle).astype(F),
        sin=np.sin(angle).astype(F),
    )


def batch(rows: int, **fields: Any) -> ops.Batch:
    positions = np.arange(rows)
    return ops.Batch(**({"ids": None, "positions": positions, "full_from": 0 * positions} | fields))


# ---- embedding, row selection, argmax


def test_embedding_is_one_product_per_element() -> None:
    weights = model_weights({})
    backend = ReferenceBackend(weights, GEOMETRY)
    ids = np.array([6, 0, 6, 3])
    program = (ops.Embed("x"), ops.SelectRows("x", "y"))
    got = backend.replay(program, batch(4, ids=ids, num_logits=2), backend.new_cache(4), {})
    want = weights.embedding[ids].astype(F) * weights.embedding_scale[ids][:, None]
    assert got["x"].numpy().tobytes() == want.tobytes()
    assert got["y"].numpy().tobytes() == want[2:].tobytes()


def test_argmax_takes_the_lowest_of_equals() -> None:
    logits = torch.zeros(3, 5000)
    logits[0, [4999, 70, 33]] = 2.0
    logits[1, [1, 0]] = -0.0
    logits[2] = -1.0
    found = TorchLogits(logits)
    assert found.argmax() == [33, 0, 0]
    assert found.argmax([4999, 70, 4, 70]) == [70, 4, 4]
    assert found.argmax([7]) == [7, 7, 7]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_logits_that_are_not_numbers_are_an_error(bad: float) -> None:
    logits = torch.zeros(2, 9)
    logits[1, 4] = bad
    for read in (TorchLogits(logits).argmax, TorchLogits(logits).numpy):
        with pytest.raises(NumericError, match="NaN or infinity"):
            read()


def test_padding_rows_of_the_vocabulary_never_win() -> None:
    weights, _ = random_weights(7, 8, 32, 2)
    weights.scale[:] = 0
    assert weights.base.shape[0] > GEOMETRY.num_tokens
    padding = np.array([0, 0, 0, 0, 0, 9, np.nan], dtype=F)  # not even NaN there matters
    head = ops.LinearWeights(
        base=weights.base, refine=weights.refine, mult=weights.mult, scale=weights.scale,
        bias=padding, num_inputs=8, group_size=32,
    )  # fmt: skip
    backend = ReferenceBackend(model_weights({"head": head}), GEOMETRY)
    program = (ops.Embed("x"), ops.Quantise("x", "a"), ops.Linear("a", "head", "logits", "w8"))
    logits = backend.run(program, batch(3, ids=np.array([0, 1, 2])), backend.new_cache(4))
    assert logits is not None
    assert logits.argmax() == [0, 0, 0]
    assert logits.numpy().shape == (3, 5)


# ---- cache


def test_cache_bytes_are_those_of_pack() -> None:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((3, 2, 24)).astype(F)
    q4, qr, scale = numeric.kv_nest(torch.from_numpy(x))
    cache = NestedCache(GEOMETRY, 70)
    positions = np.array([69, 3, 10])
    cache.write(1, 1, torch.from_numpy(positions), (q4, qr, scale))
    planes = cache.planes(70)
    assert planes["base"].shape == planes["refine"].shape == (2, 2, 70, 2, 12)
    assert planes["scale"].dtype == np.float16
    at = planes["base"][1, 1, positions], planes["refine"][1, 1, positions]
    assert np.array_equal(at[0], pack.pack_kv_base(q4.numpy().astype(np.int8)))
    assert np.array_equal(at[1], pack.pack_kv_refine(qr.numpy().astype(np.int8)))
    assert np.array_equal(planes["scale"][1, 1, positions], scale.numpy())
    assert planes["base"].any(axis=(-2, -1)).sum() == 3
    high, low, s = cache.read(1, 1, 70)
    assert torch.equal(high[positions], 16 * q4)
    assert torch.equal(low[positions], qr)
    assert torch.equal(s[positions], scale.float())


def test_cache_of_every_code_and_the_round_trip() -> None:
    geometry = ops.Geometry(
        num_layers=1, hidden_size=8, num_heads=1, num_kv_heads=1, head_dim=256, num_tokens=5
    )
    pairs = torch.tensor([(b, r) for b in range(-8, 8) for r in range(-8, 8)]).float()
    cache = NestedCache(geometry, 3)
    nested = (pairs[:, 0].view(1, 1, 256), pairs[:, 1].view(1, 1, 256), torch.ones(1, 1).half())
    cache.write(0, 0, torch.tensor([2]), nested)
    high, low, _ = cache.read(0, 0, 3)
    assert torch.equal(high[2, 0], 16 * pairs[:, 0])
    assert torch.equal(low[2, 0], pairs[:, 1])
    planes = cache.planes(3)
    for part in planes.values():
        part.flags.writeable = False  # as from a file that is mapped
    other = NestedCache(geometry, 9)
    other.load(planes)
    for name, part in other.planes(3).items():
        assert part.tobytes() == planes[name].tobytes()
    cache.base.zero_()
    assert planes["base"].any()  # planes are copies


@pytest.mark.parametrize("kind", ["quantised", "float"])
def test_dropping_a_backend_frees_its_tensors_at_once(kind: str) -> None:
    """A conversion makes one per layer and view; a collection may come long after memory is out."""
    spec = random_spec(num_layers=1)
    backend: Any
    if kind == "quantised":
        backend = ReferenceBackend(random_model(spec, 32, 64), geometry(spec, 317))
    else:
        backend = half_models.reference(spec)
    Model(spec, backend).forward("w8", [1, 2], 0, backend.new_cache(64))
    ref = weakref.ref(backend)
    gc.collect()
    gc.disable()
    try:
        del backend
        assert ref() is None
    finally:
        gc.enable()
