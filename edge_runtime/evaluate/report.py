"""Rows of a document: one value each, with its interval and what was counted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from edge_runtime.evaluate.resume import Record
from edge_runtime.evaluate.stats import Estimate

ALL = "all"
DIGITS = 6


def with_total(records: Mapping[str, Sequence[Record]]) -> dict[str, list[Record]]:
    """Return records by workload and, where there are several, of all together."""
    found = {name: list(rows) for name, rows in records.items()}
    if len(found) > 1:
        found[ALL] = [record for rows in records.values() for record in rows]
    return found


def row(
    task: str, workload: str, view: str, metric: str, estimate: Estimate, **more: Any
) -> dict[str, Any]:
    """Return one value as a document carries it."""
    return {
        "task": task,
        "workload": workload,
        "view": view,
        "metric": metric,
        "value": rounded(estimate.value) if estimate.n else None,  # nothing was measured
        "ci95": None if estimate.ci95 is None else [rounded(x) for x in estimate.ci95],
        "n": estimate.n,
        "items": estimate.items,
    } | more


def rounded(x: float) -> float:
    """Round to DIGITS significant digits."""
    return float(f"{x:.{DIGITS}g}")


def lines(document: Mapping[str, Any]) -> list[str]:
    """Return the tables for people; of differences those over all data, without JS."""
    found = _table(document["rows"])
    pairs = document["pairs"]
    last = pairs[-1]["workload"] if pairs else ""
    shown = [p for p in pairs if p["workload"] == last and p["metric"] != "js"]
    if shown:
        found += ["", "in pairs, item by item:", *_table(shown)]
    found += _slot_lines(document["rows"])
    if skipped := document.get("skipped_too_long", 0):
        found.append(f"left out: {skipped} prompts are too long for the context")
    return found + [f"{key}: {text}" for key, text in document.get("notes", {}).items()]


def _slot_lines(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Acceptance of each draft slot, where there are any."""
    found = []
    for r in rows:
        if len(r.get("slots", ())) > 1:
            shares = " ".join("-" if s["acceptance"] is None else f"{s['acceptance']:.2f}"
                              for s in r["slots"])  # fmt: skip
            found.append(f"{r['workload']}, {r['view']}: {shares}")
    return ["", "acceptance of slot 1, 2, …:", *found] if found else []


def _table(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Columns as wide as what stands in them."""
    head = ("workload", "view", "metric", "value", "95 % interval", "n", "items")
    cells = [head]
    for r in rows:
        view = str(r["view"]) + (f" - {r['minus']}" if "minus" in r else "")
        view += f" / {r['over']}" if "over" in r else ""
        metric = str(r["metric"]) + (f" with {r['against']}" if "against" in r else "")
        ci = r["ci95"]
        interval = "" if ci is None else f"{ci[0]:.4g} to {ci[1]:.4g}"
        cells.append(
            (
                r["workload"],
                view,
                metric,
                "-" if r["value"] is None else f"{r['value']:.4g}",
                interval,
                str(r["n"]),
                str(r["items"]),
            )
        )
    widths = [max(len(str(c[i])) for c in cells) for i in range(len(head))]
    text = [3, 4, 5, 6]
    return [
        "  ".join(
            str(c).rjust(w) if i in text else str(c).ljust(w)
            for i, (c, w) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in cells
    ]
