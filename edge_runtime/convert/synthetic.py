"""A checkpoint of random weights in a known shape, for speed and memory where there is no model.

Invariant: the same shape, options and seed give the same bytes in every file, on every machine
(where the hidden size has a Hadamard matrix): raw bits of PCG64, seeded by the name of the plane,
go through tables of whole numbers. One piece of a plane is in memory at a time. The manifest says
`synthetic`, and whatever runs it says so.

What is taken from a converted SmolLM2-135M-Instruct (all its linears; figures by
`python tools/plane_statistics.py DIR`): how often each base and each refinement nibble comes (here
independent of each other, but for the legal refinements of -8), quantiles of |m|, with signs by the
toss of a coin and 32767 once in a row, quantiles of S over its median, quantiles of the embedding's
codes and scales, and the gain of each kind of matrix, rms(W) · √K, the median over the layers.
What is not: groups of 128 have larger maxima than those of 64, rows of a real q or k differ more,
and there are no outliers and no correlations. SmolLM2 has neither biases (here within ±0.5) nor
head norms (here 0.75 to 1.25).

Sizes of outputs: a norm stands before every linear but o and down, so what a layer adds does not
depend on how large its input is, and a sum over layers stays finite. o and down have their gain
times √(30 / layers), which leaves the residual stream at the end as large as that of SmolLM2's 30.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
import numpy.typing as npt

from edge_runtime import __version__
from edge_runtime.convert import resources
from edge_runtime.convert.hadamard import random_rotation
from edge_runtime.convert.synthetic_text import byte_tokenizer
from edge_runtime.errors import UsageError
from edge_runtime.format import manifest as fmt
from edge_runtime.format.spec import ModelSpec
from edge_runtime.format.stream import ShardStream
from edge_runtime.format.writer import CheckpointWriter, digest
from edge_runtime.kernels import pack
from edge_runtime.kernels.layout import GROUP_SIZES
from edge_runtime.plan.footprint import linear_shapes, usual_group_size

BASE_COUNTS = (5, 3, 5, 9, 14, 20, 26, 31, 33, 31, 27, 20, 14, 9, 5, 4)  # of 256, q4 = -8 … 7
REFINE_COUNTS = (18, 10, 12, 14, 15, 16, 16, 16, 19, 17, 16, 16, 15, 14, 13, 29)  # q_r = -8 … 7
MULT = {0: 5211, 10: 15558, 50: 18133, 250: 22124, 500: 25290, 750: 28917, 950: 32767, 1000: 32767}
ROW_SCALE = {0: 440, 50: 710, 250: 900, 500: 1000, 750: 1120, 950: 1420, 1000: 1850}  # 1/1000
EMBED_CODE = {0: -127, 1: -121, 10: -90, 50: -64, 250: -26, 500: 0,
              750: 26, 950: 64, 990: 90, 999: 121, 1000: 127}  # fmt: skip
EMBED_SCALE = {0: 650, 50: 720, 250: 870, 500: 1000, 750: 1150, 950: 1400, 1000: 1640}
EMBED_MEDIAN = 0.003384  # of the scales
GAINS = {"qkv": 1.57, "o": 4.04, "gate_up": 1.12, "down": 7.46, "head": 6.2}
GAIN_LAYERS = 30  # of the model that they were taken from
PIECE_BYTES = 1 << 20  # of a plane, about: a piece and its random bits stay in a cache

Bits = Callable[[int], npt.NDArray[np.uint16]]
Progress = Callable[[int, int, str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class SyntheticOptions:
    """What the user may choose; of a conversion's options what decides sizes, and the seed."""

    group_size: int | None = None
    rotate: Literal["hadamard", "none"] = "hadamard"
    seed: int = 0


