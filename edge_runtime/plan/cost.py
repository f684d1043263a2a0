"""What a step reads and computes, and how long that takes at a roof.

Invariant: a step takes the longer of its bytes over the bandwidth that kernels reach and its
products over the tensor cores' rate; without a known bandwidth nothing is predicted. Bytes count
every weight once whatever the number of rows, and the cache before the row once.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from edge_runtime.format.spec import ModelSpec
from edge_runtime.kernels.layout import (
    CHUNK_ROWS,
    MAX_GAMMA,
    kv_base_per_token_bytes,
    kv_half_per_token_bytes,
    kv_stored_per_token_bytes,
)
from edge_runtime.plan.footprint import linear_bytes, linear_shapes, num_weights
from edge_runtime.profiles import DeviceProfile, Mode

View = Literal["fp16", "w8", "w4"]
Kv = Literal["fp16", "kv8", "kv4"]
PLANES = {"w8": 2, "w4": 1}
READ_SHARE = 0.62  # of the bandwidth; W8 kernel of the BitNest paper on Orin NX (A.6.3)
COMPUTE_SHARE = 0.5  # of the int8 rate, for prompts: lower end of what instruction counts allow


class Roof(msgspec.Struct, frozen=True, kw_only=True):
    """What a device can do at most in a power mode, and the share of it that kernels reach."""

    bytes_s: float | None  # memory bandwidth
    read_share: float
    mac_s: float | None  # dense int8 products; half of it for fp16
    compute_share: float = COMPUTE_SHARE


class Speculation(msgspec.Struct, frozen=True, kw_only=True):
    """The draft length that pays most; 0: drafting does not pay."""

    gamma: int
    tokens_per_cycle: float
    tok_s: float


def roof(device: DeviceProfile, mode: Mode | None) -> Roof:
    """Return the roof of a mode of a device."""
    clock = None if mode is None else mode.gpu_max_mhz
    sms = None if mode is None else mode.sm_count
    per_clock = device.int8_mac_per_clk_sm
    mac = None if None in (clock, sms, per_clock) else per_clock * sms * clock * 1e6  # type: ignore[operator]  # none is None
    bandwidth = None if mode is None else mode.bandwidth_gb_s
    return Roof(
        bytes_s=None if bandwidth is None else bandwidth * 1e9,
        read_share=READ_SHARE if device.read_share is None else device.read_share,
        mac_s=mac,
    )


def kv_read_per_token(spec: ModelSpec) -> dict[Kv, int]:
    """Bytes that a pass reads of every token in the cache, by what it reads of it."""
    shape = spec.num_layers, spec.num_kv_heads, spec.head_dim
    return {
        "kv8": kv_stored_per_token_bytes(*shape),
        "kv4": kv_base_per_token_bytes(*shape),
        "fp16": kv_half_per_token_bytes(*shape),
    }


def weight_bytes(spec: ModelSpec, group_size: int, view: View) -> int:
    """Bytes of all weights that a pass reads, and of one row of the embedding."""
    if view == "fp16":
        return 2 * num_weights(spec) + 2 * spec.hidden_size
    shapes = linear_shapes(spec).values()
    return sum(linear_bytes(n, k, group_size, PLANES[view]) for n, k in shapes) + spec.hidden_size


def step_bytes(spec: ModelSpec, group_size: int, view: View, position: int, kv: Kv = "kv8") -> int:
    """Bytes that a pass of a few rows reads at a position."""
    return weight_bytes(spec, group_size, view) + position * kv_read_per_token(spec)[kv]


def step_macs(spec: ModelSpec, position: float, rows: int = 1) -> float:
    """Products of a pass of so many rows whose mean position is given: linears and attention."""
    attention = 2 * spec.num_layers * spec.q_size * position
    return rows * (num_weights(spec) + attention)


def step_seconds(
    top: Roof,
    spec: ModelSpec,
    group_size: int,
    view: View,
    position: int,
    *,
    rows: int = 1,
    kv: Kv = "kv8",
) -> float | None:
    """Seconds of a pass of a few rows; None where the bandwidth is not known."""
    if top.bytes_s is None:
        return None
    read = step_bytes(spec, group_size, view, position, kv) / (top.bytes_s * top.read_share)
    return max(read, _compute_seconds(top, view, step_macs(spec, position, rows)))


def prefill_tok_s(
    top: Roof, spec: ModelSpec, group_size: int, view: View, tokens: int, kv: Kv = "kv8"
) -> float | None:
    """Tokens a second of reading a prompt, chunk by chunk; None where a roof is not known.

    The head is counted once for a chunk at most: only the last row has logits.
    """
    if top.bytes_s is None or top.mac_s is None:
        return None
    seconds, start = 0.0, 0
    while start < tokens:
        rows = min(CHUNK_ROWS, tokens - start)
        end = start + rows
        read = step_bytes(spec, group_size, view, end, kv) / (top.bytes_s * top.read_share)
        macs = step_macs(spec, (start + end) / 2, rows)
        macs -= (rows - 1) * spec.vocab_size * spec.hidden_size
        seconds += max(read, _compute_seconds(top, view, macs))
        start = end
    return tokens / seconds


def expected_tokens(acceptance: float, gamma: int) -> float:
    """Return the tokens of a cycle, 1 + α + … + α^γ, where each draft token is kept with α."""
    return sum(acceptance**i for i in range(gamma + 1))


def speculate(
    top: Roof,
    spec: ModelSpec,
    group_size: int,
    position: int,
    acceptance: float,
    *,
    draft_kv: Kv = "kv8",
) -> Speculation | None:
    """Choose the draft length; None where the bandwidth is not known."""
    draft = step_seconds(top, spec, group_size, "w4", position, kv=draft_kv)
    best: Speculation | None = None
    for gamma in range(MAX_GAMMA + 1):
        verify = step_seconds(top, spec, group_size, "w8", position, rows=gamma + 1)
        if draft is None or verify is None:
            return None
        tokens = expected_tokens(acceptance, gamma)
        speed = tokens / (gamma * draft + verify)
        if best is None or speed > best.tok_s:
            best = Speculation(gamma=gamma, tokens_per_cycle=tokens, tok_s=speed)
    return best


def _compute_seconds(top: Roof, view: View, macs: float) -> float:
    """Seconds of products; 0 where the rate is not known, so that memory decides."""
    if top.mac_s is None:
        return 0.0
    return macs / (top.mac_s * top.compute_share * (0.5 if view == "fp16" else 1.0))
