"""Plans: what fits and what does not, for devices whose numbers are made up or recorded."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from random_weights import random_spec

from edge_runtime import profiles
from edge_runtime.errors import UsageError
from edge_runtime.plan.alternatives import with_alternatives
from edge_runtime.plan.planner import Plan, Pool, Subject, device_pool, plan
from edge_runtime.profiles import DeviceProfile, Measured, Mode

GIB = 1 << 30
SPEC = random_spec(
    num_layers=16, hidden_size=2048, intermediate_size=8192, num_heads=32, num_kv_heads=8,
    head_dim=64, vocab_size=128_256, max_position=1 << 20,
)  # fmt: skip
MODEL = Subject(name="one-billion", spec=SPEC)


def device(**fields: Any) -> DeviceProfile:
    known: dict[str, Any] = {
        "name": "board",
        "title": "A board",
        "backend": "cuda",
        "memory_total_bytes": 8 * GIB,
        "system_used_bytes": GIB // 2,
        "desktop_bytes": GIB,
        "runtime_bytes": GIB,
        "modes": (
            Mode(name="SLOW", bandwidth_gb_s=34.0, sm_count=4, gpu_max_mhz=400.0),
            Mode(name="FAST", bandwidth_gb_s=68.0, sm_count=8, gpu_max_mhz=900.0, default=True),
        ),
        "int8_mac_per_clk_sm": 2048,
        "read_share": 0.7,
    }
    return DeviceProfile(**(known | fields))


def planned(board: DeviceProfile | None = None, *, pool: Any = None, **wishes: Any) -> Plan:
    board = board or device()
    pool = pool or {}
    memory = device_pool(board, **pool)
    return with_alternatives(plan(MODEL, board, memory, **wishes), MODEL, board, memory)


def check(found: Plan) -> None:
    """What holds of every plan."""
    assert sum(found.bytes.values()) == found.total_bytes
    assert found.fits == (found.total_bytes <= found.budget_bytes)
    assert found.bytes == found.layouts["nest"].bytes
    for layout in found.layouts.values():
        assert sum(layout.bytes.values()) == layout.total_bytes
        assert layout.fits == (layout.total_bytes <= found.budget_bytes)
    m = found.max_context
    assert m["fp16"] <= m["w8"] <= m["nest"] <= m["w4"]
    assert m["two_copies"] <= m["nest"]
    assert bool(found.would_fit) <= (not found.fits)
    msgspec.json.encode(found)


@given(st.integers(0, 64 * GIB), st.integers(0, 4 * GIB), st.integers(2, 1 << 20) | st.none())
def test_every_plan(budget: int, reserve: int, context: int | None) -> None:
    found = planned(pool={"budget_bytes": budget, "reserve_bytes": reserve}, context=context)
    check(found)
    if context is None and found.fits:
        assert found.context == found.max_context["nest"]
    if found.fits:
        assert found.context <= found.max_context["nest"]
    else:
        assert found.predicted.decode_tok_s is None


def test_the_longest_context_fits_and_a_block_more_does_not() -> None:
    most = planned().max_context["nest"]
    assert 2 < most < SPEC.max_position
    assert planned(context=most).fits
    assert not planned(context=most + 1).fits


def test_the_pool_of_a_board() -> None:
    board = device()
    assert device_pool(board).budget_bytes == 8 * GIB - GIB // 2
    assert device_pool(board, desktop=True).budget_bytes == 7 * GIB - GIB // 2
    assert device_pool(board, available_bytes=3 * GIB).budget_bytes == 3 * GIB
    # a budget lies beside the reserve where there is room for both, as in the engine
    small = device_pool(board, budget_bytes=2 * GIB, reserve_bytes=GIB)
    assert (small.budget_bytes, small.reserve_bytes) == (2 * GIB, 0)
    large = device_pool(board, budget_bytes=7 * GIB, reserve_bytes=GIB)
    assert (large.budget_bytes, large.reserve_bytes) == (8 * GIB - GIB // 2, GIB)
    assert device_pool(board).reserve_bytes == 64 << 20  # what an engine keeps free by itself


def test_a_device_of_unknown_memory_needs_a_budget() -> None:
    unknown = device(memory_total_bytes=None)
    with pytest.raises(UsageError, match="not known") as caught:
        device_pool(unknown)
    assert "--budget" in caught.value.message
    assert device_pool(unknown, budget_bytes=GIB).budget_bytes == GIB


def test_modes() -> None:
    fast, slow = planned(), planned(mode="slow")
    assert (fast.mode, slow.mode) == ("FAST", "SLOW")
    assert fast.predicted.decode_tok_s == pytest.approx(2 * slow.predicted.decode_tok_s)
    with pytest.raises(UsageError, match="no mode") as caught:
        planned(mode="LUDICROUS")
    assert "SLOW, FAST" in caught.value.hint


def test_beyond_the_model() -> None:
    with pytest.raises(UsageError, match="1048576"):
        planned(context=(1 << 20) + 1)
    with pytest.raises(UsageError):
        planned(context=1)
    dynamic = msgspec.structs.replace(
        MODEL,
        spec=msgspec.structs.replace(
            SPEC, rope=msgspec.structs.replace(SPEC.rope, kind="dynamic", factor=2.0)
        ),
    )
    board = device(memory_total_bytes=64 * GIB)
    found = plan(dynamic, board, device_pool(board), context=1_500_000)
    assert found.fits
    assert found.model_max_context == 1 << 21


def test_energy_only_where_it_was_measured() -> None:
    assert planned().predicted.j_per_token is None
    power = Measured(mode="FAST", rail="VDD_IN", decode_mw=10_000, source="us")
    found = planned(device(measured=(power,))).predicted
    assert found.power == power
    assert found.j_per_token == pytest.approx(10 / found.decode_tok_s)
    assert planned(device(measured=(power,)), mode="SLOW").predicted.j_per_token is None
    unnamed = msgspec.structs.replace(power, mode="")
    assert planned(device(measured=(unnamed,)), mode="SLOW").predicted.j_per_token is not None


def test_a_device_without_a_bandwidth_has_no_speeds() -> None:
    found = planned(device(modes=()))
    assert found.fits
    assert found.predicted.decode_tok_s is None
    assert found.predicted.prefill_tok_s is None
    assert all(s.decode_tok_s is None for s in found.speeds)
    assert any("bandwidth is not known" in line for line in found.assumes)


def test_a_models_own_acceptance_is_used() -> None:
    own = msgspec.structs.replace(MODEL, acceptance=0.95, acceptance_source="measured")
    board = device()
    found = plan(own, board, device_pool(board), context=2048).predicted
    assert (found.acceptance, found.acceptance_source) == (0.95, "measured")
    assert found.decode_tok_s > planned(context=2048).predicted.decode_tok_s


def test_what_would_fit() -> None:
    board = device()
    most = planned(pool={"desktop": True}).max_context["nest"]
    found = planned(pool={"desktop": True}, context=most + 64)
    kinds = {a.kind: a for a in found.would_fit}
    assert kinds["context"].value == most
    assert planned(pool={"desktop": True}, context=kinds["context"].value).fits
    assert kinds["headless"].value == board.desktop_bytes
    assert planned(context=most + 64).fits
    for a in found.would_fit:
        if a.kind == "device":
            other = profiles.device(a.value)
            assert plan(MODEL, other, device_pool(other), context=most + 64).fits
        if a.kind == "model":
            shape = profiles.shape(a.value)
            subject = Subject(name=shape.name, spec=shape.spec)
            assert plan(subject, board, device_pool(board, desktop=True), context=most + 64).fits


def test_a_reserve_that_is_too_large_is_named() -> None:
    found = planned(pool={"reserve_bytes": 6 * GIB}, context=2048)
    assert not found.fits
    assert "reserve" in {a.kind for a in found.would_fit}


@given(st.integers(0, 16 * GIB) | st.none(), st.integers(0, 8 * GIB), st.integers(2, 1 << 18))
def test_what_would_fit_does_with_the_same_wishes(
    budget: int | None, reserve: int, context: int
) -> None:
    wishes = {"budget_bytes": budget, "reserve_bytes": reserve, "desktop": True}
    for a in planned(pool=wishes, context=context).would_fit:
        changed = {"reserve": "reserve_bytes", "budget": "budget_bytes", "headless": "desktop"}
        less = {key: value for key, value in wishes.items() if key != changed.get(a.kind)}
        other = profiles.device(a.value) if a.kind == "device" else device()
        asked = a.value if a.kind == "context" else context
        if a.kind != "model":
            assert plan(MODEL, other, device_pool(other, **less), context=asked).fits, a


def test_nothing_fits() -> None:
    found = planned(pool={"budget_bytes": 1})
    assert not found.fits
    assert set(found.max_context.values()) == {0}
    assert "context" not in {a.kind for a in found.would_fit}
    check(found)


def test_llama_2_7b_32k_on_orin_nx() -> None:
    """The issue's bar, and the paper's figures beside it, unfitted."""
    board = profiles.device("orin-nx-16gb")
    shape = profiles.shape("llama-2-7b-32k")
    subject = Subject(name=shape.name, spec=shape.spec)
    found = plan(subject, board, device_pool(board))
    check(found)
    assert found.max_context["nest"] >= 24 * 1024
    assert found.kv_read_per_token == {"kv8": 266_240, "kv4": 135_168, "fp16": 524_288}
    assert found.published is not None
    implied = found.published.implied
    assert {name: i.context for name, i in implied.items()} == {
        "fp16": 2048,
        "w8": 6144,
        "nest": 10_240,
    }
    for name, one in implied.items():
        at = plan(subject, board, device_pool(board), context=one.context)
        assert one.account_bytes == at.layouts[name].total_bytes
        assert one.extra_bytes == at.budget_bytes - one.account_bytes
    pool = Pool(budget_bytes=GIB, reserve_bytes=0, parts={"budget": GIB})
    assert plan(subject, device(), pool).published is None
