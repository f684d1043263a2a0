"""A profile as a table for people."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

Document = dict[str, Any]
MIB, GIB = 2**20, 2**30


def label(row: Document) -> str:
    """Name a row: `nest γ=4`."""
    return row["mode"] if row["gamma"] is None else f"{row['mode']} γ={row['gamma']}"


def size(count: int | None) -> str:
    """Return bytes for people."""
    if count is None:
        return "-"
    return f"{count / GIB:.2f} GiB" if count >= GIB else f"{count / MIB:.0f} MiB"


def number(value: float | None, digits: int = 1, unit: str = "") -> str:
    """Return a number for a table, `-` for unknown."""
    return "-" if value is None else f"{value:.{digits}f}{unit}"


def table(rows: list[Document]) -> Iterator[str]:
    """One line a row, under a heading."""
    yield (
        f"{'context':>7}  {'mode':<12} {'prefill':>8} {'decode':>7}  {'range':<13} {'of w8':>6} "
        f"{'of fp16':>7} {'accept':>6} {'tok/cyc':>7} {'peak':>9} {'planned':>9} {'J/token':>14}"
    )
    for row in rows:
        head = f"{row['context']:>7}  {label(row):<12} "
        if row["status"] != "ok":
            yield f"{head}{row['status']}: {row['reason']}"
            continue
        low, high = row["decode_tok_s_range"]
        spread = f"{low:.1f} to {high:.1f}"
        yield (
            f"{head}{number(row['prefill_tok_s'], 0):>8} {number(row['decode_tok_s']):>7}  "
            f"{spread:<13} {number(row['speedup_vs_w8'], 2):>6} "
            f"{number(row['speedup_vs_fp16'], 2):>7} {number(row['acceptance'], 2):>6} "
            f"{number(row['tokens_per_cycle'], 2):>7} {size(row['peak_bytes']):>9} "
            f"{size(row['planned_bytes']):>9} {joules(row):>14}"
        )


def joules(row: Document) -> str:
    """Return J/token with its 95 % interval, or `-`."""
    if row["j_per_token"] is None:
        return "-"
    low, high = row["energy"]["j_per_token_interval"]
    return f"{row['j_per_token']:.3f} ±{(high - low) / 2:.3f}"


def energy_lines(energy: Document | None) -> Iterator[str]:
    """Where joules come from, or why there are none."""
    if energy is None:
        return
    if energy["source"] is None:
        yield f"energy: unavailable ({energy['why']})"
        return
    idle = energy["idle_mw"]
    yield (
        f"energy: {energy['source']}, {energy['rail']} ({energy['scope']}), "
        + ("idle unknown" if idle is None else f"idle {idle / 1000:.2f} W")
        + "; J/token is gross, of the decode phase"
    )
    yield from (f"  {note}" for note in energy["notes"])


def proof_lines(proof: Document | None) -> Iterator[str]:
    """The longest context, planned and proven."""
    if proof is None:
        return
    gap = proof["difference_share"]
    yield (
        f"longest context: {proof['planned']} planned, {proof['proven']} proven by running it "
        f"({gap:.1%} of the budget of {size(proof['budget_bytes'])} between them; limited by the "
        f"{proof['limited_by']})"
    )
    if proof["beyond"]:
        yield f"  one block more than planned: {proof['beyond']}"
    for one in proof["tries"]:
        reason = f" ({one['reason']})" if one["reason"] else ""
        yield f"  {one['context']:>7}  {one['status']:<7} peak {size(one['peak_bytes'])}{reason}"


def lines(document: Document) -> Iterator[str]:
    """The whole report."""
    state = document["state"]
    board = state["board"]
    where = board["model"] or f"{state['system']}, {state['cores']} cores"
    mode = f", mode {board['mode']}" if board["mode"] else ""
    commit = f" ({state['commit']})" if state["commit"] else ""
    name = document["model"]
    if document["synthetic"]:
        name += " (random weights: speed and memory of its shape, no model)"
    yield f"{name} on {where}{mode}; bitnest-edge {state['version']}{commit}"
    if document["rows"]:
        yield from table(document["rows"])
    if any(r["mode"] == "fp16" and r["backend"] == "reference" for r in document["rows"]):
        yield "fp16 here is the unquantised model in torch's fp32, not an optimised 16-bit engine"
    yield from energy_lines(document["energy"])
    yield from proof_lines(document["max_context"])
    for warning in document["warnings"]:
        yield f"warning: {warning}"
