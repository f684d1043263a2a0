"""Which backend runs, and that the reason is told."""

from __future__ import annotations

from pathlib import Path

import pytest

from edge_runtime import kernels
from edge_runtime.errors import BackendUnavailable, UsageError
from edge_runtime.kernels.cpu import library


@pytest.fixture(autouse=True)
def _load_anew():
    library.load.cache_clear()
    yield
    library.load.cache_clear()


def test_auto_is_the_native_backend() -> None:
    name, why = kernels.choose_backend("auto")
    assert name == "cpu"
    assert "instruction set" in why


@pytest.mark.parametrize(("head_dim", "heads_per_kv"), [(768, 1), (64, 40)])
def test_a_model_too_wide_for_it(head_dim: int, heads_per_kv: int) -> None:
    name, why = kernels.choose_backend("auto", head_dim, heads_per_kv)
    assert name == "reference"
    assert "at most" in why
    with pytest.raises(BackendUnavailable, match="at most"):
        kernels.choose_backend("cpu", head_dim, heads_per_kv)


def test_without_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "library_path", lambda: None)
    name, why = kernels.choose_backend("auto")
    assert name == "reference"
    assert "not built" in why
    assert "compiler" in why
    with pytest.raises(BackendUnavailable, match="not built") as error:
        kernels.choose_backend("cpu")
    assert "compiler" in str(error.value.hint)


@pytest.mark.parametrize("content", [b"", b"garbage"])
def test_a_library_that_is_none(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, content: bytes
) -> None:
    (tmp_path / library.NAME).write_bytes(content)
    monkeypatch.setattr(library, "library_path", lambda: tmp_path / library.NAME)
    with pytest.raises(BackendUnavailable) as error:
        kernels.choose_backend("cpu")
    assert error.value.message.count(str(tmp_path)) == 1
    assert kernels.choose_backend("auto")[0] == "reference"


def test_a_library_of_another_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "ABI", 1)
    with pytest.raises(BackendUnavailable, match="another version"):
        kernels.choose_backend("cpu")


@pytest.mark.parametrize("backend", ["auto", "cpu"])
def test_an_instruction_set_that_is_not_here(monkeypatch: pytest.MonkeyPatch, backend: str) -> None:
    monkeypatch.setenv(library.ISA_VARIABLE, "mmx")
    with pytest.raises(UsageError, match="mmx"):
        kernels.choose_backend(backend)


def test_every_instruction_set_can_be_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    for isa in library.available_isas():
        monkeypatch.setenv(library.ISA_VARIABLE, isa)
        assert isa in kernels.choose_backend("auto")[1]


def test_a_gpu_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "cuda_status", lambda: (True, "Orin, torch 2, Triton 3"))
    assert kernels.choose_backend("auto") == ("cuda", "Orin, torch 2, Triton 3")
    assert kernels.choose_backend("cpu")[0] == "cpu"


def test_without_a_gpu_the_reason_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "cuda_status", lambda: (False, "triton is not installed"))
    name, why = kernels.choose_backend("auto")
    assert (name, why.split("; ")[-1]) == ("cpu", "not cuda: triton is not installed")
    with pytest.raises(BackendUnavailable, match="cuda is not available: triton is not installed"):
        kernels.choose_backend("cuda")


@pytest.mark.parametrize("missing", ["torch", "triton"])
def test_what_the_gpu_needs(monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    there = kernels.importlib.util.find_spec
    monkeypatch.setattr(
        kernels.importlib.util, "find_spec", lambda name: None if name == missing else there(name)
    )
    ok, why = kernels.cuda_status()
    assert not ok
    assert f"{missing} is not installed" in why.lower()


def test_the_interpreter_is_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    ok, why = kernels.cuda_status()
    assert not ok
    assert "TRITON_INTERPRET" in why
    monkeypatch.delenv("TRITON_INTERPRET")

    def no_driver(name: str) -> None:
        raise OSError(name)

    monkeypatch.setattr(kernels.ctypes, "CDLL", no_driver)
    assert kernels.cuda_status() == (False, "no NVIDIA driver (libcuda.so.1) is here")
