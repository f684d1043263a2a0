"""`bitnest-edge plan`: what fits a device, how fast, and why, before anything is loaded."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from edge_runtime.cli.options import (
    SIZE,
    THREADS,
    Parsed,
    json_option,
    print_document,
    user_path,
)
from edge_runtime.errors import BudgetError, UsageError, cut

if TYPE_CHECKING:
    from edge_runtime.plan.planner import Plan, Pool
    from edge_runtime.profiles import DeviceProfile


def parse_context(text: str) -> int:
    """Return tokens: `8192`, or `24K` in powers of 1024."""
    number, times = (text[:-1], 1024) if text[-1:] in ("k", "K") else (text, 1)
    if not (number.isascii() and number.isdigit() and len(number) <= 9) or int(number) < 1:
        raise ValueError(f"{cut(text)!r} is not a number of tokens: write 8192 or 24K")
    return int(number) * times


@click.command()
@click.argument("model")
@click.option(
    "--device",
    default="auto",
    show_default=True,
    metavar="NAME|auto",
    help="A device by the name of its profile; auto: this machine, with the memory it has now.",
)
@click.option(
    "--context",
    type=Parsed("tokens", parse_context),
    metavar="N",
    help="Tokens of context that must fit, e.g. 8192 or 24K.  [default: as long as fits]",
)
@click.option("--mode", metavar="NAME", help="Power mode.  [default: the one in force, or usual]")
@click.option("--desktop", is_flag=True, help="Count a desktop as running on the device.")
@click.option(
    "--budget",
    type=SIZE,
    metavar="SIZE",
    help="Memory the program may use, e.g. 7.5G.  [default: what the device leaves]",
)
@click.option(
    "--reserve",
    type=SIZE,
    metavar="SIZE",
    help="Memory to leave to everything else.  [default: 64 MiB]",
)
@click.option("--threads", type=THREADS, metavar="N", help="CPU threads, on the cpu backend.")
@json_option
def command(
    model: str,
    device: str,
    context: int | None,
    mode: str | None,
    desktop: bool,
    budget: int | None,
    reserve: int | None,
    threads: int | None,
    as_json: bool,
) -> None:
    """Say what fits a device, how long a context, how fast, and why; nothing is loaded.

    MODEL is a converted folder, a Hugging Face folder or its config.json, a .gguf file, or the name
    of a known shape such as llama-2-7b-32k. Exit code 3: it does not fit.
    """
    import msgspec

    from edge_runtime.cli.plan_subject import read_subject
    from edge_runtime.cli.plan_text import describe
    from edge_runtime.plan.alternatives import with_alternatives
    from edge_runtime.plan.planner import plan

    subject = read_subject(model, user_path(model))
    profile, pool, mode, notes = _device(device, mode, desktop, budget, reserve)
    if threads is not None and profile.backend != "cpu":
        notes.append("--threads changes nothing here: it is for the cpu backend")
    found = plan(subject, profile, pool, mode=mode, context=context, threads=threads)
    found = with_alternatives(found, subject, profile, pool, threads)
    for line in describe(found, notes):
        click.echo(line, err=as_json)
    if as_json:
        print_document(msgspec.to_builtins(found) | {"notes": notes})
    if not found.fits:
        raise _refusal(found)


def _device(
    name: str, mode: str | None, desktop: bool, budget: int | None, reserve: int | None
) -> tuple[DeviceProfile, Pool, str | None, list[str]]:
    """Return a device, its memory, the power mode, and what a user should know of them."""
    from edge_runtime import profiles
    from edge_runtime.plan.planner import device_pool

    available: int | None = None
    total: int | None = None
    notes: list[str] = []
    if name.strip().lower() == "auto":
        if desktop:
            raise UsageError("--desktop is for a device by its name: what runs here is counted")
        profile, mode, notes = _this_machine(mode)
        from edge_runtime import machine

        available, total = machine.available_bytes(), machine.total_bytes()
    else:
        profile = profiles.device(name)
    notes += _backend_notes(profile)
    pool = device_pool(
        profile,
        desktop=desktop,
        available_bytes=available,
        total_bytes=total,
        budget_bytes=budget,
        reserve_bytes=reserve or 0,
    )
    return profile, pool, mode, notes + _memory_notes(pool, budget, reserve)


def _memory_notes(pool: Pool, budget: int | None, reserve: int | None) -> list[str]:
    """Say where the memory that is planned with is not what was asked for."""
    notes = []
    if budget is not None and "budget" not in pool.parts:
        there = (pool.budget_bytes - pool.reserve_bytes) / 2**30
        notes.append(f"--budget is more than there is: {there:.2f} GiB are planned with")
    if reserve and not pool.reserve_bytes:
        notes.append("the reserve lies outside of the budget")
    elif reserve is not None and reserve < pool.reserve_bytes:
        least = pool.reserve_bytes / 2**20
        notes.append(f"--reserve is less than what stays free in any case: {least:.0f} MiB")
    return notes


def _this_machine(mode: str | None) -> tuple[DeviceProfile, str | None, list[str]]:
    from edge_runtime import profiles
    from edge_runtime.profiles.detect import detect

    board = detect()
    if board.profile is None:
        title = board.model or "this Jetson"
        unknown = profiles.DeviceProfile(name="unknown", title=title, backend="cuda")
        return unknown, mode, [f"no profile describes this board: {board.reason}"]
    profile = profiles.device(board.profile)
    notes: list[str] = []
    if mode is None and board.mode is not None:
        if profile.mode(board.mode) is not None:
            mode = board.mode
        else:
            notes.append(f"power mode {board.mode} is not in the profile: the usual one is planned")
    return profile, mode, notes


def _backend_notes(profile: DeviceProfile) -> list[str]:
    if profile.backend == "none":
        return [f"this program does not compute on it: {profile.why_no_backend}"]
    if profile.backend == "cuda":
        from edge_runtime.kernels import cuda_missing

        if why := cuda_missing():
            return [f"the cuda backend is planned, which is not there on this machine: {why}"]
    return []


def _refusal(found: Plan) -> BudgetError:
    over = found.total_bytes - found.budget_bytes
    what = f"{found.context} tokens" if found.context_asked else "even the shortest context"
    near = "; ".join(a.text for a in found.would_fit)
    return BudgetError(
        f"memory: {found.model} with {what} takes {found.total_bytes / 2**30:.2f} GiB, "
        f"{found.budget_bytes / 2**30:.2f} GiB are there: {over / 2**30:.2f} GiB too much",
        f"would fit: {near}" if near else "nothing that is known here would fit",
    )
