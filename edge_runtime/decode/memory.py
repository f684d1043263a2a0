"""What fits: the longest context within a budget, and what this process took.

Invariant: a context that does not fit is refused with the numbers before anything is allocated.
"""

from __future__ import annotations

import resource

import psutil

from edge_runtime import kernels
from edge_runtime.decode import arguments
from edge_runtime.errors import BudgetError, UsageError
from edge_runtime.format.spec import ModelSpec
from edge_runtime.kernels.layout import kv_plain_per_token_bytes, kv_stored_per_token_bytes
from edge_runtime.model.runner import DEFAULT_CHUNK
from edge_runtime.model.transformer import activation_bytes


def fit_context(
    spec: ModelSpec,
    ctx: str | int,
    backend: str,
    budget_bytes: int | None,
    reserve_bytes: int,
    *,
    view: str = "nest",
    group_size: int = 64,
    threads: int | None = None,
) -> int:
    """Resolve --ctx: as asked, or the model's own maximum as far as memory allows.

    Raises BudgetError with the numbers, UsageError for an impossible value.
    """
    available = psutil.virtual_memory().available - reserve_bytes
    limit = available if budget_bytes is None else min(available, budget_bytes)
    shape = spec.num_layers, spec.num_kv_heads, spec.head_dim
    weights, embedding = spec_weights(spec), spec.vocab_size * spec.hidden_size
    if view == "fp":
        per_token = kv_plain_per_token_bytes(*shape)
        fixed = kernels.float_fixed_bytes(weights, embedding)
    else:
        per_token = kv_stored_per_token_bytes(*shape) + kernels.attention_per_token_bytes(
            backend, spec.num_heads, spec.head_dim, threads
        )
        fixed = kernels.fixed_bytes(
            weights,
            embedding,
            backend,
            group_size=group_size,
            workspace=DEFAULT_CHUNK * activation_bytes(spec),
        )
    fits = max(0, (limit - fixed) // per_token)
    asked = arguments.context(ctx)
    if asked is None:
        context = min(spec.max_position, fits)
    else:
        context = asked
        longest = spec.max_position
        if spec.rope.kind == "dynamic":  # made to go beyond what the model was trained on
            longest = int(longest * spec.rope.factor)
        if context > longest:
            raise UsageError(
                f"context: this model was made for at most {longest} positions, got "
                + arguments.shown(context)
            )
    if context > fits or context < 2:
        raise BudgetError(
            f"memory: weights and workspace take about {fixed / 2**20:.0f} MiB and "
            f"{max(context, 2)} tokens of context {max(context, 2) * per_token / 2**20:.0f} MiB, "
            f"{max(0, limit) / 2**20:.0f} MiB are available"
            + ("" if limit == available else f" within the budget of {limit / 2**20:.0f} MiB"),
            f"the largest context that fits is {fits}"
            if fits >= 2
            else "raise --budget, lower --reserve, or use a smaller model",
        )
    return context


def spec_weights(spec: ModelSpec) -> int:
    """Number of weights in all linears."""
    layer = spec.hidden_size * (2 * spec.q_size + 2 * spec.kv_size + 3 * spec.intermediate_size)
    return spec.num_layers * layer + spec.vocab_size * spec.hidden_size


def peak_rss_bytes() -> int:
    """Peak resident memory of this process."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
