"""The commands. Each one gathers what it is told and hands it on; what is heavy is imported inside."""

from __future__ import annotations

import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar

import typer
from thinwire.swarm.errors import HintedError

from .options import Options, memory_of

if TYPE_CHECKING:
    from .config import Config, Flags
    from .status import Status


@dataclass(slots=True)
class Session:
    """What the frame must know when a command fails: where the log is and whether to show tracebacks."""

    log: Path | None = None
    debug: bool = False


class NoDaemonError(HintedError):
    """Asked something that only a running daemon knows."""

    exit_code: ClassVar[int] = 4


class InputError(HintedError):
    """A file named on the command line that cannot be used."""

    exit_code: ClassVar[int] = 2


Home = Annotated[Path | None, typer.Option("--home", metavar="DIR", help="Keep key, settings and state in DIR.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show tracebacks.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Name = Annotated[str | None, typer.Option("--name", metavar="TEXT", help="Name that others see beside this peer's id.")]
Host = Annotated[str | None, typer.Option("--host", metavar="ADDRESS", help="Address to listen on.")]
Port = Annotated[int | None, typer.Option("--port", metavar="N", help="Port where strangers knock; 0: any free one.")]
Ports = Annotated[str | None, typer.Option("--ports", metavar="A-B", help="Range of ports for members.")]
Advertise = Annotated[
    str | None, typer.Option("--advertise", metavar="HOST[:PORT]", help="Address that others shall dial.")
]
Site = Annotated[str | None, typer.Option("--site", metavar="NAME", help="Network that I share with others.")]
Data = Annotated[
    Path | None, typer.Option("--data", metavar="PATH", help="File or directory to train on [Python's own library].")
]
Device = Annotated[str | None, typer.Option("--device", metavar="NAME", help="cpu, cuda, cuda:N or auto.")]
Threads = Annotated[int | None, typer.Option("--threads", metavar="N", help="Threads that compute.")]
Up = Annotated[str | None, typer.Option("--up", metavar="RATE", help="Most of the uplink to take, such as 20Mbit/s.")]
Rounds = Annotated[int | None, typer.Option("--rounds", metavar="N", min=1, help="Leave after round N.")]
Place = Annotated[
    int | None, typer.Option("--place", metavar="N", min=0, help="Which shards of the data are mine [from the key].")
]
Memory = Annotated[
    str | None,
    typer.Option(
        "--memory", metavar="SIZE", help="What training may take; too small for the model: hold a stage of it."
    ),
]
Stage = Annotated[int | None, typer.Option("--stage", metavar="N", min=0, help="Hold this stage of the model.")]
Search = Annotated[
    float, typer.Option("--search", metavar="SECONDS", min=0, help="Give up when no peer has answered for so long.")
]
Log = Annotated[str, typer.Option("--log", metavar="STYLE", help="auto, rich, plain or json.")]


def _settings(context: typer.Context, debug: bool, flags: Flags) -> Config:
    from .config import load

    session = context.find_object(Session) or Session()
    session.debug = debug
    config = load(flags, os.environ)
    session.log = config.directories.log
    return config


def start(
    context: typer.Context,
    run: Annotated[Path, typer.Argument(metavar="RUN.toml", help="The run's manifest.")],
    local: Annotated[int, typer.Option("--local", metavar="N", min=0, max=64, help="Start N peers here.")] = 0,
    weak: Annotated[
        int, typer.Option("--weak", metavar="N", min=0, max=64, help="With --local: N more that have --memory each.")
    ] = 0,
    memory: Memory = None,
    chaos: Annotated[
        bool, typer.Option("--chaos", help="With --local: kill one on the way, let one join late.")
    ] = False,
    wait_for: Annotated[
        int,
        typer.Option("--wait-for", metavar="N", min=1, max=256, help="Train once N peers are here, or in a minute."),
    ] = 1,
    rounds: Rounds = None,
    data: Data = None,
    device: Device = None,
    threads: Threads = None,
    host: Host = None,
    port: Port = None,
    ports: Ports = None,
    advertise: Advertise = None,
    up: Up = None,
    site: Site = None,
    name: Name = None,
    place: Place = None,
    home: Home = None,
    log: Log = "auto",
    debug: Debug = False,
) -> int:
    """Start a run and print the line with which others join it."""
    flags: Flags = dict(
        data=data, device=device, threads=threads, host=host, port=port, ports=ports, advertise=advertise, up=up,
        site=site, name=name, home=home,
    )  # fmt: skip
    config = _settings(context, debug, flags)
    options = Options(
        local=local,
        weak=weak,
        memory=_memory(memory),
        chaos=chaos,
        rounds=rounds,
        place=place,
        wait_for=wait_for,
        log=_log(log),
        debug=debug,
    )
    if bool(weak) is not (memory is not None) or (weak and not local):
        raise InputError(
            "--weak and --memory go together, with --local: who founds a run holds the whole model",
            "for example --local 2 --weak 3 --memory 512MiB",
        )
    if chaos and local < 2:
        raise InputError("--chaos needs at least two local peers", "add --local 4")
    from thinwire.swarm.manifest import parse

    try:
        toml = run.read_bytes()
    except OSError as error:
        raise InputError(
            f"cannot read {run}: {error.strerror}", "name a run's TOML, such as examples/demo.toml"
        ) from None
    parse(toml, run.name)  # mistakes show at once, before torch is loaded
    _check_machine(config)
    from . import daemon

    return daemon.start(run, config, options)


def join(
    context: typer.Context,
    invite: Annotated[str, typer.Argument(metavar="INVITE", help="What `thinwire start` or `invite` printed.")],
    memory: Memory = None,
    stage: Stage = None,
    search: Search = 60.0,
    rounds: Rounds = None,
    data: Data = None,
    device: Device = None,
    threads: Threads = None,
    host: Host = None,
    port: Port = None,
    ports: Ports = None,
    advertise: Advertise = None,
    up: Up = None,
    site: Site = None,
    name: Name = None,
    place: Place = None,
    home: Home = None,
    log: Log = "auto",
    debug: Debug = False,
) -> int:
    """Join a run, fetch its state from the peers, and train along."""
    flags: Flags = dict(
        data=data, device=device, threads=threads, host=host, port=port, ports=ports, advertise=advertise, up=up,
        site=site, name=name, home=home,
    )  # fmt: skip
    config = _settings(context, debug, flags)
    options = Options(
        rounds=rounds,
        place=place,
        memory=_memory(memory),
        stage=stage,
        search=search,
        log=_log(log),
        debug=debug,
    )
    from thinwire.swarm.invite import Invite

    Invite.parse(invite)  # a typo shows at once
    _check_machine(config)
    from . import daemon

    return daemon.join(invite, config, options)


def _memory(size: str | None) -> int | None:
    try:
        return None if size is None else memory_of(size)
    except ValueError as error:
        raise InputError(f"--memory: {error}", "write 2GiB or 512MiB, for example") from None


def _log(style: str) -> str:
    if style not in ("auto", "rich", "plain", "json"):
        raise InputError(f"unknown log style {style!r}", "it is auto, rich, plain or json")
    return style


def _check_machine(config: Config) -> None:
    """What can be known to fail before anything is started: data and device."""
    if config.data is not None:
        source = config.sources["data"]
        if not config.data.exists():
            raise InputError(f"{source}: {config.data} does not exist", "name a file or directory of text")
        files = config.data.rglob("*") if config.data.is_dir() else [config.data]
        if not any(file.is_file() and file.stat().st_size for file in files):
            raise InputError(f"{source}: {config.data} has no data", "name a file or directory with text in it")
    if config.device.startswith("cuda"):
        from .device import choose_device

        choose_device(config.device)


def status(context: typer.Context, json: Json = False, home: Home = None, debug: Debug = False) -> None:
    """Show what the daemon here is doing."""
    said, alive = _daemon(_settings(context, debug, {"home": home}))
    if json:
        import msgspec

        sys.stdout.write(msgspec.json.encode({"running": alive, "status": said}).decode() + "\n")
    if said is None or not alive:
        raise _none_here(said)
    if not json:
        from .statustable import show

        show(said, time.time())


def invite(context: typer.Context, home: Home = None, debug: Debug = False) -> None:
    """Print the line with which others join the run of the daemon here."""
    said, alive = _daemon(_settings(context, debug, {"home": home}))
    if said is None or not alive:
        raise _none_here(said)
    if not said.invite:
        raise NoDaemonError("the daemon has no address yet under which it can be joined", "try again in a moment")
    print(f"thinwire join {said.invite}")


def _daemon(config: Config) -> tuple[Status | None, bool]:
    from .status import alive, read_status

    said = read_status(config.directories.status)
    return said, said is not None and alive(said)


def _none_here(said: Status | None) -> NoDaemonError:
    message = "no daemon is running here"
    if said is not None:
        message += f"; the last one ended in round {said.round} of run {said.run_name or said.run[:8]}"
    return NoDaemonError(
        message, "start one with `thinwire start` or `thinwire join`, or name its directory with --home"
    )


def show_id(context: typer.Context, json: Json = False, home: Home = None, debug: Debug = False) -> None:
    """Print who this peer is, and where its key is (made now if there is none)."""
    from thinwire.swarm.identity import Identity

    config = _settings(context, debug, {"home": home})
    identity = Identity.load_or_create(config.directories.key)
    _print_pairs([("peer", identity.peer_id.hex()), ("key", str(config.directories.key))], json)


def config_show(context: typer.Context, json: Json = False, home: Home = None, debug: Debug = False) -> None:
    """Print every setting of this machine and where its value came from."""
    from .config import as_json, rows

    config = _settings(context, debug, {"home": home})
    if json:
        import msgspec

        print(msgspec.json.format(msgspec.json.encode(as_json(config))).decode())
        return
    table = [("setting", "value", "source"), *rows(config)]
    widths = [max(len(row[column]) for row in table) for column in range(2)]
    for setting, value, source in table:
        print(f"{setting:<{widths[0]}}  {value:<{widths[1]}}  {source}")


def _print_pairs(pairs: list[tuple[str, str]], as_json: bool) -> None:
    if as_json:
        import msgspec

        print(msgspec.json.encode(dict(pairs)).decode())
        return
    for name, value in pairs:
        print(f"{name:<5} {value}")


def export(
    context: typer.Context,
    out: Annotated[Path, typer.Argument(metavar="OUT", help="File to write, or directory for transformers.")],
    run: Annotated[str, typer.Option("--run", metavar="ID", help="Which run, by the start of its id.")] = "",
    format: Annotated[
        str, typer.Option("--format", metavar="KIND", help="safetensors, or transformers: a folder.")
    ] = "safetensors",
    home: Home = None,
    debug: Debug = False,
) -> None:
    """Write the weights of the newest good checkpoint."""
    from .export import export as write

    config = _settings(context, debug, {"home": home})
    write(config, out, run, format)
