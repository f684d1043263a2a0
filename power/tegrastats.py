"""Lines of NVIDIA's tegrastats, of every release from L4T r24 to r39.

Invariant: `parse_line` never raises and never invents: every rail it returns stands in the line as
that name and number, a field that is missing, torn or said twice with two values is unknown, and a
total needs all its rails. A rail prints now/mean/max; only the first number is used, because the
mean runs since tegrastats started. Fields are found by name: their order differs between captures.

What looks like a value but is none: `EMC_FREQ 0%` without a clock (debugfs was not readable),
`GR3D_FREQ @[..]` (load unknown), `-256C` (block without power), `PMIC@100C` or 50C (a constant),
`NC` (channel not connected). A line may hold several records glued together, torn ones among them:
the last complete one counts.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime
from typing import IO

from edge_runtime.power.rails import INPUT_RAILS, TotalRule, total_rule

MAX_LINE_BYTES = 64 << 10  # a real line has less than 2 KiB

# a literal in front lets the regex engine skip to it; the look-behind after it is the word's edge
_START = re.compile(r"RAM(?<![A-Za-z_]RAM)[ \t]+(?=\d)", re.ASCII)
_DATE = re.compile(r"(\d\d-\d\d-\d{4} \d\d:\d\d:\d\d)[ \t]+\Z", re.ASCII)
_DATE_CHARS = 40
_RAM = re.compile(r"RAM[ \t]+(\d{1,7})/(\d{1,7})MB(?![A-Za-z0-9])", re.ASCII)
_SWAP = re.compile(r"SWAP(?<!\SSWAP)[ \t]+(\d{1,7})/(\d{1,7})MB(?![A-Za-z0-9])", re.ASCII)
# the first number is whole when a unit or a slash ends it; what follows may be torn
_RAIL = re.compile(
    r"(?<!\S)([A-Z][A-Z0-9_]*)[ \t]+(-?\d{1,7})"
    r"(?:(?:mW)?/-?\d{0,7}(?:mW?)?(?:/-?\d{0,7}(?:mW?)?)?|mW)(?!\S)",
    re.ASCII,
)
_BARE_RAIL = re.compile(
    r"(?<!\S)((?:VDD|VIN|POM)[A-Z0-9_]*)[ \t]+(-?\d{1,7})(?=[ \t]+\S)", re.ASCII
)
_INPUT = re.compile(rf"(?<!\S)({'|'.join(INPUT_RAILS)})(?!\S)", re.ASCII)
_GPU = re.compile(
    r"GR3D(?<!\SGR3D)(?:_FREQ)?[ \t]+(?:(\d{1,3})%)?(?:@(?:(\d{1,5})|\[(\d[\d,]{0,60})\]))?(?!\S)",
    re.ASCII,
)
_EMC = re.compile(r"EMC(?<!\SEMC)(?:_FREQ)?[ \t]+(\d{1,3})%@(\d{1,5})(?!\S)", re.ASCII)
_TEMPERATURE = re.compile(
    r"(?<!\S)([A-Za-z][A-Za-z0-9_]*)@(-?\d{1,4}(?:\.\d{1,4})?)C(?:/\S*)?(?!\S)", re.ASCII
)
_NOT_RAILS = frozenset({"RAM", "SWAP", "IRAM", "NC"})
_OFF_C = -256.0
_PLACEHOLDERS_C = (50.0, 100.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """What one line says; None is unknown. Powers in mW are those of now."""

    rails: dict[str, int] = field(default_factory=dict)
    total_mw: int | None = None
    total_rail: str | None = None
    scope: str | None = None
    ram_used_mb: int | None = None
    ram_total_mb: int | None = None
    swap_used_mb: int | None = None
    swap_total_mb: int | None = None
    gpu_load_percent: int | None = None
    gpu_mhz: int | None = None
    emc_load_percent: int | None = None
    emc_mhz: int | None = None
    temperatures_c: dict[str, float] = field(default_factory=dict)
    date: datetime | None = None  # local time of the board, no zone, to the second


@dataclass(frozen=True, slots=True)
class _Part:
    """One record's text with the rails in it; `seen` also counts input rails it cannot read."""

    text: str
    date: str | None
    rails: dict[str, int]
    seen: frozenset[str]


