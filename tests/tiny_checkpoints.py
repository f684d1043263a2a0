"""Tiny random models, converted: what decoding, format and pipeline tests run on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tiny_models

from edge_runtime.convert.pipeline import Conversion, ConvertOptions
from edge_runtime.convert.source import open_source

CALIBRATION = "".join(
    f"The {i}th word of the world is hello, and {i * 37 % 101} in the other hand is nothing.\n"
    for i in range(60)
)


def tiny_options(folder: Path, **options: Any) -> ConvertOptions:
    """Options with one short calibration window from a text of our own."""
    file = folder / "calibration.txt"
    file.write_text(CALIBRATION)
    return ConvertOptions(**({"calibration": file, "calibration_tokens": 512} | options))


def convert_tiny(
    folder: Path,
    architecture: str = "llama",
    *,
    options: dict[str, Any] | None = None,
    **model: Any,
) -> Path:
    """Write a random model into `folder`, convert it and return the checkpoint's path.

    `options` go to `ConvertOptions`, everything else to `tiny_models.write_hf`.
    """
    source = tiny_models.write_hf(folder / "source", architecture, **model)
    out = folder / "checkpoint"
    chosen = tiny_options(folder, **(options or {}))
    Conversion(open_source(source), out, chosen, lambda *_: None).run()
    return out
