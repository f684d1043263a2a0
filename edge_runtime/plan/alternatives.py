"""What would fit where a plan does not: the nearest things first.

Invariant: each alternative was planned like the original and fits.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from edge_runtime import profiles
from edge_runtime.plan.footprint import num_weights
from edge_runtime.plan.planner import (
    LEAST_CONTEXT,
    Alternative,
    Plan,
    Pool,
    Subject,
    accounts,
    device_pool,
    longest_context,
)
from edge_runtime.profiles import DeviceProfile

AT_MOST = 2  # models, and devices


def with_alternatives(plan: Plan, subject: Subject, device: DeviceProfile, pool: Pool) -> Plan:
    """Return a plan that does not fit with what would; one that fits as it is."""
    if plan.fits:
        return plan
    found = tuple(_alternatives(plan, subject, device, pool))
    return msgspec.structs.replace(plan, would_fit=found)


def max_context(subject: Subject, device: DeviceProfile, pool: Pool) -> int:
    """Return the longest context of the nest; 0: not even its weights fit."""
    fits = accounts(subject, device, pool)["nest"].max_context(pool.budget_bytes)
    return min(longest_context(subject.spec), fits)


def _alternatives(
    plan: Plan, subject: Subject, device: DeviceProfile, pool: Pool
) -> Iterator[Alternative]:
    wanted = plan.context_asked or LEAST_CONTEXT
    if (most := plan.max_context["nest"]) >= LEAST_CONTEXT:
        yield Alternative(kind="context", value=most, text=f"--context {most}")
    yield from _other_pools(subject, device, pool, wanted)
    yield from _models(subject, device, pool, wanted)
    yield from _devices(subject, device, wanted)


def _other_pools(
    subject: Subject, device: DeviceProfile, pool: Pool, wanted: int
) -> Iterator[Alternative]:
    """The same with nothing reserved, and without a desktop."""
    if pool.reserve_bytes:
        most = max_context(subject, device, msgspec.structs.replace(pool, reserve_bytes=0))
        if most >= wanted:
            text = f"without a reserve: up to {most} tokens"
            yield Alternative(kind="reserve", value=0, text=text)
    freed = -pool.parts.get("desktop", 0)
    if freed and "budget" not in pool.parts:
        more = msgspec.structs.replace(pool, budget_bytes=pool.budget_bytes + freed)
        if (most := max_context(subject, device, more)) >= wanted:
            text = f"without the desktop ({freed / 2**20:.0f} MiB): up to {most} tokens"
            yield Alternative(kind="headless", value=freed, text=text)


def _models(
    subject: Subject, device: DeviceProfile, pool: Pool, wanted: int
) -> Iterator[Alternative]:
    """The largest known models that are smaller and take the context."""
    size = num_weights(subject.spec)
    known = [profiles.shape(name) for name in profiles.shape_names()]
    smaller = [k for k in known if num_weights(k.spec) <= size and k.name != subject.name]
    found = 0
    for shape in sorted(smaller, key=lambda k: -num_weights(k.spec)):
        most = max_context(Subject(name=shape.name, spec=shape.spec), device, pool)
        if most >= wanted and found < AT_MOST:
            found += 1
            text = f"model {shape.name}: up to {most} tokens"
            yield Alternative(kind="model", value=shape.name, text=text)


def _devices(subject: Subject, device: DeviceProfile, wanted: int) -> Iterator[Alternative]:
    """The smallest devices that this program computes on and that take it."""
    names = profiles.device_names()
    plain = [n for n in names if n == n.removesuffix("-super")]
    known = [profiles.device(name) for name in plain]  # other firmware: the same memory
    fitting = []
    for other in known:
        total = other.memory_total_bytes
        if total is None or other.backend == "none" or other.name == device.name:
            continue
        most = max_context(subject, other, device_pool(other))
        if most >= wanted:
            fitting.append((total, other.name, most))
    for _, name, most in sorted(fitting)[:AT_MOST]:
        yield Alternative(kind="device", value=name, text=f"device {name}: up to {most} tokens")
