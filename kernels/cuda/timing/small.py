"""The small ops: embedding, norm and quantisers, RoPE with the KV write, argmax, sampling, look-up.

Under a few microseconds a launch is what is measured; the time says more than GB/s there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from edge_runtime.kernels.cuda import activations, embedding, head, kv, ngram, sampling
from edge_runtime.kernels.cuda.cache import NestedCache
from edge_runtime.kernels.cuda.timing.entry import Entry, Sizes, num_copies
from edge_runtime.kernels.layout import kv_stored_per_token_bytes, padded
from edge_runtime.kernels.ops import Geometry
from edge_runtime.kernels.sampling import Parameters

EPS = 1e-5
LOOK_UP_TOKENS = 32768
KINDS = {
    "min_p": Parameters(temperature=0.8, min_p=0.05, seed=7),
    "top_k": Parameters(temperature=0.8, top_k=40, seed=7),
    "top_p": Parameters(temperature=0.8, top_p=0.95, seed=7),
}


def activation_bytes(M: int, K: int, group: int) -> int:
    """Bytes of a quantised activation: codes, a scale a row, a sum a group."""
    return M * (padded(K, group) + 4 + 4 * -(-K // group))


def quantisers(s: Sizes) -> Iterator[Entry]:
    """RMSNorm + quantise, quantise."""
    for M in s.rows:
        size = M * s.hidden * 4 + activation_bytes(M, s.hidden, s.group_size)
        n = num_copies(size, s.device)
        x = torch.randn(n, M, s.hidden, device=s.device)
        out = [activations.new_activation(M, s.hidden, s.group_size, s.device) for _ in range(n)]
        norm, plain = _quantisers(x, out, s.group_size)
        yield Entry("norm_quantise", M, norm, n, size, f"{s.hidden}")
        yield Entry("quantise", M, plain, n, size, f"{s.hidden}")


def _quantisers(
    x: Tensor, out: list[activations.Activation], group: int
) -> tuple[Callable[[int], object], Callable[[int], object]]:
    return (
        lambda i: activations.norm_quantise(x[i], EPS, group, out[i]),
        lambda i: activations.quantise(x[i], group, out[i]),
    )


def silu(s: Sizes) -> Iterator[Entry]:
    """silu·mul + quantise."""
    for M in s.rows:
        size = M * s.inner * 8 + activation_bytes(M, s.inner, s.group_size)
        n = num_copies(size, s.device)
        x = torch.randn(n, M, 2 * s.inner, device=s.device)
        out = activations.new_activation(M, s.inner, s.group_size, s.device)
        room = activations.new_silu_room(x[0])
        call = _silu(x, s.group_size, out, room)
        yield Entry("silu_mul_quantise", M, call, n, size, f"{s.inner}")


def _silu(
    x: Tensor, group: int, out: activations.Activation, room: activations.SiluRoom
) -> Callable[[int], object]:
    return lambda i: activations.silu_mul_quantise(x[i], group, out, room)


def embeddings(s: Sizes) -> Iterator[Entry]:
    """Gather of embedding rows."""
    table = torch.randint(-127, 128, (s.vocabulary, s.hidden), dtype=torch.int8, device=s.device)
    scale = torch.rand(s.vocabulary, device=s.device)
    for M in s.rows:
        ids = torch.randint(0, s.vocabulary, (64, M), device=s.device)
        out = torch.empty(M, s.hidden, device=s.device)
        size = M * (s.hidden * 5 + 12)  # a row, its scale and its id
        yield Entry("embed", M, _embed(ids, table, scale, out), 64, size, f"{s.hidden}")


def _embed(ids: Tensor, table: Tensor, scale: Tensor, out: Tensor) -> Callable[[int], object]:
    return lambda i: embedding.embed(ids[i], table, scale, out=out)


def rope(s: Sizes) -> Iterator[Entry]:
    """Head norms, RoPE and the quantised write of K and V."""
    D, width = s.head_dim, (s.heads + 2 * s.kv_heads) * s.head_dim
    geometry = Geometry(
        num_layers=1, hidden_size=s.hidden, num_heads=s.heads, num_kv_heads=s.kv_heads,
        head_dim=D, num_tokens=s.vocabulary,
    )  # fmt: skip
    cache = NestedCache(geometry, s.tokens, s.device).layer(0)
    cos, sin = (torch.randn(s.tokens, D // 2, device=s.device) for _ in range(2))
    norms = (torch.rand(D, device=s.device), torch.rand(D, device=s.device)) if s.qk_norm else None
    for M in s.rows:
        read = 4 * M * (width + D)  # q, k, v; cosines and sines
        size = read + 4 * M * s.heads * D + M * kv_stored_per_token_bytes(1, s.kv_heads, D)
        n = num_copies(size, s.device)
        qkv = torch.randn(n, M, width, device=s.device)
        out = torch.empty(M, s.heads, D, device=s.device)
        positions = torch.arange(M, dtype=torch.int32, device=s.device)

        def call(
            i: int, qkv: Tensor = qkv, positions: Tensor = positions, out: Tensor = out
        ) -> object:
            return kv.rope_kv(qkv[i], positions, cos, sin, cache, out, head_norms=norms, eps=EPS)

        yield Entry("rope_kv", M, call, n, size, f"{width}")


def choices(s: Sizes) -> Iterator[Entry]:
    """Argmax and sampling."""
    for M in s.rows:
        size = M * s.vocabulary * 4
        n = num_copies(size, s.device)
        x = torch.randn(n, M, s.vocabulary, device=s.device) * 3
        best = head.new_choice(M, s.vocabulary, s.device)
        yield Entry("argmax", M, _argmax(x, best), n, size, f"{s.vocabulary}")
        for kind, p in KINDS.items():
            cut = bool(p.top_k or p.top_p < 1)
            room = sampling.new_room(M, s.vocabulary, s.device, truncate=cut)
            settings = sampling.Settings.of([p] * M, list(range(M)), s.device)
            call = _sample(x, settings, cut, room)
            yield Entry("sample", M, call, n, size, f"{s.vocabulary}", kind)


def _argmax(x: Tensor, choice: head.Choice) -> Callable[[int], object]:
    return lambda i: head.argmax(x[i], x.shape[2], out=choice)


def _sample(
    x: Tensor, settings: sampling.Settings, cut: bool, room: sampling.Room
) -> Callable[[int], object]:
    return lambda i: sampling.sample(x[i], x.shape[2], settings, truncate=cut, out=room)


def look_ups(s: Sizes) -> Iterator[Entry]:
    """N-gram look-up."""
    n, length = 8, LOOK_UP_TOKENS
    tokens = torch.randint(0, s.vocabulary, (n, length), dtype=torch.int32, device=s.device)
    sizes = torch.tensor([length, 0], dtype=torch.int32, device=s.device)
    drafted = torch.zeros(8, dtype=torch.int32, device=s.device)
    out = ngram.new_draft(length, s.device)

    def call(i: int) -> object:
        return ngram.look_up(tokens[i], sizes[:1], drafted, sizes[1:], 7, out)

    yield Entry("ngram", 1, call, n, length * 4, f"{length}")
