"""A folder of machine code: written, read, checked, and what it serves. No code is compiled."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import killed
import pytest
import torch

from edge_runtime.errors import BackendUnavailable
from edge_runtime.kernels.cuda import launch, saved
from edge_runtime.kernels.cuda.compile import Compiled
from edge_runtime.kernels.cuda.launch import Signature

pytest.importorskip("triton")
FACTS = {"triton": "3.9.0", "arch": 87, "fewest_columns": 8}


def compiled_like(name: str, text: str = "") -> Compiled:
    return Compiled(
        name=name, arch=87, num_warps=1, shared_bytes=0, parameters=("u64", "u32", "u64"),
        ptx=f".target sm_87 {text}", cubin=b"\x7fELF" + text.encode(),
    )  # fmt: skip


def sign(kernel: str, *arguments: str, **constants: Any) -> Signature:
    return Signature(kernel, arguments, tuple(sorted(constants.items())), 1, None)


SET = {"BLOCK": 4, "FLAG": True}
KNOWN = {
    sign("m.f", "*i8:16", "i32:16", **SET): compiled_like("f"),
    sign("m.f", "*i8", "i32:16", **SET): compiled_like("f", "weaker"),
    sign("m.f", "*i8", "i32", **SET): compiled_like("f", "weakest"),
    sign("m.g", "*i8:16"): compiled_like("g"),
    sign("m.h", "*i8:16"): compiled_like("g"),
}


@pytest.fixture
def small(tmp_path: Path) -> Path:
    saved.write(KNOWN, tmp_path / "code", FACTS)
    return tmp_path / "code"


def test_a_folder_holds_what_was_written(small: Path) -> None:
    read = saved.Folder.read(small)
    for signature, code in KNOWN.items():
        stem = read.find(signature)
        assert stem is not None
        assert read.compiled(stem) == code
    assert len(set(read.launches.values())) == 4  # g and h are one code
    assert read.index["arch"] == 87


def test_killed_anywhere_a_folder_is_the_old_one_or_the_new_one(tmp_path: Path) -> None:
    folder = tmp_path / "code"
    other = {sign("m.f", "*i8:16"): compiled_like("f"), sign("m.k"): compiled_like("k", "new")}
    found = []
    saved.write(KNOWN, folder, FACTS)
    for _ in killed.at_every_step(lambda: saved.write(other, folder, FACTS)):
        read = saved.Folder.read(folder)
        found.append(set(read.launches) == set(other))
        for signature, code in (other if found[-1] else KNOWN).items():
            stem = read.find(signature)
            assert stem is not None
            assert read.compiled(stem) == code
        saved.write(KNOWN, folder, FACTS)
    assert found == sorted(found)
    assert found[0] is False
    assert found[-1] is True
    saved.write(other, folder, FACTS)
    assert len(list(folder.iterdir())) == 1 + 2 * len(other)


@pytest.mark.parametrize(
    ("arguments", "constants", "found"),
    [
        (("*i8:16", "i32:16"), SET, ""),
        (("*i8", "i32:16"), SET, "weaker"),
        (("*i8:16", "i32"), SET, "weakest"),
        (("*i8:16", "i32:16"), SET | {"BLOCK": 8}, None),
        (("*i8:16", "i32:16"), SET | {"FLAG": False}, None),
        (("*i16:16", "i32:16"), SET, None),
        (("*i8:16", "i64:16"), SET, None),
        (("*i8:16",), SET, None),
        (("*i8:16", "i32:16"), {"BLOCK": 4}, None),
    ],
)
def test_weaker_code_serves_and_no_other(
    arguments: tuple[str, ...], constants: dict[str, Any], found: str | None, small: Path
) -> None:
    read = saved.Folder.read(small)
    stem = read.find(sign("m.f", *arguments, **constants))
    assert (stem and read.compiled(stem).ptx) == (
        found if found is None else f".target sm_87 {found}"
    )
    assert read.find(sign("m.g", "*i8")) is None  # what knows more is not taken


def change(folder: Path, **fields: Any) -> None:
    index = json.loads((folder / saved.INDEX).read_text())
    (folder / saved.INDEX).write_text(json.dumps(index | fields))


def _any_file(folder: Path, end: str) -> Path:
    return sorted(folder.glob(f"*{end}"))[0]


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def _leave_the_folder(folder: Path) -> None:
    index = json.loads((folder / saved.INDEX).read_text())
    facts = next(iter(index["code"].values()))
    facts["files"] = {f"../{name}": known for name, known in facts["files"].items()}
    (folder / saved.INDEX).write_text(json.dumps(index))


BROKEN: dict[str, tuple[Callable[[Path], object], str]] = {
    "no index": (lambda f: (f / saved.INDEX).unlink(), "No such file"),
    "no JSON": (lambda f: (f / saved.INDEX).write_text("{"), "not what was written"),
    "a list": (lambda f: (f / saved.INDEX).write_text("[]"), "not what was written"),
    "format": (lambda f: change(f, format=2), "format 2"),
    "version": (lambda f: change(f, package="9.9"), r"version 9\.9"),
    "kernels": (lambda f: change(f, sources_sha256="0"), "other kernels"),
    "no code": (lambda f: change(f, code={}), "does not describe"),
    "no arch": (lambda f: change(f, arch=None), "not what was written"),
    "bytes": (lambda f: _flip(_any_file(f, ".cubin.gz")), "hash"),
    "cut": (lambda f: _any_file(f, ".ptx.gz").write_bytes(b"1"), "1 bytes, expected"),
    "gone": (lambda f: _any_file(f, ".ptx.gz").unlink(), "No such file"),
    "elsewhere": (_leave_the_folder, "lies elsewhere"),
}


@pytest.mark.parametrize("what", BROKEN)
def test_a_broken_folder_is_refused(what: str, small: Path) -> None:
    spoil, words = BROKEN[what]
    spoil(small)
    with pytest.raises(BackendUnavailable, match=words) as error:
        saved.Saved.open(small, "--kernels")
    assert str(small) in error.value.message
    assert "kernels save" in error.value.hint


def test_what_is_not_there_is_named(small: Path) -> None:
    way = saved.Saved.open(small, "--kernels")
    with pytest.raises(BackendUnavailable, match=r"m\.g\(\*i32:16, i32, X=1; 2 warps\)") as error:
        way.launch(launch.Kernel("m", "g"), (1,), [torch.zeros(4, dtype=torch.int32), 3],
                   {"X": 1, "num_warps": 2})  # fmt: skip
    assert "kernels save MODEL" in error.value.hint


def test_which_way_is_chosen(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "_way", None)
    monkeypatch.setattr(launch, "_folder", None)
    monkeypatch.delenv(launch.FOLDER_VARIABLE, raising=False)
    used, why = launch.described_way()
    assert (used or "").startswith("Triton 3.")
    monkeypatch.setattr(launch, "_way", None)
    monkeypatch.setenv(launch.FOLDER_VARIABLE, str(small))
    used, why = launch.described_way()
    assert used is not None
    assert "4 kernels for sm_87" in used
    assert launch.FOLDER_VARIABLE in used
    assert launch.arch(torch.device("cpu")) == 87
    launch.use_folder(small, "--kernels")
    assert "--kernels" in launch.way().why
    monkeypatch.setattr(launch, "_way", None)
    monkeypatch.setattr(launch, "_folder", None)
    _flip(_any_file(small, ".cubin.gz"))
    used, why = launch.described_way()
    assert used is None
    assert "hash" in why  # never Triton in its place
    monkeypatch.delenv(launch.FOLDER_VARIABLE)
    monkeypatch.setattr(launch.importlib.util, "find_spec", lambda name: None)
    used, why = launch.described_way()
    assert (used, why) == (None, launch.NEITHER)
