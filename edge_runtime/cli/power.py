"""`bitnest-edge power watch|parse`: the power rails live, or a log of them summed up.

Invariant: with --json stdout holds the document alone, and text for people goes to stderr. A value
that is not known is null, never 0. `parse` reads and writes line by line: a log may be of any size.
Ctrl-C ends `watch` with its summary, and no child is left.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import click

from edge_runtime.cli.options import Finite, Whole, json_option, print_document, user_path

if TYPE_CHECKING:
    from edge_runtime.power import Meter, Record, Sample
    from edge_runtime.power.logfile import LogTotals

power_source_option = click.option(
    "--power-source",
    default="auto",
    show_default=True,
    metavar="auto|tegrastats|ina3221|jtop|nvml|replay:FILE|none",
    help="Where power is read.",
)
_LOOK_S = 0.05
_MOST_RAILS = 256  # no board has as many; a broken log may
_WATCHED = "watch"


@click.group()
def command() -> None:
    """Watch the power rails, or sum up a log of them."""


# ---- watch


@command.command()
@power_source_option
@click.option(
    "--interval",
    type=Finite(0.02, 3600),
    default=1.0,
    show_default=True,
    metavar="SECONDS",
    help="Time between readings.",
)
@click.option("--count", type=Whole(min=1), metavar="N", help="End after N readings.")
@json_option
def watch(power_source: str, interval: float, count: int | None, as_json: bool) -> None:
    """Show every rail live, the total first, until Ctrl-C or for --count readings."""
    from edge_runtime.power import PowerUnavailable, open_meter

    if power_source == "none":
        raise PowerUnavailable("there is nothing to watch with --power-source none")
    meter = open_meter(power_source, interval_s=interval)
    stats: dict[str, RailStats] = {}
    interrupted = False
    with _display(meter, as_json) as show:
        try:
            meter.start()
            with meter.window(_WATCHED):
                for sample in _samples(meter, interval, count):
                    for name, mw in {"total": sample.total_mw, **sample.rails}.items():
                        stats.setdefault(name, RailStats()).add(mw)
                    show(sample, stats)
        except KeyboardInterrupt:
            interrupted = True
        finally:
            meter.stop(tail=False)
    document = watch_document(meter, stats)
    for line in watch_lines(document):
        click.echo(line, err=as_json)
    if as_json:
        print_document(document)
    if interrupted:
        raise KeyboardInterrupt
    if meter.ended and document["readings"] != count:
        raise PowerUnavailable(
            f"the power source ended after {document['readings']} readings: {meter.notes[-1]}"
        )


def _samples(meter: Meter, interval_s: float, count: int | None) -> Iterator[Sample]:
    """Yield a new reading at every interval, until `count` of them or the source's end."""
    given, last_s = 0, float("-inf")
    due = time.monotonic()
    while count is None or given < count:
        sample = meter.latest()
        now = time.monotonic()
        if sample is not None and sample.time_s > last_s and now >= due:
            last_s, given = sample.time_s, given + 1
            due = max(now, due) + 0.9 * interval_s  # the source keeps the time
            yield sample
        elif meter.ended:
            return
        time.sleep(min(_LOOK_S, interval_s / 4))


class RailStats:
    """Mean, least and most of what was shown of a rail, in mW."""

    def __init__(self) -> None:
        self.count = 0
        self.now = self.sum = 0.0
        self.least, self.most = float("inf"), float("-inf")

    def add(self, mw: float) -> None:
        """Add a reading."""
        self.count += 1
        self.now = mw
        self.sum += mw
        self.least, self.most = min(self.least, mw), max(self.most, mw)

    def document(self) -> dict[str, float]:
        """Return the figures for a document."""
        return {
            "now_mw": self.now,
            "mean_mw": self.sum / self.count,
            "min_mw": self.least,
            "max_mw": self.most,
        }


Show = Callable[["Sample", dict[str, RailStats]], None]


@contextlib.contextmanager
def _display(meter: Meter, as_json: bool) -> Iterator[Show]:
    """Show readings as a table that stays in place on a terminal, else as a line each."""
    stream = sys.stderr if as_json else sys.stdout
    click.echo(f"power from {meter.source}: {meter.rail} ({meter.scope})", err=as_json)
    for reason in meter.why:
        click.echo(f"  {reason}", err=True)
    if not stream.isatty():
        yield lambda sample, _: click.echo(reading_line(meter, sample), err=as_json)
        return
    from rich.console import Console
    from rich.live import Live

    with Live(console=Console(file=stream), auto_refresh=False) as live:
        yield lambda sample, stats: live.update(_table(meter, sample, stats), refresh=True)


def reading_line(meter: Meter, sample: Sample) -> str:
    """Return one reading as a line."""
    rails = "  ".join(f"{name} {mw} mW" for name, mw in sample.rails.items())
    return f"{meter.rail} {sample.total_mw / 1000:.2f} W   {rails}"


def _table(meter: Meter, sample: Sample, stats: dict[str, RailStats]) -> Any:
    from rich.table import Table

    table = Table(caption=_state(sample.record), caption_justify="left")
    table.add_column("rail")
    for head in ("now W", "mean W", "min W", "max W"):
        table.add_column(head, justify="right")
    for name, rail in stats.items():
        cells = (rail.now, rail.sum / rail.count, rail.least, rail.most)
        label = f"total ({meter.scope}): {meter.rail}" if name == "total" else name
        table.add_row(label, *(f"{mw / 1000:.2f}" for mw in cells))
    return table


