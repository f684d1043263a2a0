"""An engine on the CUDA kernels without a GPU, in Triton's interpreter: a few short answers."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from edge_runtime import kernels
from edge_runtime.decode import prefix
from edge_runtime.decode.engine import Engine
from edge_runtime.decode.sampling import Sampling

PROMPT = np.random.default_rng(4).integers(0, 277, 9).tolist()


@pytest.fixture
def opened(
    checkpoints: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., Engine]]:
    """Opens engines on the 1-layer model; cuda is on offer."""
    pytest.importorskip("triton")
    if os.environ.get("TRITON_INTERPRET") != "1":
        # the interpreter is chosen for a whole process, in which the others want the GPU
        pytest.skip("a GPU is here: test_identity.py and the others run on it")
    monkeypatch.setattr(kernels, "cuda_status", lambda: (True, "in the interpreter"))
    engines: list[Engine] = []

    def get(backend: str, **options: str) -> Engine:
        engines.append(Engine.open(checkpoints("llama-r3"), backend=backend, ctx=64, **options))
        return engines[-1]

    yield get
    for engine in engines:
        engine.close()


@pytest.mark.filterwarnings(
    "ignore::RuntimeWarning"
)  # the interpreter's numpy, where IEEE is meant
@pytest.mark.parametrize(
    ("sampling", "policy", "draft"),
    [(Sampling(), "kv4", "2"), (Sampling(temperature=0.8, top_k=40, seed=11), "kv8", "3")],
)
def test_the_answer_of_the_reference(
    opened: Callable[..., Engine], sampling: Sampling, policy: str, draft: str
) -> None:
    want = opened("reference", draft="off").generate(
        PROMPT, max_new_tokens=7, sampling=sampling, ignore_eos=True
    )
    engine = opened("cuda", draft=draft, draft_source="base", kv_policy=policy)
    got = engine.generate(PROMPT, max_new_tokens=7, sampling=sampling, ignore_eos=True).complete()
    assert got.token_ids == want.complete().token_ids
    assert (got.backend, got.backend_why) == ("cuda", "in the interpreter")
    assert got.draft["drafted"] > 0


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_prompts_file_has_the_bytes_of_the_reference(
    opened: Callable[..., Engine], tmp_path: Path
) -> None:
    reference, beginning = opened("reference", draft="off"), PROMPT[:6]
    want = reference.generate(PROMPT, max_new_tokens=4, ignore_eos=True).complete().token_ids
    prefix.save(reference, tmp_path / "reference", beginning)
    cuda = opened("cuda", draft="2", draft_source="base")
    prefix.save(cuda, tmp_path / "cuda", beginning)
    assert (tmp_path / "cuda").read_bytes() == (tmp_path / "reference").read_bytes()
    prefix.load(cuda, tmp_path / "reference")
    cuda.reuse([])
    got = cuda.generate(PROMPT, max_new_tokens=4, ignore_eos=True).complete()
    assert (got.token_ids, got.cached_tokens) == (want, len(beginning))


def test_auto_takes_it(opened: Callable[..., Engine]) -> None:
    assert opened("auto").backend_name == "cuda"
