"""Arguments that several commands share, the settings of this machine, and mistakes in arguments."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import typer
from thinwire.swarm.identity.errors import HintedError

if TYPE_CHECKING:
    from thinwire.node.runtime.load_settings import Config, Flags


@dataclass(slots=True)
class CliSession:
    """State that the error handler needs when a command fails.

    `log`: the log file. `debug`: show tracebacks. `serves`: the command runs a daemon, so its errors belong in the log.
    """

    log: Path | None = None
    debug: bool = False
    serves: bool = False


class InputError(HintedError):
    """A file named on the command line cannot be used."""

    exit_code: ClassVar[int] = 2


MOST = 10**9
"""Largest number that options for counts take."""

LAST_SEED = 2**53 - 1
"""Largest seed; a JSON reader keeps it exactly."""


def finite(value: float | None) -> float | None:
    """Return the value of an option. Raises typer.BadParameter for NaN and infinity.

    Typer's own bounds accept NaN, and infinity where there is no upper one.
    """
    if value is not None and not math.isfinite(value):
        raise typer.BadParameter(f"{value} is not a finite number")
    return value


def mistaken_number(error: Exception) -> str:
    """Return the message for an option whose value is no number within its bounds; "" for other mistakes.

    Typer's message is that of the library that converts the value, in terms of that library.
    """
    option, cause = getattr(error, "param", None), error.__cause__
    kind = getattr(getattr(option, "type_descriptor", None), "annotation", None)
    found: list[Any] = getattr(cause, "errors", list)()
    if kind not in (int, float) or not found:
        return ""
    from msgspec import Meta
    from thinwire.swarm.manifest.type_words import wanted

    low, high = getattr(option, "min", None), getattr(option, "max", None)
    words = wanted(Annotated[kind, Meta(ge=low, le=high)])
    return f"{'/'.join(getattr(option, 'opts', []))}: {found[0].get('input')!r} is not {words}"


Home = Annotated[Path | None, typer.Option("--home", metavar="DIR", help="Keep key, settings and state in DIR.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show tracebacks.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Name = Annotated[str | None, typer.Option("--name", metavar="TEXT", help="Name that others see beside this peer's id.")]
Host = Annotated[str | None, typer.Option("--host", metavar="ADDRESS", help="Address to listen on.")]
Port = Annotated[
    int | None, typer.Option("--port", metavar="N", help="Port for joiners; 0: any free port [7400, or as last time].")
]
Ports = Annotated[str | None, typer.Option("--ports", metavar="A-B", help="Ports for links [the 99 after --port].")]
Advertise = Annotated[str | None, typer.Option("--advertise", metavar="HOST[:PORT]", help="Address that others dial.")]
MapPort = Annotated[bool, typer.Option("--map-port", help="Ask the router to forward the ports (PCP, NAT-PMP, UPnP).")]
Site = Annotated[
    str | None, typer.Option("--site", metavar="NAME", help="Name of the network shared with nearby peers.")
]
Data = Annotated[
    str | None,
    typer.Option("--data", metavar="PATH", help="File, directory or hf:DATASET to train on [Python's own library]."),
]
Model = Annotated[
    str | None,
    typer.Option("--model", metavar="NAME", help="Train this model of yours: MODULE:FUNCTION or hf:FOLDER."),
]
Device = Annotated[str | None, typer.Option("--device", metavar="NAME", help="cpu, cuda, cuda:N or auto.")]
Compile = Annotated[bool, typer.Option("--compile", help="Compile the model: a minute more, then faster steps.")]
GradientCheckpointing = Annotated[
    bool, typer.Option("--gradient-checkpointing", help="Compute activations twice: less memory, slower steps.")
]
EvaluateEvery = Annotated[
    int | None,
    typer.Option(
        "--evaluate-every", metavar="N", help="Rounds between two evaluations on held-out text; 0: never [10]."
    ),
]
Threads = Annotated[int | None, typer.Option("--threads", metavar="N", help="Threads for computing.")]
Up = Annotated[str | None, typer.Option("--up", metavar="RATE", help="Limit for outgoing data, such as 20Mbit/s.")]
NoRelay = Annotated[
    bool, typer.Option("--no-relay", help="Pass nothing on between peers that cannot reach each other.")
]
Monitor = Annotated[
    str | None,
    typer.Option("--monitor", metavar="NAME[,NAME]", help="Show the run in these tools, too: tensorboard, wandb."),
]
Rounds = Annotated[int | None, typer.Option("--rounds", metavar="N", min=1, max=MOST, help="Leave after round N.")]
Place = Annotated[
    int | None,
    typer.Option("--place", metavar="N", min=0, max=MOST, help="This peer's shards of the data [from the key]."),
]
Memory = Annotated[
    str | None,
    typer.Option(
        "--memory", metavar="SIZE", help="Memory for training; if the model does not fit, hold a stage of it."
    ),
]
Stage = Annotated[
    int | None, typer.Option("--stage", metavar="N", min=0, max=MOST, help="Hold this stage of the model.")
]
Search = Annotated[
    float,
    typer.Option(
        "--search", metavar="SECONDS", min=0, callback=finite, help="Time to look for a peer before giving up."
    ),
]
Lan = Annotated[bool, typer.Option("--lan", help="Use the local network as a directory of runs.")]
Public = Annotated[bool, typer.Option("--public", help="Publish the run in the public directory.")]
Bootstrap = Annotated[
    str | None, typer.Option("--bootstrap", metavar="ADDR[,ADDR]", help="Nodes of the DHT with the public directory.")
]
Log = Annotated[str, typer.Option("--log", metavar="STYLE", help="auto, rich, plain or json.")]


def memory_bytes(size: str | None) -> int | None:
    """Return the bytes of an option --memory. Raises InputError."""
    from thinwire.node.runtime.settings import size_of

    if size is None:
        return None
    try:
        found = size_of(size)
    except ValueError as error:
        raise InputError(f"--memory: {error}", "write 2GiB or 512MiB, for example") from None
    if found < 1 << 20:
        raise InputError(f"--memory: {size!r} is less than 1 MiB", "give the unit, too, as in 2GiB or 512MiB")
    return found


def settings(context: typer.Context, debug: bool, flags: Flags) -> Config:
    """Return the settings of this machine: the flags of this call go first, see `load`."""
    from thinwire.node.runtime.load_settings import load

    session = context.find_object(CliSession) or CliSession()
    session.debug = debug
    config = load(flags, os.environ)
    session.log = config.directories.log
    return config
