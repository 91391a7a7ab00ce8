"""Entry point of the command line: parse, run, and turn errors into two lines and an exit code.

Nothing heavy is imported here or in the modules of commands before a command runs: `thinwire --help` must not wait for torch.

Other packages add commands through the entry point group `thinwire.commands`: each entry names a function with Typer's
annotations. `sim` and `plan` come from the simulator this way.
"""

from __future__ import annotations

import errno
import sys
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

import typer
from thinwire.node.cli import daemon_commands, model_commands, new_run, run_commands
from thinwire.node.cli.arguments import CliSession, mistaken_number
from thinwire.node.cli.completion import first_word
from thinwire.node.runtime.console import discard_unwritable, record_traceback, replace_closed, tell, warn
from thinwire.node.runtime.signals import INTERRUPTED, Termination
from thinwire.swarm.identity.errors import HintedError
from typer.core import TyperGroup

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

ENTRY_POINTS = "thinwire.commands"
"""Entry point group of commands that other packages provide."""

CLOSED_PIPE = 128 + 13
"""Exit code of a command whose reader has closed the pipe: a shell reports it after SIGPIPE."""

EXIT_CODES = {
    "0": "done, or left in order after a first signal",
    "1": "the run or a check failed",
    "2": "usage or configuration; a package is missing; no such run, weights or text here",
    "3": "could not start here: port, key, device, disk, memory",
    "4": "no swarm reachable, or no daemon here",
    "5": "manifest or protocol mismatch, run.toml has changed, not admitted, banned, or key in use elsewhere",
    "6": "nothing to recover",
    "130, 143": "stopped at once by Ctrl-C or SIGTERM: by the second signal, or by the first in a process that is no peer "
    "of a run (a daemon that loads, start --local, doctor, sim, export, generate, ...)",
    str(CLOSED_PIPE): "the reader of the output has closed the pipe",
}
"""Exit codes of all commands, as the help and the README list them."""

MEMORY_HINT = (
    "end other programs, or raise the limit of the shell or the service; the setting gradient_checkpointing saves some; else "
    "take a smaller model"
)
_ROOM = "make room on the disk, or choose another directory with --home DIR"
_FILES = "raise the limit of open files before you start, for example with `ulimit -n 4096`"
MACHINE_ERRORS = {
    errno.ENOSPC: _ROOM,
    errno.EDQUOT: _ROOM,
    errno.EACCES: "run the command as the user of this file or directory, or choose another directory with --home DIR",
    errno.EROFS: "choose a directory that can be written with --home DIR",
    errno.ENOMEM: MEMORY_HINT,
    errno.EMFILE: _FILES,
    errno.ENFILE: _FILES,
    errno.EIO: "check the disk, for example with `dmesg`; or the terminal of the command was closed",
}
"""Errors of the operating system that the user can mend -> hint. The exit code is 3."""


def _epilog() -> str:
    """Return the exit codes as lines; the mark at the beginning keeps the line breaks."""
    lines = ["\b", "Exit codes:"]
    for code, meaning in EXIT_CODES.items():
        lines += textwrap.wrap(meaning, 78, initial_indent=f"  {code:<9}", subsequent_indent=" " * 11)
    return "\n".join(lines)


app = typer.Typer(
    name="thinwire",
    help="Train one model on many machines that share nothing but ordinary internet links.",
    epilog=_epilog(),
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)


def _version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        from thinwire.swarm.messages.registry import VERSION

        print(f"thinwire {version('thinwire')} (protocol {VERSION})")
        raise typer.Exit


@app.callback()
def options(
    version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Print the version."),
) -> None:
    """Options that precede a command."""


config_app = typer.Typer(help="This machine's settings.", rich_markup_mode=None)
config_app.command("show")(run_commands.config_show)

app.command("init")(new_run.init)
app.command("start")(run_commands.start)
app.command("join")(run_commands.join)
app.command("runs")(run_commands.runs)
app.command("status")(daemon_commands.status)
app.command("top")(daemon_commands.top)
app.command("logs")(daemon_commands.logs)
app.command("page")(daemon_commands.page)
app.command("replay")(daemon_commands.replay)
app.command("recover")(daemon_commands.recover)
app.command("invite")(daemon_commands.invite)
app.command("doctor")(run_commands.doctor)
app.command("revoke")(daemon_commands.revoke)
app.command("id")(run_commands.show_id)
app.command("export")(model_commands.export)
app.command("generate")(model_commands.generate)
app.command("evaluate")(model_commands.evaluate)
app.add_typer(config_app, name="config")


