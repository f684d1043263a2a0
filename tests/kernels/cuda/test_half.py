"""The 16-bit baseline, KV16 and two copies: near the reference, or the nest bit for bit; memory.

Tolerances are RMS over RMS of logits against the fp32 reference. In fp32 (the interpreter alone)
1e-5 is left: torch adds in another order. fp16 keeps 11 bits: 5e-4 a rounding, some twenty of
them in a row of a two-layer model: 5e-3. bf16 keeps 8: eight times as much.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from half_models import CONTEXT, NUM_TOKENS, half_model, play, reference, tensors
from random_weights import random_linear, random_spec, random_weights
from triton_devices import DEVICES, device_of

from edge_runtime.errors import UsageError
from edge_runtime.format.spec import ModelSpec
from edge_runtime.kernels import ops
from edge_runtime.kernels.reference.ops import ReferenceBackend
from edge_runtime.kernels.sampling import Parameters
from edge_runtime.model.runner import Model
from edge_runtime.model.transformer import geometry
from edge_runtime.plan.footprint import footprint

SPECS: dict[str, ModelSpec] = {
    "D16-tied": random_spec(tied_embedding=True),
    "D64-biases-group3": random_spec(
        architecture="qwen2", hidden_size=200, num_heads=3, num_kv_heads=1, head_dim=64,
        qkv_bias=True, o_bias=True, mlp_bias=True,
    ),
    "D80-head-norms-group7": random_spec(
        architecture="qwen3", qk_norm=True, hidden_size=72, num_heads=7, num_kv_heads=1,
        head_dim=80, intermediate_size=200,
    ),
}  # fmt: skip
TOLERANCES = {torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 4e-2}
CHUNKS = [3, 40, 1, 5, 17]  # rows of passes, over the end of a block and of a split


def half(spec: ModelSpec, device: str, dtype: torch.dtype | None = None) -> Any:
    from edge_runtime.kernels.cuda.half_backend import HalfBackend

    where = torch.device(device_of(device))
    return HalfBackend(half_model(spec), geometry(spec, NUM_TOKENS), where, dtype)


def far(got: ops.F32, want: ops.F32) -> float:
    assert got.shape == want.shape
    return float(np.sqrt(((got - want) ** 2).mean() / (want**2).mean()))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("name", SPECS)
def test_near_the_reference(name: str, dtype: torch.dtype, device: str) -> None:
    if device == "cuda" and dtype == torch.float32:
        pytest.skip("products of fp32 are rounded to tf32 there")
    if device == "cpu" and dtype == torch.bfloat16:
        pytest.skip("the interpreter of Triton multiplies the bits of bf16 as integers")
    spec = SPECS[name]
    backend = half(spec, device, dtype)
    wanted = play(Model(spec, reference(spec), quantised=False), "fp", CHUNKS)
    model = Model(spec, backend, quantised=False)
    for got, want in zip(play(model, "fp", CHUNKS), wanted, strict=True):
        assert far(got, want) < TOLERANCES[dtype]


@pytest.mark.parametrize("device", DEVICES)
def test_chunks_of_any_size_agree(device: str) -> None:
    """Rows by the decoding kernel, by SDPA, and in parts of a batch."""
    spec = SPECS["D16-tied"]
    backend = half(spec, device)
    model = Model(spec, backend, quantised=False)
    ids = np.random.default_rng(2).integers(0, NUM_TOKENS, 70).tolist()
    found = []
    for chunk in (16, 70, 40):
        kv = backend.new_cache(CONTEXT)
        done, logits = model.prefill("fp", ids, 0, kv, chunk=chunk, want_logits=True)
        assert done == 70
        assert logits is not None
        found.append((logits.numpy(), kv.planes(70)["kv"]))
    for logits, planes in found[1:]:
        assert far(logits, found[0][0]) < TOLERANCES[torch.float16]
        assert far(planes, found[0][1]) < TOLERANCES[torch.float16]
    other = backend.new_cache(CONTEXT)
    other.load({"kv": found[0][1]})
    assert (other.planes(70)["kv"] == found[0][1]).all()
    rows = model.prefill(
        "fp", tensors(spec)["embed"].numpy()[ids], 0, kv, chunk=40, want_logits=True
    )[1]
    assert rows is not None
    assert far(rows.numpy(), found[0][0]) < TOLERANCES[torch.float16]


def test_a_wide_range_takes_bf16_and_what_is_too_large_is_refused() -> None:
    from edge_runtime.kernels.cuda.half import load

    device = torch.device(device_of("cpu"))
    assert half_model(SPECS["D16-tied"]).dtype == torch.float16
    for name in ("D64-biases-group3", "D80-head-norms-group7"):
        assert half_model(SPECS[name]).dtype == torch.bfloat16
    model = half_model(SPECS["D16-tied"])
    original = model.rows

    def rows(name: str) -> Any:
        return [2e6 * x for x in original(name)] if name == "layers.1.down" else original(name)

    object.__setattr__(model, "rows", rows)
    with pytest.raises(UsageError, match=r"layers\.1\.down: .* range of torch\.float16"):
        load(model, device, torch.float16)
    load(model, device, torch.bfloat16)


@pytest.mark.parametrize("device", DEVICES)
def test_random_weights_on_the_device(device: str) -> None:
    from edge_runtime.kernels.cuda.half import random_weights
    from edge_runtime.kernels.cuda.half_backend import HalfBackend

    spec, where = random_spec(num_layers=20), torch.device(device_of(device))
    model = half_model(spec)
    made = random_weights(model, where, model.dtype)
    assert made.num_bytes == footprint(spec, layout="fp16", backend="cuda").weights_bytes + sum(
        x.nbytes for x in (model.cos, model.sin)
    )
    backend = HalfBackend(made, geometry(spec, NUM_TOKENS), where)
    got = next(play(Model(spec, backend, quantised=False), "fp", [3]))
    assert np.isfinite(got).all()
    assert 0.1 < got.std() < 10


# nested linears, held in other ways


def nested(kind: str, device: str, group_size: int = 32) -> Any:
    from edge_runtime.kernels.cuda import half_backend
    from edge_runtime.kernels.cuda.backend import CudaBackend

    spec = random_spec(num_layers=1, qkv_bias=True)
    weights = random_weights(spec, group_size, CONTEXT)
    classes = {
        "nest": CudaBackend,
        "w8": half_backend.Kv16Backend,
        "two_copies": half_backend.TwoCopiesBackend,
        "reference": ReferenceBackend,
    }
    shape = geometry(spec, NUM_TOKENS, rotate_kv=True)
    if kind == "reference":
        return Model(spec, ReferenceBackend(weights, shape))
    return Model(spec, classes[kind](weights, shape, torch.device(device_of(device))))


@pytest.mark.parametrize("device", DEVICES)
def test_a_16_bit_cache_is_near_the_reference(device: str) -> None:
    """The nested cache keeps steps of 1/112 of a head's largest number: about 0.7 %, RMS over RMS.
    What differs so little falls on other int8 codes four times on its way to the logits (attention,
    norm, silu·mul, norm), 1 % each time: 2 % in all. R3 is left out, to no effect."""
    rows = [20, 1, 5]
    found = play(nested("w8", device), "w8", rows)
    for got, want in zip(found, play(nested("reference", device), "w8", rows), strict=True):
        assert far(got, want) < 4e-2


@pytest.mark.parametrize("device", DEVICES)
def test_two_copies_are_the_nest(device: str) -> None:
    models = [nested(kind, device) for kind in ("nest", "two_copies")]
    for view, rows in (("w8", [20, 5]), ("w4", [1, 3])):
        for one, other in zip(*(play(m, view, rows) for m in models), strict=True):
            assert one.tobytes() == other.tobytes()
    backend = models[1].backend
    assert backend.passes.draft.keys() == backend.passes.weights.linears.keys()
    for name, draft in backend.passes.draft.items():
        target = backend.passes.weights.linears[name]
        assert draft.base.data_ptr() != target.base.data_ptr()
        assert draft.bias is target.bias


# memory


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", SPECS)
def test_the_unquantised_model_takes_what_is_planned(name: str, device: str) -> None:
    from edge_runtime.kernels.cuda import sizes

    spec, backend = SPECS[name], half(SPECS[name], device)
    arch = backend._arch
    account = footprint(spec, layout="fp16", backend="cuda", arch=arch)
    lines = account.lines(CONTEXT)
    assert backend.weights_bytes == account.weights_bytes + lines["rope"]
    kv = backend.new_cache(CONTEXT)
    assert kv.num_bytes == lines["kv"]
    backend.prepare(Model(spec, backend, quantised=False).program("fp"))
    of_attention = kv.part.nbytes + kv.stat.nbytes
    assert 0 <= account.per_block["workspace"] * CONTEXT // 64 - of_attention < 1024
    libraries = sizes.cublas(arch) + sizes.half_prompt(
        spec.q_size, spec.num_heads, sizes.HALF_CHUNK_ROWS
    )
    libraries += sizes.sampling(spec.vocab_size)  # made where it is first used
    planned = account.fixed["workspace"] - libraries - account.per_block["workspace"]
    assert planned <= backend.workspace_bytes <= planned + 16 * 1024  # the batch, and the argmax
    assert sizes.half_cache(backend.geometry, CONTEXT) == lines["kv"] + of_attention
    backend.close()
    assert backend.weights_bytes == 0


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("layout", ["w8", "two_copies"])
def test_other_layouts_take_what_is_planned(layout: Any, device: str) -> None:
    from edge_runtime.kernels.cuda import sizes

    model = nested(layout, device)
    backend: Any = model.backend
    account = footprint(
        model.spec, layout=layout, backend="cuda", group_size=32, arch=backend._arch
    )
    lines = account.lines(CONTEXT)
    assert backend.weights_bytes == account.weights_bytes + lines["rope"]
    kv: Any = backend.new_cache(CONTEXT)
    assert kv.num_bytes == lines["kv"]
    for view in ("w8", "w4"):
        backend.prepare(model.program(view))
    planned = lines["workspace"] - sizes.sampling(model.spec.vocab_size)  # where it is first used
    if layout == "w8":
        of_attention = account.per_block["workspace"] * (CONTEXT // 64 + 1)
        rows = sizes.chunk_rows(backend._arch)
        prompt = sizes.half_prompt(model.spec.q_size, model.spec.num_heads, rows)
        planned -= prompt + of_attention
    else:
        planned -= account.per_block["workspace"] * (CONTEXT // 64 + 15)
    assert planned <= backend.workspace_bytes <= planned + 16 * 1024
    nest = footprint(model.spec, backend="cuda", group_size=32, arch=backend._arch)
    assert (backend.weights_bytes > nest.weights_bytes * 4 / 3) == (layout == "two_copies")


# cycles


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_cycles_choose_what_single_passes_do(temperature: float, device: str) -> None:
    spec = SPECS["D16-tied"]
    backend = half(spec, device)
    model, kv = Model(spec, backend, quantised=False), backend.new_cache(CONTEXT)
    parameters = Parameters(temperature=temperature, seed=5)
    prompt, answer = [3, 1, 4, 1, 5], []
    model.forward("fp", prompt[:-1], 0, kv)
    for i in range(4):
        logits = model.forward("fp", [(prompt + answer)[-1]], 4 + i, kv)
        chosen = logits.argmax()[0]
        if temperature:
            chosen = logits.sample(0, 5 + i, prompt, answer, parameters)
        answer.append(chosen)
    program = model.program("fp")
    cycles = backend.cycles(program, program, kv, None)
    cycles.begin(prompt, parameters)
    found: list[int] = []
    for _ in range(4):
        cycles.launch(0, 0, len(prompt) + len(found))
        found += cycles.read().tokens
    assert found == answer


def test_graphs_and_no_allocation_after_the_first_of_a_kind() -> None:
    spec = SPECS["D64-biases-group3"]
    backend = half(spec, "cuda")
    model, kv = Model(spec, backend, quantised=False), backend.new_cache(CONTEXT)

    def run(rows: int, start: int) -> Any:
        return model.forward("fp", [7] * rows, start, kv, num_logits=rows)

    def passes() -> list[bytes]:
        return [run(*kind).numpy().tobytes() for kind in kinds]

    kinds = [(1, 0), (5, 1)]
    first = [passes() for _ in range(2)]  # launches, then capture
    before = torch.cuda.memory_stats()
    for kind in 3 * kinds:
        run(*kind)
    after = torch.cuda.memory_stats()
    assert passes() == first[0] == first[1]
    assert len(kv.graphs) == 2
    for name in ("allocation.all.allocated", "segment.all.allocated"):
        assert after[name] == before[name], name


def test_planes_are_the_target_that_the_reference_multiplies() -> None:
    """What stands for the original of a synthetic checkpoint."""
    from edge_runtime.convert.half import _dequantised
    from edge_runtime.kernels.reference.linear import ExactLinear

    w = random_linear(np.random.default_rng(0), 30, 100, 32, bias=False)
    planes = {"x.base": w.base, "x.refine": w.refine, "x.mult": w.mult, "x.scale": w.scale}
    got = np.concatenate(
        [_dequantised(planes.__getitem__, "x", slice(a, a + 16), 32) for a in (0, 16)]
    )
    x = np.eye(128, dtype=np.float32)
    want = ExactLinear.from_weights(w, "w8")(torch.from_numpy(x), torch.ones(128)).numpy().T
    np.testing.assert_allclose(got, want, rtol=1e-6)


@pytest.mark.parametrize("kind", ["fp", "w8"])
def test_what_is_launched_is_recorded(kind: str) -> None:
    """`kernels save --baseline` has it: cycles and choices are the engine's own."""
    from edge_runtime.convert.half import blank
    from edge_runtime.kernels.cuda import launch, record
    from edge_runtime.kernels.cuda.record_half import baseline_signatures
    from edge_runtime.model import launches

    class Spy(launch.Jit):
        def launch(self, kernel: Any, grid: Any, arguments: Any, options: Any) -> None:
            kinds, _ = launch.described(arguments, kernel.plain)
            seen.add(launch.signature(kernel.name, kinds, options))
            super().launch(kernel, grid, arguments, options)

    device_of("cpu")
    seen: set[launch.Signature] = set()
    spec = random_spec(num_layers=1, qkv_bias=True)
    if kind == "fp":
        cpu = torch.device("cpu")
        from edge_runtime.kernels.cuda.half_backend import HalfBackend

        backend = HalfBackend(half_model(spec), geometry(spec, NUM_TOKENS), cpu)
        model = Model(spec, backend, quantised=False)
    else:
        model = nested("w8", "cpu")
    with launch.using(Spy()):
        list(play(model, "fp" if kind == "fp" else "w8", [3, 16, 40, 1]))
    biased = frozenset(("layers.0.qkv",))
    subject = launches._subject(model.spec, 32, biased, NUM_TOKENS, False)
    recorded = baseline_signatures(subject, blank(spec, 512))
    recorded += record.engine_signatures(subject)
    if kind == "w8":  # its linears are test_saved.py's
        seen = {signature for signature in seen if signature.kernel.startswith("half")}
    assert len(seen) >= 4
    for signature in seen:
        assert any(one.serves(signature) for one in recorded), signature


@pytest.mark.timeout(300)
def test_kernels_on_orin(repository: Path) -> None:
    """Compiled for sm_87 without a GPU: no spills, and two programs' shared memory fits."""
    pytest.importorskip("triton")
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, str(repository / "tests" / "orin_half.py")],
        env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    reports = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(reports) == 20
    for report in reports:
        assert report["stack"] == report["spills"] == report["narrow"] == 0, report
        assert report["shared"] <= 82 * 1024, report
        if "attend16" in report["kernel"]:
            assert report["wide"] > 8, report
