"""Builders of tiny random models: Hugging Face folders that transformers loads, and GGUF files.

`write_hf` and `write_gguf` with the same arguments hold the same model (GGUF in fp32).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

Json = dict[str, Any]

SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_CLASSES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def byte_alphabet() -> list[str]:
    """Byte-level BPE's 256 characters, in the order of the bytes."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = iter(range(256, 512))
    return [chr(b) if b in shown else chr(next(rest)) for b in range(256)]


def bpe_tokens() -> tuple[list[str], list[tuple[str, str]]]:
    """(tokens, merges) of a small byte-level vocabulary; the special tokens come last."""
    merges = [("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o"), ("Ġ", "w"), ("o", "r")]
    merges += [("Ġw", "or"), ("l", "d"), ("Ġwor", "ld"), ("Ġ", "t"), ("Ġt", "he"), ("Ġ", "Ġ")]
    merges += [("i", "n"), ("a", "n"), ("e", "r"), ("in", "g"), ("Ġ", "a"), ("Ċ", "Ċ")]
    tokens = byte_alphabet() + ["".join(pair) for pair in merges]
    return [*tokens, *SPECIALS], merges


def tokenizer_json() -> str:
    """A tokenizer.json of `bpe_tokens`."""
    tokens, merges = bpe_tokens()
    byte_level: Json = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    body: Json = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": tokens.index(t), "content": t, **flags, "special": True} for t in SPECIALS
        ],
        "normalizer": None,
        "pre_tokenizer": byte_level | {"use_regex": True},
        "post_processor": None,
        "decoder": byte_level | {"use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": "",
            "end_of_word_suffix": "",
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {t: i for i, t in enumerate(tokens)},
            "merges": [" ".join(pair) for pair in merges],
        },
    }
    return json.dumps(body, ensure_ascii=False)


def hf_config(architecture: str = "llama", **overrides: Any) -> Json:
    """A config.json of a tiny model.

    Keyword arguments set or add keys. `rope={"rope_type": …}` writes `rope_parameters`, and with
    `rope_spelling="old"` `rope_scaling` and a top-level `rope_theta`. A value of `...` drops a key.
    """
    old = overrides.pop("rope_spelling", "new") == "old"
    rope: Json = dict(overrides.pop("rope", None) or {})
    theta = overrides.pop("rope_theta", 10000.0)
    tokens, _ = bpe_tokens()
    config: Json = {
        "architectures": [_CLASSES[architecture]],
        "model_type": architecture,
        "vocab_size": 320,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "bos_token_id": tokens.index("<|im_start|>"),
        "eos_token_id": tokens.index("<|im_end|>"),
        "torch_dtype": "float32",
        "use_cache": True,
    }
    if architecture == "llama":
        config |= {"attention_bias": False, "mlp_bias": False}
    if architecture == "qwen3":
        config |= {"attention_bias": False, "head_dim": 16}
    if old:
        config |= {"rope_theta": theta, "rope_scaling": rope or None}
    else:
        config["rope_parameters"] = {"rope_theta": theta, "rope_type": "default"} | rope
    config |= overrides
    return {key: value for key, value in config.items() if value is not ...}


def hf_tensors(config: Json, *, seed: int = 0, outliers: int = 0) -> dict[str, torch.Tensor]:
    """Random fp32 tensors under the names of transformers, norms near 1.

    `outliers` channels of the residual stream are written and read 30 times stronger.
    """
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    for name, shape in _hf_shapes(config):
        values = torch.randn(shape, generator=generator)
        if name.endswith("norm.weight"):
            tensors[name] = 1.0 + 0.1 * values
        elif name.endswith(".bias"):
            tensors[name] = 0.1 * values
        else:
            tensors[name] = values / shape[-1] ** 0.5
    channels = torch.randperm(config["hidden_size"], generator=generator)[:outliers]
    for name, tensor in tensors.items():
        if name.endswith(("embed_tokens.weight", "layernorm.weight")):
            tensor[..., channels] *= 30.0
        elif name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor[channels] *= 30.0
    return tensors


