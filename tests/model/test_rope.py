"""Rotary tables against the definitions of transformers, for every scaling kind."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tiny_models
import torch

from edge_runtime.convert.hf_config import model_spec
from edge_runtime.model.rope import inverse_frequencies, rope_tables

LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
KINDS: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"rope_type": "linear", "factor": 3.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "llama3": {"rope_type": "llama3", "factor": 8.0} | LLAMA3,
    "yarn": YARN,
    "yarn-betas": YARN | {"beta_fast": 16.0, "beta_slow": 2.0},
    "yarn-long": YARN | {"original_max_position_embeddings": 2**16},
    "yarn-exact": YARN | {"truncate": False},
    "yarn-factor": YARN | {"attention_factor": 1.3},
    "yarn-mscale": YARN | {"mscale": 0.8, "mscale_all_dim": 0.5},
    "yarn-mscale-equal": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0},
}
POSITIONS = [0, 1, 8191]


def transformers_frequencies(config: dict[str, Any], context: int) -> tuple[np.ndarray, float]:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    hf = LlamaConfig(**{k: v for k, v in config.items() if k != "model_type"})
    kind = hf.rope_parameters["rope_type"]
    if kind == "default":
        inverse, factor = LlamaRotaryEmbedding.compute_default_rope_parameters(hf)
    else:
        inverse, factor = ROPE_INIT_FUNCTIONS[kind](hf, torch.device("cpu"), seq_len=context)
    return inverse.double().numpy(), float(factor)


@pytest.mark.parametrize("context", [256, 8192])
@pytest.mark.parametrize("theta", [10000.0, 1e6])
@pytest.mark.parametrize("kind", KINDS)
def test_tables(kind: str, theta: float, context: int) -> None:
    config = tiny_models.hf_config(rope=KINDS[kind], rope_theta=theta, head_dim=24)
    spec = model_spec(config)
    want, factor = transformers_frequencies(config, context)
    got, own_factor = inverse_frequencies(spec, context)
    # transformers works in fp32
    np.testing.assert_allclose(got, want, rtol=2e-6)
    assert own_factor == pytest.approx(factor, rel=1e-6)
    cos, sin = rope_tables(spec, context)
    assert cos.shape == sin.shape == (context, 12)
    assert cos.dtype == np.float32
    positions = [p for p in POSITIONS if p < context]
    angles = np.array(positions)[:, None] * got
    # one rounding to fp32 of a factor near 1
    np.testing.assert_allclose(cos[positions], np.cos(angles) * own_factor, atol=2e-7)
    np.testing.assert_allclose(sin[positions], np.sin(angles) * own_factor, atol=2e-7)
    # and against fp32 angles as transformers takes them: position · 2^-24 of error
    tolerance = 2e-6 * max(positions) + 1e-6
    np.testing.assert_allclose(cos[positions], np.cos(np.outer(positions, want)) * factor,
        atol=tolerance)  # fmt: skip


def test_a_table_does_not_depend_on_the_context_unless_dynamic() -> None:
    for kind, rope in KINDS.items():
        spec = model_spec(tiny_models.hf_config(rope=rope))
        same = np.array_equal(rope_tables(spec, 300)[0], rope_tables(spec, 900)[0][:300])
        assert same == (kind != "dynamic"), kind
