"""`bitnest-edge bench`: its documents, on a model too small for its figures to mean anything."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from edge_runtime import bench
from edge_runtime.cli.bench import CURVE
from edge_runtime.decode.engine import Engine


def test_decode(call, tiny_checkpoint: Path) -> None:
    code, out, err = call(
        "bench", "decode", tiny_checkpoint, "-n", 6, "--limit", 2, "--backend", "cpu", "--json"
    )
    assert code == 0, err
    document = json.loads(out)
    assert document["differing"] == 0
    assert document["prompts"] == 2
    assert document["read_gb_s"]["median"] > 0
    assert [row["mode"] for row in document["rows"]] == ["w8", "w4", "nest"]
    w8, w4, nest = document["rows"]
    assert w8["ratio_to_w8"] == {"median": 1, "min": 1, "max": 1, "mean": 1}
    assert w4["bytes_per_token"] < w8["bytes_per_token"]
    assert nest["tokens_per_cycle"] >= 1
    for row in document["rows"]:
        assert row["decode_tok_s"]["min"] <= row["decode_tok_s"]["median"]
    assert "tok/s" in err


def test_decode_beside_the_unquantised_model(call, tiny_checkpoint: Path) -> None:
    args = ("bench", "decode", tiny_checkpoint, "-n", 4, "--limit", 1, "--backend", "cpu")
    code, out, err = call(*args, "--also", "fp", "--json")
    assert code == 0, err
    rows = {row["mode"]: row for row in json.loads(out)["rows"]}
    assert list(rows) == ["w8", "w4", "nest", "fp16"]
    assert (rows["w8"]["backend"], rows["fp16"]["backend"]) == ("cpu", "reference")
    assert rows["fp16"]["memory"]["weights_bytes"] > rows["w8"]["memory"]["weights_bytes"]
    assert rows["fp16"]["ratio_to_w8"]["median"] > 0
    assert "fp16" in err
    code, _, err = call(*args, "--also", "w8-kv16")
    assert code == 2
    assert "mode w8-kv16: expected --backend cuda, got cpu" in err
    for wrong, said in ((("--also", "w9"), "none of"), (("--original", "x"), "without --also")):
        code, _, err = call(*args, *wrong)
        assert code == 2
        assert said in err


def test_kernels(call, tiny_checkpoint: Path) -> None:
    code, out, err = call(
        "bench", "kernels", tiny_checkpoint, "--repeats", 2, "--backend", "cpu", "--json"
    )
    assert code == 0, err
    document = json.loads(out)
    assert document["empty_step_s"]["median"] > 0
    steps = {(row["view"], row["rows"]): row["of_one_w8_row"] for row in document["steps"]}
    assert steps["w8", 1] == 1
    assert steps["w4", 1] > 0
    rows = document["rows"]
    assert {row["linear"] for row in rows} == {"qkv", "o", "gate_up", "down", "head"}
    assert {row["rows"] for row in rows} == set(bench.ROWS)
    assert all(row["gb_s"] > 0 and row["share_of_read"] > 0 for row in rows)


def test_a_backend_that_cannot_measure_memory_says_so(call, tiny_checkpoint: Path) -> None:
    args = ("bench", "decode", tiny_checkpoint, "-n", 3, "--limit", 1, "--backend", "reference")
    code, out, _ = call(*args)
    assert code == 0
    assert "not measured by this backend" in out


def test_the_engine_is_left_as_it_was(tiny_checkpoint: Path) -> None:
    with Engine.open(tiny_checkpoint, backend="cpu", ctx=128) as engine:
        draft = engine.draft
        bench.decode(engine, [[1, 2, 3]], new_tokens=4)
        bench.kernels(engine, rows=(1,), repeats=1)
        assert engine.draft is draft
        assert engine.target_view == "w8"
        expected = engine.generate([5, 6], max_new_tokens=5, ignore_eos=True).complete()
    with Engine.open(tiny_checkpoint, backend="cpu", ctx=128) as fresh:
        again = fresh.generate([5, 6], max_new_tokens=5, ignore_eos=True).complete()
    assert again.token_ids == expected.token_ids


def test_bytes_of_a_step_are_the_planes(tiny_checkpoint: Path) -> None:
    with Engine.open(tiny_checkpoint, backend="cpu", ctx=64) as engine:
        spec = engine.model.spec
        both, base = (bench.step_bytes(engine, view, 0) for view in ("w8", "w4"))
        planes = [p for n, p in _manifest(tiny_checkpoint)["planes"].items() if n.endswith("base")]
        size = sum(p["shape"][0] * p["shape"][1] for p in planes)
        assert both - base == size
        per_token = bench.step_bytes(engine, "w4", 1) - base
        assert per_token == spec.num_layers * 2 * spec.num_kv_heads * (spec.head_dim + 2)


def test_declared_acceptance(call, tiny_checkpoint: Path) -> None:
    args = ("bench", "decode", tiny_checkpoint, "-n", 17, "--limit", 1, "--backend", "cpu")
    code, out, err = call(
        *args, "--accept", "4,4,3", "--accept", "0.5", "--draft", 4, "--also", "fp", "--json"
    )
    assert code == 0, err
    document = json.loads(out)
    rows = {(row["mode"], row["accept"]): row for row in document["rows"]}
    assert list(rows) == [
        ("w8", None), ("w4", None), ("nest", None), ("fp16", None), ("nest", "4,4,3"),
        ("nest", "0.5"),
    ]  # fmt: skip
    assert document["differing"] == 0  # of the answer that is one
    assert [row["forced"] for row in rows.values()] == [False] * 4 + [True] * 2
    assert rows["nest", "0.5"]["declared_tokens_per_cycle"] == 3
    assert rows["nest", "0.5"]["acceptance"] == pytest.approx(0.5, abs=0.06)
    assert rows["nest", "4,4,3"]["tokens_per_cycle"] > rows["nest", "0.5"]["tokens_per_cycle"]
    assert rows["fp16", None]["ratio_to_fp16"]["mean"] == 1
    assert rows["nest", None]["ratio_to_fp16"]["mean"] > 0
    assert not document["synthetic"]
    table = [line.split("  ")[0] for line in err.splitlines()]
    assert "nest @0.5" in table
    assert "nest" in table
    assert "declared, not measured" in err
    assert "not an optimised 16-bit engine" in err


def test_a_curve_of_a_context(call, tiny_checkpoint: Path) -> None:
    code, out, err = call(
        *("bench", "decode", tiny_checkpoint, "-n", 8, "--context", 33, "--repeats", 1),
        *("--curve", "--draft", 2, "--draft-source", "base", "--backend", "cpu", "--json"),
    )
    assert code == 0, err
    document = json.loads(out)
    assert document["prompt_tokens"] == 33
    curve = [row for row in document["rows"] if row["forced"]]
    assert [row["accept"] for row in curve] == list(CURVE)
    per_cycle = [row["declared_tokens_per_cycle"] for row in curve]
    assert per_cycle == [1 + 2 * float(rate) for rate in CURVE]
    lines = [line for line in err.splitlines() if line.startswith("nest")]
    assert len(lines) == len(CURVE) + 1  # and what was measured, at its place
    cycles = [float(line.split()[-2]) for line in lines]
    assert cycles == sorted(cycles)


@pytest.mark.parametrize(
    ("args", "reason"),
    [
        (["--accept", "0.9"], "--draft 4"),
        (["--accept", "0.9", "--draft", 4, "--draft-source", "both"], "fixed draft of the base"),
        (["--accept", "0.9", "--draft", "off"], "fixed draft"),
        (["--accept", "5", "--draft", 4], "at most the 4 tokens"),
        (["--accept", "1.1"], "a rate from 0.0 to 1.0"),
        (["--context", 8, "--limit", 1], "--context"),
        (["--context", 2047], "do not fit a context of 2048"),
        (["--original", "x"], "without --also"),
    ],
)
def test_what_decode_refuses(call, tiny_checkpoint: Path, args: list[object], reason: str) -> None:
    code, out, err = call("bench", "decode", tiny_checkpoint, "--backend", "cpu", *args)
    assert (code, out) == (2, "")
    assert reason in err


def _manifest(folder: Path) -> dict:
    return json.loads((folder / "manifest.json").read_text())


@pytest.mark.parametrize("args", [("bench", "nothing"), ("bench", "decode")])
def test_usage(call, args: tuple[str, ...]) -> None:
    assert call(*args)[0] == 2