class Synthesis:
    """One checkpoint to be made; `run` makes it."""

    def __init__(
        self,
        spec: ModelSpec,
        shape: str,
        out: Path,
        options: SyntheticOptions,
        progress: Progress = lambda done, count, what: None,
    ) -> None:
        """shape: the name of the spec. Checks the disk, opens or continues the partial folder.

        Raises BudgetError, and UsageError for a folder that is taken or a vocabulary too small.
        """
        fmt.check_spec(spec, shape)
        G = options.group_size or usual_group_size(spec)
        if G not in GROUP_SIZES:
            raise UsageError(f"group size: expected one of {GROUP_SIZES}, got {G}")
        self.spec, self.shape, self.group_size, self.options = spec, shape, G, options
        self._progress = progress
        self.text, self._tokenizer = byte_tokenizer(spec.vocab_size)
        rotate = options.rotate == "hadamard"
        self._r1 = random_rotation(spec.hidden_size, options.seed) if rotate else None
        r3 = rotate and spec.head_dim & (spec.head_dim - 1) == 0  # as a conversion chooses
        self.rotation = fmt.Rotation(kind="none", r3=r3)
        if self._r1 is not None:
            self.rotation = fmt.Rotation(kind=self._r1.kind, scale=self._r1.scale, r3=r3)
        resources.check_disk(spec, G, self.rotation.kind, out)
        self.writer = CheckpointWriter(out, self._identity())
        self.shards = ["embed", *(f"layer-{i:03}" for i in range(spec.num_layers)), "head"]

    def _identity(self) -> str:
        identity = {
            **asdict(self.options),
            "synthetic": msgspec.to_builtins(self.spec),
            "shape": self.shape,
            "group_size": self.group_size,
            "format": fmt.SYNTHETIC_VERSION,
            "program": __version__,
        }
        return json.dumps(identity)

    def run(self) -> fmt.Manifest:
        """Write what is missing and return the manifest; stopped, it can be continued at once."""
        try:
            for number, shard in enumerate(self.shards):
                self._progress(number, len(self.shards), self._describe(number))
                if not self.writer.has(shard):
                    with self.writer.stream(shard, self.shapes(shard)) as stream:
                        self._fill(stream)
            manifest = self.manifest()
            self.writer.finish(manifest, self._tokenizer)
            self._progress(len(self.shards), len(self.shards), "done")
            return manifest
        finally:
            self.writer.close()

    def _describe(self, number: int) -> str:
        if number == 0:
            return "embedding"
        layers = self.spec.num_layers
        return f"layer {number} of {layers}" if number <= layers else "LM head"

    def shapes(self, shard: str) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Return dtype and shape of every plane of a shard."""
        prefix = f"layers.{int(shard[6:])}." if shard.startswith("layer-") else shard + "."
        planes = fmt.expected_planes(self.spec, self.group_size, self.rotation.kind)
        with_r1 = "r1" if shard == "embed" else prefix
        return {name: entry for name, entry in planes if name.startswith((prefix, with_r1))}

    def _fill(self, stream: ShardStream) -> None:
        """Write every plane of a shard; a refinement comes with its base."""
        for name, (_, shape) in stream.shapes.items():
            kind = name.rsplit(".", 1)[-1]
            if kind == "base":
                self._linear(stream, name.removesuffix(".base"), shape)
            elif kind == "codes":
                table, bits = _quantiles(EMBED_CODE).astype(np.int8), self._bits(name)
                for rows in _pieces(shape):
                    stream.write(name, table[bits(rows * shape[1])])
            elif name == "embed.scale":
                scales = _quantiles(EMBED_SCALE)[self._bits(name)(shape[0])] * (EMBED_MEDIAN / 1000)
                stream.write(name, scales.astype(np.float32))
            elif name == "r1":
                assert self._r1 is not None
                stream.write(name, self._r1.matrix.numpy())
            elif kind == "bias":
                bits16 = self._bits(name)(shape[0]).astype(np.float32)
                stream.write(name, bits16 / np.float32(65536) - np.float32(0.5))
            elif kind in ("q_norm", "k_norm"):
                bits16 = self._bits(name)(shape[0]).astype(np.float32)
                stream.write(name, bits16 / np.float32(131072) + np.float32(0.75))

    def _linear(self, stream: ShardStream, name: str, shape: tuple[int, ...]) -> None:
        """Write the four planes of a linear, base and refinement piece by piece together."""
        K = linear_shapes(self.spec)[name][1]
        N, Kp = shape[0], 2 * shape[1]
        base, refine = self._bits(f"{name}.base"), self._bits(f"{name}.refine")
        for rows in _pieces(shape):
            low = _BASE_PAIRS[base(rows * shape[1])].reshape(rows, -1)
            fine = _REFINE_PAIRS[refine(rows * shape[1])].reshape(rows, -1) | _LEGAL[low]
            if Kp > K:
                low, fine = _zero_padding(low, fine, K, self.group_size)
            stream.write(f"{name}.base", low)
            stream.write(f"{name}.refine", fine)
        mult, scale = self._scales(name, N, K, Kp // self.group_size)
        stream.write(f"{name}.mult", mult)
        stream.write(f"{name}.scale", scale)

    def _scales(
        self, name: str, N: int, K: int, groups: int
    ) -> tuple[npt.NDArray[np.int16], npt.NDArray[np.float32]]:
        """Return m [N, groups] and S [N], such that rms(W) · √K is the kind's gain."""
        bits = self._bits(f"{name}.mult")(N * groups).reshape(N, groups)
        size = _quantiles(MULT)[bits]
        size[np.arange(N), size.argmax(1)] = 32767
        signs = self._bits(f"{name}.sign")(N * groups).reshape(N, groups) & 1
        mult = np.where(signs == 0, size, -size).astype(np.int16)
        kind = name.rsplit(".", 1)[-1]
        gain = GAINS[kind]
        if kind in ("o", "down"):
            gain *= math.sqrt(GAIN_LAYERS / self.spec.num_layers)
        median = gain / math.sqrt(K) / (_CODE_RMS * _rms(MULT) * _rms(ROW_SCALE))
        scale = _quantiles(ROW_SCALE)[self._bits(f"{name}.scale")(N)] * median
        return mult, scale.astype(np.float32)

    def _bits(self, plane: str) -> Bits:
        """Return a source of 16-bit numbers: the next ones with every call."""
        seed = hashlib.sha256(f"{self.options.seed}/{plane}".encode()).digest()[:16]
        raw = np.random.PCG64(np.random.SeedSequence(int.from_bytes(seed, "little"))).random_raw

        def bits(count: int) -> npt.NDArray[np.uint16]:
            words = np.asarray(raw(-(-count // 4)), dtype="<u8")
            return words.view("<u2")[:count]

        return bits

    def manifest(self) -> fmt.Manifest:
        """Return the manifest of the shards, which are all written."""
        planes: dict[str, fmt.Plane] = {}
        for shard in self.shards:
            planes |= msgspec.convert(self.writer.read_report(shard), dict[str, fmt.Plane])
        manifest = fmt.Manifest(
            format=fmt.FORMAT,
            version=fmt.SYNTHETIC_VERSION,
            spec=self.spec,
            text=self.text,
            group_size=self.group_size,
            rotation=self.rotation,
            options=None,
            provenance={"kind": "synthetic", "shape": self.shape},
            tokenizer_sha256=digest(self._tokenizer),
            planes=planes,
            clipped_share=0.0,
            agreement=None,
            synthetic=fmt.Synthetic(shape=self.shape, seed=self.options.seed),
        )
        fmt.check_manifest(manifest, str(self.writer.partial))
        return manifest


def _pieces(shape: tuple[int, ...]) -> Iterator[int]:
    """Yield numbers of rows, together all of [N, bytes]. A piece takes whole words of the bits."""
    size = max(8, PIECE_BYTES // shape[1] // 8 * 8)
    for at in range(0, shape[0], size):
        yield min(size, shape[0] - at)


def _quantiles(points: dict[int, int]) -> npt.NDArray[np.int64]:
    """Return 65,536 values, equally likely, from some quantiles (in 1/1000): whole numbers, since
    a float could be rounded another way elsewhere."""
    at = np.arange(65536, dtype=np.int64) * 1000
    table = np.empty(65536, dtype=np.int64)
    for (p, low), (q, high) in pairwise(sorted(points.items())):
        part = (at >= p * 65536) & (at < q * 65536)
        table[part] = low + (high - low) * (at[part] - p * 65536) // ((q - p) * 65536)
    return table


def _rms(points: dict[int, int]) -> float:
    table = _quantiles(points)
    return math.sqrt(int((table * table).sum()) / table.size)


def _pairs(counts: tuple[int, ...], first: int) -> npt.NDArray[np.uint8]:
    """Return 65,536 bytes of two independent nibbles, each as often as counted (of 256); the
    nibbles are `first`, `first` + 1, … modulo 16."""
    assert sum(counts) == 256
    nibbles = np.repeat((np.arange(16) + first) % 16, counts).astype(np.uint8)
    pairs: npt.NDArray[np.uint8] = nibbles[:, None] << np.uint8(4) | nibbles
    return pairs.reshape(-1)


def _zero_padding(
    base: npt.NDArray[np.uint8], refine: npt.NDArray[np.uint8], K: int, G: int
) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]:
    """Return planes whose codes are 0 from input K on."""
    found: list[Any] = []
    for plane, nothing in ((base, 0), (refine, 8)):
        nibbles = pack.unpack_plane(plane, G)
        nibbles[:, K:] = nothing
        found.append(pack.pack_plane(nibbles, G))
    return found[0], found[1]


def _code_rms() -> float:
    """Of 16·q4 + q_r, both independent."""
    codes = range(-8, 8)
    q4, qr = (
        [sum(n * c**power for n, c in zip(counts, codes, strict=True)) / 256 for power in (1, 2)]
        for counts in (BASE_COUNTS, REFINE_COUNTS)
    )
    return math.sqrt(256 * q4[1] + 32 * q4[0] * qr[0] + qr[1])


_BASE_PAIRS = _pairs(BASE_COUNTS, 8)  # two's complement: -8 is 8
_REFINE_PAIRS = _pairs(REFINE_COUNTS, 0)
_BYTES = np.arange(256, dtype=np.uint8)
_LEGAL = np.where(_BYTES & 15 == 8, 8, 0).astype(np.uint8) | np.where(
    _BYTES >> 4 == 8, 128, 0
).astype(np.uint8)  # by base byte: where q4 is -8, q_r is 0 … 7
_CODE_RMS = _code_rms()
