"""What fits a device, how long a context, how fast, and what would fit if it does not.

Invariant: a plan loads nothing and starts nothing. What a device's profile does not know is None
and said so; what is assumed is listed in `assumes`. `fits` says whether the account, the reserve
included, is within `budget_bytes`.
"""

from __future__ import annotations

from typing import Any

import msgspec

from edge_runtime.errors import UsageError, cut
from edge_runtime.format.spec import ModelSpec
from edge_runtime.plan import cost, footprint, predict, published
from edge_runtime.plan.footprint import LAYOUTS, Footprint
from edge_runtime.plan.predict import Prediction, Speed
from edge_runtime.plan.published import Claims
from edge_runtime.profiles import DeviceProfile, Mode

SHORT_POSITION = 2048  # where speed is told besides the end of the context
LEAST_CONTEXT = 2


class Subject(msgspec.Struct, frozen=True, kw_only=True):
    """The model that is planned for. acceptance: of its own draft, where that was measured."""

    name: str
    spec: ModelSpec
    group_size: int | None = None
    acceptance: float | None = None
    acceptance_source: str = ""
    synthetic: bool = False  # a checkpoint of random weights


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """What was measured and wished of a device's memory, for the same on another one."""

    desktop: bool = False
    available_bytes: int | None = None
    total_bytes: int | None = None
    budget_bytes: int | None = None
    reserve_bytes: int = 0


class Pool(msgspec.Struct, frozen=True, kw_only=True):
    """The memory that there is. budget_bytes: for this program, what it leaves free included."""

    budget_bytes: int
    reserve_bytes: int  # of the budget, left to others
    parts: dict[str, int]  # how the budget came about
    asked: Asked = Asked()


class Alternative(msgspec.Struct, frozen=True, kw_only=True):
    """Something near that would fit. kind: context, headless, reserve, budget, model or device."""

    kind: str
    value: str | int
    text: str


class LayoutPlan(msgspec.Struct, frozen=True, kw_only=True):
    """One way of holding the model, at the planned context."""

    total_bytes: int
    max_context: int
    fits: bool
    weights_bytes: int  # of the total: matrices, scales, embedding, head
    bytes: dict[str, int]


class Implied(msgspec.Struct, frozen=True, kw_only=True):
    """The memory besides our account that a published maximum context implies."""

    context: int
    account_bytes: int
    extra_bytes: int  # of the budget, what the account at that context leaves


class Published(msgspec.Struct, frozen=True, kw_only=True):
    """What others published, and what their longest contexts imply."""

    claims: Claims
    implied: dict[str, Implied]


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """The answer. `bytes` is the account of the nest at `context` and sums to `total_bytes`."""

    model: str
    device: str
    device_title: str
    mode: str | None
    backend: str
    group_size: int
    model_max_context: int
    context: int
    context_asked: int | None
    pool: dict[str, int]
    budget_bytes: int
    fits: bool
    total_bytes: int
    bytes: dict[str, int]
    max_context: dict[str, int]
    layouts: dict[str, LayoutPlan]
    kv_stored_per_token: int
    kv_read_per_token: dict[str, int]
    predicted: Prediction
    speeds: tuple[Speed, ...]
    published: Published | None
    assumes: tuple[str, ...]
    would_fit: tuple[Alternative, ...] = ()
    synthetic: bool = False


def device_pool(device: DeviceProfile, **wishes: Any) -> Pool:
    """Return the memory of a device: what its profile leaves, or what was measured as available.

    `wishes` are the fields of `Asked`. As in the engine, a little stays free whatever is asked for,
    and a budget is a limit of its own: a reserve is taken from it only as far as the device has no
    memory outside of it. Raises UsageError where no memory is known.
    """
    asked = Asked(**wishes)
    budget = asked.budget_bytes
    parts: dict[str, int] = {}
    if asked.available_bytes is not None:
        parts["available"] = asked.available_bytes
    elif device.memory_total_bytes is not None:
        parts["memory_total"] = device.memory_total_bytes
        parts["system_used"] = -(device.system_used_bytes or 0)
        if asked.desktop:
            parts["desktop"] = -(device.desktop_bytes or 0)
    elif budget is None:
        raise UsageError(
            f"how much memory programs have on {device.title} is not known: expected "
            "--budget SIZE, got none",
            f"say how much there is: --device {device.name} --budget SIZE",
        )
    if not parts:
        assert budget is not None
        return Pool(budget_bytes=budget, reserve_bytes=0, parts={"budget": budget}, asked=asked)
    total = device.memory_total_bytes if asked.total_bytes is None else asked.total_bytes
    reserve = footprint.reserve_bytes(asked.reserve_bytes, total)
    there = max(0, sum(parts.values()))
    if budget is None or budget > there - reserve:
        return Pool(budget_bytes=there, reserve_bytes=reserve, parts=parts, asked=asked)
    parts["budget"] = budget
    return Pool(budget_bytes=budget, reserve_bytes=0, parts=parts, asked=asked)


