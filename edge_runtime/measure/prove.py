"""The longest context that really runs: a plan is a claim, a child process that filled it is proof.

Invariant: every try fills its whole context (prefill, then decoding to the last token) in a child
process; what a try took is its own peak of memory. A try that dies proves that its context is too
long and harms nobody.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from edge_runtime.kernels.layout import KV_BLOCK
from edge_runtime.measure.child import Outcome

TAIL = 8  # tokens of each try that are decoded, the rest is its prompt
MOST_TRIES = 12
CLOSE_ENOUGH = 0.005  # of the budget: what a try would gain is not worth its time


class Try(msgspec.Struct, frozen=True, kw_only=True):
    """One context that was tried."""

    context: int
    status: str  # ok, oom, refused
    peak_bytes: int | None = None
    reason: str = ""


class Proof(msgspec.Struct, frozen=True, kw_only=True):
    """What was planned, what was proven."""

    planned: int  # tokens
    proven: int  # the longest that ran within the budget; 0: none
    budget_bytes: int
    block_bytes: int  # of KV_BLOCK tokens
    limited_by: str  # "memory", or "model": its positions end there
    beyond: str  # status of one block more than planned, asked of the engine
    tries: tuple[Try, ...]

    @property
    def difference_bytes(self) -> int:
        """Memory between the planned and the proven context."""
        return abs(self.planned - self.proven) // KV_BLOCK * self.block_bytes


Attempt = Callable[[int, bool], Outcome]
"""(context, whether the engine keeps to the budget) -> how it ended."""


def prove(
    planned: int, longest: int, budget_bytes: int, block_bytes: int, attempt: Attempt
) -> Proof:
    """Search the longest context that runs within a budget.

    planned: by the account. longest: positions that the model has.
    """
    tries: list[Try] = []

    def runs(context: int, *, enforced: bool) -> bool:
        outcome = attempt(context, enforced)
        peak = max((e["peak_bytes"] or 0 for e in outcome.runs("w8")), default=None)
        status, reason = outcome.status, outcome.reason
        if status == "ok" and peak is not None and peak > budget_bytes:
            status = "oom"
            reason = f"took {peak} bytes of {budget_bytes}"
        tries.append(Try(context=context, status=status, peak_bytes=peak, reason=reason))
        return status == "ok"

    good, bad = 0, longest + 1
    context = planned
    while len(tries) < MOST_TRIES and KV_BLOCK <= context < bad:
        if runs(context, enforced=context <= planned):
            good = context
        else:
            bad = context
        context = _next(good, bad, longest, budget_bytes, block_bytes, tries[-1])
        gain = (context - good) // KV_BLOCK * block_bytes
        if context <= good or (good and gain <= budget_bytes * CLOSE_ENOUGH):
            break
    beyond = ""
    if planned + KV_BLOCK <= longest:
        beyond = attempt(planned + KV_BLOCK, True).status
    return Proof(
        planned=planned,
        proven=good,
        budget_bytes=budget_bytes,
        block_bytes=block_bytes,
        limited_by="model" if good == longest else "memory",
        beyond=beyond,
        tries=tuple(tries),
    )


def _next(good: int, bad: int, longest: int, budget_bytes: int, block_bytes: int, last: Try) -> int:
    """Return the context to try next: by what the last one left or lacked, else half-way."""
    if last.peak_bytes is not None:
        blocks = (budget_bytes - last.peak_bytes) // block_bytes
        context = (last.context // KV_BLOCK + blocks) * KV_BLOCK
    else:
        context = (good + bad) // 2 // KV_BLOCK * KV_BLOCK
    if context >= bad:
        context = (good + bad) // 2 // KV_BLOCK * KV_BLOCK
    return min(context, longest)


def document(proof: Proof) -> dict[str, Any]:
    """Return the proof as plain data."""
    found: dict[str, Any] = msgspec.to_builtins(proof)
    found["difference_bytes"] = proof.difference_bytes
    found["difference_share"] = proof.difference_bytes / proof.budget_bytes
    return found
