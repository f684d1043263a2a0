"""The ops a model is made of: each defined once, here; a program is a flat tuple of them.

The model (`model.transformer`) emits a program per view; a backend replays it for a `Batch`.
Registers are named fp32 buffers ("x") or quantised activations ("a"); rows M, positions, lengths
and policy come from the batch at replay and are never part of a program.

Bits. Linears, quantisers, QK dots and PV sums are integer functions, so any order gives the same
bits. What is left in floating point is defined here to the bit: IEEE fp32, round to nearest even,
no fused multiply-add, sums over 32 strided lanes ascending and then a halving tree
(16, 8, 4, 2, 1), `exp` of non-positive numbers by the one polynomial of `reference/numeric.py`.
Letters: M rows, H hidden, K/N in/out features, G group, D head dim, T cached tokens.

    quantise   scale = max|x| / 127;  code = clamp(rne(x · (127 / max|x|)), ±127);
               max|x| < 2^-100 -> all 0
    linear     acc[n] = Σ_g m[n,g] · Σ_{k∈g} code[n,k] · x[k]                   exact integer
               y[n] = (fp32(acc) · x_scale) · S[n]  (+ bias[n])  (+ residual[n])
               code = 16·q4 + q_r in the w8 view, 16·q4 in the w4 view
    norm       y = x · (1 / sqrt(Σx² / H + eps)); weights are folded into the next linear
    silu·mul   e = exp(-|g|); s = (g >= 0 ? 1 : e) / (1 + e); y = (g · s) · u
    rope       (a, b) -> (a·cos - b·sin, b·cos + a·sin) on pairs (i, i + D/2)
    KV write   s = fp16(max|x| / (7 + 7/16)) rounded up, at most 65504;
               q4 = clamp(rne(x / s), -8, 7);
               q_r = clamp(rne((x - q4·s) / (s / 16)), -8, 7), 0…7 where q4 = -8
    attention  per query head: q quantised to int8 (scale qs); per absolute block of 64 tokens
               s[t] = (fp32(q · k[t]) · (qs · 1/√D)) · (ks[t] / 16);  mb = max s;  p = exp(s - mb)
               lb = Σ p;  w = p · (vs[t] / 16);  wm = max w;  i[t] = rne(w · (32767 / wm))
               ob[d] = fp32(Σ_t i[t] · v[t,d]) · (wm / 32767);  wm < 2^-100 -> ob = 0
               then over blocks:  c = exp(mb - max mb);  out = (Σ ob·c) / (Σ lb·c), ascending
               k[t], v[t] are 16·q4 + q_r for t >= full_from, 16·q4 before it
    argmax     the lowest index among equal maxima, among the first `num_tokens`; NaN is an error

Two things go beyond the design. The integer PV sum (it allows float products): with it attention
too is independent of order, of M and of chunking on every backend. The scale of K and V: the
paper's max|x| / 7 leaves unused what base and refinement reach together; figures: tools/LOG.md.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from edge_runtime.errors import NumericError
from edge_runtime.kernels.sampling import Parameters

View = Literal["w8", "w4", "fp"]
F32 = npt.NDArray[np.float32]
I64 = npt.NDArray[np.int64]


def not_finite() -> NumericError:
    """Return the error of logits that are no numbers."""
    return NumericError(
        "logits hold NaN or infinity",
        "the weights or an embedding row given by the caller are broken",
    )


@dataclass(frozen=True, slots=True)
class Embed:
    """x = code[id] · scale[id] (int8 row, one scale), or the batch's own rows."""

    out: str


@dataclass(frozen=True, slots=True)
class NormQuantise:
    """a = quantise(norm(x))."""

    x: str
    out: str
    eps: float


@dataclass(frozen=True, slots=True)
class Quantise:
    """a = quantise(x)."""

    x: str
    out: str


@dataclass(frozen=True, slots=True)
class Linear:
    """out = linear(a) (+ residual register)."""

    a: str
    weight: str
    out: str
    view: View
    residual: str | None = None


@dataclass(frozen=True, slots=True)
class RopeKv:
    """Split qkv, normalise heads (qwen3), rotate q and k, write k and v; q -> out [M, heads·D]."""

    qkv: str
    out: str
    layer: int
    eps: float
    qk_norm: bool = False


@dataclass(frozen=True, slots=True)
class Attention:
    """out[M, heads·D] = attention of q over the cache of a layer, row i up to its own position."""

    q: str
    out: str
    layer: int


@dataclass(frozen=True, slots=True)
class SiluMulQuantise:
    """a = quantise(silu(g) · u), with gate_up = [g | u]."""

    gate_up: str
    out: str


@dataclass(frozen=True, slots=True)
class SelectRows:
    """out = the rows of x whose logits the batch asks for."""

    x: str
    out: str


