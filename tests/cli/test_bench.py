"""`bitnest-edge bench`: its documents, on a model too small for its figures to mean anything."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from edge_runtime import bench
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
    assert "layout w8 is there on the cuda backend only, not on cpu" in err
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


def _manifest(folder: Path) -> dict:
    return json.loads((folder / "manifest.json").read_text())


@pytest.mark.parametrize("args", [("bench", "nothing"), ("bench", "decode")])
def test_usage(call, args: tuple[str, ...]) -> None:
    assert call(*args)[0] == 2
