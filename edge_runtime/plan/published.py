"""What others published for a model on a board, to be shown beside a plan and never fitted to."""

from __future__ import annotations

import msgspec


class Claims(msgspec.Struct, frozen=True, kw_only=True):
    """Longest context, bytes of weights and decode tok/s by layout; with the source."""

    max_context: dict[str, int]
    weights_gib: dict[str, float]
    decode_tok_s: dict[str, tuple[float, float]]  # from, to; at 2K tokens
    source: str


_CLAIMS = {  # (shape, board without the suffix of its firmware)
    ("llama-2-7b-32k", "orin-nx-16gb"): Claims(
        max_context={"fp16": 2048, "w8": 6144, "nest": 10240},
        weights_gib={"nest": 6.22, "w8": 6.22, "two_copies": 9.38},
        decode_tok_s={"fp16": (6.0, 6.0), "w8": (7.8, 7.8), "nest": (9.0, 9.3)},
        source="BitNest (arXiv 2610.02800): longest contexts A.6.2, weights 4.4, tok/s A.6.1",
    ),
}


def claims(model: str, device: str) -> Claims | None:
    """Return what was published for a known shape on a board, or None."""
    return _CLAIMS.get((model, device.removesuffix("-super")))
