"""Blocks of logits against whole passes, transformers, and steps one token at a time."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import scalar_ops
import torch

from edge_runtime.cache.policy import KV8
from edge_runtime.decode.sampling import Sampling
from edge_runtime.errors import UsageError
from edge_runtime.evaluate import views as views_module
from edge_runtime.evaluate.views import Views, ViewSpec, parse_view
from edge_runtime.kernels.ops import View

IDS = np.random.default_rng(4).integers(0, 270, 90).tolist()
NAMES = ("fp", "w8a8", "nest", "w4", "nest:kv4", "w4:recent:64", "draft", "draft:kv4")


def rows(views: Views, name: str, first: int = 0) -> np.ndarray:
    return np.concatenate(list(views.get(parse_view(name)).blocks(IDS, first)))


@pytest.mark.parametrize("name", NAMES)
def test_blocks_do_not_matter(views: Views, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = rows(views, name)
    assert whole.shape == (90, 277)
    monkeypatch.setattr(views_module, "LOGITS_BYTES", 4 * 277 * 9)  # blocks of nine rows
    blocks = list(views.get(parse_view(name)).blocks(IDS, 40))
    assert [len(b) for b in blocks] == [9, 9, 9, 9, 9, 5]
    found = np.concatenate(blocks)
    if name == "fp":  # torch adds in another order
        assert np.abs(found - whole[40:]).max() < 1e-4 * np.abs(whole).max()
    else:
        assert found.tobytes() == whole[40:].tobytes()


def test_the_original_is_that_of_transformers(views: Views, tiny_source: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_source, dtype=torch.float32).eval()
    with torch.inference_mode():
        want = model(torch.tensor([IDS])).logits[0].numpy()[:, :277]
    assert np.abs(rows(views, "fp") - want).max() < 1e-4 * np.abs(want).max()


@pytest.mark.parametrize("name", ["draft", "draft:kv4", "draft:recent:64"])
def test_a_draft_as_it_really_runs(views: Views, name: str) -> None:
    """One base row, then one target row that restores the cache, from the first to the last."""
    engine, policy = views.engine("nest"), parse_view(name).policy
    cache = engine.model.backend.new_cache(len(IDS))
    want = []
    for at, token in enumerate(IDS):
        logits = engine.model.forward("w4", [token], at, cache, policy=policy).numpy()
        want.append(logits[0].copy())
        engine.model.forward("w8", [token], at, cache)
    assert rows(views, name).tobytes() == np.array(want).tobytes()
    assert rows(views, name).tobytes() != rows(views, "w4").tobytes()


def test_the_target_and_its_policies(views: Views) -> None:
    engine = views.engine("nest")
    cache = engine.model.backend.new_cache(len(IDS))
    cases: dict[str, View] = {"nest": "w8", "w8": "w8", "w4": "w4", "nest:kv4": "w8"}
    for name, view in cases.items():
        policy = parse_view(name).policy
        logits = engine.model.forward(
            view,
            IDS,
            0,
            cache,
            policy=policy,
            num_logits=len(IDS),
        )
        assert rows(views, name).tobytes() == logits.numpy().tobytes()
    assert rows(views, "nest:kv4").tobytes() != rows(views, "nest").tobytes()


def test_w8a8_is_close_and_is_not_the_target(views: Views) -> None:
    original, plain, target = (rows(views, name) for name in ("fp", "w8a8", "nest"))
    error = scalar_ops.rms_ratio(plain, original)
    assert 0 < error < scalar_ops.rms_ratio(target, original) < 0.12


def test_w4a16_is_the_base_without_rounded_activations(views: Views) -> None:
    wide, base, original = (rows(views, name) for name in ("w4a16", "w4", "fp"))
    error = scalar_ops.rms_ratio(base, wide)
    assert 0 < error < 0.5 * scalar_ops.rms_ratio(wide, original)
    with pytest.raises(UsageError, match="is not quantised"):
        parse_view("w4a16:kv4")


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_answers(views: Views, temperature: float) -> None:
    sampling = Sampling(temperature=temperature, seed=5)

    def answer(name: str) -> list[int]:
        view = views.get(parse_view(name))
        result = view.answer(IDS[:70], new_tokens=16, sampling=sampling, ignore_eos=True)
        return result.token_ids

    assert answer("nest") == answer("w8")
    for name in ("nest:kv4", "w4", "w4:kv4"):
        view = views.get(parse_view(name))
        engine, policy = view.engine, parse_view(name).policy
        program = "w4" if name.startswith("w4") else "w8"
        cache = engine.model.backend.new_cache(100)
        want, ids = [], IDS[:70]
        forward = views.engine("nest").model.forward
        while len(want) < 16:  # the whole text anew for every token
            text = [*ids, *want]
            logits = forward(program, text, 0, cache, policy=policy)  # type: ignore[arg-type]
            if temperature:
                want.append(logits.sample(0, len(text), ids, want, sampling))
            else:
                want += logits.argmax()
        assert answer(name) == want
    assert len({tuple(answer(n)) for n in ("nest", "nest:kv4", "w4", "fp")}) > 1


def test_a_text_and_an_answer_in_turns(views: Views) -> None:
    """What one leaves in the cache is nothing to the other."""
    view, sampling = views.get(parse_view("nest")), Sampling()
    first = view.answer(IDS[:40], new_tokens=8, sampling=sampling).token_ids
    logits = rows(views, "nest")
    assert view.answer(IDS[:40], new_tokens=8, sampling=sampling).token_ids == first
    assert rows(views, "nest").tobytes() == logits.tobytes()


def test_spelling() -> None:
    for name in NAMES:
        assert str(parse_view(name)) == name
    assert parse_view("draft:kv8") == ViewSpec("draft", KV8)
    for wrong in ("w2", "", "nest:", "nest:kv2", "fp:kv4", "nest:recent:0"):
        with pytest.raises(UsageError):
            parse_view(wrong)


def test_a_draft_answers_nothing(views: Views) -> None:
    with pytest.raises(UsageError, match="answers nothing"):
        views.get(parse_view("draft")).answer([1, 2], new_tokens=3, sampling=Sampling())
