"""Tokenizer, chat template and end tokens of a Hugging Face folder."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tiny_models
import torch
from hf_folders import edit, refused

from edge_runtime.convert.source import open_source


def test_text_of_a_plain_folder(tmp_path: Path) -> None:
    text = open_source(tiny_models.write_hf(tmp_path)).text
    assert text.eos_ids == (276,)
    assert (text.bos_id, text.add_bos, text.bos_token) == (275, False, "<|im_start|>")
    assert text.num_tokens == 277
    assert text.chat_template == tiny_models.CHAT_TEMPLATE


@pytest.mark.parametrize("layout", ["config", "list", "jinja", "json", "none"])
def test_chat_template_in_any_place(tmp_path: Path, layout: str) -> None:
    folder = tiny_models.write_hf(tmp_path, chat_template=None)
    settings = folder / "tokenizer_config.json"
    if layout == "config":
        edit(settings, chat_template="T")
    elif layout == "list":
        others = [{"name": "tool_use", "template": "U"}, {"name": "default", "template": "T"}]
        edit(settings, chat_template=others)
    elif layout == "jinja":
        edit(settings, chat_template="old")
        (folder / "chat_template.jinja").write_text("T")
    elif layout == "json":
        (folder / "chat_template.json").write_text('{"chat_template": "T"}')
    expected = None if layout == "none" else "T"
    assert open_source(folder).text.chat_template == expected


def test_end_tokens_are_a_union(tmp_path: Path) -> None:
    folder = tiny_models.write_hf(tmp_path, eos_token_id=[1, 2])
    edit(folder / "generation_config.json", eos_token_id=[2, 3])
    edit(folder / "tokenizer_config.json", eos_token="<|endoftext|>", pad_token=None)
    text = open_source(folder).text
    assert text.eos_ids == (274, 1, 2, 3, 276)  # the template's <|im_end|> last
    assert text.eos_token == "<|endoftext|>"
    edit(folder / "tokenizer_config.json", chat_template="{{ messages[0].content }}")
    assert open_source(folder).text.eos_ids == (274, 1, 2, 3)


def test_bos_from_setting_or_post_processor(tmp_path: Path) -> None:
    folder = tiny_models.write_hf(tmp_path)
    edit(folder / "tokenizer_config.json", add_bos_token=True)
    assert open_source(folder).text.add_bos
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    del settings["add_bos_token"]
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    assert not open_source(folder).text.add_bos
    bos = "<|im_start|>"
    processor = {
        "type": "TemplateProcessing",
        "single": [
            {"SpecialToken": {"id": bos, "type_id": 0}},
            {"Sequence": {"id": "A", "type_id": 0}},
        ],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {bos: {"id": bos, "ids": [275], "tokens": [bos]}},
    }
    edit(folder / "tokenizer.json", post_processor=processor)
    assert open_source(folder).text.add_bos


def test_tokenizer_missing_broken_or_too_large(tmp_path: Path) -> None:
    folder = tiny_models.write_hf(tmp_path / "a")
    (folder / "tokenizer.json").rename(folder / "tokenizer.model")
    assert "tokenizer.model" in refused(folder, "no tokenizer.json").hint
    (folder / "tokenizer.json").write_text("{}")
    refused(folder, "tokenizer.json is not a usable tokenizer")
    small = tiny_models.write_hf(tmp_path / "b", vocab_size=270)
    refused(small, "277 tokens", "270 rows")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_tiny_models_load_in_transformers(tmp_path: Path, architecture: str) -> None:
    """The builder's folders are real: transformers finds every weight and no other."""
    transformers = pytest.importorskip("transformers")
    folder = tiny_models.write_hf(tmp_path, architecture, shards=2, tie_word_embeddings=True)
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True
    )
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    weight = model.model.layers[1].self_attn.q_proj.weight
    assert torch.equal(weight, open_source(folder).tensor("layers.1.q"))


@pytest.mark.parametrize(
    "name",
    [
        "chat_template.jinja",
        "chat_template.json",
        "tokenizer_config.json",
        "generation_config.json",
        "special_tokens_map.json",
    ],
)
def test_a_pointer_in_place_of_a_text(tmp_path: Path, name: str) -> None:
    folder = tiny_models.write_hf(tmp_path)
    (folder / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    assert "git lfs pull" in refused(folder, name, "Git LFS pointer").hint
