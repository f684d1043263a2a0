"""What would fit where a plan does not: the nearest things first.

Invariant: each alternative was planned like the original, with the same wishes of a reserve, a
budget, a desktop and threads, and fits.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

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


def with_alternatives(
    plan: Plan, subject: Subject, device: DeviceProfile, pool: Pool, threads: int | None = None
) -> Plan:
    """Return a plan that does not fit with what would; one that fits as it is."""
    if plan.fits:
        return plan
    wanted = plan.context_asked or LEAST_CONTEXT
    found = list(_other_pools(subject, device, pool, threads, wanted))
    found += _models(subject, device, pool, threads, wanted)
    found += _devices(subject, device, pool, threads, wanted)
    if (most := plan.max_context["nest"]) >= LEAST_CONTEXT:
        found.insert(0, Alternative(kind="context", value=most, text=f"--context {most}"))
    return msgspec.structs.replace(plan, would_fit=tuple(found))


def max_context(
    subject: Subject, device: DeviceProfile, pool: Pool, threads: int | None = None
) -> int:
    """Return the longest context of the nest; 0: not even its weights fit."""
    fits = accounts(subject, device, pool, threads)["nest"].max_context(pool.budget_bytes)
    return min(longest_context(subject.spec), fits)


def _as_asked(device: DeviceProfile, pool: Pool, **changed: Any) -> Pool:
    """Return a device's pool with the wishes of another pool, some of them changed."""
    return device_pool(device, **(msgspec.structs.asdict(pool.asked) | changed))


def _other_pools(
    subject: Subject, device: DeviceProfile, pool: Pool, threads: int | None, wanted: int
) -> Iterator[Alternative]:
    """The same with the least reserve, without a budget, and without a desktop."""
    asked = pool.asked
    changes: list[tuple[str, int, str, Pool]] = []
    if asked.reserve_bytes:
        least = _as_asked(device, pool, reserve_bytes=0)
        changes.append(("reserve", 0, "without --reserve", least))
    if asked.budget_bytes is not None and len(pool.parts) > 1:
        changes.append(
            ("budget", 0, "without --budget", _as_asked(device, pool, budget_bytes=None))
        )
    if freed := -pool.parts.get("desktop", 0):
        text = f"without the desktop ({freed / 2**20:.0f} MiB)"
        changes.append(("headless", freed, text, _as_asked(device, pool, desktop=False)))
    for kind, value, text, other in changes:
        most = max_context(subject, device, other, threads)
        if most >= wanted:
            yield Alternative(kind=kind, value=value, text=f"{text}: up to {most} tokens")


def _models(
    subject: Subject, device: DeviceProfile, pool: Pool, threads: int | None, wanted: int
) -> Iterator[Alternative]:
    """The largest known models that are smaller and take the context."""
    size = num_weights(subject.spec)
    known = [profiles.shape(name) for name in profiles.shape_names()]
    smaller = [k for k in known if num_weights(k.spec) <= size and k.name != subject.name]
    found = 0
    for shape in sorted(smaller, key=lambda k: -num_weights(k.spec)):
        most = max_context(Subject(name=shape.name, spec=shape.spec), device, pool, threads)
        if most >= wanted and found < AT_MOST:
            found += 1
            text = f"model {shape.name}: up to {most} tokens"
            yield Alternative(kind="model", value=shape.name, text=text)


def _devices(
    subject: Subject, device: DeviceProfile, pool: Pool, threads: int | None, wanted: int
) -> Iterator[Alternative]:
    """The smallest devices that this program computes on and that take it."""
    names = profiles.device_names()
    plain = [n for n in names if n == n.removesuffix("-super")]
    known = [profiles.device(name) for name in plain]  # other firmware: the same memory
    fitting = []
    for other in known:
        total = other.memory_total_bytes
        if total is None or other.backend == "none" or other.name == device.name:
            continue
        its = _as_asked(other, pool, available_bytes=None, total_bytes=None)
        most = max_context(subject, other, its, threads)
        if most >= wanted:
            fitting.append((total, other.name, most))
    for _, name, most in sorted(fitting)[:AT_MOST]:
        yield Alternative(kind="device", value=name, text=f"device {name}: up to {most} tokens")
