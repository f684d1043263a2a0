"""Hugging Face folders: what is read, what is refused, and that refusals name their cause."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
from hf_folders import edit, refused
from safetensors.torch import load_file, save_file

from edge_runtime.convert.hf_config import model_spec
from edge_runtime.convert.source import open_source, tensor_shapes
from edge_runtime.errors import CheckpointError, UnsupportedModel
from edge_runtime.format.spec import RopeSpec

INDEX = "model.safetensors.index.json"


def test_every_tensor_has_its_shape_and_value(tmp_path: Path) -> None:
    folder = tiny_models.write_hf(tmp_path / "m", "qwen3", head_dim=24, dtype="bfloat16")
    source = open_source(folder)
    stored = load_file(folder / "model.safetensors")
    for name, shape in tensor_shapes(source.spec):
        tensor = source.tensor(name)
        assert tensor.dtype == torch.float32
        assert tuple(tensor.shape) == shape
    assert torch.equal(
        source.tensor("layers.1.k"), stored["model.layers.1.self_attn.k_proj.weight"].float()
    )
    source.close()


def test_mixed_dtypes_and_any_sharding_give_the_same_tensors(tmp_path: Path) -> None:
    dtypes = ("float32", "float16", "bfloat16")
    one = open_source(tiny_models.write_hf(tmp_path / "one", dtype=dtypes))
    indexed = open_source(tiny_models.write_hf(tmp_path / "indexed", dtype=dtypes, shards=3))
    folder = tiny_models.write_hf(tmp_path / "bare", dtype=dtypes, shards=3, index=False)
    save_file({"x": torch.zeros(1)}, folder / "consolidated.safetensors")
    bare = open_source(folder)
    for name, _ in tensor_shapes(one.spec):
        assert torch.equal(one.tensor(name), indexed.tensor(name))
        assert torch.equal(one.tensor(name), bare.tensor(name))


def test_names_without_the_model_prefix(tmp_path: Path) -> None:
    folder = tiny_models.write_hf(tmp_path / "m")
    file = folder / "model.safetensors"
    save_file({k.removeprefix("model."): v for k, v in load_file(file).items()}, file)
    source = open_source(folder)
    assert source.tensor("norm").shape == (64,)


# ---- tied embeddings: the four cases


def test_tied_and_absent(tmp_path: Path) -> None:
    source = open_source(tiny_models.write_hf(tmp_path, tie_word_embeddings=True))
    assert source.spec.tied_embedding
    assert not source.warnings


def test_tied_and_present_identical(tmp_path: Path) -> None:
    source = open_source(tiny_models.write_hf(tmp_path, tie_word_embeddings=True, with_head=True))
    assert source.spec.tied_embedding
    assert not source.warnings


def test_tied_and_present_different_uses_the_stored_head(tmp_path: Path) -> None:
    head = torch.randn(320, 64)
    folder = tiny_models.write_hf(
        tmp_path, tie_word_embeddings=True, replace={"lm_head.weight": head}
    )
    source = open_source(folder)
    assert not source.spec.tied_embedding
    assert torch.equal(source.tensor("head"), head)
    assert "lm_head.weight" in source.warnings[0]


def test_untied_and_absent_names_the_tensor(tmp_path: Path) -> None:
    folder = tiny_models.write_hf(tmp_path, tie_word_embeddings=False, with_head=False)
    with pytest.raises(CheckpointError, match=r"lm_head\.weight is missing"):
        open_source(folder)


# ---- damaged folders


def test_missing_shard(tmp_path: Path) -> None:
    folder = tiny_models.write_hf(tmp_path / "a", shards=3)
    (folder / "model-00002-of-00003.safetensors").unlink()
    refused(folder, "model-00002-of-00003.safetensors")
    (folder / INDEX).unlink()
    refused(folder, "model-00002-of-00003.safetensors", "expected 3 shards")


def test_duplicate_tensor_across_files(tmp_path: Path) -> None:
    folder = tiny_models.write_hf(tmp_path, shards=2, index=False)
    file = folder / "model-00002-of-00002.safetensors"
    first = load_file(folder / "model-00001-of-00002.safetensors")
    name = next(iter(first))
    save_file(load_file(file) | {name: first[name]}, file)
    refused(folder, name, "two files")


def test_stale_indices(tmp_path: Path) -> None:
    folder = tiny_models.write_hf(tmp_path, shards=2)
    body = json.loads((folder / INDEX).read_text())
    moved = json.loads(json.dumps(body))
    name = next(iter(moved["weight_map"]))
    moved["weight_map"][name] = "model-00002-of-00002.safetensors"
    (folder / INDEX).write_text(json.dumps(moved))
    refused(folder, name, "model-00002-of-00002.safetensors")

    short = json.loads(json.dumps(body))
    del short["weight_map"][name]
    (folder / INDEX).write_text(json.dumps(short))
    refused(folder, name, "not in")

    short["weight_map"]["model.ghost"] = "model-00001-of-00002.safetensors"
    (folder / INDEX).write_text(json.dumps(body | {"weight_map": short["weight_map"]}))
    refused(folder, "model.ghost")

    body["weight_map"][name] = "../evil.safetensors"
    (folder / INDEX).write_text(json.dumps(body))
    refused(folder, "../evil.safetensors")


def test_index_beside_a_single_file(tmp_path: Path) -> None:
    folder = tiny_models.write_hf(tmp_path, shards=2)
    whole: dict[str, torch.Tensor] = {}
    shards = sorted(folder.glob("model-*.safetensors"))
    for shard in shards:
        whole |= load_file(shard)
    save_file(whole, folder / "model.safetensors")
    refused(folder, "two sets of weights")
    for shard in shards:
        shard.unlink()
    assert "stale" in refused(folder, "is not there").hint


@pytest.mark.parametrize(
    ("content", "word"),
    [
        (b"<!DOCTYPE html><html><body>404</body></html>", "web page"),
        (b"", "empty file"),
        (b"PK\x03\x04" + bytes(60), "zip archive"),
    ],
)
def test_other_things_saved_as_safetensors(tmp_path: Path, content: bytes, word: str) -> None:
    folder = tiny_models.write_hf(tmp_path)
    (folder / "model.safetensors").write_bytes(content)
    refused(folder, "model.safetensors", word)


@pytest.mark.parametrize(
    "name", ["model-00001-of-00002.safetensors", INDEX, "config.json", "tokenizer.json"]
)
def test_a_pointer_in_place_of_a_file(tmp_path: Path, name: str) -> None:
    folder = tiny_models.write_hf(tmp_path, shards=2)
    (folder / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    assert "git lfs pull" in refused(folder, name, "Git LFS pointer").hint


def test_truncated_file(tmp_path: Path) -> None:
    folder = tiny_models.write_hf(tmp_path)
    file = folder / "model.safetensors"
    data = file.read_bytes()
    file.write_bytes(data[:-100])
    refused(folder, "model.safetensors is truncated", f"got {len(data) - 100}")
    file.write_bytes(data[:200])
    refused(folder, "model.safetensors")


def test_wrong_shape_missing_and_unknown_tensors(tmp_path: Path) -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    wrong = tiny_models.write_hf(tmp_path / "a", replace={name: torch.zeros(128, 65)})
    refused(wrong, name, "[128, 64]", "[128, 65]")
    refused(tiny_models.write_hf(tmp_path / "b", drop=(name,)), name, "missing")
    extra = "model.layers.0.self_attn.gate.weight"
    more = tiny_models.write_hf(tmp_path / "c", replace={extra: torch.zeros(3)})
    refused(more, "unknown tensor", extra)
    buffers = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8)}
    open_source(tiny_models.write_hf(tmp_path / "d", replace=buffers)).close()


def test_absurd_depth_and_names_that_are_not_text(tmp_path: Path) -> None:
    folder = tiny_models.write_hf(tmp_path / "b")
    edit(folder / "config.json", num_hidden_layers=10**12)
    refused(folder, "layers", "21 in all")
    odd = tiny_models.write_hf(tmp_path / "c", replace={"a\x1b[31m\nb": torch.zeros(1)})
    refused(odd, r"a\x1b[31m\nb")


def test_wrong_dtype(tmp_path: Path) -> None:
    folder = tiny_models.write_hf(tmp_path)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    tensors["model.norm.weight"] = torch.ones(64, dtype=torch.int8)
    save_file(tensors, file)
    refused(folder, "model.norm.weight", "I8")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_not_finite_is_named_when_read(tmp_path: Path, value: float) -> None:
    norm = torch.ones(64)
    norm[5] = value
    source = open_source(tiny_models.write_hf(tmp_path, replace={"model.norm.weight": norm}))
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight .* 1 of 64"):
        source.tensor("norm")


def test_pickle_and_other_paths_are_refused(tmp_path: Path) -> None:
    folder = tiny_models.write_hf(tmp_path / "m")
    refused(folder / "model.safetensors", "model.safetensors")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    refused(folder, "pytorch_model.bin", "pickle")
    (folder / "pytorch_model.bin").unlink()
    refused(folder, "no *.safetensors")
    (folder / "manifest.json").write_text("{}")
    refused(folder, "already a nested checkpoint")
    refused(tmp_path, "no config.json")
    refused(tmp_path / "nowhere", "no model at")
    (folder / "manifest.json").unlink()
    (folder / "config.json").write_text("<html>")
    refused(folder, "config.json", "web page")


# ---- config.json


def _spec(architecture: str = "llama", **overrides: Any) -> Any:
    return model_spec(tiny_models.hf_config(architecture, **overrides))


def test_old_and_new_spelling_of_rope() -> None:
    rope = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 128,
    }
    new = _spec(rope=rope, rope_theta=500000.0)
    old = _spec(rope=rope, rope_theta=500000.0, rope_spelling="old")
    assert new == old
    assert new.rope == RopeSpec(
        kind="llama3",
        theta=500000.0,
        factor=8.0,
        original_max_position=128,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
    )
    typed = _spec(rope={"type": "linear", "factor": 2}, rope_spelling="old").rope
    assert typed == RopeSpec(kind="linear", factor=2.0)


def test_yarn_and_dynamic_fields() -> None:
    fields = {"beta_fast": 16, "beta_slow": 2, "mscale": 1.0, "mscale_all_dim": 0.5}
    fields |= {"attention_factor": 1.25, "truncate": False}
    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    spec = _spec("qwen3", rope=rope | fields).rope
    assert (spec.kind, spec.factor, spec.original_max_position) == ("yarn", 4.0, 64)
    assert (spec.beta_fast, spec.beta_slow, spec.truncate) == (16.0, 2.0, False)
    assert (spec.mscale, spec.mscale_all_dim, spec.attention_factor) == (1.0, 0.5, 1.25)
    dynamic = _spec(rope={"rope_type": "dynamic", "factor": 2.0}).rope
    assert (dynamic.kind, dynamic.factor, dynamic.original_max_position) == ("dynamic", 2.0, 256)


def test_architecture_switches() -> None:
    llama = _spec(attention_bias=True, mlp_bias=True, head_dim=24)
    assert (llama.qkv_bias, llama.o_bias, llama.mlp_bias) == (True, True, True)
    assert llama.head_dim == 24
    qwen2 = _spec("qwen2")
    assert (qwen2.qkv_bias, qwen2.o_bias, qwen2.qk_norm) == (True, False, False)
    qwen3 = _spec("qwen3", head_dim=...)
    assert (qwen3.qkv_bias, qwen3.qk_norm, qwen3.head_dim) == (False, True, 128)
    assert _spec(num_key_value_heads=...).num_kv_heads == 4


YARN = {"rope_type": "yarn"}


@pytest.mark.parametrize(
    ("overrides", "word"),
    [
        ({"model_type": "gemma2"}, "gemma2"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification"),
        ({"attn_logit_softcapping": 30.0}, "attn_logit_softcapping"),
        ({"quantization_config": {"quant_method": "gptq"}}, "gptq"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"sliding_window": 4096}, "sliding_window"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding_attention"),
        ({"rope": {"rope_type": "longrope", "factor": 2.0}}, "longrope"),
        ({"rope": {"rope_type": "linear", "factor": 2.0, "mystery": 1}}, "mystery"),
        ({"rope": {"rope_type": "linear"}}, "factor"),
        ({"rope": {"rope_type": "linear", "factor": -2.0}}, "factor"),
        ({"hidden_size": ...}, "hidden_size"),
        ({"num_hidden_layers": "two"}, "num_hidden_layers"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"head_dim": 15}, "head_dim"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps"),
        ({"rms_norm_eps": 10**400}, "rms_norm_eps"),
        ({"rope_theta": 10**400}, "rope_theta"),
        ({"hidden_size": 10**400}, "hidden_size"),
        ({"rope": {"rope_type": "linear", "factor": 10**400}}, "factor"),
        ({"rope": {"rope_type": "dynamic", "factor": float("inf")}}, "factor"),
        ({"rope": YARN | {"original_max_position_embeddings": 1e400}}, "original_max_position"),
        ({"rope": YARN | {"original_max_position_embeddings": "x"}}, "original_max_position"),
        ({"rope": YARN | {"beta_fast": 10**400}}, "beta_fast"),
        ({"rope": YARN | {"attention_factor": float("nan")}}, "attention_factor"),
        ({"rope": YARN | {"mscale": 10**400}}, "mscale"),
        ({"architectures": 1}, "architectures"),
        ({"layer_types": "full_attention"}, "layer_types"),
    ],
)
def test_refused_by_name(overrides: dict[str, Any], word: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        _spec(**overrides)
    assert word in caught.value.message


def test_everything_transformers_writes_is_known(tmp_path: Path) -> None:
    """Also the keys of old configs, which had every generation default."""
    transformers = pytest.importorskip("transformers")
    for name in ("Llama", "Qwen2", "Qwen3"):
        config = getattr(transformers, name + "Config")(architectures=[name + "ForCausalLM"])
        model_spec(config.to_dict())
        model_spec(json.loads(config.to_json_string()))
    old = {"sliding_window": 32768, "use_sliding_window": False, "max_window_layers": 21}
    old |= {"do_sample": False, "top_p": 1.0, "_name_or_path": "x", "rope_interleaved": False}
    old |= {"transformers.js_config": {}, "is_llama_config": True, "some_future_key": None}
    assert _spec("qwen2", **old).architecture == "qwen2"
    with pytest.raises(UnsupportedModel):
        _spec("qwen2", **old | {"use_sliding_window": True})


# ---- text assets
