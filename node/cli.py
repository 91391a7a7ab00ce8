"""The command line's frame: parse, run, and turn what goes wrong into two lines and an exit code.

Nothing heavy is imported here or in commands.py before a command runs: `thinwire --help` must not wait for torch.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

import typer
from thinwire.swarm.errors import HintedError

from . import commands, simcommands
from .commands import Session
from .console import record_traceback, tell

EXIT_CODES = """\b
Exit codes: 0 done, 1 the run failed, 2 usage or configuration,
3 could not start here (port, key, device), 4 no swarm reachable,
5 manifest or protocol mismatch, 130 and 143 stopped by a signal."""

app = typer.Typer(
    name="thinwire",
    help="Train one model on many machines that share nothing but ordinary internet links.",
    epilog=EXIT_CODES,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)


def _version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        from thinwire.swarm.protocol import VERSION

        print(f"thinwire {version('thinwire')} (protocol {VERSION})")
        raise typer.Exit


@app.callback()
def options(
    version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Print the version."),
) -> None:
    """Only what comes before a command."""


config_app = typer.Typer(help="This machine's settings.", rich_markup_mode=None)
config_app.command("show")(commands.config_show)

app.command("start")(commands.start)
app.command("join")(commands.join)
app.command("status")(commands.status)
app.command("invite")(commands.invite)
app.command("id")(commands.show_id)
app.command("export")(commands.export)
app.command("plan")(simcommands.plan)
app.command("sim")(simcommands.sim)
app.add_typer(config_app, name="config")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; `arguments` default to those of the process. Returns the exit code."""
    session = Session()
    arguments = sys.argv[1:] if arguments is None else arguments
    try:
        code = app(args=arguments or ["--help"], prog_name="thinwire", standalone_mode=False, obj=session)
        if sys.stdout is not None:  # closed by whoever started us
            sys.stdout.flush()
        return code if isinstance(code, int) else 0
    except HintedError as error:
        record_traceback(error, session.log, show=session.debug)
        tell(str(error), error.hint)
        return error.exit_code
    except (KeyboardInterrupt, typer.Abort):
        return 130
    except BrokenPipeError:
        # The reader (head, less) has seen enough; what is still buffered must not complain when the interpreter ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:
        describe = getattr(error, "format_message", None)
        if describe is not None:  # a mistake in the arguments; the class's place differs between versions of typer
            place = getattr(getattr(error, "ctx", None), "command_path", "thinwire")
            tell(describe(), f"see `{place} --help`")
            return 2
        logged = record_traceback(error, session.log, show=session.debug)
        hint = f"the traceback is in {session.log}" if logged else "run it again with --debug to see the traceback"
        tell(f"internal error: {type(error).__name__}: {error}", f"{hint}; please report it")
        return 1