def write_hf(
    path: Path,
    architecture: str = "llama",
    *,
    seed: int = 0,
    outliers: int = 0,
    dtype: str | tuple[str, ...] = "float32",
    shards: int = 1,
    index: bool = True,
    with_head: bool | None = None,
    drop: tuple[str, ...] = (),
    replace: dict[str, torch.Tensor] | None = None,
    chat_template: str | None = CHAT_TEMPLATE,
    **overrides: Any,
) -> Path:
    """Write a model folder and return it; `overrides` go to `hf_config`.

    `dtype` may be several names, used in turn. `with_head` forces lm_head in or out (default: in
    unless tied). `drop` and `replace` damage the tensors on purpose.
    """
    path.mkdir(parents=True, exist_ok=True)
    config = hf_config(architecture, **overrides)
    tensors = hf_tensors(config, seed=seed, outliers=outliers)
    tied = bool(config.get("tie_word_embeddings"))
    if with_head is None:
        with_head = not tied
    if tied and with_head:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    if not with_head:
        tensors.pop("lm_head.weight", None)
    tensors |= replace or {}
    dtypes = (dtype,) if isinstance(dtype, str) else dtype
    stored = {
        name: tensor.to(_DTYPES[dtypes[i % len(dtypes)]]).contiguous()
        for i, (name, tensor) in enumerate(tensors.items())
        if name not in drop
    }
    _write_weights(path, stored, shards, index)
    (path / "config.json").write_text(json.dumps(config, indent=2))
    (path / "generation_config.json").write_text(
        json.dumps({"bos_token_id": config.get("bos_token_id"), "eos_token_id": 276})
    )
    write_tokenizer(path, chat_template)
    return path


def write_tokenizer(path: Path, chat_template: str | None = CHAT_TEMPLATE) -> None:
    """Write tokenizer.json and tokenizer_config.json into a folder."""
    (path / "tokenizer.json").write_text(tokenizer_json(), encoding="utf-8")
    settings: Json = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
        "pad_token": "<|im_end|>",
        "add_bos_token": False,
    }
    if chat_template is not None:
        settings["chat_template"] = chat_template
    (path / "tokenizer_config.json").write_text(json.dumps(settings))


def _write_weights(path: Path, stored: dict[str, torch.Tensor], shards: int, index: bool) -> None:
    metadata = {"format": "pt"}
    if shards == 1:
        save_file(stored, path / "model.safetensors", metadata=metadata)
        return
    names = list(stored)
    weight_map: dict[str, str] = {}
    for i in range(shards):
        file = f"model-{i + 1:05d}-of-{shards:05d}.safetensors"
        part = {name: stored[name] for name in names[i::shards]}
        save_file(part, path / file, metadata=metadata)
        weight_map |= dict.fromkeys(part, file)
    if index:
        total = sum(t.numel() * t.element_size() for t in stored.values())
        body = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (path / "model.safetensors.index.json").write_text(json.dumps(body))


def _hf_shapes(config: Json) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    head_dim = config.get("head_dim") or hidden // heads
    kind = config["model_type"]
    bias = bool(config.get("attention_bias"))
    yield "model.embed_tokens.weight", (config["vocab_size"], hidden)
    for i in range(config["num_hidden_layers"]):
        p = f"model.layers.{i}."
        yield p + "input_layernorm.weight", (hidden,)
        for name, rows in (("q", heads), ("k", kv_heads), ("v", kv_heads)):
            yield f"{p}self_attn.{name}_proj.weight", (rows * head_dim, hidden)
            if bias or kind == "qwen2":
                yield f"{p}self_attn.{name}_proj.bias", (rows * head_dim,)
        if kind == "qwen3":
            yield p + "self_attn.q_norm.weight", (head_dim,)
            yield p + "self_attn.k_norm.weight", (head_dim,)
        yield p + "self_attn.o_proj.weight", (hidden, heads * head_dim)
        if bias and kind != "qwen2":
            yield p + "self_attn.o_proj.bias", (hidden,)
        yield p + "post_attention_layernorm.weight", (hidden,)
        for name, shape in (
            ("gate", (inner, hidden)),
            ("up", (inner, hidden)),
            ("down", (hidden, inner)),
        ):
            yield f"{p}mlp.{name}_proj.weight", shape
            if config.get("mlp_bias"):
                yield f"{p}mlp.{name}_proj.bias", (shape[0],)
    yield "model.norm.weight", (hidden,)
    if not config.get("tie_word_embeddings"):
        yield "lm_head.weight", (config["vocab_size"], hidden)


# ---- GGUF

