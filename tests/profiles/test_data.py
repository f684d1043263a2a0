"""The data files: all load, agree with themselves, and say where their numbers are from."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from edge_runtime import profiles
from edge_runtime.errors import InternalError, UsageError
from edge_runtime.format.spec import ModelSpec
from edge_runtime.profiles import load

DEVICES = profiles.device_names()
SHAPES = profiles.shape_names()
FOLDER = Path(load.__file__).resolve().parent

# parameters of the published weights, as the Hub counts them
PARAMETERS = {
    "llama-2-7b": 6_738_415_616,
    "llama-2-7b-32k": 6_738_415_616,
    "llama-3-8b": 8_030_261_248,
    "llama-3.2-3b": 3_212_749_824,
    "openvla-7b": 6_738_415_616 + 2 * 64 * 4096,  # 64 rows more than Llama 2, in two matrices
    "qwen2-7b": 7_615_616_512,
    "qwen2.5-3b": 3_085_938_688,
    "qwen2.5-7b": 7_615_616_512,
    "smollm2-135m": 134_515_008,
}


def parameters(spec: ModelSpec) -> int:
    """Count the weights of a model."""
    hidden, rows = spec.hidden_size, spec.q_size + 2 * spec.kv_size
    layer = hidden * (rows + spec.q_size + 3 * spec.intermediate_size) + 2 * hidden
    layer += rows if spec.qkv_bias else 0
    embedding = spec.vocab_size * hidden * (1 if spec.tied_embedding else 2)
    return spec.num_layers * layer + embedding + hidden


@pytest.mark.parametrize("name", DEVICES)
def test_every_number_of_a_device_has_its_source(name: str) -> None:
    for line in (FOLDER / "devices" / f"{name}.toml").read_text("utf-8").splitlines():
        if re.match(r"\w+ = [-\d]", line):
            assert re.search(r"  # \S.{3,}", line), f"no source beside: {line}"


@pytest.mark.parametrize("name", DEVICES)
def test_a_device_is_consistent(name: str) -> None:
    found = profiles.device(name)
    assert found.name == name
    assert found.title
    assert (found.backend == "none") == bool(found.why_no_backend)
    if not found.modes:
        assert found.mode() is None
        return
    assert [mode.default for mode in found.modes].count(True) == 1
    default = found.mode()
    assert default is not None
    assert default.default
    names = [mode.name for mode in found.modes]
    assert len(set(names)) == len(names)
    ids = [mode.id for mode in found.modes if mode.id is not None]
    assert len(set(ids)) == len(ids)
    assert {one.mode for one in found.measured} <= {*names, ""}
    for mode in found.modes:
        if mode.emc_max_mhz and mode.bandwidth_gb_s and found.memory_bus_bits:
            derived = mode.emc_max_mhz * 2 * found.memory_bus_bits / 8 / 1000
            assert mode.bandwidth_gb_s == pytest.approx(derived, rel=0.002)
        if mode.power_w is not None:
            assert f"{mode.power_w:.0f}W" in mode.name


def test_no_part_number_stands_in_two_profiles() -> None:
    parts = [part for name in DEVICES for part in profiles.device(name).part_numbers]
    assert len(set(parts)) == len(parts)


def test_cpu_has_no_numbers() -> None:
    found = profiles.device("cpu")
    assert found.backend == "cpu"
    assert found.memory_total_bytes is None
    assert found.modes == ()


def test_power_was_measured_where_it_is_said() -> None:
    [measured] = profiles.device("orin-nano-8gb-super").measured
    assert (measured.mode, measured.rail) == ("MAXN_SUPER", "VDD_IN")
    assert (measured.idle_mw, measured.decode_mw) == (6210, 21500)
    [derived] = profiles.device("orin-nx-16gb").measured
    assert derived.idle_mw is None
    assert 0.95 * 9.0 < derived.decode_mw / 1000 < 0.95 * 9.3


@pytest.mark.parametrize("written", ["30W", "MODE_30W", "mode_30w"])
def test_a_mode_is_found_in_either_form_of_its_name(written: str) -> None:
    mode = profiles.device("agx-orin-64gb").mode(written)
    assert mode is not None
    assert (mode.name, mode.sm_count) == ("MODE_30W", 8)
    assert profiles.device("agx-orin-64gb").mode("31W") is None


def test_the_shapes_are_those_of_the_published_weights() -> None:
    assert set(PARAMETERS) == set(SHAPES)
    counted = {name: parameters(profiles.shape(name).spec) for name in SHAPES}
    assert counted == PARAMETERS


@pytest.mark.parametrize("name", SHAPES)
def test_a_shape_is_consistent(name: str) -> None:
    found = profiles.shape(name)
    assert found.name == name
    assert found.source
    assert found.spec.num_heads % found.spec.num_kv_heads == 0
    assert found.spec.q_size == found.spec.hidden_size
    assert found.spec.qkv_bias == (found.spec.architecture == "qwen2")


def test_the_32k_model_stretches_its_positions() -> None:
    spec = profiles.shape("llama-2-7b-32k").spec
    assert (spec.rope.kind, spec.rope.factor, spec.max_position) == ("linear", 8.0, 32768)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("orin-nx", "orin-nx-16gb"),
        ("orin-nano-super", "orin-nano-8gb-super"),
        ("agx-orin", "agx-orin-64gb"),
        ("zzz", "known: "),
        ("", "known: "),
        ("../models/llama-2-7b", ""),
        ("x" * 10_000, "known: "),
    ],
)
def test_an_unknown_device_names_near_ones(name: str, words: str) -> None:
    with pytest.raises(UsageError, match="unknown device") as raised:
        profiles.device(name)
    assert words in raised.value.hint


def test_a_name_may_be_written_in_capitals() -> None:
    assert profiles.device(" Orin-NX-16GB ").name == "orin-nx-16gb"


def test_an_unknown_shape_names_near_ones() -> None:
    with pytest.raises(UsageError, match="unknown model shape") as raised:
        profiles.shape("llama-2-7b-64k")
    assert "llama-2-7b-32k" in raised.value.hint


@pytest.mark.parametrize("text", ['titel = "x"', "title = ", 'title = "x"\nbackend = "gpu"'])
def test_a_broken_file_of_ours_is_named(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "devices").mkdir()
    (tmp_path / "devices/bad.toml").write_text(text)
    monkeypatch.setattr(load, "FOLDER", tmp_path)
    with pytest.raises(InternalError, match=r"bad\.toml"):
        load.device("bad")
