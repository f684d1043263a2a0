"""Rotation and fusion keep the function of a plain fp64 layer."""

import math

import pytest
import torch

from edge_runtime.convert.hadamard import Rotation, random_rotation
from edge_runtime.convert.rotate import (
    FusedLayer,
    fuse_layer,
    rotate_embedding_rows,
    rotate_head,
)
from edge_runtime.convert.source import tensor_shapes
from edge_runtime.format.spec import ModelSpec

Tensors = dict[str, torch.Tensor]


def make_spec(**changes: object) -> ModelSpec:
    """An odd shape: hidden 92 has no Hadamard matrix, 3 query heads per KV head, head_dim 20."""
    fields: dict[str, object] = {
        "architecture": "qwen3",
        "num_layers": 1,
        "hidden_size": 92,
        "intermediate_size": 70,
        "num_heads": 6,
        "num_kv_heads": 2,
        "head_dim": 20,
        "vocab_size": 11,
        "max_position": 64,
        "rms_norm_eps": 1e-6,
    }
    return ModelSpec(**(fields | changes))  # type: ignore[arg-type]


def make_tensors(spec: ModelSpec, seed: int = 0) -> Tensors:
    """All tensors of the model, the layer's under their short names."""
    rng = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in tensor_shapes(spec):
        value = torch.randn(shape, generator=rng)
        scale = 1 / math.sqrt(shape[-1]) if len(shape) == 2 else 0.5
        tensors[name.removeprefix("layers.0.")] = value * scale + (1.0 if "norm" in name else 0.0)
    return tensors


def norm(x: torch.Tensor, gamma: torch.Tensor | None, eps: float) -> torch.Tensor:
    y = x / torch.sqrt(x.square().mean(-1, keepdim=True) + eps)
    return y if gamma is None else y * gamma


def linear(x: torch.Tensor, W: torch.Tensor, b: torch.Tensor | None) -> torch.Tensor:
    return x @ W.double().T + (0 if b is None else b.double())