class CommandError(HintedError):
    """A command of another package cannot be loaded."""

    exit_code: ClassVar[int] = 1


def command_line(wanted: str = "") -> TyperGroup:
    """Return all commands, those of other packages included.

    When `wanted` is a built-in command, no entry point is read. When it is the name of an entry point, only that one is loaded;
    raises CommandError when this fails. Else, as for the help, all are loaded, and one that fails is skipped with a warning.
    """
    group = typer.main.get_command(app)
    assert isinstance(group, TyperGroup)
    if wanted in group.commands:
        return group
    from importlib.metadata import entry_points

    found = sorted(entry_points(group=ENTRY_POINTS), key=lambda entry: entry.name)
    named = [entry for entry in found if entry.name == wanted]
    for entry in named or found:
        if entry.name in group.commands:
            warn(f"skipped the command {entry.name!r} of {_package(entry)}: there is one of this name")
            continue
        try:
            single = typer.Typer(add_completion=False, rich_markup_mode=None)
            single.command(entry.name)(entry.load())
            group.add_command(typer.main.get_command(single), entry.name)
        except (Exception, SystemExit) as error:
            message = (
                f"the command {entry.name!r} of {_package(entry)} cannot be loaded: {type(error).__name__}: {error}"
            )
            if named:
                raise CommandError(message, f"reinstall or remove {_package(entry)}") from error
            warn(message)
    return group


def _package(entry: EntryPoint) -> str:
    return entry.dist.name if entry.dist is not None else entry.value


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; `arguments` default to those of the process. Return the exit code.

    A command whose reader (head, less) closes the pipe ends without a message.
    """
    replace_closed()
    try:
        return _run(arguments)
    except BrokenPipeError:
        return CLOSED_PIPE
    except SystemExit as end:
        # The library of the commands makes exit code 1 of a closed pipe.
        if isinstance(end.__context__, BrokenPipeError):
            return CLOSED_PIPE
        raise
    finally:
        discard_unwritable()


def _run(arguments: Sequence[str] | None) -> int:
    """Run one command. Return the exit code; raise BrokenPipeError or SystemExit for a closed pipe."""
    session, termination = CliSession(), Termination()
    arguments = sys.argv[1:] if arguments is None else arguments
    wanted = first_word(list(arguments))
    try:
        group = command_line(wanted)
        with termination:
            code = group(args=list(arguments) or ["--help"], prog_name="thinwire", standalone_mode=False, obj=session)
        if sys.stdout is not None:  # the parent process may have closed it
            sys.stdout.flush()
        # Typer returns the code of Ctrl-C.
        return termination.code if code == INTERRUPTED else code if isinstance(code, int) else 0
    except HintedError as error:
        # The log is that of the daemon: no foreseen error of another command belongs there, or `logs` would show it.
        record_traceback(error, session.log if session.serves else None, show=session.debug)
        tell(str(error), error.hint)
        return error.exit_code
    except (KeyboardInterrupt, typer.Abort):
        return termination.code
    except BrokenPipeError:
        raise
    except OSError as error:
        if error.errno not in MACHINE_ERRORS:
            return _internal(error, session)
        record_traceback(error, session.log, show=session.debug)
        tell(
            f"{error.strerror}: {error.filename}" if error.filename else str(error.strerror),
            MACHINE_ERRORS[error.errno],
        )
        return 3
    except Exception as error:
        describe = getattr(error, "format_message", None)
        if describe is not None:  # a mistake in the arguments; the class's place differs between versions of typer
            # The context is unknown if the argument of an option is missing.
            known = f"thinwire {wanted}" if wanted in group.commands else "thinwire"
            place = getattr(getattr(error, "ctx", None), "command_path", known)
            tell(mistaken_number(error) or describe(), f"see `{place} --help`")
            return 2
        if _lacks_memory(error):
            record_traceback(error, session.log, show=session.debug)
            tell("there is not enough memory", MEMORY_HINT)
            return 3
        return _internal(error, session)


def _lacks_memory(error: Exception) -> bool:
    """Return True for an allocation that failed: of Python, numpy, or torch, which is not imported here."""
    return (
        isinstance(error, MemoryError)
        or type(error).__name__ == "OutOfMemoryError"  # torch's, of a GPU
        or (isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error))
    )


def _internal(error: Exception, session: CliSession) -> int:
    """Print an unforeseen error; return the exit code."""
    logged = record_traceback(error, session.log, show=session.debug)
    hint = f"the traceback is in {session.log}" if logged else "run it again with --debug to see the traceback"
    tell(f"internal error: {type(error).__name__}: {error}", f"{hint}; please report it")
    return 1
