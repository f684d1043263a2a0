"""Speed and energy that a plan predicts, and what the prediction rests on.

Invariant: every figure is the roof of `cost.py` times a share that is told; joules come from power
that was measured on that board, and from nothing else.
"""

from __future__ import annotations

import msgspec

from edge_runtime.format.spec import ModelSpec
from edge_runtime.plan import cost
from edge_runtime.plan.cost import Kv, Roof, View
from edge_runtime.profiles import DeviceProfile, Measured, Mode

PROMPT_TOKENS = 512  # of the prompt whose reading is predicted
ACCEPTANCE = 0.9
ACCEPTANCE_SOURCE = (
    "the draft of our SmolLM2-135M, over the target's cache, chooses the target's token at 0.90 of "
    "2,535 positions of chats, teacher-forced (README, How good is it)"
)
KV4_SHARE = 0.96  # of the acceptance that a kv4 draft keeps: 0.873 against 0.905 there
PAPER_ACCEPTANCE = 0.98
PAPER_SOURCE = (
    "the paper's 0.944 of drafted tokens at draft 4 (BitNest A.5.3, LLaMA-2-7B-32K, KV8 draft) is "
    "0.98 a token"
)


class Acceptance(msgspec.Struct, frozen=True, kw_only=True):
    """How often a drafted token is kept when those before it were."""

    rate: float
    source: str


class Speed(msgspec.Struct, frozen=True, kw_only=True):
    """Decoding one way at one position of the context; None: not known, or does not fit."""

    mode: str
    position: int
    decode_tok_s: float | None
    roof_tok_s: float | None  # were memory read at its full rate
    acceptance: float | None = None
    gamma: int | None = None
    tokens_per_cycle: float | None = None


class Prediction(msgspec.Struct, frozen=True, kw_only=True):
    """Of the nest at the end of the planned context; joules gross, on the rail that is named."""

    prefill_tok_s: float | None
    decode_tok_s: float | None
    j_per_token: float | None
    decode_roof_tok_s: float | None
    prompt_tokens: int
    position: int
    gamma: int | None
    acceptance: float
    acceptance_source: str
    tokens_per_cycle: float | None
    power: Measured | None


def acceptance(measured: float | None, source: str) -> Acceptance:
    """Return the acceptance to plan with: the model's own, or that of our small model."""
    if measured is not None:
        return Acceptance(rate=measured, source=source)
    return Acceptance(rate=ACCEPTANCE, source=ACCEPTANCE_SOURCE)


def power(device: DeviceProfile, mode: Mode | None) -> Measured | None:
    """Return the power measured in a mode; one whose mode is not stated serves for want of it."""
    named = [m for m in device.measured if mode is not None and m.mode == mode.name]
    return next(iter([*named, *(m for m in device.measured if not m.mode)]), None)


def full(top: Roof) -> Roof:
    """Return the roof itself: everything at its full rate."""
    return msgspec.structs.replace(top, read_share=1.0, compute_share=1.0)


def prediction(
    top: Roof | None,
    spec: ModelSpec,
    group_size: int,
    context: int,
    alpha: Acceptance,
    measured: Measured | None,
) -> Prediction:
    """Predict the nest where the context is full; top None: it does not fit, so nothing."""
    prompt = min(PROMPT_TOKENS, context)
    prefill = found = ideal = joules = None
    if top is not None:
        found = cost.speculate(top, spec, group_size, context, alpha.rate)
        ideal = cost.speculate(full(top), spec, group_size, context, alpha.rate)
        prefill = cost.prefill_tok_s(top, spec, group_size, "w8", prompt)
    if found is not None and measured is not None:
        joules = measured.decode_mw / 1000 / found.tok_s
    return Prediction(
        prefill_tok_s=prefill,
        decode_tok_s=None if found is None else found.tok_s,
        j_per_token=joules,
        decode_roof_tok_s=None if ideal is None else ideal.tok_s,
        prompt_tokens=prompt,
        position=context,
        gamma=None if found is None else found.gamma,
        acceptance=alpha.rate,
        acceptance_source=alpha.source,
        tokens_per_cycle=None if found is None else found.tokens_per_cycle,
        power=measured,
    )