def attend(spec: ModelSpec, qkv: torch.Tensor, norms: list[torch.Tensor | None]) -> torch.Tensor:
    """Causal attention [T, q_size + 2 kv_size] -> [T, q_size], positions as a plain rotation."""
    T, D = qkv.shape[0], spec.head_dim
    q, k, v = torch.split(qkv, [spec.q_size, spec.kv_size, spec.kv_size], 1)
    q, k = q.reshape(T, -1, D), k.reshape(T, -1, D)
    if spec.qk_norm:
        q, k = norm(q, norms[0], spec.rms_norm_eps), norm(k, norms[1], spec.rms_norm_eps)
    angle = torch.arange(T)[:, None] / 100.0 ** (torch.arange(D // 2) / D).double()
    cos, sin = angle.cos()[:, None], angle.sin()[:, None]
    turned = []
    for x in (q, k):
        a, b = torch.split(x, D // 2, -1)
        turned.append(torch.cat([a * cos - b * sin, b * cos + a * sin], -1))
    q, k = turned[0], turned[1].repeat_interleave(spec.group, 1)
    v = v.reshape(T, -1, D).repeat_interleave(spec.group, 1)
    scores = torch.einsum("thd,shd->hts", q, k) / math.sqrt(D)
    scores += torch.full((T, T), -math.inf, dtype=torch.float64).triu(1)
    return torch.einsum("hts,shd->thd", scores.softmax(-1), v).reshape(T, -1)


def plain_layer(spec: ModelSpec, t: Tensors, x: torch.Tensor) -> torch.Tensor:
    """The source's layer, x [T, H] fp64."""
    h = norm(x, t["attn_norm"], spec.rms_norm_eps)
    qkv = torch.cat([linear(h, t[n], t.get(n + ".bias")) for n in "qkv"], 1)
    a = attend(spec, qkv, [t.get("q_norm"), t.get("k_norm")])
    x = x + linear(a, t["o"], t.get("o.bias"))
    h = norm(x, t["mlp_norm"], spec.rms_norm_eps)
    gate, up = (linear(h, t[n], t.get(n + ".bias")) for n in ("gate", "up"))
    return x + linear(torch.nn.functional.silu(gate) * up, t["down"], t.get("down.bias"))


def fused_layer(spec: ModelSpec, f: FusedLayer, x: torch.Tensor) -> torch.Tensor:
    """The converted layer, x [T, H] fp64 in the rotated basis."""
    qkv = linear(norm(x, None, spec.rms_norm_eps), f.qkv, f.qkv_bias)
    x = x + linear(attend(spec, qkv, [f.q_norm, f.k_norm]), f.o, f.o_bias)
    both = linear(norm(x, None, spec.rms_norm_eps), f.gate_up, f.gate_up_bias)
    gate, up = torch.split(both, spec.intermediate_size, 1)
    return x + linear(torch.nn.functional.silu(gate) * up, f.down, f.down_bias)


def orthogonal(n: int, seed: int) -> Rotation:
    """Exact to fp64, so that only the weights' fp32 cast remains."""
    A = torch.randn(n, n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return Rotation(torch.linalg.qr(A)[0], 1.0, "orthogonal")


SPECS: dict[str, dict[str, object]] = {
    "plain": {},
    "qwen2: q k v biases": {"qkv_bias": True},
    "qwen3: qk norm, head_dim given": {"qk_norm": True},
    "every bias": {"qkv_bias": True, "o_bias": True, "mlp_bias": True},
    "hadamard sizes": {"hidden_size": 96, "head_dim": 16, "qkv_bias": True},
    "one head per kv head": {"num_heads": 2, "qkv_bias": True, "o_bias": True},
}


@pytest.mark.parametrize("case", SPECS)
@pytest.mark.parametrize("rotated", ["R1 and R2", "R1", "R2", "none"])
def test_logits_do_not_change(case: str, rotated: str) -> None:
    spec = make_spec(**SPECS[case])
    tensors = make_tensors(spec)
    H, D = spec.hidden_size, spec.head_dim
    r1 = None
    if "R1" in rotated:
        r1 = random_rotation(H, 1) if "hadamard" in case else orthogonal(H, 1)
    r2 = random_rotation(D, 2) if "R2" in rotated else None
    fused = fuse_layer(tensors, spec, r1, r2)
    ids = torch.tensor([3, 0, 7, 7, 1, 10, 2])
    x = plain_layer(spec, tensors, tensors["embed"][ids].double())
    expected = linear(norm(x, tensors["norm"], spec.rms_norm_eps), tensors["head"], None)
    x = fused_layer(spec, fused, rotate_embedding_rows(tensors["embed"][ids], r1).double())
    head = rotate_head(tensors["head"], tensors["norm"], r1)
    logits = linear(norm(x, None, spec.rms_norm_eps), head, None)
    error = (logits - expected).norm() / expected.norm()
    assert float(error) < 1e-6


def test_qr_fallback_is_good_to_fp32() -> None:
    spec = make_spec()
    tensors = make_tensors(spec)
    r1 = random_rotation(spec.hidden_size, 1)
    assert r1.kind == "orthogonal"
    x = tensors["embed"].double()
    expected = rotate_embedding_rows(plain_layer(spec, tensors, x), r1)
    fused = fuse_layer(tensors, spec, r1, None)
    got = fused_layer(spec, fused, rotate_embedding_rows(tensors["embed"], r1).double())
    assert float((got - expected).norm() / expected.norm()) < 1e-5


def test_tied_embedding_becomes_two_matrices() -> None:
    """Each from the source's rows, neither from the other's rotated result."""
    spec = make_spec(hidden_size=96, tied_embedding=True)
    tensors = make_tensors(spec)
    r1 = random_rotation(96, 4)
    embed = rotate_embedding_rows(tensors["embed"], r1)
    head = rotate_head(tensors["embed"], tensors["norm"], r1)
    back = r1.dense().T
    assert torch.allclose(embed.double() @ back, tensors["embed"].double(), atol=1e-6)
    assert torch.allclose(
        head.double() @ back, (tensors["embed"] * tensors["norm"]).double(), atol=1e-6
    )


def test_fused_shapes_and_types() -> None:
    spec = make_spec(qkv_bias=True, o_bias=True, mlp_bias=True, qk_norm=True)
    f = fuse_layer(make_tensors(spec), spec, None, None)
    H, F = spec.hidden_size, spec.intermediate_size
    rows = spec.q_size + 2 * spec.kv_size
    shapes = {
        "qkv": (rows, H),
        "qkv_bias": (rows,),
        "o": (H, spec.q_size),
        "o_bias": (H,),
        "gate_up": (2 * F, H),
        "gate_up_bias": (2 * F,),
        "down": (H, F),
        "down_bias": (H,),
        "q_norm": (spec.head_dim,),
        "k_norm": (spec.head_dim,),
    }
    for name, shape in shapes.items():
        assert getattr(f, name).shape == shape, name
        assert getattr(f, name).dtype == torch.float32, name


def test_without_rotation_only_the_norms_move() -> None:
    spec = make_spec(qkv_bias=True)
    t = make_tensors(spec)
    f = fuse_layer(t, spec, None, None)
    F = spec.intermediate_size
    assert torch.equal(f.o, t["o"])
    assert torch.equal(f.down, t["down"])
    assert torch.equal(f.gate_up[F:], t["up"] * t["mlp_norm"])
    assert torch.equal(f.qkv[-spec.kv_size :], t["v"] * t["attn_norm"])
    assert f.qkv_bias is not None
    assert torch.equal(f.qkv_bias, torch.cat([t["q.bias"], t["k.bias"], t["v.bias"]]))
    assert f.o_bias is None
    assert f.down_bias is None
    assert f.q_norm is None


@pytest.mark.parametrize("rows", [0, 1, 4095, 4096, 4097, 9000])
def test_a_long_table_is_rotated_in_pieces(rows: int) -> None:
    r1 = random_rotation(12, 0)
    table = torch.randn(rows, 12, generator=torch.Generator().manual_seed(rows))
    gamma = torch.linspace(0.5, 2, 12)
    whole = (table.double() * gamma.double()) @ r1.dense()
    assert torch.allclose(rotate_head(table, gamma, r1), whole.float(), rtol=1e-6, atol=1e-7)
    assert torch.allclose(
        rotate_embedding_rows(table, r1), (table.double() @ r1.dense()).float(), atol=1e-6
    )


def test_bf16_source_is_accepted() -> None:
    spec = make_spec(hidden_size=96, qkv_bias=True, qk_norm=True)
    tensors = {name: value.bfloat16() for name, value in make_tensors(spec).items()}
    exact = fuse_layer(
        {n: v.float() for n, v in tensors.items()}, spec, random_rotation(96, 1), None
    )
    f = fuse_layer(tensors, spec, random_rotation(96, 1), None)
    assert torch.equal(f.qkv, exact.qkv)
    assert torch.equal(f.down, exact.down)
    assert f.q_norm is not None
    assert f.q_norm.dtype == torch.float32