def longest_context(spec: ModelSpec) -> int:
    """Return the most positions that the model may be given."""
    if spec.rope.kind == "dynamic":  # made to go beyond what the model was trained on
        return int(spec.max_position * spec.rope.factor)
    return spec.max_position


def choose_mode(device: DeviceProfile, name: str | None) -> Mode | None:
    """Return a mode of a device. Raises UsageError for one that it does not have."""
    mode = device.mode(name)
    if name is not None and mode is None:
        names = ", ".join(m.name for m in device.modes) or "it has none"
        raise UsageError(f"mode: {cut(name)!r} is no mode of {device.title}", f"its modes: {names}")
    return mode


def accounts(
    subject: Subject, device: DeviceProfile, pool: Pool, threads: int | None = None
) -> dict[str, Footprint]:
    """Return the account of every layout on a device."""
    backend = "cpu" if device.backend == "cpu" else "cuda"
    return {
        layout: footprint.footprint(
            subject.spec,
            layout=layout,
            backend=backend,
            group_size=subject.group_size,
            threads=threads,
            runtime_bytes=device.runtime_bytes,
            reserve_bytes=pool.reserve_bytes,
        )
        for layout in LAYOUTS
    }


def plan(
    subject: Subject,
    device: DeviceProfile,
    pool: Pool,
    *,
    mode: str | None = None,
    context: int | None = None,
    threads: int | None = None,
) -> Plan:
    """Plan a model on a device. context None: as long as fits.

    mode None: the device's default. Raises UsageError for a mode that it does not have and for a
    context beyond the model's own.
    """
    spec, longest = subject.spec, _checked_longest(subject, context)
    chosen = choose_mode(device, mode)
    held = accounts(subject, device, pool, threads)
    most = {name: min(longest, f.max_context(pool.budget_bytes)) for name, f in held.items()}
    planned = context or max(LEAST_CONTEXT, min(spec.max_position, most["nest"]))
    layouts = {name: _layout(f, planned, most[name], pool) for name, f in held.items()}
    nest = layouts["nest"]
    group_size = subject.group_size or footprint.usual_group_size(spec)
    top = cost.roof(device, chosen)
    alpha = predict.acceptance(subject.acceptance, subject.acceptance_source)
    speeds = predict.speeds(
        top, spec, group_size, sorted({min(SHORT_POSITION, planned), planned}), alpha, most
    )
    predicted = predict.prediction(
        top if nest.fits else None, spec, group_size, planned, alpha, predict.power(device, chosen)
    )
    return Plan(
        model=subject.name,
        device=device.name,
        device_title=device.title,
        mode=None if chosen is None else chosen.name,
        backend=device.backend,
        group_size=group_size,
        model_max_context=longest,
        context=planned,
        context_asked=context,
        pool=pool.parts,
        budget_bytes=pool.budget_bytes,
        fits=nest.fits,
        total_bytes=nest.total_bytes,
        bytes=nest.bytes,
        max_context=most,
        layouts=layouts,
        kv_stored_per_token=held["nest"].per_block["kv"] // held["nest"].block,
        kv_read_per_token={str(k): v for k, v in cost.kv_read_per_token(spec).items()},
        predicted=predicted,
        speeds=speeds,
        published=_compared(published.claims(subject.name, device.name), held, pool),
        assumes=predict.assumptions(device, chosen, top, alpha),
        synthetic=subject.synthetic,
    )


def _checked_longest(subject: Subject, context: int | None) -> int:
    """Return the model's own limit. Raises UsageError for a context that is beyond it."""
    longest = longest_context(subject.spec)
    if context is not None and not LEAST_CONTEXT <= context <= longest:
        raise UsageError(
            f"context: expected {LEAST_CONTEXT} to {longest} tokens, for which {subject.name} was "
            f"made, got {context}"
        )
    return longest


def _layout(account: Footprint, context: int, most: int, pool: Pool) -> LayoutPlan:
    total = account.total_bytes(context)
    return LayoutPlan(
        total_bytes=total,
        max_context=most,
        fits=total <= pool.budget_bytes,
        weights_bytes=account.weights_bytes,
        bytes=account.lines(context),
    )


def _compared(claims: Claims | None, held: dict[str, Footprint], pool: Pool) -> Published | None:
    if claims is None:
        return None
    implied = {}
    for layout, context in claims.max_context.items():
        account = held[layout].total_bytes(context)
        implied[layout] = Implied(
            context=context, account_bytes=account, extra_bytes=pool.budget_bytes - account
        )
    return Published(claims=claims, implied=implied)
