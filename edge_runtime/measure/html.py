"""A profile as one HTML file that opens without a network: tables, and plots drawn as SVG.

Invariant: everything that comes from a document is escaped; a series is drawn where it has numbers
and nowhere else. Colours are told apart without colour vision too (Okabe and Ito, 2008).
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from html import escape
from typing import Any

from edge_runtime.measure import report

Document = dict[str, Any]
Points = Sequence[tuple[float, float]]
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
WIDTH, HEIGHT, LEFT, BOTTOM, TOP, RIGHT = 560, 300, 64, 44, 16, 130
STYLE = (
    "body{font:15px/1.45 system-ui,sans-serif;max-width:74em;margin:2em auto;padding:0 1em}"
    "table{border-collapse:collapse}td,th{padding:.2em .7em;border-bottom:1px solid #ddd;"
    "text-align:right}td:nth-child(2),th:nth-child(2){text-align:left}"
    "figure{display:inline-block;margin:1em 1em 0 0}figcaption{font-weight:600}"
    "svg text{font:12px system-ui,sans-serif}pre{overflow:auto;background:#f6f6f6;padding:1em}"
    ".warning{color:#a33}"
)


def page(document: Document) -> str:
    """Return the report of `bitnest-edge profile` as HTML."""
    rows = document["rows"]
    parts = [
        f"<h1>{escape(str(document['model']))}</h1>",
        *(f"<p>{escape(line)}</p>" for line in list(report.lines(document))[:1]),
        *(f'<p class="warning">{escape(w)}</p>' for w in document["warnings"]),
        _figures(rows),
        _table(rows),
        *(f"<p>{escape(line)}</p>" for line in report.energy_lines(document["energy"])),
    ]
    proof = list(report.proof_lines(document["max_context"]))
    if proof:
        parts.append("<pre>" + escape("\n".join(proof)) + "</pre>")
    text = json.dumps(document, indent=1, ensure_ascii=False)
    parts.append(f"<details><summary>The document</summary><pre>{escape(text)}</pre></details>")
    title = escape(f"bitnest-edge profile: {document['model']}")
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title>'
        f"<style>{STYLE}</style>" + "\n".join(parts) + "</html>\n"
    )


def _table(rows: Sequence[Document]) -> str:
    heads = (
        *("context", "mode", "status", "prefill tok/s", "decode tok/s", "of w8", "of fp16"),
        *("acceptance", "tokens/cycle", "peak", "planned", "J/token"),
    )
    body = []
    for row in rows:
        cells = (
            *(str(row["context"]), report.label(row), row["status"]),
            *(report.number(row["prefill_tok_s"], 0), report.number(row["decode_tok_s"])),
            *(report.number(row["speedup_vs_w8"], 2), report.number(row["speedup_vs_fp16"], 2)),
            *(report.number(row["acceptance"], 2), report.number(row["tokens_per_cycle"], 2)),
            *(report.size(row["peak_bytes"]), report.size(row["planned_bytes"])),
            report.joules(row),
        )
        body.append("<tr>" + "".join(f"<td>{escape(c)}</td>" for c in cells) + "</tr>")
    head = "".join(f"<th>{h}</th>" for h in heads)
    return f"<table><tr>{head}</tr>{''.join(body)}</table>"


def _figures(rows: Sequence[Document]) -> str:
    def by_context(value: str) -> dict[str, Points]:
        return _series(rows, lambda row: row["context"], value)

    drafts = [r for r in rows if r["mode"] == "nest" and r["gamma"]]
    acceptance: dict[str, Points] = {}
    for context in sorted({r["context"] for r in drafts}):
        here = [r for r in drafts if r["context"] == context and r["acceptance"] is not None]
        acceptance[f"{context} tokens"] = sorted((r["gamma"], r["acceptance"]) for r in here)
    figures = [
        ("Decoding, tok/s against context", lines(by_context("decode_tok_s"))),
        ("Energy, J/token against context", lines(by_context("j_per_token"))),
        ("Acceptance against tokens drafted", lines(acceptance)),
        ("Peak memory and plan, MiB", bars(_memory(rows))),
    ]
    return "".join(
        f"<figure><figcaption>{escape(title)}</figcaption>{drawn}</figure>"
        for title, drawn in figures
        if drawn
    )


def _series(
    rows: Sequence[Document], x: Callable[[Document], float], value: str
) -> dict[str, Points]:
    found: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        if row[value] is not None:
            found.setdefault(report.label(row), []).append((x(row), row[value]))
    return {name: sorted(points) for name, points in found.items()}


def _memory(rows: Sequence[Document]) -> list[tuple[str, dict[str, float], float | None]]:
    """For each context the parts of the largest peak, in MiB, and the plan."""
    found = []
    for context in sorted({r["context"] for r in rows}):
        here = [r for r in rows if r["context"] == context and r["peak_bytes"]]
        if not here:
            continue
        row = max(here, key=lambda r: r["peak_bytes"])
        memory = row["memory"]
        weights, kv = memory["weights_bytes"], memory["kv_bytes"]
        parts = {"weights": weights, "KV cache": kv}
        parts["workspace, runtime"] = max(0, row["peak_bytes"] - weights - kv)
        plan = row["planned_bytes"]
        scaled = {name: count / report.MIB for name, count in parts.items()}
        found.append((f"{context}", scaled, None if plan is None else plan / report.MIB))
    return found


def nice_step(span: float) -> float:
    """Return 1, 2 or 5 times a power of ten: about five steps in a span."""
    rough = span / 5
    power = 10.0 ** math.floor(math.log10(rough))
    return power * next(m for m in (1, 2, 5, 10) if rough <= m * power * 1.000001)


class _Axes:
    """Maps numbers to places and draws the frame; y begins at 0."""

    def __init__(self, x0: float, x1: float, y1: float) -> None:
        self.x0, self.x1 = x0, x1 if x1 > x0 else x0 + 1
        self.step = nice_step(y1 if y1 > 0 else 1)
        self.y1 = self.step * math.ceil((y1 if y1 > 0 else 1) / self.step)
        self.parts: list[str] = []
        for i in range(round(self.y1 / self.step) + 1):
            y = self.y(i * self.step)
            self.parts.append(
                f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>'
                f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{i * self.step:g}</text>'
            )

    def x(self, value: float) -> float:
        share = (value - self.x0) / (self.x1 - self.x0)
        return LEFT + 12 + share * (WIDTH - LEFT - RIGHT - 24)

    def y(self, value: float) -> float:
        return HEIGHT - BOTTOM - value / self.y1 * (HEIGHT - BOTTOM - TOP)

    def tick(self, x: float, text: str) -> None:
        y = HEIGHT - BOTTOM + 18
        self.parts.append(f'<text x="{x:.1f}" y="{y}" text-anchor="middle">{escape(text)}</text>')

    def key(self, number: int, name: str) -> None:
        y = TOP + 8 + 18 * number
        self.parts.append(
            f'<rect x="{WIDTH - RIGHT + 10}" y="{y - 8}" width="12" height="12" '
            f'fill="{COLOURS[number % len(COLOURS)]}"/>'
            f'<text x="{WIDTH - RIGHT + 28}" y="{y + 3}">{escape(name)}</text>'
        )

    def svg(self) -> str:
        return (
            f'<svg width="{WIDTH}" height="{HEIGHT}" role="img">' + "".join(self.parts) + "</svg>"
        )


def lines(series: dict[str, Points]) -> str:
    """Draw lines with points; nothing without numbers."""
    drawn = {name: points for name, points in series.items() if points}
    if not drawn:
        return ""
    xs = sorted({x for points in drawn.values() for x, _ in points})
    axes = _Axes(xs[0], xs[-1], max(y for points in drawn.values() for _, y in points))
    for x in xs:
        axes.tick(axes.x(x), f"{x:g}")
    for number, (name, points) in enumerate(drawn.items()):
        colour = COLOURS[number % len(COLOURS)]
        places = [(axes.x(x), axes.y(y)) for x, y in points]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        axes.parts.append(
            f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>'
            + "".join(
                f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{colour}"/>' for x, y in places
            )
        )
        axes.key(number, name)
    return axes.svg()


def bars(stacks: Sequence[tuple[str, dict[str, float], float | None]]) -> str:
    """Draw stacked bars, each with a mark (the plan) beside it."""
    if not stacks:
        return ""
    tops = [max(sum(parts.values()), mark or 0) for _, parts, mark in stacks]
    axes = _Axes(0, len(stacks), max(tops))
    names = list(stacks[0][1])
    for i, (label, parts, mark) in enumerate(stacks):
        x, width = axes.x(i + 0.2), axes.x(i + 0.8) - axes.x(i + 0.2)
        level = 0.0
        for number, name in enumerate(names):
            top, bottom = axes.y(level + parts[name]), axes.y(level)
            axes.parts.append(
                f'<rect x="{x:.1f}" y="{top:.1f}" width="{width:.1f}" '
                f'height="{bottom - top:.1f}" fill="{COLOURS[number]}"/>'
            )
            level += parts[name]
        if mark is not None:
            y = axes.y(mark)
            axes.parts.append(
                f'<line x1="{x - 6:.1f}" x2="{x + width + 6:.1f}" y1="{y:.1f}" y2="{y:.1f}" '
                'stroke="#000" stroke-width="2" stroke-dasharray="4 3"/>'
            )
        axes.tick(x + width / 2, label)
    for number, name in enumerate(names):
        axes.key(number, name)
    axes.parts.append(
        f'<text x="{WIDTH - RIGHT + 10}" y="{TOP + 12 + 18 * len(names)}">- - planned</text>'
    )
    return axes.svg()