def _state(record: Record | None) -> str | None:
    """Return what else a line of tegrastats said."""
    if record is None:
        return None
    parts = []
    if record.ram_used_mb is not None:
        parts.append(f"RAM {record.ram_used_mb}/{record.ram_total_mb} MB")
    if record.gpu_load_percent is not None:
        parts.append(f"GPU {record.gpu_load_percent} %")
    if record.gpu_mhz is not None:
        parts.append(f"{record.gpu_mhz} MHz")
    if record.temperatures_c:
        name, hottest = max(record.temperatures_c.items(), key=lambda item: item[1])
        parts.append(f"{name} {hottest:.0f} °C")
    return " · ".join(parts) or None


def watch_document(meter: Meter, stats: dict[str, RailStats]) -> dict[str, Any]:
    """Return what was watched as a document."""
    total = stats.get("total")
    energy = meter.energy(_WATCHED)
    return {
        "source": meter.source,
        "rail": meter.rail,
        "scope": meter.scope,
        "why": meter.why,
        "notes": meter.notes,
        "readings": total.count if total else 0,
        "duration_s": energy.duration_s,
        "mean_mw": total.document()["mean_mw"] if total else None,
        "energy_j": energy.gross_j,
        "energy_low_j": energy.low_j,
        "energy_high_j": energy.high_j,
        "energy_note": energy.note,
        "rails": {name: rail.document() for name, rail in stats.items() if name != "total"},
    }


def watch_lines(document: dict[str, Any]) -> list[str]:
    """Return the summary for people."""
    mean, energy = document["mean_mw"], document["energy_j"]
    text = f"{document['readings']} readings in {document['duration_s']:.1f} s"
    if mean is not None:
        text += f", mean {mean / 1000:.2f} W"
    if energy is not None:
        half = (document["energy_high_j"] - document["energy_low_j"]) / 2
        text += f", {energy:.1f} ± {half:.1f} J"
    elif document["energy_note"]:
        text += f" (energy: {document['energy_note']})"
    return [f"{text}; {document['rail']} ({document['scope']})", *document["notes"]]


# ---- parse


@command.command()
@click.argument("log", metavar="LOG")
@click.option(
    "--interval",
    type=Finite(min=0, min_open=True, max=86400),
    metavar="SECONDS",
    help="Time between lines.  [default: from the dates, else 1]",
)
@json_option
def parse(log: str, interval: float | None, as_json: bool) -> None:
    """Sum up a log of tegrastats: duration, mean power, energy.

    LOG is a file, or - for stdin. Lines that are no lines of tegrastats are passed over.
    """
    from edge_runtime.power.logfile import HINT, LogSummary, PowerLogError, read_records

    summary = LogSummary()
    rails: dict[str, RailStats] = {}
    name = "stdin" if log == "-" else log
    with _opened(log) as stream:
        for record in read_records(stream, name):
            if as_json:
                sys.stdout.write(", " if summary.lines else '{"lines": [')
                sys.stdout.write(json.dumps(line_document(record), ensure_ascii=False))
            summary.add(record)
            for rail, mw in record.rails.items():
                if rail in rails or len(rails) < _MOST_RAILS:
                    rails.setdefault(rail, RailStats()).add(mw)
    if not summary.lines:
        raise PowerLogError(f"{name} holds no line of tegrastats", HINT)
    totals = summary.totals(interval)
    for line in parse_lines(totals, rails):
        click.echo(line, err=as_json)
    if as_json:
        text = json.dumps(summary_document(totals, rails), ensure_ascii=False, allow_nan=False)
        click.echo(f'], "summary": {text}}}')


@contextlib.contextmanager
def _opened(log: str) -> Iterator[IO[bytes]]:
    from edge_runtime.power.logfile import open_log

    if log == "-":
        yield sys.stdin.buffer
        return
    with open_log(Path(user_path(log))) as stream:
        yield stream


def line_document(record: Record) -> dict[str, Any]:
    """Return a line as a document."""
    return {
        "total_mw": record.total_mw,
        "total_rail": record.total_rail,
        "rails": record.rails,
        "ram_used_mb": record.ram_used_mb,
        "ram_total_mb": record.ram_total_mb,
        "date": record.date.isoformat(sep=" ") if record.date else None,
    }


def summary_document(totals: LogTotals, rails: dict[str, RailStats]) -> dict[str, Any]:
    """Return the summary as a document."""
    return {
        "duration_s": totals.duration_s,
        "mean_mw": totals.mean_mw,
        "energy_j": totals.energy_j,
        "lines": totals.lines,
        "lines_with_total": totals.lines_with_total,
        "total_rails": list(totals.rails),
        "duration_from": totals.how,
        "rails": {name: rail.document() for name, rail in rails.items()},
    }


def parse_lines(totals: LogTotals, rails: dict[str, RailStats]) -> list[str]:
    """Return the summary for people."""
    seconds = "unknown" if totals.duration_s is None else f"{totals.duration_s:.1f} s"
    lines = [f"lines      {totals.lines}", f"duration   {seconds} ({totals.how})"]
    if totals.mean_mw is None:
        lines.append("mean power unknown: no line has a known total")
    else:
        lines.append(f"total      {' and '.join(totals.rails)}")
        lines.append(f"mean power {totals.mean_mw / 1000:.3f} W")
        lines.append("energy     " + _joules(totals.energy_j))
    if 0 < totals.lines_with_total < totals.lines:
        missing = totals.lines - totals.lines_with_total
        lines.append(f"note       {missing} lines have no known total; the mean is of the others")
    if len(totals.rails) > 1:
        lines.append("note       the log mixes boards: its mean power means little")
    for name, rail in rails.items():
        mean = rail.sum / rail.count / 1000
        lines.append(f"  {name:<18}{mean:9.3f} W mean {rail.most / 1000:9.3f} W most")
    return lines


def _joules(energy_j: float | None) -> str:
    return "unknown" if energy_j is None else f"{energy_j:.1f} J"
