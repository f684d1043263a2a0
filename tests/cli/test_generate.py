"""generate: what goes to which stream, every exit code, and the end by Ctrl-C or a closed pipe."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tiny_models

from edge_runtime.format.reader import Checkpoint

FIELDS = {
    *("text", "token_ids", "prompt_tokens", "new_tokens", "finish_reason", "ttft_s"),
    *("prefill_tok_s", "decode_tok_s", "decode_s", "backend", "view", "kv_policy"),
    *("context_max", "draft", "memory", "energy"),
}
DRAFT = {"gamma_mean", "drafted", "accepted", "acceptance", "cycles", "tokens_per_cycle"}
MEMORY = {"weights_bytes", "kv_bytes", "workspace_bytes", "peak_bytes"}
ENTER = "import sys\nfrom edge_runtime.cli import main\nmain(sys.argv[1:])"


def start(*args: object) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", ENTER, *map(str, args)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def test_stdout_is_the_answer_and_stderr_the_rest(call, tiny_checkpoint: Path) -> None:
    args = ("generate", tiny_checkpoint, "-p", "hello world", "-n", 12, "--backend", "reference")
    code, out, err = call(*args)
    assert code == 0
    assert "tok/s" in err
    assert len(err.splitlines()) == 2
    assert err.splitlines()[0] == (
        f"{tiny_checkpoint.name} · backend reference · view nest · draft up to 7 ngram · KV kv8 "
        "· context 2048"
    )
    code, document, _ = call(*args, "--json")
    assert code == 0
    assert document.count("\n") == 1
    result = json.loads(document)
    assert out == result["text"] + "\n"
    assert result["new_tokens"] == 12
    assert set(result) >= FIELDS
    assert set(result["draft"]) >= DRAFT
    assert set(result["memory"]) >= MEMORY


def test_why_is_said_on_request(call, tiny_checkpoint: Path) -> None:
    args = ("generate", tiny_checkpoint, "-p", "hello", "-n", 2, "--json")
    result = json.loads(call(*args)[1])
    err = call("-v", *args)[2]
    assert result["draft_why"]
    for why in (result["backend_why"], "chosen in each cycle as measured"):
        assert why in err
        assert why not in call(*args)[2]


def test_quiet_says_nothing(call, tiny_checkpoint: Path) -> None:
    code, _, err = call("-q", "generate", tiny_checkpoint, "-p", "hello", "-n", 2)
    assert (code, err) == (0, "")


def test_every_view_of_the_target_gives_the_same_ids(call, tiny_checkpoint: Path) -> None:
    common = ("generate", tiny_checkpoint, "-p", "hello the world", "-n", 24, "--ignore-eos")
    answers = []
    for more in (
        ("--view", "w8"),
        ("--draft", "off"),
        ("--draft", "7", "--draft-source", "base", "--kv-policy", "kv4"),
        ("--draft", "4", "--draft-source", "both", "--kv-policy", "recent:64"),
    ):
        code, out, _ = call(*common, *more, "--json")
        assert code == 0
        answers.append(json.loads(out)["token_ids"])
    assert answers[0] == answers[1] == answers[2] == answers[3]


def test_a_drawn_seed_is_reported_and_repeats(call, tiny_checkpoint: Path) -> None:
    common = ("generate", tiny_checkpoint, "-p", "hello", "-n", 16, "--temp", "1")
    _, out, err = call(*common)
    seed = re.search(r"seed (\d+)", err)
    assert seed
    _, again, _ = call(*common, "--seed", seed[1], "--json")
    assert json.loads(again)["text"] + "\n" == out
    assert json.loads(again)["seed"] == int(seed[1])


def test_fp_runs_the_source(call, tiny_checkpoint: Path, tiny_source: Path) -> None:
    common = ("generate", tiny_checkpoint, "-p", "hello", "-n", 4, "--view", "fp", "--json")
    code, out, _ = call(*common)
    assert (code, json.loads(out)["view"]) == (0, "fp")
    assert "unquantised" in json.loads(out)["backend_why"]
    assert (
        json.loads(call(*common, "--original", tiny_source)[1])["token_ids"]
        == (json.loads(out)["token_ids"])
    )


def test_fp_without_its_source(call, tiny_checkpoint: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(tiny_checkpoint, tmp_path / "copy")
    manifest = json.loads((copy / "manifest.json").read_text())
    manifest["provenance"]["path"] = str(tmp_path / "gone")
    (copy / "manifest.json").write_text(json.dumps(manifest))
    code, out, err = call("generate", copy, "-p", "hello", "--view", "fp")
    assert (code, out) == (2, "")
    assert "--original SRC" in err
    other = tiny_models.write_hf(tmp_path / "other", num_hidden_layers=3)
    code, out, err = call("generate", copy, "-p", "x", "--view", "fp", "--original", other)
    assert (code, out) == (2, "")
    assert "another model" in err


def test_raw_has_no_template(call, tiny_checkpoint: Path) -> None:
    common = ("generate", tiny_checkpoint, "-p", "hello", "-n", 1, "--json")
    assert json.loads(call(*common, "--raw")[1])["prompt_tokens"] == 1
    assert json.loads(call(*common)[1])["prompt_tokens"] > 5


def test_a_prompt_from_a_file_or_stdin(call, tiny_checkpoint: Path, tmp_path: Path) -> None:
    def ids(*args: object, stdin: bytes = b"") -> Any:
        code, out, _ = call("generate", tiny_checkpoint, "-n", 8, "--json", *args, stdin=stdin)
        assert code == 0
        return json.loads(out)["token_ids"]

    file = tmp_path / "prompt.txt"
    expected = ids("-p", "hello\nworld")
    for data in (b"hello\nworld", b"hello\r\nworld\r\n", b"\xef\xbb\xbfhello\nworld\n"):
        file.write_bytes(data)
        assert ids("--file", file) == expected
        assert ids("--file", "-", stdin=data) == expected


def test_stop_and_deadline(call, tiny_checkpoint: Path) -> None:
    common = ("generate", tiny_checkpoint, "-p", "hello", "--ignore-eos")
    text = json.loads(call(*common, "-n", 20, "--json")[1])["text"]
    stop = next(c for c in text[3:] if c.isprintable() and c != "\ufffd")
    result = json.loads(call(*common, "-n", 20, "--stop", "none", "--stop", stop, "--json")[1])
    assert (result["finish_reason"], result["text"]) == ("stop", text[: text.index(stop)])
    result = json.loads(call(*common, "-n", 1900, "--deadline", "0.02", "--json")[1])
    assert (result["finish_reason"], result["late"]) == ("deadline", True)


@pytest.mark.parametrize(
    ("args", "code", "reason"),
    [
        (["-p", ""], 2, "empty"),
        (["-p", " \n"], 2, "empty"),
        ([], 2, "expected one prompt, got none"),
        (["-p", "a", "--file", "b"], 2, "got two"),
        (["--file", "/no/such/file"], 5, "No such file"),
        (["-p", "hello", "--temp", "-1"], 2, "temperature"),
        (["-p", "hello", "--temp", "nan"], 2, "--temp"),
        (["-p", "hello", "--temp", "warm"], 2, "--temp"),
        (["-p", "hello", "--top-p", "0"], 2, "top_p"),
        (["-p", "hello", "-n", "0"], 2, "-n"),
        (["-p", "hello", "--deadline", "0"], 2, "--deadline"),
        (["-p", "hello", "--no-such-flag"], 2, "--no-such-flag"),
        (["-p", "hello" * 40, "--ctx", "16"], 3, "context holds 16"),
        (["-p", "hello", "--ctx", "4096"], 2, "2048"),
        (["-p", "hello", "--budget", "1M"], 3, "MiB are available"),
        (["-p", "hello", "--backend", "cuda"], 4, "cuda"),
    ],
)
def test_exit_codes(call, tiny_checkpoint: Path, args: list[str], code: int, reason: str) -> None:
    found, out, err = call("generate", tiny_checkpoint, *args)
    assert (found, out) == (code, "")
    assert reason in err


def test_models_that_cannot_run(call, tmp_path: Path, tiny_source: Path) -> None:
    gguf = tiny_models.write_gguf(tmp_path / "a b.gguf")
    (tmp_path / "half.partial").mkdir()
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "x.gguf").write_text("garbage")
    (tmp_path / "lfs.gguf").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\n")
    (tmp_path / "m.safetensors").write_bytes(bytes(64))
    cases: list[tuple[object, int, str]] = [
        (tmp_path / "missing", 5, "no model at"),
        ("org/name", 5, "hf:org/name"),
        (gguf, 5, f"bitnest-edge convert '{gguf}' -o 'a b-nested'"),
        (tiny_source, 5, "unconverted"),
        (tmp_path / "x.gguf", 5, "got 7 bytes beginning"),
        (tmp_path / "m.safetensors", 5, "the folder of a converted model"),
        (tmp_path / "lfs.gguf", 5, "git lfs pull"),
        (tmp_path / "half", 5, "not finished"),
        (tmp_path / "half.partial", 5, "not finished"),
        (tmp_path, 5, "manifest.json"),
        ("/dev/null", 5, "got a device, a pipe or a socket"),
        (tmp_path / "pipe", 5, "got a device, a pipe or a socket"),
        ("", 2, "expected a path or a name, got an empty text"),
        ("hf:", 2, "unknown model 'hf:'"),
        ("x" * 5000, 2, "not a usable path: xxx"),
    ]
    for model, code, reason in cases:
        found, out, err = call("generate", model, "-p", "hello")
        assert (found, out) == (code, ""), model
        assert reason in err
        assert "First use" not in err


def test_a_flipped_byte_is_named(call, tiny_checkpoint: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(tiny_checkpoint, tmp_path / "copy")
    file = copy / Checkpoint(copy).manifest.planes["head.refine"].file
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    code, out, err = call("generate", copy, "-p", "hello")
    assert (code, out) == (5, "")
    assert "damaged" in err


def test_without_a_template_it_completes(call, tiny_checkpoint: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(tiny_checkpoint, tmp_path / "copy")
    manifest = json.loads((copy / "manifest.json").read_text())
    manifest["text"]["chat_template"] = None
    (copy / "manifest.json").write_text(json.dumps(manifest))
    code, out, err = call("generate", copy, "-p", "hello", "-n", 2, "--json")
    assert (code, json.loads(out)["prompt_tokens"]) == (0, 1)
    assert "no chat template" in err
    code, out, err = call("chat", copy, "--once", "hello")
    assert (code, out) == (2, "")
    assert "no chat template" in err


def test_without_torch_the_line_that_installs_it(call, tiny_checkpoint, monkeypatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    code, _, err = call("generate", tiny_checkpoint, "-p", "hello", "--view", "fp")
    assert code == 4
    assert "pip install torch" in err


def test_ctrl_c_shows_what_there_is(tiny_checkpoint: Path) -> None:
    args = ("generate", tiny_checkpoint, "-p", "hello", "-n", 2000, "--ignore-eos")
    child = start(*args, "--view", "w8", "--backend", "reference")  # not over before Ctrl-C comes
    assert child.stdout is not None
    first = child.stdout.read(40)
    child.send_signal(signal.SIGINT)
    rest, err = child.communicate(timeout=60)
    assert child.returncode == 130
    assert (first + rest).endswith(b"\n")
    assert len(first + rest) > 40
    assert b"stopped" in err
    assert b"Traceback" not in err


def test_a_reader_that_leaves_early(tiny_checkpoint: Path) -> None:
    child = start("generate", tiny_checkpoint, "-p", "hello", "-n", 300, "--ignore-eos")
    assert child.stdout is not None
    assert child.stderr is not None
    child.stdout.read(1)
    child.stdout.close()
    err = child.stderr.read()
    child.stderr.close()
    assert child.wait(60) == 0
    assert b"Traceback" not in err
    assert b"Error" not in err
