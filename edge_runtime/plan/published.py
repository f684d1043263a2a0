"""What others published for a model on a board, to be shown beside a plan and never fitted to."""

from __future__ import annotations

import msgspec


class Claims(msgspec.Struct, frozen=True, kw_only=True):
    """Longest context by layout, and decode tok/s; with the source."""

    contexts: dict[str, int]
    decode_tok_s: dict[str, tuple[float, float]]  # from, to
    source: str


_BITNEST = "BitNest (arXiv 2610.02800), A.6.1 and A.6.2"
_CLAIMS = {  # (shape, board without the suffix of its firmware)
    ("llama-2-7b-32k", "orin-nx-16gb"): Claims(
        contexts={"fp16": 2048, "w8": 6144, "nest": 10240},  # 2K, 6K, 10K in Table 14's text
        decode_tok_s={"fp16": (6.0, 6.0), "w8": (7.8, 7.8), "nest": (9.0, 9.3)},
        source=_BITNEST,
    ),
}


def contexts(model: str, device: str) -> Claims | None:
    """Return what was published for a known shape on a board, or None."""
    return _CLAIMS.get((model, device.removesuffix("-super")))
