"""What a GGUF file's metadata says of its model: metadata -> `ModelSpec`, without torch.

Invariant: a key of the architecture's section that is not known stops here, by its name.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from edge_runtime.convert.ggml_types import TYPES
from edge_runtime.convert.gguf_file import GgufFile, Metadata, shown
from edge_runtime.errors import BackendUnavailable, CheckpointError, UnsupportedModel, cut
from edge_runtime.format.spec import ARCHITECTURES, ModelSpec, RopeSpec


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Keys of the architecture's own section that are read below, or that change nothing.
_KNOWN_KEYS = _words(
    """block_count context_length embedding_length feed_forward_length attention.head_count
    attention.head_count_kv attention.layer_norm_rms_epsilon attention.key_length
    attention.value_length rope.dimension_count rope.freq_base rope.scaling.type
    rope.scaling.factor rope.scaling.original_context_length rope.scaling.attn_factor
    rope.scaling.yarn_beta_fast rope.scaling.yarn_beta_slow rope.scaling.finetuned rope.scale_linear
    vocab_size tensor_data_layout"""
)
_FLOAT_TYPES: dict[int, np.dtype[Any]] = {
    0: np.dtype("<f4"),
    1: np.dtype("<f2"),
    28: np.dtype("<f8"),
}


def model_spec(file: GgufFile) -> ModelSpec:
    """Translate a file's metadata. Raises UnsupportedModel or CheckpointError naming the key."""
    meta = file.metadata
    architecture = meta.get("general.architecture")
    if architecture not in ARCHITECTURES:
        raise UnsupportedModel(
            f"{file.name}: architecture {shown(architecture)} is not supported, expected one of "
            + ", ".join(ARCHITECTURES),
            "this runtime runs Llama 2/3, SmolLM2, Qwen2/2.5 and Qwen3 dense text models",
        )
    section = {
        k[len(architecture) + 1 :]: v for k, v in meta.items() if k.startswith(architecture + ".")
    }
    for key in sorted(set(section) - _KNOWN_KEYS):
        if section[key]:  # a zero or false (e.g. expert_count) says that the option is off
            raise UnsupportedModel(
                f"{file.name}: unknown metadata key {architecture}.{cut(key)} (value "
                f"{shown(section[key])}); it may change how the model computes"
            )
    heads, hidden = _integer(section, "attention.head_count"), _integer(section, "embedding_length")
    kv_heads = _integer(section, "attention.head_count_kv", heads)
    head_dim = _integer(section, "attention.key_length", hidden // heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if _integer(section, key, head_dim) != head_dim:
            raise UnsupportedModel(
                f"{file.name}: {key} must equal the head size {head_dim}, got {section[key]}"
            )
    if heads % kv_heads or head_dim % 2:
        raise CheckpointError(
            f"{file.name}: expected KV heads that divide the heads and an even head size, got "
            f"{kv_heads}, {heads} and {head_dim}"
        )
    if "token_embd.weight" not in file.tensors:
        raise CheckpointError(f"{file.name}: tensor token_embd.weight is missing")

    def has(tensor: str) -> bool:
        return f"blk.0.{tensor}.bias" in file.tensors

    return ModelSpec(
        architecture=architecture,
        num_layers=_integer(section, "block_count"),
        hidden_size=hidden,
        intermediate_size=_integer(section, "feed_forward_length"),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=file.tensors["token_embd.weight"].shape[0],
        max_position=_integer(section, "context_length"),
        rms_norm_eps=_number(section, "attention.layer_norm_rms_epsilon"),
        rope=_rope_spec(file, section, head_dim),
        qkv_bias=architecture == "qwen2" or has("attn_q") or has("attn_v"),
        o_bias=has("attn_output"),
        mlp_bias=has("ffn_gate") or has("ffn_down"),
        qk_norm=architecture == "qwen3",
        tied_embedding="output.weight" not in file.tensors,
    )


def _rope_spec(file: GgufFile, section: Metadata, head_dim: int) -> RopeSpec:
    theta = _number(section, "rope.freq_base", 10000.0)
    kind = section.get("rope.scaling.type", "none")
    factor = _number(section, "rope.scaling.factor", 1.0)
    if "rope.scaling.type" not in section and section.get("rope.scale_linear"):
        kind, factor = "linear", _number(section, "rope.scale_linear")
    if "rope_freqs.weight" in file.tensors:
        if kind != "none":
            raise UnsupportedModel(
                f"{file.name}: rope_freqs.weight together with RoPE scaling {shown(kind)}"
            )
        return _llama3_from_factors(file, section, theta, head_dim)
    if kind == "none" or (kind == "linear" and factor == 1.0):
        return RopeSpec(theta=theta)
    if kind == "linear":
        return RopeSpec(kind="linear", theta=theta, factor=factor)
    if kind != "yarn":
        raise UnsupportedModel(
            f"{file.name}: RoPE scaling {shown(kind)} is not supported, expected none, linear or "
            "yarn"
        )
    attention = None
    if "rope.scaling.attn_factor" in section:  # it multiplies yarn's own 0.1·ln(factor) + 1
        attention = _number(section, "rope.scaling.attn_factor")
        attention *= 0.1 * math.log(max(factor, 1.0)) + 1.0
    return RopeSpec(
        kind="yarn",
        theta=theta,
        factor=factor,
        original_max_position=_integer(
            section, "rope.scaling.original_context_length", _integer(section, "context_length")
        ),
        beta_fast=_number(section, "rope.scaling.yarn_beta_fast", 32.0),
        beta_slow=_number(section, "rope.scaling.yarn_beta_slow", 1.0),
        attention_factor=attention,
    )


def _llama3_from_factors(
    file: GgufFile, section: Metadata, theta: float, head_dim: int
) -> RopeSpec:
    """Recover llama3 scaling from the frequency divisors that a GGUF stores in its place.

    A divisor is 1 for short wavelengths, `factor` for long ones and blended in between. The
    parameters every published Llama 3.x uses are tried; a table they do not explain is refused.
    """
    check_type(file.name, "rope_freqs.weight", file.tensors["rope_freqs.weight"].type)
    stored = dequantise(file, "rope_freqs.weight").reshape(-1).astype(np.float64)
    if stored.size == head_dim // 2 and np.all(stored == 1.0):
        return RopeSpec(theta=theta)
    if stored.size == head_dim // 2:
        spec = RopeSpec(
            kind="llama3",
            theta=theta,
            factor=float(stored.max()),
            original_max_position=_integer(section, "rope.scaling.original_context_length", 8192),
            low_freq_factor=1.0,
            high_freq_factor=4.0,
        )
        if np.allclose(_llama3_divisors(spec, head_dim), stored, rtol=2e-5, atol=0):
            return spec
    raise UnsupportedModel(
        f"{file.name}: rope_freqs.weight ({stored.size} divisors up to {stored.max():g}) is not a "
        "llama3 scaling with the usual parameters (low 1, high 4, original context 8192)",
        "convert from the Hugging Face folder of the model",
    )


def _llama3_divisors(spec: RopeSpec, head_dim: int) -> np.ndarray[Any, np.dtype[np.float64]]:
    frequency = spec.theta ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    turns = spec.original_max_position * frequency / (2 * math.pi)
    smooth = (turns - spec.low_freq_factor) / (spec.high_freq_factor - spec.low_freq_factor)
    smooth = np.clip(smooth, 0.0, 1.0)
    divisors: np.ndarray[Any, np.dtype[np.float64]] = 1 / ((1 - smooth) / spec.factor + smooth)
    return divisors


def _integer(section: Metadata, key: str, default: int | None = None) -> int:
    value = section.get(key, default)
    if isinstance(value, list) and value and all(v == value[0] for v in value):
        value = value[0]  # one number per layer, all alike
    if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
        raise CheckpointError(
            f"GGUF metadata: {key} must be a positive integer, got {shown(value)}"
        )
    return value


def _number(section: Metadata, key: str, default: float | None = None) -> float:
    value = section.get(key, default)
    number = value if isinstance(value, (int, float)) and not isinstance(value, bool) else 0.0
    if not 0 < number <= float(np.finfo(np.float32).max):
        raise CheckpointError(f"GGUF metadata: {key} must be a positive number, got {shown(value)}")
    return float(str(np.float32(number)))  # 1e-05 as it was written, not 9.99999975e-06


def need_gguf() -> None:
    """Raise BackendUnavailable where the gguf package, which dequantises, is not installed."""
    try:
        import gguf  # noqa: F401
    except ImportError as error:
        raise BackendUnavailable(
            f"reading a GGUF file needs the gguf package: {error}",
            "pip install 'bitnest-edge[convert]'",
        ) from None


def check_type(file: str, name: str, kind: int) -> None:
    """Raise UnsupportedModel for a tensor type that cannot be dequantised."""
    if kind in _FLOAT_TYPES:
        return
    need_gguf()
    from gguf.quants import _type_traits

    if kind not in _type_traits:  # its keys are IntEnum members
        raise UnsupportedModel(
            f"{file}: tensor {name} has type {TYPES[kind][0]}, which the installed gguf package "
            "cannot dequantise",
            "pip install -U gguf, or convert from the Hugging Face folder of the model",
        )


def dequantise(file: GgufFile, name: str) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Return one tensor as fp32, a copy. `check_type` was asked before."""
    raw, kind = file.data(name), file.tensors[name].type
    if kind in _FLOAT_TYPES:  # a copy: writable, independent of the mapping
        return np.array(raw.view(_FLOAT_TYPES[kind]), dtype=np.float32)
    from gguf.constants import GGMLQuantizationType
    from gguf.quants import dequantize

    return np.require(dequantize(raw, GGMLQuantizationType(kind)), np.float32, ["C", "W"])
