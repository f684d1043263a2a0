"""What `bench kernels --backend cuda` measures: every op, the bytes it counts, its document.

Without a GPU the ops run in Triton's interpreter and the timer is a fake one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import json
import re
import sys
import types
import typing
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from triton_devices import device_of

from edge_runtime import cli
from edge_runtime.cli import bench_cuda
from edge_runtime.errors import BackendUnavailable
from edge_runtime.kernels import cuda, ops
from edge_runtime.kernels.cuda.timing import text
from edge_runtime.kernels.cuda.timing.entry import Entry, Sizes
from edge_runtime.plan import footprint

pytest.importorskip("triton")
TINY = Sizes(
    linears={
        "qkv": (128, 64), "o": (64, 64), "gate_up": (192, 64), "down": (64, 96), "head": (80, 64),
    },
    hidden=64, inner=96, vocabulary=80, heads=4, kv_heads=2, head_dim=16, group_size=32, tokens=128,
    rows=(1, 3), device="cpu",
)  # fmt: skip


@pytest.fixture
def interpreter() -> None:
    device_of("cpu")


@pytest.fixture
def entries(interpreter: None) -> list[Entry]:
    from edge_runtime.kernels.cuda.timing import registry

    functions = (*registry.SECTIONS["linear"], *registry.SECTIONS["small"])
    return [one for function in functions for one in function(TINY)]


def test_every_op_is_timed(entries: list[Entry]) -> None:
    from edge_runtime.kernels.cuda.timing import registry

    assert {*registry.OPS, *registry.WITHOUT_KERNEL} == set(typing.get_args(ops.Op))
    timed = {function for functions in registry.SECTIONS.values() for function in functions}
    assert timed >= {function for function, _ in registry.OPS.values()}
    names = {name for _, name in registry.OPS.values()} - {"attention"}  # its inputs need a GPU
    assert names <= {one.name for one in entries}
    for one in entries:
        for i in range(one.num_copies):
            one.call(i)


def test_linears_in_both_views_and_beside_fp16(entries: list[Entry]) -> None:
    for name in TINY.linears:
        some = [(e.rows, e.kind, e.peer) for e in entries if e.name == name]
        kinds = (("w4", False), ("w8", False), ("fp16", True))
        assert some == [(M, *kind) for M in TINY.rows for kind in kinds]


@pytest.mark.parametrize(("N", "K", "G"), [(64, 64, 32), (48, 200, 32), (16, 576, 64)])
def test_bytes_of_a_linear_are_its_tensors(N: int, K: int, G: int) -> None:
    from edge_runtime.kernels.cuda.timing import linears

    w = linears.weights(N, K, 1, G, device="cpu")
    rest = w.mult.nbytes + w.scale.nbytes
    assert linears.num_bytes(N, K, G, "w4") == w.base.nbytes + rest
    assert linears.num_bytes(N, K, G, "w8") == w.base.nbytes + w.refine.nbytes + rest
    for view, planes in (("w4", 1), ("w8", 2)):
        assert linears.num_bytes(N, K, G, view) == footprint.linear_bytes(N, K, G, planes)


def test_bytes_of_small_ops_are_their_tensors(entries: list[Entry]) -> None:
    from edge_runtime.kernels.cuda import activations

    M, s = 3, TINY
    found = {e.name: e.num_bytes for e in entries if e.rows == M}
    wide = activations.new_activation(M, s.inner, s.group_size, "cpu")
    narrow = activations.new_activation(M, s.hidden, s.group_size, "cpu")
    size = {a: sum(t.nbytes for t in (a.codes, a.scale, a.sums)) for a in (wide, narrow)}
    assert found["quantise"] == found["norm_quantise"] == M * s.hidden * 4 + size[narrow]
    assert found["silu_mul_quantise"] == M * 2 * s.inner * 4 + size[wide]
    assert found["argmax"] == torch.empty(M, s.vocabulary).nbytes
    row = torch.empty(s.hidden, dtype=torch.int8).nbytes + torch.empty(s.hidden).nbytes
    assert found["embed"] == M * (row + 4 + 8)  # fp32 scale, int64 id
    heads = torch.empty(M, s.heads + 2 * s.kv_heads, s.head_dim).nbytes
    tables = 2 * torch.empty(M, s.head_dim // 2).nbytes
    q, written = torch.empty(M, s.heads, s.head_dim).nbytes, M * s.kv_heads * (2 * s.head_dim + 4)
    assert found["rope_kv"] == heads + tables + q + written


def test_sizes_are_those_of_the_model() -> None:
    from edge_runtime.cli.plan_subject import read_subject

    sizes = bench_cuda.sizes_of(read_subject("llama-2-7b", Path("llama-2-7b")), None)
    assert sizes.linears == {
        "qkv": (12288, 4096), "o": (4096, 4096), "gate_up": (22016, 4096), "down": (4096, 11008),
        "head": (32000, 4096),
    }  # fmt: skip
    assert (sizes.group_size, sizes.rows, sizes.tokens) == (128, (1, 5, 8, 16), 4096)


class FakeTimer:
    """Runs each call once and says that it took a microsecond."""

    num_sms, whole, handle = 8, True, 0
    current = contextlib.nullcontext

    def measure(
        self, calls: Sequence[Sequence[Any]], turns: int, *, clocks: bool = False
    ) -> list[Any]:
        from edge_runtime.kernels.cuda.timing.timer import Sample

        for some in calls:
            some[0]()
        return [Sample([1e-6] * turns, [1e3] * turns, [1e9] * turns) for _ in calls]


@contextlib.contextmanager
def no_slice() -> Iterator[Any]:
    raise BackendUnavailable("no green contexts in this test")
    yield


@pytest.fixture
def faked(monkeypatch: pytest.MonkeyPatch, interpreter: None) -> None:
    from edge_runtime.kernels.cuda.timing import report

    gpu = {"name": "Fake", "capability": "8.7", "num_sms": 8, "l2_bytes": 1 << 20}
    for owner, name, value in (
        (cuda, "require_gpu", lambda: None), (report, "require_gpu", lambda: None),
        (report, "Timer", FakeTimer), (report, "gpu", lambda: gpu),
        (report, "copy_bandwidth", lambda timer, turns: [1e11] * turns),
        (report.sm_slice, "open_slice", no_slice),
        (bench_cuda, "sizes_of", lambda subject, rows: dataclasses.replace(TINY, rows=rows)),
    ):  # fmt: skip
        monkeypatch.setattr(owner, name, value)


def run(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, str, str]:
    command = ["bench", "kernels", "llama-2-7b", "--backend", "cuda", *args]
    with pytest.raises(SystemExit) as exit_:
        cli.main(command)
    out, err = capsys.readouterr()
    assert "Traceback" not in err
    return exit_.value.code, out, err


def test_document(faked: None, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(
        capsys, "--json", "--only", "linear,small,slice", "--rows", "3", "--repeats", "2"
    )
    assert code == 0, err
    (line,) = out.splitlines()
    document = json.loads(line)
    assert document.keys() == {
        "model", "backend", "gpu", "torch", "cuda", "triton", "peers", "sizes", "weights", "turns",
        "copy_gb_s", "rows", "slice", "synthetic",
    }  # fmt: skip
    assert document["backend"] == "cuda"
    assert document["copy_gb_s"] == {"median": 100, "min": 100, "max": 100}
    assert document["peers"].keys() == {"fp16", "int4", "gemlite", "torch"}
    assert document["slice"]["why_not"] == "no green contexts in this test"
    for row in document["rows"]:
        assert row["gb_s"] == pytest.approx(row["bytes"] / 1e-6 / 1e9)
        assert row["share_of_copy"] == pytest.approx(row["gb_s"] / 100)
        assert row["rows"] == 3 or row["op"] == "ngram"
        assert row["seconds"] == {"median": 1e-6, "min": 1e-6, "max": 1e-6}
        linear = row["op"] in TINY.linears and not row["peer"]
        assert row["faster_than"] == ({"fp16": 1.0} if linear else {})
    assert {row["section"] for row in document["rows"]} == {"linear", "small"}


def test_text_is_80_columns_wide(faked: None, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "--only", "linear,slice", "--rows", "1")
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert all(len(line) <= text.WIDTH for line in lines)
    assert "slice: unavailable: no green contexts in this test" in lines
    row = next(line for line in lines if line.startswith("gate_up"))
    assert re.fullmatch(r"gate_up +192x64 +w4 +1 +1\.00 +\d+\.\d +\d+% +1\.00", row)


def test_lines_of_a_slice() -> None:
    row = {
        "op": "gate_up", "shape": "22016x4096", "kind": "w8", "rows": 16, "faster_than": {},
        "seconds": {"median": 1e-4}, "bytes_per_clock": 43.84, "gb_s": 1.0, "share_of_copy": None,
    }  # fmt: skip
    assert text.line(row).endswith(" 100.00  43.8 B/clk/SM")
    whole = {"num_sms": 8, "whole_gpu": True, "why_not": None, "rows": []}
    assert text.slice_lines({"slice": whole}) == ["slice: the whole GPU, 8 SMs, code for sm_87"]
    assert text.slice_lines({"slice": None}) == []
    wide = row | {"op": "attention", "shape": "32/32x128 32768", "kind": "recent:1024", "rows": 1}
    for facts in ({}, {"bytes_per_clock": 43.84}):
        one = wide | {"faster_than": {"torch": 12.34}, "gb_s": 4321.0, "share_of_copy": 1.0} | facts
        assert len(text.line(one)) <= text.WIDTH
        assert text.line(one).split()[:5] == ["attention", "32/32x128", "32768", "recent:1024", "1"]


def open_slice(monkeypatch: pytest.MonkeyPatch, capability: int, num_sms: int) -> Any:
    from edge_runtime.kernels.cuda.timing import slice as sm_slice

    gpu = types.SimpleNamespace(multi_processor_count=num_sms)
    monkeypatch.setattr(sm_slice, "Timer", FakeTimer)
    monkeypatch.setattr(sm_slice, "capability", lambda: capability)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
    with sm_slice.open_slice() as timer:
        return timer


def test_the_slice_of_a_small_gpu_is_the_whole_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(open_slice(monkeypatch, 87, 8), FakeTimer)


def test_why_there_is_no_slice(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BackendUnavailable, match="sm_87 does not run on sm_80"):
        open_slice(monkeypatch, 80, 108)

    def create(**kinds: int) -> None:
        raise RuntimeError("the driver is too old\nmore")

    old, new = types.ModuleType("old"), types.ModuleType("new")
    new.GreenContext = types.SimpleNamespace(create=create)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch.cuda.green_contexts", old)
    with pytest.raises(BackendUnavailable, match="has no green contexts"):
        open_slice(monkeypatch, 90, 132)
    monkeypatch.setitem(sys.modules, "torch.cuda.green_contexts", new)
    with pytest.raises(BackendUnavailable, match=r"8 multiprocessors: the driver is too old$"):
        open_slice(monkeypatch, 90, 132)


@pytest.mark.parametrize(
    ("args", "code", "words"),
    [
        (("--rows", "0"), 2, "numbers from 1 to 16"),
        (("--rows", "1,x"), 2, "numbers from 1 to 16"),
        (("--only", "linears"), 2, "none of linear, attention, small, slice, prefill"),
        (("--threads", "2"), 2, "cuda runs on the GPU"),
    ],
)
def test_usage(
    args: tuple[str, ...], code: int, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    found, out, err = run(capsys, *args)
    assert (found, out) == (code, "")
    assert words in err


def test_only_is_for_cuda(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        cli.main(["bench", "kernels", "llama-2-7b", "--only", "linear"])
    assert exit_.value.code == 2
    assert "--only is for --backend cuda" in capsys.readouterr().err


@pytest.mark.parametrize("missing", ["torch", "triton", "a GPU"])
def test_what_is_missing_is_said(
    missing: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *a: None if name == missing else find(name, *a)
    )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    code, out, err = run(capsys, "--json")
    assert (code, out) == (4, "")
    assert missing.lower() in err.splitlines()[0].lower()
    assert "hint:" in err


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_run_on_a_gpu() -> None:
    device_of("cuda")
    from edge_runtime.kernels.cuda.timing.report import measure

    sizes = Sizes(
        linears={
            "qkv": (1024, 512), "o": (512, 512), "gate_up": (2048, 512), "down": (512, 1024),
            "head": (1000, 512),
        },
        hidden=512, inner=1024, vocabulary=1000, heads=8, kv_heads=4, head_dim=64, tokens=256,
        rows=(1, 5),
    )  # fmt: skip
    document = json.loads(json.dumps(measure(sizes, turns=2)))
    rows = document["rows"]
    assert {row["section"] for row in rows} == {"linear", "attention", "small", "prefill"}
    assert all(row["seconds"]["median"] > 0 and row["gb_s"] > 0 for row in rows)
    assert all(row["faster_than"]["fp16"] > 0 for row in rows if row["kind"] in ("w4", "w8"))
    found = document["slice"]
    if found["why_not"] is None:
        assert {row["section"] for row in found["rows"]} == {"slice", "prefill_slice"}
        assert all(100 < row["mhz"] < 4000 for row in found["rows"])
        assert all(0 < row["bytes_per_clock"] < 200 for row in found["rows"])
