"""RoPE and the quantised KV write in Triton: bits and bytes equal to the reference."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from triton_devices import DEVICES, device_of

from edge_runtime.kernels import ops
from edge_runtime.kernels.cuda.cache import NestedCache
from edge_runtime.kernels.reference.ops import ReferenceBackend

F = np.float32
CONTEXT = 150


class Case:
    """A geometry with rope tables and head norms, on the reference and on a device."""

    def __init__(
        self, heads: int, kv_heads: int, D: int, *, norm: bool, rotate: bool, seed: int = 0
    ) -> None:
        rng = np.random.default_rng(seed)
        self.geometry = ops.Geometry(
            num_layers=2, hidden_size=8, num_heads=heads, num_kv_heads=kv_heads, head_dim=D,
            num_tokens=1, rotate_kv=rotate,
        )  # fmt: skip
        angle = rng.uniform(0, 7, (CONTEXT, D // 2))
        self.norms = {
            f"layers.1.{n}": rng.uniform(0.5, 2, D).astype(F) for n in ("q_norm", "k_norm")
        }
        self.weights = ops.ModelWeights(
            linears={}, embedding=np.zeros((1, 8), np.int8), embedding_scale=np.zeros(1, F),
            cos=np.cos(angle).astype(F), sin=np.sin(angle).astype(F), head_norms=self.norms,
        )  # fmt: skip
        self.op = ops.RopeKv("x", "q", 1, 1e-6, norm)
        self.reference = ReferenceBackend(self.weights, self.geometry)
        self.width = (heads + 2 * kv_heads) * D
        self.rng = rng

    def check(self, positions: list[int], qkv: np.ndarray, device: str) -> None:
        """One call on either side from caches full of the same garbage."""
        from edge_runtime.kernels.cuda.kv import rope_kv

        g = self.geometry
        want_cache = self.reference.new_cache(CONTEXT)
        planes = want_cache.planes(CONTEXT)
        planes["base"][:] = 0xA5
        planes["refine"][:] = 0x5A
        planes["scale"][:] = 0.5
        want_cache.load(planes)
        cache = NestedCache(g, CONTEXT, device)
        cache.load(planes)
        registers = {"x": torch.from_numpy(qkv)}
        batch = ops.Batch(
            ids=None, positions=np.array(positions), full_from=np.zeros(len(positions), np.int64)
        )
        self.reference.replay((self.op,), batch, want_cache, registers)
        out = torch.full(
            (len(positions), g.num_heads, g.head_dim), float("nan"), device=device
        )  # fmt: skip
        norms = [torch.from_numpy(self.norms[f"layers.1.{n}_norm"]).to(device) for n in "qk"]
        rope_kv(
            torch.from_numpy(qkv).to(device),
            torch.tensor(positions, dtype=torch.int32, device=device),
            torch.from_numpy(self.weights.cos).to(device),
            torch.from_numpy(self.weights.sin).to(device),
            cache.layer(1),
            out,
            head_norms=(norms[0], norms[1]) if self.op.qk_norm else None,
            eps=self.op.eps,
            rotate_kv=g.rotate_kv,
        )
        assert out.cpu().numpy().tobytes() == registers["q"].numpy().tobytes()
        got = cache.planes(CONTEXT)
        for name, plane in want_cache.planes(CONTEXT).items():
            assert got[name].tobytes() == plane.tobytes(), name

    def random(self, rows: int) -> np.ndarray:
        """fp32 [rows, width]"""
        return self.rng.standard_normal((rows, self.width)).astype(F)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "D"), [(2, 2, 64), (3, 1, 96), (4, 1, 128), (7, 1, 24), (6, 2, 16)]
)
@pytest.mark.parametrize("norm", [False, True])
def test_bits(heads: int, kv_heads: int, D: int, norm: bool, device: str) -> None:
    case = Case(heads, kv_heads, D, norm=norm, rotate=False)
    case.check([63, 64, 0, 149], case.random(4), device_of(device))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("D", [16, 64, 128])
def test_hadamard(D: int, device: str) -> None:
    case = Case(3, 1, D, norm=D == 64, rotate=True)
    case.check([5, 127, 1], case.random(3), device_of(device))


@pytest.mark.parametrize("device", DEVICES)
def test_magnitudes(device: str) -> None:
    """Zero vectors, subnormal scales, vectors past what fp16 scales hold, exact ties."""
    case = Case(2, 2, 24, norm=False, rotate=False)
    qkv = case.random(8)
    for row, factor in enumerate((0.0, 1e-7, 1e-5, 1e4, 4.6e5, 1e9, 1e-38, 1.0)):
        qkv[row] *= F(factor)
    qkv[7] = np.round(qkv[7] * 2) / 2  # ties
    case.check([3, 9, 64, 65, 66, 70, 100, 149], qkv, device_of(device))


@pytest.mark.parametrize("device", DEVICES)
def test_nan_reaches_the_scale(device: str) -> None:
    from edge_runtime.kernels.cuda.kv import rope_kv

    device = device_of(device)
    case = Case(1, 1, 24, norm=False, rotate=False)
    qkv = case.random(2)
    qkv[0, 24 + 5] = np.nan
    qkv[0, 48 + 5] = np.nan
    cache = NestedCache(case.geometry, 64, device)
    rope_kv(
        torch.from_numpy(qkv).to(device),
        torch.tensor([3, 4], dtype=torch.int32, device=device),
        torch.from_numpy(case.weights.cos).to(device),
        torch.from_numpy(case.weights.sin).to(device),
        cache.layer(1),
        torch.empty(2, 1, 24, device=device),
    )
    assert np.isnan(cache.planes(5)["scale"][1, :, 3]).all()
    assert np.isfinite(cache.planes(5)["scale"][1, :, 4]).all()


def test_cache_round_trip() -> None:
    """Planes come back as they were loaded; later tokens stay."""
    geometry = ops.Geometry(
        num_layers=2, hidden_size=8, num_heads=3, num_kv_heads=3, head_dim=24, num_tokens=1
    )
    rng = np.random.default_rng(0)
    cache = NestedCache(geometry, 200, "cpu")
    planes = {
        "base": rng.integers(0, 256, (2, 2, 200, 3, 12), dtype=np.uint8),
        "refine": rng.integers(0, 256, (2, 2, 200, 3, 12), dtype=np.uint8),
        "scale": rng.standard_normal((2, 2, 200, 3)).astype(np.float16),
    }
    cache.load(planes)
    assert cache.num_bytes == 2 * 3 * 256 * (24 * 2 + 4)
    for length in (1, 63, 64, 65, 130, 200):
        for name, plane in cache.planes(length).items():
            assert plane.tobytes() == planes[name][:, :, :length].tobytes()
    head = {name: plane[:, :, :70] ^ 255 for name, plane in planes.items() if name != "scale"}
    cache.load(head | {"scale": planes["scale"][:, :, :70]})
    for name in ("base", "refine"):
        planes[name][:, :, :70] ^= 255
        assert cache.planes(200)[name].tobytes() == planes[name].tobytes()
    cache.load({name: plane[1:, :, :70] for name, plane in planes.items()}, 0)
    for name, plane in planes.items():
        assert cache.planes(200, 1)[name].tobytes() == plane[1:].tobytes()
        assert cache.planes(70, 0)[name].tobytes() == plane[1:, :, :70].tobytes()
