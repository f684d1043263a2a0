"""Hugging Face `config.json` -> `ModelSpec`, for llama, qwen2 and qwen3.

Invariant: every key of the config is either used, or knowingly ignored, or the conversion stops
and names it. A key that changes the mathematics can therefore never be dropped in silence.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import msgspec

from edge_runtime.convert.source import describe_file
from edge_runtime.errors import CheckpointError, UnsupportedModel
from edge_runtime.format.lfs import refuse_pointer
from edge_runtime.format.spec import ARCHITECTURES, ROPE_KINDS, ModelSpec, RopeSpec

Config = dict[str, Any]

_CLASSES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_USED = _words(
    """architectures model_type vocab_size hidden_size intermediate_size num_hidden_layers
    num_attention_heads num_key_value_heads head_dim hidden_act max_position_embeddings rms_norm_eps
    tie_word_embeddings attention_bias mlp_bias rope_theta rope_scaling rope_parameters
    partial_rotary_factor original_max_position_embeddings sliding_window use_sliding_window
    max_window_layers layer_types quantization_config compression_config rope_interleaved
    is_encoder_decoder is_decoder add_cross_attention bos_token_id eos_token_id
    pad_token_id"""
)

# Training, bookkeeping, generation defaults and output switches: none changes a forward pass.
_IGNORED = _words(
    """torch_dtype dtype use_cache initializer_range transformers_version pretraining_tp
    attention_dropout hidden_dropout resid_pdrop embd_pdrop dropout return_dict output_attentions
    output_hidden_states torchscript use_bfloat16 pruned_heads
    tie_encoder_decoder cross_attention_hidden_size chunk_size_feed_forward id2label label2id
    problem_type finetuning_task task_specific_params tokenizer_class prefix sep_token_id
    decoder_start_token_id unk_token_id bad_words_ids begin_suppress_tokens suppress_tokens
    forced_bos_token_id forced_eos_token_id diversity_penalty do_sample early_stopping
    encoder_no_repeat_ngram_size exponential_decay_length_penalty length_penalty max_length
    min_length no_repeat_ngram_size num_beam_groups num_beams
    num_return_sequences output_scores remove_invalid_values repetition_penalty
    return_dict_in_generate temperature top_k top_p typical_p tf_legacy_loss
    transformers.js_config is_llama_config unsloth_fixed unsloth_version unsloth_training
    max_sequence_length model_max_length tokenizer_model_max_length tokenizer_padding_side
    attn_implementation use_flash_attn gradient_checkpointing z_loss_weight ignore_index
    auto_mapping name_or_path license language tags base_model neftune_noise_alpha
    vocab_file"""
)

_ROPE_KEYS = _words(
    """rope_type type rope_theta factor original_max_position_embeddings low_freq_factor
    high_freq_factor beta_fast beta_slow attention_factor mscale mscale_all_dim truncate
    partial_rotary_factor finetuned"""
)


def read_json(path: Path) -> dict[str, Any]:
    """Parse a JSON object. Raises CheckpointError saying what the file is instead."""
    refuse_pointer(path)
    try:
        value = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{path.name} is not JSON ({error}): got {describe_file(path)}", "download it again"
        ) from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path.name}: expected a JSON object, got {type(value).__name__}")
    return value


def model_spec(config: Config) -> ModelSpec:
    """Translate a parsed config.json. Raises UnsupportedModel or CheckpointError naming the key."""
    architecture = _architecture(config)
    _refuse_unknown_keys(config)
    _refuse_options(config, architecture)
    heads = _integer(config, "num_attention_heads")
    hidden = _integer(config, "hidden_size")
    head_dim = _integer(
        config, "head_dim", 128 if architecture == "qwen3" else max(hidden // heads, 1)
    )
    kv_heads = _integer(config, "num_key_value_heads", heads if architecture == "llama" else None)
    attention_bias = bool(config.get("attention_bias") or False)
    max_position = _integer(
        config, "max_position_embeddings", 2048 if architecture == "llama" else 32768
    )
    if heads % kv_heads:
        raise CheckpointError(
            f"config.json: num_key_value_heads must divide num_attention_heads, got {kv_heads} "
            f"and {heads}"
        )
    if head_dim % 2:
        raise UnsupportedModel(f"config.json: head_dim must be even for RoPE, got {head_dim}")
    fields: dict[str, Any] = {
        "architecture": architecture,
        "num_layers": _integer(config, "num_hidden_layers"),
        "hidden_size": hidden,
        "intermediate_size": _integer(config, "intermediate_size"),
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "head_dim": head_dim,
        "vocab_size": _integer(config, "vocab_size"),
        "max_position": max_position,
        "rms_norm_eps": _number(config, "rms_norm_eps", 1e-6),
        "rope": rope_spec(config, max_position),
        "qkv_bias": attention_bias if architecture != "qwen2" else True,
        "o_bias": attention_bias if architecture != "qwen2" else False,
        "mlp_bias": bool(config.get("mlp_bias") or False) and architecture == "llama",
        "qk_norm": architecture == "qwen3",
        "tied_embedding": bool(config.get("tie_word_embeddings") or False),
    }
    return ModelSpec(**fields)


def _architecture(config: Config) -> str:
    model_type = config.get("model_type")
    if model_type not in ARCHITECTURES:
        raise UnsupportedModel(
            f"config.json: model_type {model_type!r} is not supported, expected one of "
            + ", ".join(ARCHITECTURES),
            "this runtime runs Llama 2/3, SmolLM2, Qwen2/2.5 and Qwen3 dense text models",
        )
    assert isinstance(model_type, str)
    classes = _list(config, "architectures")
    if classes and _CLASSES[model_type] not in classes:
        raise UnsupportedModel(
            f"config.json: architectures of a {model_type} model: expected "
            f"{_CLASSES[model_type]}, got {', '.join(map(str, classes))}",
            "only causal language models are supported",
        )
    return model_type


def _refuse_unknown_keys(config: Config) -> None:
    for key in sorted(config):
        known = key in _USED or key in _IGNORED or key.startswith("_")
        if not known and config[key] is not None:
            raise UnsupportedModel(
                f"config.json: unknown key {key!r} (value {_short(config[key])}); "
                "it may change how the model computes",
                f"if it does not affect inference, delete {key!r} from config.json",
            )


def _refuse_options(config: Config, architecture: str) -> None:
    for key in ("quantization_config", "compression_config"):
        if config.get(key):
            method = config[key].get("quant_method") if isinstance(config[key], dict) else None
            raise UnsupportedModel(
                f"config.json: the model is already quantised ({key}, method {method}); expected "
                "fp32, fp16 or bf16 weights",
                "convert from the original, unquantised model",
            )
    activation = config.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise UnsupportedModel(f"config.json: hidden_act must be silu, got {activation!r}")
    rotary = config.get("partial_rotary_factor")
    if rotary is not None and rotary != 1:
        raise UnsupportedModel(f"config.json: partial_rotary_factor must be 1, got {rotary}")
    for key in ("rope_interleaved", "is_encoder_decoder", "add_cross_attention"):
        if config.get(key):
            raise UnsupportedModel(f"config.json: {key} must be false, got {config[key]}")
    windowed = config.get("use_sliding_window")
    if windowed is None and architecture == "llama":
        windowed = config.get("sliding_window") is not None
    layer_types = _list(config, "layer_types")
    others = sorted({str(t) for t in layer_types if t != "full_attention"})
    if windowed or others:
        raise UnsupportedModel(
            "config.json: expected full attention in every layer, got "
            + (", ".join(others) or f"sliding_window {config.get('sliding_window')}"),
        )


def rope_spec(config: Config, max_position: int) -> RopeSpec:
    """Translate `rope_scaling` or `rope_parameters`. Refuses other kinds of RoPE by name."""
    raw = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if not isinstance(raw, dict):
        raise CheckpointError(f"config.json: rope_scaling must be an object, got {_short(raw)}")
    if set(raw) == {"full_attention"} and isinstance(raw["full_attention"], dict):
        raw = raw["full_attention"]
    rope = {key: value for key, value in raw.items() if value is not None}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ROPE_KINDS:
        raise UnsupportedModel(
            f"config.json: RoPE kind {kind!r} is not supported, expected one of "
            + ", ".join(ROPE_KINDS)
        )
    for key in sorted(set(rope) - _ROPE_KEYS):
        raise UnsupportedModel(
            f"config.json: unknown RoPE key {key!r} (value {_short(rope[key])})",
            "it may change the positions the model was trained with",
        )
    if rope.get("partial_rotary_factor", 1) != 1:
        raise UnsupportedModel(
            f"config.json: partial_rotary_factor must be 1, got {rope['partial_rotary_factor']}"
        )
    fields: Config = {
        "kind": kind,
        "theta": _number(rope, "rope_theta", _number(config, "rope_theta", 10000.0)),
    }
    if kind != "default":
        fields |= _rope_scaling(kind, rope, config, max_position)
    try:
        return msgspec.convert(fields, RopeSpec)
    except msgspec.ValidationError as error:
        raise CheckpointError(f"config.json: RoPE parameters: {error}") from None


def _rope_scaling(kind: str, rope: Config, config: Config, max_position: int) -> Config:
    original = config.get("original_max_position_embeddings")
    if original is None:
        original = rope.get("original_max_position_embeddings", max_position)
    if kind == "dynamic":
        original = max_position  # dynamic NTK scales from the configured maximum
    fields: Config = {"original_max_position": original, "factor": rope.get("factor")}
    if kind == "linear":
        del fields["original_max_position"]
    if kind == "yarn" and fields["factor"] is None and _is_positive(original):
        fields["factor"] = max_position / original
    needed = ("low_freq_factor", "high_freq_factor") if kind == "llama3" else ()
    for key in needed:
        fields[key] = rope.get(key)
    for key, value in fields.items():
        if not _is_positive(value):
            raise CheckpointError(
                f"config.json: RoPE kind {kind} needs a positive {key}, got {_short(value)}"
            )
    if kind == "yarn":
        for key in ("beta_fast", "beta_slow"):
            if rope.get(key):  # 0 means "the default" to transformers
                fields[key] = _number(rope, key, 0.0)
        for key in ("mscale", "mscale_all_dim"):
            if rope.get(key):
                fields[key] = _number(rope, key, 0.0)
        if "attention_factor" in rope:
            fields["attention_factor"] = _number(rope, "attention_factor", 0.0)
        if "truncate" in rope:
            fields["truncate"] = rope["truncate"]
    return fields


def _list(config: Config, key: str) -> list[Any]:
    value = config.get(key)
    if value is not None and not isinstance(value, list):
        raise CheckpointError(f"config.json: {key} must be a list, got {_short(value)}")
    return value or []


def _is_positive(value: Any) -> bool:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return number and 0 < value <= sys.float_info.max  # an int may be beyond any float


def _integer(config: Config, key: str, default: int | None = None) -> int:
    value = config.get(key)
    if value is None:
        value = default
    if not isinstance(value, int) or isinstance(value, bool) or not 0 < value < 1 << 63:
        raise CheckpointError(f"config.json: {key} must be a positive integer, got {_short(value)}")
    return value


def _number(config: Config, key: str, default: float) -> float:
    value = config.get(key)
    if value is None:
        return default
    if not _is_positive(value):
        raise CheckpointError(f"config.json: {key} must be a positive number, got {_short(value)}")
    return float(value)


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
