"""The document of `report.py` for people, 80 columns wide; imports neither torch nor Triton."""

from __future__ import annotations

import textwrap
from typing import Any

WIDTH = 80
BASE = "fp16"  # the peer that the last column compares with; where it is missing, the fastest


def head_lines(document: dict[str, Any]) -> list[str]:
    """The GPU, its copy bandwidth, versions, peers, and the table's head."""
    gpu, copy = document["gpu"], document["copy_gb_s"]
    peers = "; ".join(f"{name}: {what}" for name, what in document["peers"].items())
    paragraphs = [
        f"{gpu['name']}, {gpu['num_sms']} SMs, compute capability {gpu['capability']}; "
        f"copy {copy['median']:.0f} GB/s ({copy['min']:.0f} to {copy['max']:.0f})",
        f"torch {document['torch']}, Triton {document['triton']}; {document['weights']}; groups "
        f"of {document['sizes']['group_size']}",
        f"peers: {peers}",
    ]
    lines = [line for text in paragraphs for line in textwrap.wrap(text, WIDTH)]
    return [
        *lines,
        f"{'op':<18}{'shape':<16}{'kind':<11}{'rows':>4}{'us':>9}{'GB/s':>7}{'of copy':>8}"
        f"{'x ' + BASE:>7}",
    ]


def line(row: dict[str, Any]) -> str:
    """One figure; on a slice bytes per clock and multiprocessor in place of GB/s."""
    ratio = row["faster_than"].get(BASE) or min(row["faster_than"].values(), default=None)
    start = (
        f"{row['op'][:17]:<18}{row['shape'][:15]:<16}{row['kind'][:11]:<11}{row['rows']:>4}"
        f"{row['seconds']['median'] * 1e6:>9.2f}"
    )
    end = f"{ratio:>7.2f}" if ratio is not None else ""
    if "bytes_per_clock" in row:
        return f"{start}{row['bytes_per_clock']:>6.1f} B/clk/SM{end}".rstrip()
    return f"{start}{row['gb_s']:>7.1f}{row['share_of_copy']:>8.0%}{end}".rstrip()


def slice_lines(document: dict[str, Any]) -> list[str]:
    """What the rows in bytes per clock were measured on."""
    found = document["slice"]
    if found is None:
        return []
    if found["why_not"]:
        text = f"slice: unavailable: {found['why_not']}"
    elif found["whole_gpu"]:
        text = f"slice: the whole GPU, {found['num_sms']} SMs, code for sm_87"
    else:
        text = (
            f"slice: code for sm_87 on {found['num_sms']} SMs of this GPU, clocks read there; an "
            "Orin NX 16 GB at 918 MHz needs 13.9 B/clk/SM for its pin bandwidth"
        )
    return textwrap.wrap(text, WIDTH)