_GGUF_PARTS = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name: str) -> str:
    """Name of a transformers tensor in a GGUF file."""
    stem, kind = name.rsplit(".", 1)
    top = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    if stem in top:
        return f"{top[stem]}.{kind}"
    _, _, layer, part = stem.split(".", 3)
    return f"blk.{layer}.{_GGUF_PARTS[part]}.{kind}"


def interleave(rows: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows of each head from half-split pairs to the adjacent pairs of llama GGUF files."""
    half = rows.reshape(heads, 2, rows.shape[0] // heads // 2, -1)
    return half.transpose(1, 2).reshape(rows.shape).contiguous()


def write_gguf(
    path: Path,
    architecture: str = "llama",
    *,
    seed: int = 0,
    outliers: int = 0,
    quant: str = "F32",
    metadata: Json | None = None,
    extra: dict[str, torch.Tensor] | None = None,
    tokenizer: str = "gpt2",
    pre: str | None = "gpt-2",
    padding: int = 0,
    **overrides: Any,
) -> Path:
    """Write one GGUF file and return it; `overrides` go to `hf_config`.

    `quant` is a ggml type for matrices (any the gguf package can quantise to). `metadata` adds
    architecture keys (prefixed here), `extra` adds tensors. `tokenizer` is gpt2 or llama; `padding`
    unused tokens follow the real ones of gpt2.
    """
    import gguf

    config = hf_config(architecture, **overrides)
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(config.get("rope_parameters", config)["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    for key, value in (metadata or {}).items():
        kinds = {str: writer.add_string, bool: writer.add_bool, int: writer.add_uint32}
        kinds.get(type(value), writer.add_float32)(f"{architecture}.{key}", value)
    if tokenizer == "gpt2":
        _gguf_bpe(writer, pre, padding)
    else:
        _gguf_spm(writer)
    for name, tensor in hf_tensors(config, seed=seed, outliers=outliers).items():
        part = name.rsplit(".", 2)[-2]
        if architecture == "llama" and part in ("q_proj", "k_proj"):
            tensor = interleave(tensor, heads if part == "q_proj" else kv_heads)
        _add_gguf_tensor(writer, gguf_name(name), tensor, quant if tensor.dim() == 2 else "F32")
    for name, tensor in (extra or {}).items():
        _add_gguf_tensor(writer, name, tensor, "F32")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_gguf_tensor(writer: Any, name: str, tensor: torch.Tensor, quant: str) -> None:
    import gguf

    kind = gguf.GGMLQuantizationType[quant]
    if quant == "F32":
        writer.add_tensor(name, tensor.numpy())
    else:
        writer.add_tensor(name, gguf.quants.quantize(tensor.numpy(), kind), raw_dtype=kind)


def _gguf_bpe(writer: Any, pre: str | None, padding: int) -> None:
    tokens, merges = bpe_tokens()
    types = [3 if t in SPECIALS else 1 for t in tokens] + [5] * padding
    tokens += [f"[PAD{len(tokens) + i}]" for i in range(padding)]
    writer.add_tokenizer_model("gpt2")
    if pre is not None:
        writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges([" ".join(pair) for pair in merges])
    writer.add_bos_token_id(tokens.index("<|im_start|>"))
    writer.add_eos_token_id(tokens.index("<|im_end|>"))
    writer.add_add_bos_token(False)
    writer.add_chat_template(CHAT_TEMPLATE)


def spm_tokens() -> tuple[list[str], list[float], list[int]]:
    """(tokens, scores, types) of a small SentencePiece vocabulary with byte fallback."""
    tokens = ["<unk>", "<s>", "</s>"] + [f"<0x{b:02X}>" for b in range(256)]
    types = [2, 3, 3] + [6] * 256
    pieces = ["▁h", "el", "lo", "▁hel", "▁hello", "▁w", "or", "ld", "▁wor", "▁world", "▁▁", "ing"]
    pieces += ["in", "g", *"▁abcdefhijklmnopqrstuvwxyz.,!0123456789", "Ġ"]
    scores = [0.0] * len(tokens) + [-float(i) for i in range(len(pieces))]
    return tokens + pieces, scores, types + [1] * len(pieces)


def _gguf_spm(writer: Any) -> None:
    tokens, scores, types = spm_tokens()
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores(scores)
    writer.add_token_types(types)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
