"""The longest context of a model here: planned by the account, proven in child processes."""

from __future__ import annotations

from typing import Any

import msgspec

from edge_runtime import kernels
from edge_runtime.decode.memory import account_here, fit_context, room_bytes
from edge_runtime.format.manifest import Manifest
from edge_runtime.measure import child, prove
from edge_runtime.measure.child import Outcome
from edge_runtime.measure.profile import Wishes
from edge_runtime.measure.worker import Way

OTHERS_SHARE = 0.01  # of what is free, left alone where no budget is given: it comes and goes


def find(wishes: Wishes, manifest: Manifest) -> dict[str, Any]:
    """Plan the longest context and prove it. Raises BudgetError where nothing fits at all."""
    spec = manifest.spec
    name, _ = kernels.choose_backend(
        wishes.job.backend, spec.head_dim, spec.num_heads // spec.num_kv_heads
    )
    sizes: dict[str, Any] = {"group_size": manifest.group_size, "threads": wishes.job.threads}
    budget = wishes.job.budget_bytes
    account = account_here(spec, name, **sizes)
    if budget is None:
        budget = int(room_bytes(0, wishes.job.reserve_bytes, name) * (1 - OTHERS_SHARE))
    planned = fit_context(spec, "auto", name, budget, wishes.job.reserve_bytes, **sizes)

    def attempt(context: int, enforced: bool) -> Outcome:
        tail = min(prove.TAIL, context - 1)
        job = msgspec.structs.replace(
            wishes.job_of([Way(mode="w8")], context - tail),
            new_tokens=tail,
            repeats=1,
            warm_up=False,
            ctx=context,
            budget_bytes=budget if enforced else None,
            reserve_bytes=wishes.job.reserve_bytes if enforced else 0,
        )
        return child.run(job, floor_bytes=wishes.job.reserve_bytes)

    proof = prove.prove(planned, spec.max_position, budget, account.block_bytes, attempt)
    return prove.document(proof)
