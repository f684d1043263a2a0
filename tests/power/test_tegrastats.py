"""Lines of tegrastats: the recorded ones exactly, broken ones without inventing anything."""

from __future__ import annotations

import io
import random
import re
from pathlib import Path

import pytest
from tegrastats_fakes import CORPUS, corpus, expected

from edge_runtime.power.rails import RULES, total_rule
from edge_runtime.power.tegrastats import Record, parse_line, read_lines

FUZZED = 100_000
ORIN = (
    "10-08-2026 04:38:21 RAM 1343/7620MB (lfb 157x4MB) SWAP 165/3810MB (cached 3MB) "
    "CPU [0%@1497,0%@729] EMC_FREQ 15%@204 GR3D_FREQ 0%@[305] VIC off APE 200 cpu@48.562C "
    "VDD_IN 5251mW/8535mW VDD_CPU_GPU_CV 512mW/1944mW VDD_SOC 2720mW/3659mW"
)


def parsed(line: str) -> Record:
    record = parse_line(line)
    assert record is not None
    return record


def answers(record: Record | None) -> list[int | None]:
    assert record is not None
    return [record.total_mw, record.ram_used_mb, record.ram_total_mb]


@pytest.mark.parametrize("row", corpus(), ids=lambda row: row["id"])
def test_recorded_lines(row: dict[str, str]) -> None:
    assert answers(parse_line(row["line"])) == expected(row)


def test_every_line_of_the_shared_corpus(shared_data: Path) -> None:
    rows = corpus(shared_data / "tegrastats.tsv")
    assert len(rows) >= len(corpus(CORPUS))
    wrong = [r["id"] for r in rows if answers(parse_line(r["line"])) != expected(r)]
    assert not wrong


def test_the_other_fields() -> None:
    record = parsed(ORIN)
    assert record.rails == {"VDD_IN": 5251, "VDD_CPU_GPU_CV": 512, "VDD_SOC": 2720}
    assert (record.total_rail, record.scope) == ("VDD_IN", "module")
    assert (record.swap_used_mb, record.swap_total_mb) == (165, 3810)
    assert (record.gpu_load_percent, record.gpu_mhz) == (0, 305)
    assert (record.emc_load_percent, record.emc_mhz) == (15, 204)
    assert record.temperatures_c == {"cpu": 48.562}
    assert str(record.date) == "2026-10-08 04:38:21"


@pytest.mark.parametrize(
    ("text", "field", "value"),
    [
        ("EMC_FREQ 0%", "emc_load_percent", None),
        ("EMC 1%@408", "emc_mhz", 408),
        ("GR3D_FREQ 22%", "gpu_load_percent", 22),
        ("GR3D_FREQ 22%", "gpu_mhz", None),
        ("GR3D_FREQ @[314,314,314]", "gpu_load_percent", None),
        ("GR3D_FREQ @[314,314,314]", "gpu_mhz", 314),
        ("GR3D_FREQ 39%@[305,0]", "gpu_mhz", 305),
        ("GR3D 3%@76", "gpu_load_percent", 3),
        ("GR3D_FREQ 0%@305 GR3D2_FREQ 9%@114", "gpu_load_percent", 0),
        ("CV0@-256C cpu@-1.5C PMIC@100C tj@50C", "temperatures_c", {"cpu": -1.5, "tj": 50.0}),
        ("cpu@34.312C/34.843C", "temperatures_c", {"cpu": 34.312}),
        ("VDD_IN 5143/2615", "rails", {"VDD_IN": 5143}),
        ("VDD_IN 5143mW", "rails", {"VDD_IN": 5143}),
        ("VDD_IN 5143 VDD_SOC 12 APE 150", "rails", {"VDD_IN": 5143, "VDD_SOC": 12}),
        ("VDD_IN    5143mW/2615mW/9999mW", "rails", {"VDD_IN": 5143}),
        ("VDD_GPU -392mW/-1mW", "rails", {"VDD_GPU": -392}),
        ("NC 0mW/0mW IRAM 0/252kB(lfb 252kB) APE 150 VIC_FREQ 729", "rails", {}),
        ("VDD_IN 5143mW/26", "rails", {"VDD_IN": 5143}),  # its mean is torn, not the power
        ("VDD_IN 51", "rails", {}),
        ("VDD_IN 51 VDD_SOC 5mW/5mW", "rails", {"VDD_SOC": 5}),
        ("VDD_IN 1mW/1mW VDD_IN 2mW/2mW", "rails", {}),
        ("VDD_IN 99999999mW/1mW", "rails", {}),
        ("xVDD_IN 5mW/5mW vdd 5mW/5mW", "rails", {}),
    ],
)
def test_fields(text: str, field: str, value: object) -> None:
    assert getattr(parsed(f"RAM 1/2MB (lfb 1x4MB) {text}"), field) == value


