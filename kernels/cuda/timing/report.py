"""Run what was asked for and return one document: the copy bandwidth first, then op by op.

    document: gpu{…} sizes{…} peers{name: version or why not} copy_gb_s{median,min,max}
        rows[{section,op,shape,kind,rows,peer,bytes,seconds{…},gb_s,share_of_copy,faster_than{…}}]
        slice{num_sms,why|null,rows[{… ,clocks{…},mhz,bytes_per_clock}]}

faster_than: seconds of each peer of the same op, shape and rows over ours. bytes_per_clock: of one
multiprocessor of the slice. Only the slice runs code for sm_87; the rest is native.
"""

from __future__ import annotations

import contextlib
import itertools
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

import torch

from edge_runtime.errors import BackendUnavailable, BudgetError
from edge_runtime.kernels.cuda import require_gpu, require_triton
from edge_runtime.kernels.cuda.timing import peers, prefill, registry
from edge_runtime.kernels.cuda.timing import slice as sm_slice
from edge_runtime.kernels.cuda.timing.entry import Entry, Sizes
from edge_runtime.kernels.cuda.timing.timer import Sample, Timer, copy_bandwidth, spread

WHAT = ("linear", "attention", "small", "slice", "prefill")
Told = Callable[[dict[str, Any]], None]


def measure(
    sizes: Sizes,
    *,
    only: Sequence[str] = WHAT,
    turns: int = 9,
    head: Told = lambda document: None,
    told: Told = lambda row: None,
) -> dict[str, Any]:
    """Measure and return the document. head gets it before its rows are there; told gets each row.

    Raises BackendUnavailable without a GPU or Triton, BudgetError where the GPU is too small.
    """
    require_gpu()
    require_triton()
    try:
        return _measure(sizes, only, turns, head, told)
    except torch.cuda.OutOfMemoryError as error:
        raise BudgetError(
            f"inputs of these sizes do not fit the GPU: {str(error).splitlines()[0]}",
            "measure less at a time (--only), or a smaller model",
        ) from error


def _measure(
    sizes: Sizes, only: Sequence[str], turns: int, head: Told, told: Told
) -> dict[str, Any]:
    timer = Timer()
    copied = copy_bandwidth(timer, turns)
    document = _head(sizes, copied, turns)
    head(document)
    copy = statistics.median(copied)
    rows = document["rows"]
    for section, functions in registry.SECTIONS.items():
        if section in only:
            for function in functions:
                found = partial(_row, section=section, copy=copy, clocks=False)
                rows += _measured(timer, function(sizes), turns, found, told)
    for M in prefill.ROWS if "prefill" in only else ():
        found = partial(_row, section="prefill", copy=copy, clocks=False)
        entries = prefill.native(sizes.inner, sizes.hidden, M, sizes.group_size)
        rows += _measured(timer, entries, turns, found, told)
    if {"slice", "prefill"} & set(only):
        document["slice"] = _slice(sizes, only, turns, told)
    return document


def _slice(sizes: Sizes, only: Sequence[str], turns: int, told: Told) -> dict[str, Any]:
    """Time code for sm_87 on a slice of the GPU, or say why there is none."""
    rows: list[dict[str, Any]] = []
    with contextlib.ExitStack() as stack:
        try:
            timer = stack.enter_context(sm_slice.open_slice())
        except BackendUnavailable as error:
            return {"num_sms": None, "whole_gpu": False, "why_not": error.message, "rows": rows}
        row = partial(_row, copy=None, clocks=True, num_sms=timer.num_sms)
        if "slice" in only:
            found = partial(row, section="slice")
            rows += _measured(timer, sm_slice.entries(sizes, timer), turns, found, told)
        for M in prefill.ROWS if "prefill" in only else ():
            found = partial(row, section="prefill_slice")
            entries = prefill.on_slice(timer, sizes.inner, sizes.hidden, M, sizes.group_size)
            rows += _measured(timer, entries, turns, found, told)
        return {"num_sms": timer.num_sms, "whole_gpu": timer.whole, "why_not": None, "rows": rows}


def _measured(
    timer: Timer,
    entries: Iterable[Entry],
    turns: int,
    row: Callable[..., dict[str, Any]],
    told: Told,
) -> list[dict[str, Any]]:
    """Time entries; what has the same name, shape and rows in turns."""
    rows: list[dict[str, Any]] = []
    for _, group in itertools.groupby(entries, lambda e: (e.name, e.shape, e.rows)):
        some = list(group)
        calls = [[partial(e.call, i) for i in range(e.num_copies)] for e in some]
        samples = timer.measure(calls, turns, clocks=row.keywords["clocks"])  # type: ignore[attr-defined]
        timed = list(zip(some, samples, strict=True))
        others: dict[str, tuple[Entry, Sample]] = {}  # the fastest of each kind
        for entry, sample in sorted(timed, key=lambda t: t[1].median):
            if entry.peer:
                others.setdefault(entry.kind, (entry, sample))
        beside = {kind: sample for kind, (_, sample) in others.items()}
        found = [row(e, x, beside) for e, x in timed if not e.peer]
        found += [row(e, x, {}) for e, x in others.values()]
        for one in found:
            told(one)
        rows += found
    return rows


def _row(
    entry: Entry,
    sample: Sample,
    others: dict[str, Sample],
    *,
    section: str,
    copy: float | None,
    clocks: bool,
    num_sms: int = 0,
) -> dict[str, Any]:
    speed = entry.num_bytes / sample.median
    row = {
        "section": section,
        "op": entry.name,
        "shape": entry.shape,
        "kind": entry.kind,
        "rows": entry.rows,
        "peer": entry.peer,
        "bytes": entry.num_bytes,
        "seconds": spread(sample.seconds),
        "gb_s": speed / 1e9,
        "share_of_copy": None if copy is None else speed / copy,
        "faster_than": {name: x.median / sample.median for name, x in others.items()},
    }
    if clocks:
        ticks = statistics.median(sample.clocks)
        row["clocks"] = spread(sample.clocks)
        row["mhz"] = statistics.median(sample.hz) / 1e6
        row["bytes_per_clock"] = entry.num_bytes / num_sms / ticks
    return row


def gpu() -> dict[str, Any]:
    """Name and sizes of the current GPU."""
    found = torch.cuda.get_device_properties(torch.cuda.current_device())
    return {
        "name": found.name,
        "capability": f"{found.major}.{found.minor}",
        "num_sms": found.multi_processor_count,
        "l2_bytes": found.L2_cache_size,
    }


def _head(sizes: Sizes, copied: list[float], turns: int) -> dict[str, Any]:
    import triton

    return {
        "gpu": gpu(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "triton": triton.__version__,
        "peers": peers.versions(),
        "sizes": asdict(sizes),
        "weights": "random planes of these sizes; none are read",
        "turns": turns,
        "copy_gb_s": spread([x / 1e9 for x in copied]),
        "rows": [],
        "slice": None,
    }