def parse_line(line: str) -> Record | None:
    """Return what a line says, or None if it is no line of tegrastats."""
    line = line[:MAX_LINE_BYTES]
    starts = [_start(line, match.start()) for match in _START.finditer(line)]
    if not starts:
        return None
    ends = [start for start, _ in starts[1:]] + [len(line)]
    parts = [_part(line[s:end], date) for (s, date), end in zip(starts, ends, strict=True)]
    before = _part(line[: starts[0][0]], None)
    if len(parts) == 1 and parts[0].date is None:
        parts[0] = _joined(before, parts[0])
    seen = frozenset().union(before.seen, *(part.seen for part in parts))
    most = max(len(part.rails) for part in parts)
    part = next(part for part in reversed(parts) if len(part.rails) == most)
    return _record(part, total_rule(seen))


def _start(line: str, ram: int) -> tuple[int, str | None]:
    """Return where the record whose RAM field is at `ram` begins, and its date."""
    head = max(0, ram - _DATE_CHARS)
    match = _DATE.search(line[head:ram])
    return (ram, None) if match is None else (head + match.start(), match[1])


def _part(text: str, date: str | None) -> _Part:
    found = [(m[1], int(m[2])) for m in _RAIL.finditer(text)]
    # a rail without unit and slash may be the torn half of one: only where none has either
    found = found or [(m[1], int(m[2])) for m in _BARE_RAIL.finditer(text)]
    rails: dict[str, int] = {}
    unsure = set()
    for name, mw in found:
        if name in _NOT_RAILS or name.endswith("_FREQ"):
            continue
        if rails.setdefault(name, mw) != mw:
            unsure.add(name)
    seen = frozenset(rails) | frozenset(_INPUT.findall(text))
    return _Part(text, date, {n: mw for n, mw in rails.items() if n not in unsure}, seen)


def _joined(before: _Part, part: _Part) -> _Part:
    """Fields in front of RAM belong to it when their order is odd; what it says itself wins."""
    rails = {name: mw for name, mw in before.rails.items() if name not in part.seen}
    text = f"{part.text} {before.text}" if before.text else part.text
    return _Part(text, None, rails | part.rails, part.seen | before.seen)


def _record(part: _Part, rule: TotalRule | None) -> Record | None:
    text = part.text
    ram = _pair(_RAM, text)
    if ram == (None, None) and not part.rails:
        return None
    total = rule.total(part.rails) if rule is not None else None
    known = rule if total is not None else None
    swap = _pair(_SWAP, text)
    load, mhz = _gpu(text)
    emc = _EMC.search(text)
    return Record(
        rails=part.rails,
        total_mw=total,
        total_rail=known.name if known else None,
        scope=known.scope if known else None,
        ram_used_mb=ram[0],
        ram_total_mb=ram[1],
        swap_used_mb=swap[0],
        swap_total_mb=swap[1],
        gpu_load_percent=load,
        gpu_mhz=mhz,
        emc_load_percent=_percent(emc[1]) if emc else None,
        emc_mhz=int(emc[2]) if emc else None,
        temperatures_c=_temperatures(text),
        date=_date(part.date),
    )


def _pair(pattern: re.Pattern[str], text: str) -> tuple[int | None, int | None]:
    """Return (used, total); both unknown if torn, which more used than there is betrays."""
    match = pattern.search(text)
    if match is None or int(match[1]) > int(match[2]):
        return None, None
    return int(match[1]), int(match[2])


def _percent(text: str | None) -> int | None:
    return int(text) if text is not None and int(text) <= 100 else None


def _gpu(text: str) -> tuple[int | None, int | None]:
    """Return (load in %, clock in MHz). Of several clocks the highest: a gated GPC shows 0."""
    match = _GPU.search(text)
    if match is None:
        return None, None
    clocks = [int(c) for c in (match[2] or match[3] or "").split(",") if 0 < len(c) <= 5]
    return _percent(match[1]), max(clocks, default=None)


def _temperatures(text: str) -> dict[str, float]:
    found = {m[1]: float(m[2]) for m in _TEMPERATURE.finditer(text)}
    return {
        name: t
        for name, t in found.items()
        if t > _OFF_C and not (name == "PMIC" and t in _PLACEHOLDERS_C)
    }


def _date(text: str | None) -> datetime | None:
    try:
        return datetime.strptime(text, "%m-%d-%Y %H:%M:%S") if text else None
    except ValueError:
        return None


def read_lines(stream: IO[bytes]) -> Iterator[str]:
    """Yield the lines of a log in bounded memory; of a line without end only the beginning.

    A log that was piped through PowerShell is UTF-16: its zero bytes are left out.
    """
    inside = False
    while chunk := stream.readline(MAX_LINE_BYTES):
        if not inside:
            text = chunk.replace(b"\0", b"").decode("utf-8", "replace")
            yield from filter(None, re.split("[\r\n]+", text))
        inside = not chunk.endswith(b"\n")
