"""A plan as people read it: the account, the longest contexts, the speeds, what they rest on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from edge_runtime.plan.planner import LEAST_CONTEXT, Plan, Published
from edge_runtime.plan.predict import Speed

LINES = {
    "weights": "weights",
    "draft": "the draft's own copy: 4-bit weights, scales, head",
    "base": "base plane, 4 bits a weight",
    "refine": "refinement plane, 4 bits a weight",
    "scales": "group and row scales",
    "embedding": "embedding, 8 bits",
    "head": "output head, both planes and scales",
    "norms": "biases and head norms",
    "rope": "rotary tables",
    "kv": "KV cache",
    "workspace": "workspace",
    "runtime": "program, libraries, tokenizer",
    "reserve": "reserve, left to others",
}
LAYOUTS = {
    "fp16": "fp16: 16-bit weights, KV16",
    "w8": "W8A8: 8-bit weights, KV16",
    "two_copies": "two copies: W4 draft + W8 target",
    "nest": "nest: both in one, nested KV",
    "w4": "W4 alone, KV8 (for comparison)",
}
POOL = {
    "memory_total": "memory",
    "system_used": "used by the system",
    "desktop": "used by a desktop",
    "available": "available now",
    "budget": "--budget",
}


def describe(plan: Plan, notes: Sequence[str]) -> Iterator[str]:
    """Yield the report, line by line."""
    mode = f", mode {plan.mode}" if plan.mode else ""
    yield f"{plan.model} on {plan.device_title} ({plan.device}{mode})"
    if plan.synthetic:
        yield "note: random weights, made for timing: the sizes of a model, but no model"
    yield from (f"note: {note}" for note in notes)
    yield ""
    yield from _memory(plan)
    yield ""
    yield from _contexts(plan)
    yield ""
    yield from _speeds(plan)
    yield ""
    yield "assumed or taken from elsewhere:"
    yield from (f"  {line}" for line in plan.assumes)
    if plan.would_fit:
        yield ""
        yield "would fit:"
        yield from (f"  {a.text}" for a in plan.would_fit)


def _memory(plan: Plan) -> Iterator[str]:
    yield f"memory with {plan.context} tokens of context (group size {plan.group_size}):"
    for name, size in plan.bytes.items():
        yield _row(LINES[name], size)
    yield _row("total", plan.total_bytes)
    parts = ", ".join(f"{POOL[name]} {_gib(size)}" for name, size in plan.pool.items())
    yield f"{_row('budget', plan.budget_bytes)}   {parts}"
    left = plan.budget_bytes - plan.total_bytes
    yield _row("left" if plan.fits else "too much by", abs(left))
    read = ", ".join(f"{name} {size:,}" for name, size in plan.kv_read_per_token.items())
    yield (
        f"  a token of context stores {plan.kv_stored_per_token:,} bytes; a step reads of each: "
        f"{read}"
    )


def _contexts(plan: Plan) -> Iterator[str]:
    yield f"longest context (the model's own limit is {plan.model_max_context}):"
    p = plan.published
    yield f"  {'':<36}{'tokens':>8}{'weights':>12}{f'all at {plan.context}':>18}"
    for name, layout in plan.layouts.items():
        text = str(layout.max_context) if layout.max_context >= LEAST_CONTEXT else "-"
        sizes = f"{_gib(layout.weights_bytes):>12}{_gib(layout.total_bytes):>18}"
        yield f"  {LAYOUTS[name]:<36}{text:>8}{sizes}{'' if p is None else _claimed(p, name)}"
    yield (
        "  W4 alone would hold the base plane only: --view w4 decodes with it, but both planes "
        "stay in memory"
    )
    if p is not None:
        yield (
            "  What the paper's longest contexts leave of the budget is memory that its runs took "
            "and ours"
        )
        yield f"  would not, or margin: shown, not fitted. {p.claims.source}"


def _claimed(published: Published, layout: str) -> str:
    """What the paper says of a layout, and what its longest context leaves."""
    told = []
    if layout in published.claims.weights_gib:
        told.append(f"weights {published.claims.weights_gib[layout]} GiB")
    if (implied := published.implied.get(layout)) is not None:
        told.append(f"{implied.context // 1024}K, leaving {implied.extra_bytes / 2**30:.2f} GiB")
    return f"   paper: {', '.join(told)}" if told else ""


def _speeds(plan: Plan) -> Iterator[str]:
    if all(s.decode_tok_s is None for s in plan.speeds):
        yield "speed: not predicted" + ("" if plan.fits else ": it does not fit")
        return
    positions = sorted({s.position for s in plan.speeds})
    yield "decode, tok/s (share of the roof), by tokens in the cache:"
    yield "  " + " " * 28 + "".join(f"{position:>16}" for position in positions)
    for mode in dict.fromkeys(s.mode for s in plan.speeds):
        cells = [_cell(s) for s in plan.speeds if s.mode == mode]
        last = [s for s in plan.speeds if s.mode == mode][-1]
        yield f"  {mode:<28}" + "".join(f"{cell:>16}" for cell in cells) + _drafted(last)
    if plan.published is not None:
        rows = (f"{n} {_span(*s)}" for n, s in plan.published.claims.decode_tok_s.items())
        yield f"  measured by the paper on this board at 2K: {', '.join(rows)}"
    p = plan.predicted
    if p.prefill_tok_s is not None:
        yield f"prefill of {p.prompt_tokens} tokens: {p.prefill_tok_s:.0f} tok/s"
    if p.j_per_token is not None and p.power is not None:
        yield (
            f"energy: {p.j_per_token:.2f} J/token at {p.position} tokens "
            f"({p.power.decode_mw / 1000:.1f} W while decoding, rail {p.power.rail}: "
            f"{p.power.source})"
        )
    elif p.power is None:
        yield "energy: unknown, no power of this board was measured"
    yield from _honest(plan)


def _honest(plan: Plan) -> Iterator[str]:
    """Plain W4 beside the nest: faster, and what it gives up."""
    position = min(s.position for s in plan.speeds)
    speed = {s.mode: s.decode_tok_s for s in plan.speeds if s.position == position}
    w4, nest = speed.get("w4"), speed.get("nest")
    if w4 and nest:
        yield (
            f"plain W4 (--view w4, in the nest's memory) decodes {w4 / nest:.1f} times as fast as "
            "the nest, with the draft's answers: the target's next token in "
            f"{plan.predicted.acceptance:.0%} of positions (see acceptance below)"
        )


def _cell(speed: Speed) -> str:
    if speed.decode_tok_s is None or speed.roof_tok_s is None:
        return "does not fit"
    return f"{speed.decode_tok_s:.1f} ({speed.decode_tok_s / speed.roof_tok_s:.0%})"


def _span(low: float, high: float) -> str:
    return f"{low:g}" if low == high else f"{low:g} to {high:g}"


def _drafted(speed: Speed) -> str:
    if speed.acceptance is None or speed.gamma is None or speed.tokens_per_cycle is None:
        return ""
    if speed.gamma == 0:
        return f"   no drafting: with acceptance {speed.acceptance:.2f} it would not pay"
    return (
        f"   draft {speed.gamma}, acceptance {speed.acceptance:.2f}, "
        f"{speed.tokens_per_cycle:.2f} tokens a cycle"
    )


def _row(name: str, size: int) -> str:
    return f"  {name:<50}{size:>16,}{_gib(size):>12}"


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB" if abs(size) >= 2**30 // 10 else f"{size / 2**20:.1f} MiB"
