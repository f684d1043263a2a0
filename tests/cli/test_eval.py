"""eval: documents, refusals, and a run that is stopped and resumed."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from edge_runtime.evaluate import items
from edge_runtime.evaluate.report import lines

QUESTIONS = [
    {"question": f"What is {a} and 2?", "answer": f"It is {a + 2}.\n#### {a + 2}"} for a in range(4)
]
TEXT = "".join(f"The {i}th word of the world is hello, and {i * 37 % 101}.\n" for i in range(40))


@pytest.fixture
def questions(tmp_path: Path) -> Path:
    path = tmp_path / "questions.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in QUESTIONS))
    return path


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return path


def document(result: tuple[int, str, str]) -> Any:
    code, out, err = result
    assert code == 0, err
    assert len(out.splitlines()) == 1
    return json.loads(out)


def figures(found: dict[str, Any]) -> dict[str, Any]:
    """A document without what differs from run to run."""
    return {k: v for k, v in found.items() if k not in ("seconds", "state", "items_resumed")}


def test_ppl(call, tiny_checkpoint: Path, text: Path) -> None:
    args = ("eval", tiny_checkpoint, "--task", "ppl", "--data", text, "--window", 96)
    found = document(call(*args, "--views", "fp,w8a8,nest,w4", "--limit", 3, "--json"))
    assert {"task", "view", "value", "ci95", "n"} <= set(found["rows"][0])
    assert [r["view"] for r in found["rows"]] == ["fp", "w8a8", "nest", "w4"]
    for row in found["rows"]:
        assert row["n"] == 3 * 95
        assert row["ci95"][0] < row["value"] < row["ci95"][1]
    assert [p["over"] for p in found["pairs"]] == ["fp"] * 3
    assert (found["window"], found["stride"], found["items"]) == (96, 96, 3)
    assert len(found["model_sha256"]) == len(found["data"][0][2]) == 64
    assert found["original"]["sha256"]
    assert found["state"]["libraries"]["numpy"]
    code, out, _ = call(*args, "--limit", 2)
    assert code == 0
    assert out.splitlines()[0].split()[:4] == ["workload", "view", "metric", "value"]


def test_agreement_and_acceptance(call, tiny_checkpoint: Path, text: Path, questions: Path) -> None:
    both = ("--data", questions, "--data", text, "--limit", 2, "-n", 12, "--json")
    found = document(call("eval", tiny_checkpoint, "--task", "agreement", *both, "--window", 64))
    views = {r["view"] for r in found["rows"]}
    assert views == {"w8a8", "nest", "w4", "draft", "draft:kv4"}
    assert {r["against"] for r in found["rows"]} == {"original", "target"}
    assert {r["workload"] for r in found["rows"]} == {"questions", "text", "all"}
    found = document(
        call("eval", tiny_checkpoint, "--task", "acceptance", *both, "--gamma", "1,3",
             "--kv-policy", "kv8,recent:64", "--draft-source", "base,both", "--prefix", "32,64")
    )  # fmt: skip
    assert found["differing"] == 0
    assert {r["workload"] for r in found["rows"]} == {"questions", "text 32", "text 64", "all"}
    assert len(found["rows"]) == 4 * 2 * 8
    assert all(p["minus"].endswith("kv8") for p in found["pairs"])


def test_answers(call, tiny_checkpoint: Path, questions: Path, tmp_path: Path) -> None:
    resume = tmp_path / "done"
    found = document(
        call("eval", tiny_checkpoint, "--task", "gsm8k", "--data", questions, "--num-fewshot", 0,
             "--views", "nest,w8,w4,nest:kv4", "-n", 8, "--resume", resume, "--json")
    )  # fmt: skip
    assert {r["metric"] for r in found["rows"]} == {"strict", "flexible"}
    same = {p["view"]: p["value"] for p in found["pairs"]
            if p["metric"] == "same tokens" and p["against"] == "nest"}  # fmt: skip
    assert same["w8"] == 1.0
    records = [json.loads(line) for line in resume.read_text().splitlines()[1:]]
    assert len(records) == 4
    assert len(records[0]["record"]["w8"]["ids"]) == 8
    found = document(
        call("eval", tiny_checkpoint, "--task", "jsonl", "--data", questions, "--metric",
             "rouge_l", "-n", 8, "--temp", 0.7, "--seed", 3, "--json")
    )  # fmt: skip
    assert found["sampling"] == {"temperature": 0.7, "seed": 3}
    assert found["rows"][0]["metric"] == "rouge_l"


@pytest.mark.parametrize("task", ["ppl", "agreement", "acceptance", "jsonl"])
def test_resumed_is_uninterrupted(
    task: str, call, tiny_checkpoint: Path, text: Path, questions: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    more: dict[str, tuple[Any, ...]] = {
        "ppl": ("--data", text, "--window", 64, "--views", "nest,w4"),
        "agreement": ("--data", questions, "--views", "nest,draft", "-n", 8),
        "acceptance": ("--data", questions, "--gamma", "3", "-n", 12, "--temp", 0.8),
        "jsonl": ("--data", questions, "--metric", "f1", "-n", 8, "--views", "nest,w4"),
    }
    args = ("eval", tiny_checkpoint, "--task", task, *more[task], "--json")
    whole = document(call(*args, "--limit", 4))
    resume = tmp_path / "done"
    # a smaller limit first, then a run that is interrupted in its third item
    assert document(call(*args, "--limit", 1, "--resume", resume))["items_resumed"] == 0
    add, added = items.Finished.add, []

    def interrupted(self: Any, key: str, record: Any) -> Any:
        if len(added) == 1:
            raise KeyboardInterrupt
        added.append(key)
        return add(self, key, record)

    with monkeypatch.context() as patch:
        patch.setattr(items.Finished, "add", interrupted)
        code, out, err = call(*args, "--limit", 4, "--resume", resume)
    assert (code, out) == (130, "")
    assert "2 items are in" in err
    found = document(call(*args, "--limit", 4, "--resume", resume))
    assert found["items_resumed"] == 2
    assert figures(found) == figures(whole)
    again = document(call(*args, "--limit", 4, "--resume", resume))  # nothing is opened
    assert again["items_resumed"] == 4
    assert figures(again) == figures(whole)


def test_a_stale_file_is_refused(
    call, tiny_checkpoint: Path, text: Path, questions: Path, tmp_path: Path
) -> None:
    resume = tmp_path / "done"
    args = ("--task", "ppl", "--data", text, "--views", "nest", "--limit", 1, "--resume", resume)
    document(call("eval", tiny_checkpoint, *args, "--window", 64, "--json"))
    before = resume.read_bytes()
    for changed, words in (
        (("--window", 32), "window was 64, now 32"),
        (("--window", 64, "--backend", "reference"), 'backend was "cpu", now "reference"'),
    ):
        code, _, err = call("eval", tiny_checkpoint, *args, *changed)
        assert code == 2
        assert words in err
    text.write_text(TEXT + "More.")
    code, _, err = call("eval", tiny_checkpoint, *args, "--window", 64)
    assert code == 2
    assert "data was" in err
    assert resume.read_bytes() == before


def test_an_original_may_be_moved(
    call, tiny_checkpoint: Path, tiny_source: Path, text: Path, tmp_path: Path
) -> None:
    import shutil

    args = ("eval", tiny_checkpoint, "--task", "ppl", "--data", text, "--window", 64)
    args += ("--views", "fp", "--limit", 1, "--resume", tmp_path / "done", "--json")
    for folder in ("here", "there"):
        copy = shutil.copytree(tiny_source, tmp_path / folder / "source")
        found = document(call(*args, "--original", copy))
        assert str(tmp_path) not in json.dumps(found)
    assert found["items_resumed"] == 1


@pytest.mark.parametrize(
    ("args", "code", "words"),
    [
        (("--task", "ppl", "--gamma", "2"), 2, "--gamma: of no effect with --task ppl"),
        (("--task", "gsm8k", "--window", "64"), 2, "used by ppl, agreement"),
        (("--task", "ppl", "--raw"), 2, "--chat and --raw"),
        (("--task", "ppl", "--views", "nest,w2"), 2, "'w2'"),
        (("--task", "ppl", "--views", "draft"), 2, "--task agreement"),
        (("--task", "ppl", "--views", "nest,"), 2, "''"),
        (("--task", "acceptance", "--gamma", "8"), 2, "from 1 to 7"),
        (("--task", "acceptance", "--draft-source", "none"), 2, "base,both,ngram"),
        (("--task", "ppl", "--window", "64", "--stride", "65"), 2, "--stride: expected 1 to 64"),
        (("--task", "ppl", "--window", "4096"), 2, "the context is at most 2048"),
        (("--task", "ppl", "--original", "x"), 2, "without fp or w8a8"),
        (("--task", "gsm8k"), 2, "gsm8k reads gsm8k"),
        (("--task", "acceptance", "--seed", "3"), 2, "without --temp"),
        (("--task", "mmlu"), 2, "mmlu"),
        ((), 2, "--task"),
    ],
)
def test_refusals(
    args: tuple[str, ...], code: int, words: str, call, tiny_checkpoint: Path, text: Path
) -> None:
    got, out, err = call("eval", tiny_checkpoint, "--data", text, *args)
    assert (got, out) == (code, "")
    assert words in err


def test_bad_files(call, tiny_checkpoint: Path, tmp_path: Path) -> None:
    args = ("eval", tiny_checkpoint, "--task", "ppl", "--data")
    assert call(*args, tmp_path / "none.txt")[0] == 5
    assert call(*args, tmp_path)[0] == 5
    (tmp_path / "x.jsonl").write_text('{"a": 1}\n')
    code, _, err = call(*args, tmp_path / "x.jsonl")
    assert code == 5
    assert "got a" in err


def test_without_torch(tiny_checkpoint: Path, text: Path, questions: Path) -> None:
    enter = (
        "import sys; sys.modules['torch'] = None; sys.modules['transformers'] = None; "
        "from edge_runtime.cli import main; main(sys.argv[1:])"
    )
    for args in (
        ("--task", "ppl", "--data", text, "--window", "64", "--limit", "1"),
        ("--task", "acceptance", "--data", questions, "-n", "6", "--limit", "1"),
    ):
        command = [sys.executable, "-c", enter, "eval", str(tiny_checkpoint), *map(str, args)]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert done.stdout.startswith("workload")


def test_lines(make_row: Callable[..., dict[str, Any]]) -> None:
    rows = [make_row(slots=[{"acceptance": 0.5}, {"acceptance": None}])]
    pairs = [
        make_row(minus="w"),
        make_row(minus="w", metric="js"),
        make_row(workload="z", minus="u"),
    ]
    found = "\n".join(lines({"rows": rows, "pairs": pairs, "skipped_too_long": 2}))
    assert "a, v: 0.50 -" in found
    assert "v - u" in found
    assert "v - w" not in found  # of differences those of the last workload
    assert "left out: 2 prompts" in found


@pytest.fixture
def make_row() -> Callable[..., dict[str, Any]]:
    def make(**more: Any) -> dict[str, Any]:
        plain = {"workload": "a", "view": "v", "metric": "m", "value": 0.5, "ci95": None}
        return plain | {"n": 1, "items": 1} | more

    return make
