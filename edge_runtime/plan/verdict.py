"""What a converted model is good for, from the agreement that its conversion measured: one line.

Invariant: a function of the manifest alone. The speed is that of base drafts where memory decides:
a pass costs the bytes it reads, whatever the number of rows. A draft that runs for real reads the
target's cache and agrees more often than the measured one, which has a cache of its own.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from edge_runtime.format.manifest import Manifest
from edge_runtime.plan.cost import Roof, speculate, step_bytes

POSITION = 512  # tokens in the cache
LEAST_SPEEDUP = 1.05  # below it drafting is not worth its work
LEAST_QUALITY = 0.02  # of agreement that a target may lose against plain 8-bit rounding
_BYTES = Roof(bytes_s=1.0, read_share=1.0, mac_s=None)


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """Which view to run; the expected speed over `--view w8`, and the draft length it needs."""

    view: Literal["nest", "w8"]
    speedup: float
    gamma: int
    text: str


def verdict(manifest: Manifest) -> Verdict | None:
    """Judge a model; None where its conversion measured nothing (synthetic weights)."""
    a = manifest.agreement
    if a is None:
        return None
    shape = manifest.spec, manifest.group_size
    best = speculate(_BYTES, *shape, POSITION, a.draft_target)
    assert best is not None, "a bandwidth is given"
    speedup = best.tok_s * step_bytes(*shape, "w8", POSITION)
    view: Literal["nest", "w8"] = "nest" if speedup >= LEAST_SPEEDUP else "w8"
    advice = f"nest recommended, expected {speedup:.1f}x over w8"
    if view == "w8":
        advice = f"--view w8 recommended, drafts would give {speedup:.1f}x"
    text = (
        f"target {a.target_original:.2f} of plain 8-bit {a.w8_rtn_original:.2f}, "
        f"draft {a.draft_target:.2f}: {advice}"
    )
    if a.target_original < a.w8_rtn_original - LEAST_QUALITY:
        text += "; the target loses quality: calibrate on text like yours (--calib FILE)"
    return Verdict(view=view, speedup=round(speedup, 3), gamma=best.gamma, text=text)
