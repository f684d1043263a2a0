"""Attention in Triton, every form: bits equal to the reference for every M, length and policy."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from triton_devices import DEVICES, device_of

from edge_runtime.kernels import ops
from edge_runtime.kernels.cuda.cache import NestedCache
from edge_runtime.kernels.layout import NEVER, full_from, padded
from edge_runtime.kernels.reference import numeric
from edge_runtime.kernels.reference.ops import ReferenceBackend

F = np.float32
FORMS = ["words", "cols", "rows", "fused words", "fused cols"]


class Layer:
    """One layer of T cached tokens, on the reference and on a device; the rest of it is garbage."""

    def __init__(
        self, heads: int, kv_heads: int, D: int, T: int, device: str, *, seed: int = 0,
        k_scale: float = 1.0, v_scale: float = 1.0,
    ) -> None:  # fmt: skip
        geometry = ops.Geometry(
            num_layers=2, hidden_size=8, num_heads=heads, num_kv_heads=kv_heads, head_dim=D,
            num_tokens=1,
        )  # fmt: skip
        rng = np.random.default_rng(seed)
        table = np.zeros((1, D // 2), F)
        weights = ops.ModelWeights(
            linears={}, embedding=np.zeros((1, 8), np.int8), embedding_scale=np.zeros(1, F),
            cos=table, sin=table,
        )  # fmt: skip
        self.device, self.geometry = device, geometry
        self.backend = ReferenceBackend(weights, geometry)
        self.capacity = padded(T, 64)
        self.cache = self.backend.new_cache(self.capacity)
        for kind, scale in ((0, k_scale), (1, v_scale)):
            x = torch.from_numpy(rng.standard_normal((T, kv_heads, D)).astype(F) * F(scale))
            self.cache.write(1, kind, torch.arange(T), numeric.kv_nest(x))
        self.cache.base[:, :, T:] = 0x77
        self.cache.refine[:, :, T:] = 0xF8
        self.cache.scale[:, :, T:] = float("nan")
        self.q = rng.standard_normal((max(T, 16), heads, D)).astype(F)

    def reference(self, positions: Sequence[int], full: Sequence[int]) -> np.ndarray:
        """[M, heads·D]"""
        batch = ops.Batch(ids=None, positions=np.array(positions), full_from=np.array(full))
        registers = {"q": torch.from_numpy(self.q[list(positions)])}
        self.backend.replay((ops.Attention("q", "o", 1),), batch, self.cache, registers)
        return registers["o"].numpy()

    def device_cache(self) -> NestedCache:
        cache = NestedCache(self.geometry, self.capacity, self.device)
        cache.load(self.cache.planes(self.capacity))
        return cache

    def run(
        self, positions: Sequence[int], full: Sequence[int], form: str | None, split: int = 2
    ) -> np.ndarray:
        """The same on the device, outputs poisoned."""
        from edge_runtime.kernels.cuda.attention import Workspace, attention
        from edge_runtime.kernels.cuda.attention_tiles import Tiles

        g, M = self.geometry, len(positions)
        tiles = None
        if form is not None:
            kind = form.split()[-1]
            queries = {"words": 1, "cols": 16 if M > 2 else 8, "rows": 16}[kind]
            fused = form != kind
            tiles = Tiles(form=kind, queries=queries, split=split, width=2, fused=fused)
        space = Workspace(M, g.num_heads, g.head_dim, self.capacity, self.device, fused_rows=M)
        space.weights.fill_(-128)
        space.stats.fill_(float("nan"))
        space.values.fill_(float("nan"))
        out = torch.full((M, g.num_heads, g.head_dim), float("nan"), device=self.device)
        attention(
            torch.from_numpy(self.q[list(positions)]).to(self.device),
            torch.tensor(positions, dtype=torch.int32, device=self.device),
            torch.tensor(full, dtype=torch.int32, device=self.device),
            self.device_cache().layer(1),
            out,
            space,
            tiles=tiles,
            asm=self.device == "cuda",
        )
        return out.flatten(1).cpu().numpy()

    def check(self, positions: Sequence[int], full: Sequence[int], form: str | None) -> None:
        got, want = self.run(positions, full, form), self.reference(positions, full)
        assert got.tobytes() == want.tobytes(), np.argwhere(got != want)[:3]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("length", [1, 63, 64, 65, 255, 256, 257])
def test_lengths(length: int, form: str, device: str) -> None:
    """Every form at every length, with both planes, with one, and with both on the last tokens."""
    layer = Layer(1, 1, 64, length, device_of(device), seed=length)
    for full in (0, NEVER, full_from(length - 1, 70)):
        layer.check([length - 1], [full], form)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("form", ["cols", "rows", "fused cols"])
@pytest.mark.parametrize("D", [24, 64, 96, 128])
@pytest.mark.parametrize("group", [1, 3, 4, 7])
def test_shapes(group: int, D: int, form: str, device: str) -> None:
    layer = Layer(group * 2, 2, D, 130, device_of(device), seed=D + group)
    layer.check([129, 63], [64, NEVER], form)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("D", [24, 64, 96, 128])
def test_words(D: int, device: str) -> None:
    layer = Layer(2, 2, D, 130, device_of(device), seed=D)
    for form in ("words", "fused words"):
        layer.check([129], [128], form)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("M", range(1, 10))
def test_rows_of_a_batch(M: int, device: str) -> None:
    """M rows at mixed positions and policies, by the tiles that are chosen for them."""
    layer = Layer(3, 1, 24, 200, device_of(device), seed=M)
    positions = [199, 0, 63, 64, 65, 128, 5, 199, 127][:M]
    full = [full_from(p, r) for p, r in zip(positions, [70, 0, None] * 3, strict=False)]
    layer.check(positions, full, None)


@pytest.mark.parametrize("device", DEVICES)
def test_no_result_depends_on_the_other_rows(device: str) -> None:
    """Chunks of 1, 3, 5 and 20 rows, any split: the same bits."""
    layer = Layer(2, 1, 24, 200, device_of(device), seed=3)
    positions = list(range(175, 195))
    full = [full_from(p, [None, 0, 64, 20][p % 4]) for p in positions]
    want = layer.reference(positions, full)
    for chunk, split in ((20, 1), (1, 1), (3, 2), (5, 4)):
        for i in range(0, 20, chunk):
            part = slice(i, i + chunk)
            form = None if chunk == 20 else "cols"
            got = layer.run(positions[part], full[part], form, split)
            assert got.tobytes() == want[part].tobytes(), (chunk, i)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("k_scale", "v_scale"), [(1.0, 1e-4), (60.0, 1.0), (1e-8, 1.0), (1.0, 2e5), (1.0, 0.0)]
)
def test_magnitudes(k_scale: float, v_scale: float, form: str, device: str) -> None:
    """Small V, one-hot softmax, flat softmax, V near the end of fp16, zero V."""
    layer = Layer(1, 1, 24, 130, device_of(device), seed=1, k_scale=k_scale, v_scale=v_scale)
    layer.check([129], [64], form)
    layer.q[:] = 0
    layer.check([129], [0], form)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("form", ["cols", "rows", "fused cols"])
@pytest.mark.parametrize("kind", [0, 1])
def test_nan_scale_reaches_those_who_see_it(kind: int, form: str, device: str) -> None:
    layer = Layer(4, 2, 24, 130, device_of(device), seed=5)
    before = layer.reference([99, 129], [0, 0])
    layer.cache.scale[1, kind, 100, 1] = float("nan")
    got = layer.run([99, 129], [0, 0], form)
    half = before.shape[1] // 2  # heads 0 and 1 read the other KV head
    assert got[0].tobytes() == before[0].tobytes()
    assert got[1, :half].tobytes() == before[1, :half].tobytes()
    assert np.isnan(got[1, half:]).all()


@pytest.mark.filterwarnings("ignore:All-NaN slice")  # the interpreter's maximum
@pytest.mark.parametrize("device", DEVICES)
def test_nan_query(device: str) -> None:
    layer = Layer(2, 1, 24, 65, device_of(device), seed=6)
    layer.q[64, 1, 3] = np.nan
    for form in ("cols", "fused cols"):
        got = layer.run([64], [0], form)
        assert np.isnan(got[0, 24:]).all()
        assert np.isfinite(got[0, :24]).all()


def test_workspace_of_an_orin() -> None:
    """Sixteen rows over 32K tokens: 144 bytes a block of a query vector, and no more."""
    from edge_runtime.kernels.cuda.attention import Workspace

    space = Workspace(16, 32, 128, 32768, "meta", fused_rows=0)
    assert space.num_bytes == 16 * 32 * 512 * 144


@pytest.mark.parametrize("heads", [32, 28])
@pytest.mark.parametrize("D", [64, 128])
def test_large_on_a_gpu(heads: int, D: int) -> None:
    """A real layer: decoding, verification and a chunk of a prompt give the reference's bits."""
    layer = Layer(heads, heads if heads == 32 else 4, D, 1300, device_of("cuda"), seed=D)
    for rows in (1, 2, 5, 8, 16, 40):
        positions = list(range(1300 - rows, 1300))
        for full in ([0] * rows, [NEVER] * rows, [full_from(p, 300) for p in positions]):
            layer.check(positions, full, None)
    if heads == 32:
        for form in FORMS:
            layer.check([1299], [640], form)


def test_a_hundred_repeats_on_a_gpu() -> None:
    layer = Layer(8, 2, 128, 700, device_of("cuda"), seed=7)
    rows = list(range(692, 700))
    for form in ("cols", "rows", "fused cols"):
        want = layer.reference(rows, [0] * 8).tobytes()
        assert all(layer.run(rows, [0] * 8, form).tobytes() == want for _ in range(100))