def speeds(
    top: Roof,
    spec: ModelSpec,
    group_size: int,
    positions: list[int],
    alpha: Acceptance,
    max_context: dict[str, int],
) -> tuple[Speed, ...]:
    """Predict every way of decoding at some positions; one that does not fit there has None."""
    plain: tuple[tuple[str, View, Kv, str], ...] = (
        ("fp16", "fp16", "fp16", "fp16"),
        ("w8", "w8", "fp16", "w8"),
        ("w8, kv8", "w8", "kv8", "nest"),
        ("w4", "w4", "kv8", "nest"),  # --view w4: the nest is held, its base is read
    )
    drafts: tuple[tuple[str, Kv, float], ...] = (
        ("nest", "kv8", alpha.rate),
        ("nest, kv4 draft", "kv4", alpha.rate * KV4_SHARE),
        ("nest, paper's acceptance", "kv8", PAPER_ACCEPTANCE),
    )
    found = []
    for position in positions:
        for name, view, kv, layout in plain:
            there = position <= max_context[layout]
            now, most = (
                cost.step_seconds(r, spec, group_size, view, position, kv=kv) if there else None
                for r in (top, full(top))
            )
            found.append(
                Speed(
                    mode=name,
                    position=position,
                    decode_tok_s=None if now is None else 1 / now,
                    roof_tok_s=None if most is None else 1 / most,
                )
            )
        for name, kv, rate in drafts:
            there = position <= max_context["nest"]
            one, ideal = (
                cost.speculate(r, spec, group_size, position, rate, draft_kv=kv) if there else None
                for r in (top, full(top))
            )
            found.append(
                Speed(
                    mode=name,
                    position=position,
                    decode_tok_s=None if one is None else one.tok_s,
                    roof_tok_s=None if ideal is None else ideal.tok_s,
                    acceptance=rate,
                    gamma=None if one is None else one.gamma,
                    tokens_per_cycle=None if one is None else one.tokens_per_cycle,
                )
            )
    return tuple(found)


def assumptions(
    device: DeviceProfile, mode: Mode | None, top: Roof, alpha: Acceptance
) -> tuple[str, ...]:
    """Say what a plan rests on that was not measured on this device."""
    lines = []
    if device.backend != "cpu" and device.runtime_bytes is None:
        lines.append(
            "runtime: 1 GiB assumed for the CUDA context, libraries and the interpreter; no figure "
            "of this board is known"
        )
    if device.memory_total_bytes is not None and device.system_used_bytes is None:
        lines.append("memory: what the system itself uses is not known and counted as nothing")
    if top.bytes_s is None:
        what = "measure it: bitnest-edge bench decode MODEL" if device.backend == "cpu" else ""
        lines.append(
            "speed: memory bandwidth is not known, so nothing is predicted" + (what and f"; {what}")
        )
        return tuple(lines)
    known = "from its profile" if device.read_share is not None else "assumed, as on Orin NX"
    lines += [
        f"bandwidth: {top.bytes_s / 1e9:.1f} GB/s"
        + (f" in mode {mode.name}" if mode is not None else "")
        + f", of which kernels reach {top.read_share:.0%} ({known}), the same for every view",
        f"prompts: {top.compute_share:.0%} of the int8 tensor-core rate, assumed"
        if top.mac_s is not None
        else "prompts: the rate of products is not known, so nothing is predicted",
        f"acceptance: {alpha.rate:.2f} a drafted token: {alpha.source}",
        f"paper's acceptance: {PAPER_SOURCE}; its recipe is not ours",
    ]
    return tuple(lines)