@pytest.mark.parametrize(
    ("rails", "name", "total"),
    [
        ("VDD_IN 9/9 VDD_SYS_GPU 3/3", "VDD_IN", 9),
        ("POM_5V_IN 9/9 POM_5V_GPU 3/3 POM_5V_CPU 2/2", "POM_5V_IN", 9),
        ("GPU 1/1 CPU 2/2 SOC 4/4 CV 8/8 VDDRQ 16/16 SYS5V 32/32", None, 63),
        ("GPU 1/1 CPU 2/2 SOC 4/4 CV 8/8 VDDRQ 16/16", None, None),
        ("VDD_GPU_SOC 1/1 VDD_CPU_CV 2/2 VIN_SYS_5V0 4/4 VDDQ_VDD2_1V8AO 8/8", None, 7),
        ("VDD_GPU_SOC 1/1 VIN_SYS_5V0 4/4", None, None),
        ("VDD_GPU -392/0 VDD_CPU_SOC_MSS 4000/1 VIN_SYS_5V0 4000/1", None, 7608),
        ("VDD_GPU 1/1 VDD_CPU_SOC_MSS 2/2 VIN_SYS_5V0 4/4 VIN 99/99", "VIN", 99),
        # the input is there but torn: the sum of branches is not its value
        ("VDD_GPU 1/1 VDD_CPU_SOC_MSS 2/2 VIN_SYS_5V0 4/4 VIN 99", None, None),
        ("VIN_SYS_5V0 4/4", None, None),
        ("NEW_RAIL 4/4", None, None),
    ],
)
def test_which_rail_is_the_total(rails: str, name: str | None, total: int | None) -> None:
    record = parsed("RAM 1/2MB " + rails)
    assert record.total_mw == total
    if name is not None:
        assert record.total_rail == name


def test_glued_and_torn_records() -> None:
    whole, other = ORIN, ORIN.replace("5251mW", "6000mW").replace("1343/", "1500/")
    assert answers(parse_line(whole[:-40] + other)) == [6000, 1500, 7620]
    # the second record is cut: the last complete one is the first
    assert answers(parse_line(whole + " " + other[:60])) == [5251, 1343, 7620]
    assert answers(parse_line(whole[150:] + other)) == [6000, 1500, 7620]
    assert answers(parse_line(whole + whole + other)) == [6000, 1500, 7620]
    assert parsed("RAM 65" + whole).ram_used_mb == 1343


def test_order_does_not_matter() -> None:
    thor = "VIN 99mW/99mW VDD_GPU 1mW/1mW VDD_CPU_SOC_MSS 2mW/2mW VIN_SYS_5V0 4mW/4mW"
    assert parsed(f"{thor} RAM 1/2MB (lfb 1x4MB)").total_mw == 99
    assert parsed("VIN 99mW/99mW RAM 1/2MB VDD_GPU 1mW/1mW").total_mw == 99


@pytest.mark.parametrize(
    "line", ["", "RAM", "RAM 1/2", "RAM x/yMB", "SWAP 1/2MB", "VDD_IN 1/2", "RAM 3/2MB", "\0" * 99]
)
def test_what_is_no_line(line: str) -> None:
    assert parse_line(line) is None


def mutated(rng: random.Random, lines: list[str]) -> str:
    """A line cut, doubled, with its fields shuffled, or with bytes replaced; often twice."""
    line = rng.choice(lines)
    for _ in range(rng.randint(1, 2)):
        i, j = sorted((rng.randrange(len(line) + 1), rng.randrange(len(line) + 1)))
        kind = rng.randrange(6)
        if kind == 0:
            line = line[:i]
        elif kind == 1:
            line = line[:i] + line[j:]
        elif kind == 2:
            line = line[:j] + line[i:]
        elif kind == 3:
            fields = line.split(" ")
            rng.shuffle(fields)
            line = " ".join(fields)
        elif kind == 4:
            line = line[:i] + rng.choice(lines)[j:]
        else:
            data = bytearray(line.encode("latin-1", "replace"))
            for _ in range(rng.randint(1, 8)):
                if data:
                    data[rng.randrange(len(data))] = rng.randrange(256)
            line = data.decode("latin-1")
    return line


def invented(line: str, record: Record) -> str | None:
    """What a record says that its line does not; None if nothing."""
    for name, mw in record.rails.items():
        number = f"-0*{-mw}" if mw < 0 else f"-?0*{mw}"
        if not re.search(rf"(?<!\S){re.escape(name)}[ \t]+{number}(?!\d)", line, re.ASCII):
            return f"{name} {mw}"
    if record.total_mw is not None:
        assert record.total_rail is not None
        names = record.total_rail.split("+")
        if tuple(names) not in {rule.rails for rule in RULES}:
            return record.total_rail
        if record.total_mw != sum(record.rails[name] for name in names):
            return f"total {record.total_mw}"
    if record.ram_used_mb is not None:
        text = rf"RAM[ \t]+0*{record.ram_used_mb}/0*{record.ram_total_mb}MB"
        if not re.search(text, line):
            return f"RAM {record.ram_used_mb}"
    return None


def test_fuzzing_invents_nothing() -> None:
    rng = random.Random(20)
    lines = [row["line"] for row in corpus()]
    totals = 0
    for _ in range(FUZZED):
        line = mutated(rng, lines)
        record = parse_line(line)
        if record is not None:
            assert invented(line, record) is None, line
            totals += record.total_mw is not None
    assert totals > FUZZED / 5  # the mutations leave enough to be wrong about


def test_a_total_is_never_another_boards() -> None:
    for rule in RULES:
        assert total_rule(rule.rails) == rule
        assert total_rule(rule.rails[1:]) is None or len(rule.rails) > 1


def test_lines_of_a_stream() -> None:
    def lines(data: bytes) -> list[str]:
        return list(read_lines(io.BytesIO(data)))

    assert lines(b"a\r\nb\rc\n\nd") == ["a", "b", "c", "d"]
    assert [len(line) for line in lines(b"x" * 300_000 + b"\nend\n")] == [65536, 3]
    assert lines("RAM 1/2MB\r\nb\r\n".encode("utf-16")) == ["��RAM 1/2MB", "b"]
    assert lines(b"") == []
