"""`bitnest-edge profile`, on a model too small for its figures to mean anything."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

LINE = (
    "RAM 2274/6834MB (lfb 27x4MB) CPU [9%@1189,off] EMC_FREQ 0% GR3D_FREQ 22% CPU@40C "
    "VDD_IN {}mW/5542mW VDD_CPU_GPU_CV 1594mW/1594mW VDD_SOC 1234mW/1234mW\n"
)
FAST = ("--context", "24,40", "-n", 8, "--repeats", 2, "--backend", "cpu")


def test_rows_and_report(call, tiny_checkpoint: Path, tmp_path: Path) -> None:
    out_dir = tmp_path / "out"
    code, out, err = call(
        "profile", tiny_checkpoint, *FAST, "--gamma", "auto,2", "--out", out_dir, "--json"
    )
    assert code == 0, err
    document = json.loads(out.splitlines()[-1])
    rows = document["rows"]
    names = [(r["context"], r["mode"], r["gamma"]) for r in rows]
    modes = [("w8", None), ("w4", None), ("nest", None), ("nest", 2), ("fp16", None)]
    assert names == [(context, *mode) for context in (24, 40) for mode in modes]
    for row in rows:
        assert row["status"] == "ok", row["reason"]
        assert row["runs"] == 2
        low, high = row["decode_tok_s_range"]
        assert low <= row["decode_tok_s"] <= high
        assert row["prefill_tok_s"] > 0
        assert row["peak_bytes"] > 0
        assert row["planned_bytes"] > 0
        assert row["j_per_token"] is None
        assert (row["acceptance"] is not None) == bool(row["mode"] == "nest" and row["drafted"])
    w8 = rows[0]
    assert w8["speedup_vs_w8"] == 1
    assert w8["tokens_per_cycle"] == 1
    assert document["energy"] is None
    assert document["max_context"] is None
    assert document["state"]["version"]
    assert json.loads((out_dir / "profile.json").read_text()) == document
    page = (out_dir / "report.html").read_text()
    assert page.count("<svg") >= 3
    assert not re.search(r"(?:src|href)=|https?://|<script", page)  # opens offline


def test_energy_from_a_log_and_without_a_source(
    call, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    log = tmp_path / "tegrastats.log"
    log.write_text("".join(LINE.format(5000 + 40 * (i % 7)) for i in range(30)))
    some = ("--modes", "w8", "--context", "24", "-n", 8, "--repeats", 1)
    code, out, err = call(
        "profile", tiny_checkpoint, *some, "--energy", "--power-source", f"replay:{log}", "--json"
    )
    assert code == 0, err
    document = json.loads(out.splitlines()[-1])
    assert document["energy"]["source"] == "replay"
    assert document["energy"]["rail"] == "VDD_IN"
    assert any("not of this machine" in w for w in document["warnings"])
    decode = document["rows"][0]["energy"]["decode"]
    assert decode["low_j"] <= decode["high_j"]
    assert decode["gross_j"] is None  # some milliseconds: digits would be invented
    assert document["rows"][0]["j_per_token"] is None
    assert any("too short for the sensor" in w for w in document["warnings"])
    code, _, err = call(
        "profile", tiny_checkpoint, *some, "--require-energy", "--power-source", f"replay:{log}"
    )
    assert code == 4, "nothing was measured"
    assert "long enough" in err
    code, out, _ = call("profile", tiny_checkpoint, *some, "--energy", "--power-source", "none")
    assert code == 0
    assert "energy: unavailable" in out
    for asked in ("--require-energy", "--energy"):
        code, _, err = call(
            "profile", tiny_checkpoint, *some, asked, "--power-source", "ina3221",
            *(["--require-energy"] if asked == "--energy" else []),
        )  # fmt: skip
        assert code == 4, err


def test_what_does_not_fit_is_a_row(call, tiny_checkpoint: Path) -> None:
    code, out, err = call(
        "profile", tiny_checkpoint, *FAST, "--modes", "w8", "--budget", "1M", "--json"
    )
    assert code == 3
    assert "nothing could be measured" in err
    for row in json.loads(out.splitlines()[-1])["rows"]:
        assert row["status"] == "refused"
        assert row["decode_tok_s"] is None
        assert "available" in row["reason"]


def test_layouts_of_a_gpu_are_refused_elsewhere(call, tiny_checkpoint: Path) -> None:
    modes = ("--modes", "fp,w8,w8-kv16,two-copy", "--context", "24", "--gamma", "2")
    code, out, err = call("profile", tiny_checkpoint, *FAST, *modes, "--json")
    assert code == 0, err
    rows = json.loads(out.splitlines()[-1])["rows"]
    found = [(r["mode"], r["gamma"], r["status"]) for r in rows]
    assert found == [
        ("w8", None, "ok"), ("fp16", None, "ok"), ("w8-kv16", None, "refused"),
        ("two-copy", 2, "refused"),
    ]  # fmt: skip
    assert "mode two-copy: expected --backend cuda, got cpu" in rows[-1]["reason"]


def test_the_longest_context_is_proven(call, tiny_checkpoint: Path) -> None:
    args = ("--modes", "w8", "--context", "24", "-n", 8, "--repeats", 1, "--backend", "cpu")
    code, out, err = call("profile", tiny_checkpoint, *args, "--max-context", "--json")
    assert code == 0, err
    proof = json.loads(out.splitlines()[-1])["max_context"]
    assert proof["proven"] == proof["planned"]
    assert proof["limited_by"] == "model"
    assert [one["status"] for one in proof["tries"]] == ["ok"]


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("--modes", "w8,w9"), "w9"),
        (("--modes", ""), "no mode"),
        (("--context", "0"), "at least 1"),
        (("--context", "12a"), "12a"),
        (("--context", "99999999"), "positions"),
        (("--gamma", "8"), "1 to 7"),
        (("--power-source", "sun", "--energy"), "sun"),
        (("--repeats", "0"), "repeats"),
        (("--power-source", "nvml"), "no effect without --energy"),
        (("--gamma", "2", "--modes", "w8"), "no effect without nest"),
        (("--original", "x", "--modes", "w8"), "no effect without fp16"),
        (("-n", "90000"), "positions"),
        (("--out", ""), "expected a path"),
    ],
)
def test_mistakes_are_one_line(call, tiny_checkpoint: Path, args: tuple, said: str) -> None:
    code, _, err = call("profile", tiny_checkpoint, *args)
    assert code == 2
    assert said in err
    assert "Traceback" not in err


def test_a_prompt_file_that_is_none(call, tiny_checkpoint: Path, tmp_path: Path) -> None:
    empty, binary = tmp_path / "empty", tmp_path / "binary"
    empty.write_text(" \n")
    binary.write_bytes(b"\xff\xfe\x00\x80")
    for file in (empty, binary, tmp_path / "none", tmp_path):
        code, _, err = call("profile", tiny_checkpoint, *FAST, "--prompt-file", file)
        assert code == 5, err


def test_an_endless_prompt_file(call, tiny_checkpoint: Path) -> None:
    code, _, err = call("profile", tiny_checkpoint, *FAST, "--prompt-file", "/dev/zero")
    assert code == 5
    assert "at most" in err


def test_where_nothing_can_be_written_nothing_is_measured(
    call, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    code, out, err = call("profile", tiny_checkpoint, *FAST, "--out", tmp_path / "file")
    assert code == 2  # 3 is a budget
    assert out == ""
    assert "cannot write there" in err
