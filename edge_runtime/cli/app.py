"""The command line: a click group whose commands are imported when they are used.

Invariant: a user's mistake never shows a traceback. A `BitnestError` becomes `error: …`, a blank
line, `hint: …` on stderr and the error's exit code: 2 usage, 3 does not fit, 4 backend or hardware
missing, 5 bad file, 130 interrupted. A bug is told the same way, with exit code 1. A reader that
closes stdout early (`| head -1`) is no error. `BITNEST_DEBUG=1` adds the traceback.
"""

from __future__ import annotations

import errno
import importlib
import os
import select
import sys
import traceback
from collections.abc import Sequence

import click

from edge_runtime import __version__, log
from edge_runtime.errors import BitnestError, BudgetError, CheckpointError, InternalError, cut

PROGRAM = "bitnest-edge"

# Each command is `edge_runtime.cli.NAME.command`; its line in the group's help lives here alone, so
# that help imports none of them.
COMMANDS = {
    "pull": "Fetch a known model, checksum-verified; print its path.",
    "convert": "Turn a model into a nested checkpoint.",
    "chat": "Talk to a model.",
    "generate": "Complete one prompt.",
    "serve": "An OpenAI-compatible server, and a page for the browser.",
    "plan": "Say what fits a device, how fast, and why, before anything is loaded.",
    "profile": "Measure speed, memory and energy side by side; prove the longest context.",
    "eval": "Measure how good a model is, and how much of its draft is accepted.",
    "power": "Watch the power rails, or sum up a log of them.",
    "bench": "Measure speed against what this machine's memory allows.",
    "kernels": "Compile the CUDA kernels of a model, for machines without Triton.",
    "selftest": "Prove exactness on this model and this machine.",
    "doctor": "Say what was found, what was not, and why.",
}


class LazyGroup(click.Group):
    """A group that knows its commands by name and imports one only to use it."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the commands in the order of a first session, not of the alphabet."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import a command; None when there is none of that name."""
        if cmd_name not in COMMANDS:
            return None
        command = importlib.import_module(f"edge_runtime.cli.{cmd_name}").command
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the command list from the table, importing nothing."""
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


@click.group(
    cls=LazyGroup,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Exit codes: 0 ok, 2 usage, 3 does not fit, 4 backend or hardware missing, "
    "5 bad checkpoint or file, 130 interrupted; 1 a bug in this program.",
)
@click.version_option(__version__, prog_name=PROGRAM)
@click.option("-q", "--quiet", is_flag=True, help="Only errors on stderr.")
@click.option("-v", "--verbose", is_flag=True, help="Debugging on stderr.")
def app(quiet: bool, verbose: bool) -> None:
    """Run a language model whose fast 4-bit draft lives inside its 8-bit target."""
    log.configure(1 if verbose else -1 if quiet else 0)


def _debugging() -> bool:
    return os.environ.get("BITNEST_DEBUG", "") not in ("", "0")


def _report(error: BitnestError) -> int:
    if _debugging():
        traceback.print_exception(error)
    text = f"error: {error.message}"
    if error.hint:
        text += f"\n\nhint: {error.hint}"
    print(text, file=sys.stderr)
    return error.exit_code


def _run(args: Sequence[str]) -> int:
    """Run one command line and return its exit code; only BrokenPipeError is raised."""
    try:
        with app.make_context(PROGRAM, list(args)) as ctx:
            app.invoke(ctx)
        sys.stdout.flush()
    except click.exceptions.Exit as done:
        sys.stdout.flush()
        return done.exit_code
    except click.ClickException as error:
        error.message = cut(error.message, 300)  # type: ignore[misc]  # it quotes a user
        error.show()
        return BitnestError.exit_code
    except BitnestError as error:
        return _report(error)
    except (KeyboardInterrupt, click.Abort):
        if _debugging():
            traceback.print_exc()
        return 130
    except BrokenPipeError:
        raise
    except MemoryError:
        return _report(BudgetError("memory: there is none left", "use a smaller model or context"))
    except OSError as error:
        return _report(_told(error))
    except Exception as error:  # the last resort: a bug is told in one line, never swallowed
        return _report(_internal(error))
    return 0


def _told(error: OSError) -> BitnestError:
    """Tell what the system refused: 3 where there is no room, else 5 for a file."""
    where = f"{error.filename}: " if error.filename is not None else ""
    message = f"{where}{error.strerror or error}"
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.ENOMEM):
        return BudgetError(message)
    return CheckpointError(message)


def _internal(error: Exception) -> InternalError:
    """Tell a bug; its traceback comes with it where tracebacks are asked for."""
    text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    bug = InternalError(
        f"a bug in {PROGRAM}: {text}",
        "run it again with BITNEST_DEBUG=1 and report the traceback",
    )
    bug.__cause__ = error
    return bug


def _reader_is_gone() -> bool:
    """Say whether the broken pipe is stdout itself, not a socket somewhere inside."""
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))


def _open_standard_streams() -> None:
    """Let what the caller closed of 0, 1 and 2 lead nowhere, for children too.

    Else the next file that is opened would get such a number, and be read or written as a stream.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest free number
    sys.stdin = sys.stdin or open(os.devnull)  # noqa: SIM115  lives as long as the process
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115


def run(argv: Sequence[str] | None = None) -> int:
    """Run the program and return its exit code."""
    if f"_{PROGRAM.upper().replace('-', '_')}_COMPLETE" in os.environ:
        app.main(prog_name=PROGRAM)  # click's own shell completion
    _open_standard_streams()
    try:
        return _run(sys.argv[1:] if argv is None else argv)
    except BrokenPipeError as error:
        if _reader_is_gone():
            # Python flushes stdout once more on its way out: let that go nowhere
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 0
        return _report(_internal(error))