Op = Embed | NormQuantise | Quantise | Linear | RopeKv | Attention | SiluMulQuantise | SelectRows
Program = tuple[Op, ...]
# What a backend calls that runs them one by one. Names: methods bound to the object that holds them
# would keep its tensors, past `close`, until a collection.
METHODS: dict[type, str] = {
    Embed: "_embed",
    NormQuantise: "_norm_quantise",
    Quantise: "_quantise",
    Linear: "_linear",
    RopeKv: "_rope_kv",
    Attention: "_attention",
    SiluMulQuantise: "_silu_mul_quantise",
    SelectRows: "_select_rows",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Rows of one pass. Row i writes and reads the cache at its own (slot, position).

    ids: int64 [M], or None with `rows` fp32 [M, H] (embedding rows, rotated and dequantised).
    full_from: int64 [M], see `layout.full_from`. num_logits: the last so many rows give logits.
    """

    ids: I64 | None
    positions: I64
    full_from: I64
    slot: int = 0
    rows: F32 | None = None
    num_logits: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearWeights:
    """One nested matrix in canonical order. base, refine: uint8 [N, Kp/2]; mult: int16 [N, Kp/G];
    scale, bias: fp32 [N]. K is the true input size, Kp the padded one."""

    base: npt.NDArray[np.uint8]
    refine: npt.NDArray[np.uint8]
    mult: npt.NDArray[np.int16]
    scale: F32
    bias: F32 | None
    num_inputs: int
    group_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelWeights:
    """All a backend needs: nested linears in the order of use, int8 embedding [V, H] with fp32 row
    scales [V], per-layer head norms (fp32 [D], qwen3 only) and rope tables fp32 [T, D/2].

    A linear may be read from a mapped file each time it is asked for; `release` gives the pages
    of that file back, and they are read again when they are used again."""

    linears: Mapping[str, LinearWeights]
    embedding: npt.NDArray[np.int8]
    embedding_scale: F32
    cos: F32
    sin: F32
    head_norms: dict[str, F32] = field(default_factory=dict)
    release: Callable[[], None] = lambda: None


@dataclass(frozen=True, slots=True, kw_only=True)
class Geometry:
    """The sizes that ops need and a program does not carry."""

    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_tokens: int  # logits at or above it are padding
    rotate_kv: bool = False  # R3


class Logits(Protocol):
    """Logits of a pass, kept where the backend made them until they are asked for."""

    def wait(self) -> None:
        """Return when the pass is over: a backend may still be at work when `run` returns."""
        ...

    def argmax(self, allowed: Sequence[int] | I64 | None = None) -> list[int]:
        """Return the winning id per row, among `allowed` if given. NaN raises NumericError."""
        ...

    def sample(
        self,
        row: int,
        position: int,
        prompt: Sequence[int],
        answer: Sequence[int],
        parameters: Parameters,
        allowed: I64 | None = None,
    ) -> int:
        """Choose the token at absolute `position` from a row (`kernels/sampling.py`); `allowed`:
        rising ids. NaN raises NumericError."""
        ...

    def numpy(self) -> F32:
        """Return fp32 [rows, num_tokens], padding rows cut off. NaN raises NumericError."""
        ...


class Cache(Protocol):
    """Storage of the nested KV cache for one backend."""

    capacity: int

    @property
    def num_bytes(self) -> int:
        """Bytes that are allocated."""
        ...

    def planes(self, length: int, layer: int | None = None) -> dict[str, npt.NDArray[Any]]:
        """Return copies of the first `length` tokens: base, refine uint8 [L, 2, T, Hkv, D/2] and
        scale fp16 [L, 2, T, Hkv]; axis 1 is K, V. Of one layer if given: L is 1."""
        ...

    def load(self, planes: dict[str, npt.NDArray[Any]], layer: int | None = None) -> None:
        """Overwrite the first tokens with planes of the same shapes."""
        ...


class Cycle(NamedTuple):
    """What a cycle made: the target's tokens, how many were drafted, and how long it took."""

    tokens: list[int]
    drafted: int
    seconds: float


class Cycles(Protocol):
    """Draft, verify and accept where the backend keeps its tokens; a cycle may be launched while
    one is not read yet."""

    def begin(
        self, tokens: Sequence[int], parameters: Parameters, forced: Sequence[int] = ()
    ) -> None:
        """Start a text. tokens: ids by position (-1 for an embedding row), the last of which is
        not in the cache; parameters: without penalties; forced: for timing alone, how many drafted
        tokens to accept, in turns. Cycles that were not read are dropped."""
        ...

    def launch(self, base: int, look_up: int, most_tokens: int) -> None:
        """Begin a cycle of `base` draft steps and up to `look_up` tokens by look-up, of a text that
        has at most `most_tokens` by then."""
        ...

    def read(self) -> Cycle:
        """Wait for the oldest cycle. NaN raises NumericError."""
        ...


@runtime_checkable
class RunsCycles(Protocol):
    """A backend that runs cycles by itself."""

    def cycles(self, target: Program, draft: Program, cache: Any, recent: int | None) -> Cycles:
        """Return cycles over a cache; recent: of `layout.full_from`, what a draft reads of it."""
        ...


class Backend(Protocol):
    """Runs programs."""

    name: str

    @property
    def weights_bytes(self) -> int:
        """Bytes of the weights as this backend holds them, of the views made so far."""
        ...

    @property
    def chunk_rows(self) -> int:
        """Rows of a prompt that pass through a program together, at most."""
        ...

    def prepare(self, program: Program) -> None:
        """Bring the weights of a program into memory, so that its first run costs no more."""
        ...

    def new_cache(self, capacity: int) -> Cache:
        """Allocate a cache for `capacity` tokens."""
        ...

    def run(self, program: Program, batch: Batch, cache: Any) -> Logits | None:
        """Replay a program over a cache that `new_cache` made; None if it makes no logits (chunks
        of a prompt that only fill the cache)."""
        ...

    def relieve(self, cache: Any, length: int, *, running: bool = False) -> None:
        """Give memory back that the next pass can have again: activations, and what the cache holds
        behind its first `length` tokens. running: the next pass comes at once."""
        ...

    def close(self) -> None:
        """Free what it holds."""
        ...
