"""Logs summed up: where the duration comes from, and what is not known."""

from __future__ import annotations

import io

import pytest

from edge_runtime.power.logfile import LogSummary, LogTotals, PowerLogError, read_records


def totals(lines: list[str], interval_s: float | None = None) -> LogTotals:
    summary = LogSummary()
    stream = io.BytesIO("\n".join(lines).encode())
    for record in read_records(stream, "log"):
        summary.add(record)
    return summary.totals(interval_s)


def line(mw: int | None, second: float | None = None, day: int = 8) -> str:
    date = ""
    if second is not None:
        minute, rest = divmod(int(second), 60)
        date = f"10-{day:02}-2026 04:{minute:02}:{rest:02} "
    return f"{date}RAM 1/2MB" + (f" VDD_IN {mw}mW/1mW" if mw is not None else "")


def test_dates_give_the_duration() -> None:
    found = totals([line(5000, s) for s in range(11)])
    assert (found.duration_s, found.mean_mw, found.energy_j) == (10, 5000, 50)
    assert found.how == "from the dates"
    half = totals([line(5000, s / 2) for s in range(21)])
    assert half.duration_s == 10


def test_the_users_interval_goes_first() -> None:
    found = totals([line(5000, s) for s in range(11)], 0.1)
    assert found.duration_s == pytest.approx(1.1)


def test_without_dates_lines_count() -> None:
    found = totals([line(4000), "junk", line(6000)])
    assert (found.lines, found.duration_s, found.energy_j) == (2, 2, 10)
    assert found.how == "no dates: 2 lines of 1 s assumed"
    assert totals([line(4000)]).how.startswith("a single line")
    assert "only 1 of 2 lines have a date" in totals([line(1, 3), line(1)]).how


def test_holes_are_left_out() -> None:
    seconds = [*range(10), *range(1000, 1010)]
    found = totals([line(5000, s) for s in seconds])
    assert found.duration_s == 19
    assert found.how == "from the dates, 1 hole left out"
    back = [*range(100, 110), *range(50, 60)]  # the clock was set back
    assert totals([line(5000, s) for s in back]).duration_s == 19


THOR = "RAM 1/2MB VDD_GPU 4746mW/1mW VDD_CPU_SOC_MSS 3798mW/1mW VIN_SYS_5V0 4940mW/1mW"
BOARD = THOR + " VIN 19780mW/1mW"


@pytest.mark.parametrize("place", [0, 2, 4])
def test_a_line_cut_before_the_rail_of_its_total(place: int) -> None:
    for end in ("", " V", " VIN", " VIN 19", " VIN 19780"):
        lines = [BOARD] * 5
        lines[place] = THOR + end
        found = totals(lines)
        assert (found.lines, found.lines_with_total, found.rails) == (5, 4, ("VIN",))
        assert found.mean_mw == 19780


def test_logs_of_two_boards_keep_their_totals() -> None:
    found = totals([THOR] * 3 + [BOARD] * 3)
    assert (found.lines_with_total, len(found.rails)) == (6, 2)
    assert totals([THOR]).mean_mw == 13484


def test_dates_that_make_no_sense() -> None:
    found = totals([line(5000, 0, day) for day in (1, 9, 3)])
    assert (found.duration_s, found.how[:23]) == (3, "the dates make no sense")


def test_what_is_unknown() -> None:
    found = totals([line(None), line(6000)])
    assert (found.lines, found.lines_with_total, found.mean_mw) == (2, 1, 6000)
    none = totals([line(None), line(None)])
    assert (none.mean_mw, none.energy_j, none.duration_s) == (None, None, 2)
    same = totals([line(5000, 3)] * 4)
    assert (same.duration_s, same.energy_j) == (None, None)
    assert "--interval" in same.how


def test_rails_of_several_boards() -> None:
    found = totals([line(1), "RAM 1/2MB POM_5V_IN 5/5"])
    assert found.rails == ("VDD_IN", "POM_5V_IN")


def test_a_stream_that_fails() -> None:
    class Broken(io.BytesIO):
        def readline(self, size: int | None = -1, /) -> bytes:
            raise OSError(5, "Input/output error")

    with pytest.raises(PowerLogError, match="Input/output error"):
        list(read_records(Broken(), "log"))
