"""The manifest of a checkpoint: one strict JSON document beside the planes (format v1, README.md).

Invariant: unknown fields, an unknown version, a plane that the spec does not call for or a missing
one are refused by name; every size is derived from the spec and compared before a byte is used.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import msgspec

from edge_runtime.errors import CheckpointError
from edge_runtime.format.lfs import refuse_pointer
from edge_runtime.format.spec import ModelSpec, TextSpec
from edge_runtime.kernels.layout import GROUP_SIZES, padded

FORMAT = "bitnest"
VERSION = 1
SYNTHETIC_VERSION = 2  # of checkpoints of random weights: readers that do not know of them refuse
MANIFEST = "manifest.json"
TOKENIZER = "tokenizer.json"
MAX_MANIFEST_BYTES = 64 << 20
DTYPES = {"U8": 1, "I8": 1, "I16": 2, "F16": 2, "F32": 4}


class Plane(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One tensor of the checkpoint: where it lies and what its bytes hash to."""

    file: str
    dtype: Literal["U8", "I8", "I16", "F16", "F32"]
    shape: tuple[int, ...]
    sha256: str


class Rotation(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """R1 = plane "r1" · scale (kind none: identity, no plane). R2 is folded in and not kept.

    r3: a Hadamard transform of q and k after RoPE, done by the kernels while running.
    """

    kind: Literal["none", "hadamard", "orthogonal", "learned"]
    scale: float = 1.0
    r3: bool = False


class Options(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the checkpoint was made; nothing here changes how it is read."""

    base: Literal["gptq", "rtn"]
    refine: Literal["gptq", "closed"]
    bound: float | None
    balance: float = 0.0
    seed: int
    calibration: str
    calibration_tokens: int


class Agreement(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Teacher-forced top-1 agreement on held-out text, measured while converting."""

    target_original: float
    draft_target: float
    draft_original: float
    w8_rtn_original: float
    positions: int


class Synthetic(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A checkpoint of random weights, for speed and memory: no model."""

    shape: str  # whose sizes it has
    seed: int


class Manifest(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """Everything about a checkpoint except the bytes of its planes and its tokenizer.

    Either `options` say how a model was converted, or it is `synthetic`.
    """

    format: str
    version: int
    spec: ModelSpec
    text: TextSpec
    group_size: int
    rotation: Rotation
    options: Options | None
    provenance: dict[str, str]
    tokenizer_sha256: str
    planes: dict[str, Plane]
    clipped_share: float
    agreement: Agreement | None
    synthetic: Synthetic | None = None


def read_manifest(folder: Path) -> Manifest:
    """Read and check the manifest of a checkpoint, nothing else. Raises CheckpointError."""
    if not folder.is_dir():
        what = "is no folder" if folder.exists() else "does not exist"
        raise CheckpointError(f"{folder}: expected the folder of a converted model; it {what}")
    file = folder / MANIFEST
    if not file.is_file():
        raise CheckpointError(
            f"{folder}: not a converted model: there is no {MANIFEST} in it",
            f"convert it first: bitnest-edge convert {folder} -o DIR",
        )
    return decode_manifest(read_bounded(file, MAX_MANIFEST_BYTES), str(file))


def read_bounded(path: Path, limit: int) -> bytes:
    """Return a file's bytes. Raises CheckpointError for one that is too large or no real file."""
    refuse_pointer(path)
    size = path.stat().st_size
    if size > limit:
        raise CheckpointError(f"{path}: expected at most {limit} bytes, got {size}")
    return path.read_bytes()


def decode_manifest(data: bytes, where: str) -> Manifest:
    """Parse and check a manifest. Raises CheckpointError naming the field."""
    try:
        head = msgspec.json.decode(data)
    except (msgspec.DecodeError, RecursionError) as e:
        raise CheckpointError(f"{where}: not a JSON document ({e})", RECONVERT) from e
    if not isinstance(head, dict) or head.get("format") != FORMAT:
        raise CheckpointError(
            f'{where}: expected "format": "{FORMAT}", got something else',
            "is this the folder of a converted model?",
        )
    if head.get("version") not in (VERSION, SYNTHETIC_VERSION):
        raise CheckpointError(
            f"{where}: expected format version {VERSION}, got {head.get('version')!r}",
            "a newer version of bitnest-edge made it: upgrade, or convert the model again",
        )
    try:
        manifest = msgspec.json.decode(data, type=Manifest)
    except msgspec.ValidationError as e:
        raise CheckpointError(f"{where}: {e}", RECONVERT) from e
    check_manifest(manifest, where)
    return manifest


RECONVERT = "the file was changed or damaged: convert the model again"


def check_manifest(manifest: Manifest, where: str) -> None:
    """Compare the planes with what the spec calls for."""
    _check_origin(manifest, where)
    check_spec(manifest.spec, where)
    if manifest.group_size not in GROUP_SIZES:
        raise CheckpointError(
            f"{where}: group_size: expected one of {GROUP_SIZES}, got {manifest.group_size}"
        )
    if manifest.text.num_tokens < 1:
        raise CheckpointError(
            f"{where}: num_tokens: expected at least 1, got {manifest.text.num_tokens}"
        )
    _check_shares(manifest, where)
    bos, V = manifest.text.bos_id, manifest.spec.vocab_size
    if bos is not None and not 0 <= bos < V:
        raise CheckpointError(f"{where}: bos_id: expected 0…{V - 1}, got {bos}")
    D = manifest.spec.head_dim
    if manifest.rotation.r3 and D & (D - 1):
        raise CheckpointError(f"{where}: r3: expected a head_dim that is a power of two, got {D}")
    expected = dict(expected_planes(manifest.spec, manifest.group_size, manifest.rotation.kind))
    for name, (dtype, shape) in expected.items():
        if name not in manifest.planes:
            raise CheckpointError(f"{where}: plane {name!r} is missing", RECONVERT)
        plane = manifest.planes[name]
        if (plane.dtype, plane.shape) != (dtype, shape):
            raise CheckpointError(
                f"{where}: plane {name!r}: expected {dtype} {list(shape)}, "
                f"got {plane.dtype} {list(plane.shape)}",
                RECONVERT,
            )
        if not plane.file.endswith(".safetensors") or "/" in plane.file or "\\" in plane.file:
            raise CheckpointError(f"{where}: plane {name!r}: bad file name {plane.file!r}")
    if extra := sorted(set(manifest.planes) - set(expected)):
        raise CheckpointError(f"{where}: unknown plane {extra[0]!r}", RECONVERT)


def _check_origin(manifest: Manifest, where: str) -> None:
    synthetic = manifest.synthetic is not None
    if manifest.version != (SYNTHETIC_VERSION if synthetic else VERSION):
        raise CheckpointError(
            f"{where}: expected format version {VERSION}, or {SYNTHETIC_VERSION} of a synthetic "
            f"checkpoint, got {manifest.version}",
            RECONVERT,
        )
    if synthetic != (manifest.options is None) or (synthetic and manifest.agreement is not None):
        raise CheckpointError(
            f"{where}: expected options, or synthetic without options and agreement", RECONVERT
        )


def require_model(manifest: Manifest, what: str) -> None:
    """Raise CheckpointError for random weights, before `what` would measure how good they are."""
    if manifest.synthetic is not None:
        raise CheckpointError(
            f"{what} needs a model: expected a converted one, got random weights in the shape of "
            f"{manifest.synthetic.shape}",
            "synthetic checkpoints are for speed and memory: bench, profile",
        )


def _check_shares(manifest: Manifest, where: str) -> None:
    shares = {"clipped_share": manifest.clipped_share}
    if manifest.agreement is not None:
        measured = msgspec.structs.asdict(manifest.agreement)
        shares |= {f"agreement.{k}": v for k, v in measured.items() if k != "positions"}
    for name, share in shares.items():
        if not 0 <= share <= 1:
            raise CheckpointError(f"{where}: {name}: expected 0 to 1, got {share}", RECONVERT)


def check_spec(spec: ModelSpec, where: str) -> None:
    """Refuse sizes that no model has, before anything is computed from them."""
    sizes = {
        "num_layers": (spec.num_layers, 1 << 12),
        "hidden_size": (spec.hidden_size, 1 << 17),
        "intermediate_size": (spec.intermediate_size, 1 << 19),
        "num_heads": (spec.num_heads, 1 << 12),
        "num_kv_heads": (spec.num_kv_heads, 1 << 12),
        "head_dim": (spec.head_dim, 1 << 12),
        "vocab_size": (spec.vocab_size, 1 << 24),
        "max_position": (spec.max_position, 1 << 30),
    }
    for name, (value, limit) in sizes.items():
        if not 0 < value <= limit:
            raise CheckpointError(f"{where}: {name}: expected 1…{limit}, got {value}")
    r = spec.rope
    for name, number, low, high in (
        ("rms_norm_eps", spec.rms_norm_eps, 0.0, 1e3),
        ("rope.theta", r.theta, 1.0, 1e30),
        ("rope.factor", r.factor, 0.0, 1e6),
        ("rope.beta_fast", r.beta_fast, 0.0, 1e6),
        ("rope.beta_slow", r.beta_slow, 0.0, 1e6),
        ("rope.attention_factor", r.attention_factor, 0.0, 1e6),
    ):
        if number is not None and not low < number <= high:
            raise CheckpointError(
                f"{where}: {name}: expected a number above {low:g}, at most {high:g}, got {number}"
            )
    if r.kind in ("yarn", "llama3") and r.original_max_position < 1:
        raise CheckpointError(
            f"{where}: rope.original_max_position: expected at least 1, "
            f"got {r.original_max_position}"
        )
    if r.kind == "llama3" and not 0 < r.low_freq_factor < r.high_freq_factor:
        raise CheckpointError(
            f"{where}: rope: expected 0 < low_freq_factor < high_freq_factor, "
            f"got {r.low_freq_factor} and {r.high_freq_factor}"
        )
    if spec.num_heads % spec.num_kv_heads:
        raise CheckpointError(
            f"{where}: num_heads {spec.num_heads} is not a multiple of "
            f"num_kv_heads {spec.num_kv_heads}"
        )
    if spec.head_dim % 2:
        raise CheckpointError(f"{where}: head_dim: expected an even number, got {spec.head_dim}")


def linear_planes(
    name: str, shape: tuple[int, int], group_size: int, bias: bool
) -> Iterator[tuple[str, tuple[str, tuple[int, ...]]]]:
    """Yield (plane name, (dtype, shape)) of one linear."""
    N, K = shape
    Kp = padded(K, group_size)
    yield f"{name}.base", ("U8", (N, Kp // 2))
    yield f"{name}.refine", ("U8", (N, Kp // 2))
    yield f"{name}.mult", ("I16", (N, Kp // group_size))
    yield f"{name}.scale", ("F32", (N,))
    if bias:
        yield f"{name}.bias", ("F32", (N,))


def expected_planes(
    spec: ModelSpec, group_size: int, rotation: str
) -> Iterator[tuple[str, tuple[str, tuple[int, ...]]]]:
    """Yield every plane of a checkpoint with dtype and shape."""
    H, F = spec.hidden_size, spec.intermediate_size
    yield "embed.codes", ("I8", (spec.vocab_size, H))
    yield "embed.scale", ("F32", (spec.vocab_size,))
    if rotation != "none":
        yield "r1", ("I8" if rotation == "hadamard" else "F32", (H, H))
    for i in range(spec.num_layers):
        p = f"layers.{i}."
        for name, shape, bias in (
            ("qkv", (spec.q_size + 2 * spec.kv_size, H), spec.qkv_bias),
            ("o", (H, spec.q_size), spec.o_bias),
            ("gate_up", (2 * F, H), spec.mlp_bias),
            ("down", (H, F), spec.mlp_bias),
        ):
            yield from linear_planes(p + name, shape, group_size, bias)
        if spec.qk_norm:
            yield p + "q_norm", ("F32", (spec.head_dim,))
            yield p + "k_norm", ("F32", (spec.head_dim,))
    yield from linear_planes("head", (spec.vocab_size, H), group_size, False)
