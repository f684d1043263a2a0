"""Which precision of the nested KV cache a draft reads (BitNest 3.4 and A.2).

Invariant: a policy is a function of a row's absolute position alone, so drafting gives the same
tokens however rows are batched. Verification never uses it: it always reads both planes.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np

from edge_runtime.errors import UsageError, cut
from edge_runtime.kernels import layout
from edge_runtime.kernels.ops import I64


@dataclass(frozen=True, slots=True)
class KvPolicy:
    """`recent` None: kv8 (both planes); 0: kv4 (base only); N: both planes for the last N."""

    recent: int | None = None

    def __str__(self) -> str:
        """Return the command-line spelling."""
        if self.recent is None:
            return "kv8"
        return f"recent:{self.recent}" if self.recent else "kv4"

    def full_from(self, positions: I64) -> I64:
        """Return, per row, the first token read with both planes."""
        if self.recent is None:
            return np.zeros(len(positions), np.int64)
        return np.array([layout.full_from(int(p), self.recent) for p in positions], dtype=np.int64)


KV8 = KvPolicy(None)
KV4 = KvPolicy(0)


def parse_policy(text: str) -> KvPolicy:
    """Parse auto (kv8), kv8, kv4 or recent:N. Raises UsageError."""
    if text in ("auto", "kv8"):
        return KV8
    if text == "kv4":
        return KV4
    if match := re.fullmatch(r"recent:([1-9][0-9]{0,8})", text):
        return KvPolicy(int(match[1]))
    raise UsageError(
        f"KV policy: expected auto, kv8, kv4 or recent:N with N >= 1, got {cut(text)!r}",
        "for example --kv-policy recent:256",
    )
