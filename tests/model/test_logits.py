"""Logits of the graph against transformers, and that nothing but the rows themselves matters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scalar_ops
import tiny_checkpoints
import tiny_models
import torch

from edge_runtime.convert.original import float_model
from edge_runtime.convert.source import open_source
from edge_runtime.decode.draft import DraftChoice
from edge_runtime.decode.engine import Engine
from edge_runtime.decode.request import Prompt
from edge_runtime.kernels.ops import View
from edge_runtime.model.runner import Model
from edge_runtime.text.tokenizer import Tokenizer

IDS = np.random.default_rng(0).integers(0, 270, 90).tolist()
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
ODD: dict[str, Any] = {"hidden_size": 96, "intermediate_size": 100}
ODD |= {"num_attention_heads": 6, "num_key_value_heads": 2}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-gqa": ("llama", {}),
    "llama-mqa": ("llama", {"num_key_value_heads": 1}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-tied-odd": ("llama", ODD | {"tie_word_embeddings": True}),
    "llama-head-dim": ("llama", {"head_dim": 24}),
    "llama-outliers": ("llama", {"outliers": 3}),
    "llama-no-hadamard": ("llama", {"hidden_size": 92, "head_dim": 16}),
    "llama-linear": ("llama", {"rope": {"rope_type": "linear", "factor": 3.0}}),
    "llama-dynamic": ("llama", {"rope": {"rope_type": "dynamic", "factor": 2.0}}),
    "llama-3": ("llama", {"rope": LLAMA3 | {"original_max_position_embeddings": 64}}),
    "qwen2": ("qwen2", {}),
    "qwen2-mqa-tied": ("qwen2", ODD | {"num_key_value_heads": 1, "tie_word_embeddings": True}),
    "qwen2-yarn": ("qwen2", {"rope": YARN, "outliers": 2}),
    "qwen3": ("qwen3", {}),
    "qwen3-tied-odd": ("qwen3", ODD | {"head_dim": 24, "tie_word_embeddings": True}),
    "qwen3-yarn": ("qwen3", {"rope": YARN | {"mscale": 0.8, "mscale_all_dim": 0.5}}),
}


def k_outliers(folder: Path, architecture: str, model: dict[str, Any]) -> Path:
    """Write a model in which two channels of K tower over the others through their bias."""
    path = tiny_models.write_hf(folder, architecture, **model)
    bias = torch.zeros(32)
    bias[[3, 19]] = torch.tensor([40.0, -60.0])
    name = "model.layers.0.self_attn.k_proj.bias"
    return tiny_models.write_hf(path, architecture, **model, replace={name: bias})


def transformers_logits(folder: Path, ids: list[int]) -> torch.Tensor:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    with torch.inference_mode():
        return model(torch.tensor([ids])).logits[0]


def logits_of(model: Model, ids: Any, *, view: View = "fp", chunk: int = 256) -> Any:
    """Logits after every position, one prefix after another in the same cache."""
    cache = model.backend.new_cache(len(ids))
    model.prefill(view, ids[:-8], 0, cache, chunk=chunk, want_logits=False)
    return model.forward(view, ids[-8:], len(ids) - 8, cache, num_logits=8).numpy()


def close(got: Any, want: Any) -> None:
    """fp32 sums in other orders: measured 1e-6 to 1e-5 of the largest logit."""
    assert np.abs(got - want).max() <= 1e-4 * np.abs(want).max()


@pytest.mark.parametrize("name", MODELS)
def test_float_model_is_the_model_of_transformers(name: str, tmp_path: Path) -> None:
    architecture, options = MODELS[name]
    folder = tiny_models.write_hf(tmp_path / "m", architecture, **options)
    source = open_source(folder)
    plain = float_model(source, 256)
    got = logits_of(plain, IDS)
    want = transformers_logits(folder, IDS).numpy()[-8:, : got.shape[1]]
    close(got, want)
    # rotation alone changes nothing but the last bits
    rotated = float_model(source, 256, rotate_seed=3)
    close(logits_of(rotated, IDS), got)


@pytest.mark.parametrize("architecture", ["qwen2", "llama"])
def test_k_outliers(architecture: str, tmp_path: Path) -> None:
    model = {"attention_bias": True} if architecture == "llama" else {}
    folder = k_outliers(tmp_path / "m", architecture, model)
    source = open_source(folder)
    got = logits_of(float_model(source, 128, rotate_seed=1), IDS)
    close(got, transformers_logits(folder, IDS).numpy()[-8:, : got.shape[1]])


@pytest.mark.parametrize("rotate_seed", [None, 5])
@pytest.mark.parametrize("name", ["llama-tied-odd", "llama-no-hadamard"])
def test_embedding_rows_of_the_float_model(
    name: str, rotate_seed: int | None, tmp_path: Path
) -> None:
    architecture, options = MODELS[name]
    source = open_source(tiny_models.write_hf(tmp_path, architecture, **options))
    model = float_model(source, 128, rotate_seed=rotate_seed)
    rows = source.tensor("embed")[IDS].numpy()
    caches = [model.backend.new_cache(len(IDS)) for _ in range(2)]
    by_rows = model.prefill("fp", rows, 0, caches[0], want_logits=True)[1]
    by_ids = model.prefill("fp", IDS, 0, caches[1], want_logits=True)[1]
    assert by_rows is not None
    assert by_ids is not None
    close(by_rows.numpy(), by_ids.numpy())


# ---- the quantised model

CHECKPOINTS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "llama": ("llama", {"outliers": 3}, {}),
    "qwen2-odd": ("qwen2", ODD, {}),
    "qwen3-r3": ("qwen3", {"tie_word_embeddings": True}, {"r3": True}),
    "llama-no-hadamard": ("llama", {"hidden_size": 92, "head_dim": 16}, {"base": "rtn"}),
    "llama-plain": ("llama", {"attention_bias": True, "mlp_bias": True}, {"rotate": "none"}),
}


@pytest.fixture(scope="module", params=CHECKPOINTS)
def converted(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    architecture, model, options = CHECKPOINTS[request.param]
    folder = tmp_path_factory.mktemp("converted")
    path = tiny_checkpoints.convert_tiny(folder, architecture, options=options, **model)
    with Engine.open(path, backend="reference", ctx=128) as engine:
        yield engine, open_source(folder / "source")


def filled(engine: Engine, parts: list[Any], chunk: int, view: View = "w8") -> tuple[Any, Any]:
    """(planes, last logits) after a prompt given as spans."""
    prompt = Prompt(parts, engine.model.spec.hidden_size, 277)
    cache = engine.model.backend.new_cache(len(prompt))
    logits = None
    for at, part in prompt.parts(0):
        last = at + len(part) == len(prompt)
        _, logits = engine.model.prefill(view, part, at, cache, chunk=chunk, want_logits=last)
    assert logits is not None
    return cache.planes(len(prompt)), logits.numpy()


def same(a: tuple[Any, Any], b: tuple[Any, Any]) -> bool:
    return a[1].tobytes() == b[1].tobytes() and all(
        a[0][n].tobytes() == b[0][n].tobytes() for n in a[0]
    )


@pytest.mark.parametrize("view", ["w8", "w4"])
def test_chunks_do_not_matter(converted: Any, view: View) -> None:
    engine, _ = converted
    whole = filled(engine, [IDS], 256, view)
    for chunk in (1, 7, 16, 17, 64):
        assert same(filled(engine, [IDS], chunk, view), whole), chunk
    assert not same(filled(engine, [[*IDS[:-1], IDS[-1] ^ 1]], 256, view), whole)


def test_embedding_rows_are_tokens(converted: Any) -> None:
    engine, source = converted
    table = source.tensor("embed").numpy()
    whole = filled(engine, [IDS], 256)
    assert same(filled(engine, [table[IDS]], 256), whole)
    assert same(filled(engine, [table[IDS]], 1), whole)
    mixed = [IDS[:5], table[IDS[5:6]], IDS[6:40], table[IDS[40:]].copy()]
    assert same(filled(engine, mixed, 7), whole)


def test_views_are_close_to_the_original(converted: Any) -> None:
    engine, source = converted
    want = logits_of(float_model(source, 128), IDS)
    errors = [
        scalar_ops.rms_ratio(logits_of(engine.model, IDS, view=view), want) for view in ("w8", "w4")
    ]
    # eight-bit weights, activations and KV in a random model: a few percent; four bits: 5 to 40
    assert errors[0] < 0.12
    assert errors[0] < errors[1] < 0.8


# ---- a real model

PROMPTS = (
    "The capital of France is",
    "def fibonacci(n):\n",
    "<|im_start|>user\nWhat is gravity?<|im_end|>\n<|im_start|>assistant\n",
    "Once upon a time, in a land far away,",
    "1, 1, 2, 3, 5, 8, 13,",
)


def transformers_gguf(file: Path) -> Any:
    """The model as transformers reads it (without accelerate, which its front door asks for)."""
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    model = LlamaForCausalLM(LlamaConfig(**load_gguf_checkpoint(file)["config"])).eval()
    read = load_gguf_checkpoint(file, return_tensors=True, model_to_load=model)
    missing, unknown = model.load_state_dict(read["tensors"], strict=False)
    assert (missing, unknown) == (["lm_head.weight"], [])
    model.tie_weights()
    return model


@pytest.mark.model
@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_greedy_tokens_of_a_real_model(smollm2_gguf: Path) -> None:
    """64 tokens on five prompts: the same as transformers reading the same GGUF."""
    source = open_source(smollm2_gguf)
    tokenizer = Tokenizer.from_json(source.tokenizer_json, source.text.eos_ids)
    prompts = [tokenizer.encode(p, allow_special=True) for p in PROMPTS]
    theirs = transformers_gguf(smollm2_gguf)
    theirs.generation_config.eos_token_id = None  # on past the end
    want = []
    for ids in prompts:
        row = torch.tensor([ids])
        made = theirs.generate(
            row, attention_mask=torch.ones_like(row), do_sample=False, max_new_tokens=64
        )
        want.append(made[0, len(ids) :].tolist())
    del theirs
    engine = Engine(
        float_model(source, 256),
        tokenizer,
        source.text,
        view="fp",
        context=256,
        draft=DraftChoice(0, "base", "not nested"),
    )
    for ids, answer in zip(prompts, want, strict=True):
        run = engine.generate(ids, max_new_tokens=64, ignore_eos=True).complete()
        assert len(answer) == 64
        assert run.token_ids == answer
