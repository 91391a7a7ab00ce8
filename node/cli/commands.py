"""The commands.

Each one collects its arguments and passes them on; heavy modules are imported inside the functions.
"""

from __future__ import annotations

import inspect
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import typer
from thinwire.node.daemon.options import Options, memory_of, seconds_of
from thinwire.swarm.identity.errors import HintedError

if TYPE_CHECKING:
    from thinwire.node.peer.status import Status
    from thinwire.node.runtime.config import Config, Flags


@dataclass(slots=True)
class CliSession:
    """State that the error handler needs when a command fails.

    It is the log file, and whether to show tracebacks.
    """

    log: Path | None = None
    debug: bool = False


class NoDaemonError(HintedError):
    """The command needs a running daemon, and none is running."""

    exit_code: ClassVar[int] = 4


class InputError(HintedError):
    """A file named on the command line cannot be used."""

    exit_code: ClassVar[int] = 2


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
Site = Annotated[
    str | None, typer.Option("--site", metavar="NAME", help="Name of the network shared with nearby peers.")
]
Data = Annotated[
    Path | None, typer.Option("--data", metavar="PATH", help="File or directory to train on [Python's own library].")
]
Device = Annotated[str | None, typer.Option("--device", metavar="NAME", help="cpu, cuda, cuda:N or auto.")]
Threads = Annotated[int | None, typer.Option("--threads", metavar="N", help="Threads for computing.")]
Up = Annotated[str | None, typer.Option("--up", metavar="RATE", help="Limit for outgoing data, such as 20Mbit/s.")]
Rounds = Annotated[int | None, typer.Option("--rounds", metavar="N", min=1, help="Leave after round N.")]
Place = Annotated[
    int | None, typer.Option("--place", metavar="N", min=0, help="This peer's shards of the data [from the key].")
]
Memory = Annotated[
    str | None,
    typer.Option(
        "--memory", metavar="SIZE", help="Memory for training; if the model does not fit, hold a stage of it."
    ),
]
Stage = Annotated[int | None, typer.Option("--stage", metavar="N", min=0, help="Hold this stage of the model.")]
Search = Annotated[
    float, typer.Option("--search", metavar="SECONDS", min=0, help="Time to look for a peer before giving up.")
]
Lan = Annotated[bool, typer.Option("--lan", help="Use the local network as a directory of runs.")]
Public = Annotated[bool, typer.Option("--public", help="Publish the run in the public directory.")]
Bootstrap = Annotated[
    str | None, typer.Option("--bootstrap", metavar="ADDR[,ADDR]", help="Nodes of the DHT with the public directory.")
]
Log = Annotated[str, typer.Option("--log", metavar="STYLE", help="auto, rich, plain or json.")]


def _settings(context: typer.Context, debug: bool, flags: Flags) -> Config:
    from thinwire.node.runtime.config import load

    session = context.find_object(CliSession) or CliSession()
    session.debug = debug
    config = load(flags, os.environ)
    session.log = config.directories.log
    return config


def _shared(
    context: typer.Context,
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
    public: Public = False,
    lan: Lan = False,
    bootstrap: Bootstrap = None,
    home: Home = None,
    log: Log = "auto",
    debug: Debug = False,
) -> tuple[Any, Options]:
    """Return the machine's settings, and the options of this call that `start` and `join` share."""
    flags: Flags = dict(
        data=data, device=device, threads=threads, host=host, port=port, ports=ports, advertise=advertise, up=up,
        site=site, name=name, bootstrap=bootstrap, home=home,
    )  # fmt: skip
    options = Options(rounds=rounds, place=place, public=public, lan=lan, log=_log(log), debug=debug)
    return _settings(context, debug, flags), options


def _with_shared(command: Callable[..., int]) -> Callable[..., int]:
    """Give a command the parameters of `_shared` in place of its keyword arguments."""
    own, shared = (list(inspect.signature(one, eval_str=True).parameters.values()) for one in (command, _shared))
    vars(command)["__signature__"] = inspect.Signature([*own[:-1], *shared[1:]])
    return command


@_with_shared
def start(
    context: typer.Context,
    run: Annotated[Path, typer.Argument(metavar="RUN.toml", help="The run's manifest.")],
    local: Annotated[int, typer.Option("--local", metavar="N", min=0, max=64, help="Start N peers here.")] = 0,
    weak: Annotated[
        int, typer.Option("--weak", metavar="N", min=0, max=64, help="With --local: N more peers with --memory each.")
    ] = 0,
    memory: Memory = None,
    chaos: Annotated[bool, typer.Option("--chaos", help="With --local: kill one peer, let another join late.")] = False,
    wait_for: Annotated[
        int,
        typer.Option("--wait-for", metavar="N", min=1, max=256, help="Start training with N peers, or after a minute."),
    ] = 1,
    weights: Annotated[
        Path | None,
        typer.Option("--from", metavar="FILE", help="First weights: an export, or a checkpoint's directory."),
    ] = None,
    **shared: Any,
) -> int:
    """Start a run and print the command with which others join it."""
    config, options = _shared(context, **shared)
    options = replace(
        options, local=local, weak=weak, memory=_memory(memory), chaos=chaos, wait_for=wait_for, weights=weights
    )
    if bool(weak) is not (memory is not None) or (weak and not local):
        raise InputError(
            "--weak and --memory must be used together, with --local: the founder of a run holds the whole model",
            "for example --local 2 --weak 3 --memory 512MiB",
        )
    if chaos and local < 2:
        raise InputError("--chaos needs at least two local peers", "add --local 4")
    from thinwire.swarm.manifest.parser import parse

    try:
        toml = run.read_bytes()
    except OSError as error:
        raise InputError(
            f"cannot read {run}: {error.strerror}", "give the path of a run's TOML file, such as examples/demo.toml"
        ) from None
    parse(toml, run.name)  # report mistakes at once, before torch is loaded
    _check_machine(config)
    if local:
        from thinwire.node.local_swarm.launcher import start_local

        return start_local(run, config, options)
    from thinwire.node.daemon import daemon

    return daemon.start(run, config, options)


@_with_shared
def join(
    context: typer.Context,
    invite: Annotated[
        str,
        typer.Argument(
            metavar="INVITE|RUN",
            help="The invite that `thinwire start` or `invite` printed, or a run by its name or the start of its id.",
        ),
    ],
    memory: Memory = None,
    stage: Stage = None,
    search: Search = 60.0,
    **shared: Any,
) -> int:
    """Join a run: fetch its state from other peers, then train."""
    config, options = _shared(context, **shared)
    options = replace(options, memory=_memory(memory), stage=stage, search=search)
    from thinwire.node.cli.runs import find, is_run
    from thinwire.swarm.identity.invite import Invite

    by_name = is_run(invite)
    if not by_name:
        Invite.parse(invite)  # report a typo at once
    _check_machine(config)
    found = find(invite, config, options) if by_name else invite
    from thinwire.node.daemon import daemon

    return daemon.join(found, config, options)


def runs(
    context: typer.Context,
    lan: Lan = False,
    bootstrap: Bootstrap = None,
    json: Json = False,
    home: Home = None,
    debug: Debug = False,
) -> None:
    """List the runs in the public directory, or with --lan those on the local network."""
    from thinwire.node.cli.runs import show

    show(_settings(context, debug, {"home": home, "bootstrap": bootstrap}), lan=lan, as_json=json)


def _memory(size: str | None) -> int | None:
    try:
        return None if size is None else memory_of(size)
    except ValueError as error:
        raise InputError(f"--memory: {error}", "write 2GiB or 512MiB, for example") from None


def _log(style: str) -> str:
    if style not in ("auto", "rich", "plain", "json"):
        raise InputError(f"unknown log style {style!r}", "choose auto, rich, plain or json")
    return style


def _check_machine(config: Config) -> None:
    """Check the data and device before anything starts."""
    if config.data is not None:
        source = config.sources["data"]
        if not config.data.exists():
            raise InputError(f"{source}: {config.data} does not exist", "give a file or directory with text")
        files = config.data.rglob("*") if config.data.is_dir() else [config.data]
        if not any(file.is_file() and file.stat().st_size for file in files):
            raise InputError(f"{source}: {config.data} contains no data", "give a file or directory with text")
    if config.device.startswith("cuda"):
        from thinwire.node.runtime.device import choose_device

        choose_device(config.device)


def status(context: typer.Context, json: Json = False, home: Home = None, debug: Debug = False) -> None:
    """Show the status of this machine's daemon."""
    said, alive = _daemon(_settings(context, debug, {"home": home}))
    if json:
        import msgspec

        sys.stdout.write(msgspec.json.encode({"running": alive, "status": said}).decode() + "\n")
    if said is None or not alive:
        raise _none_here(said)
    if not json:
        from thinwire.node.peer.status_table import show

        show(said, time.time())


def recover(
    context: typer.Context,
    run: Annotated[str, typer.Argument(metavar="RUN", help="The run, by its name or the start of its id.")] = "",
    now: Annotated[bool, typer.Option("--now", help="Continue now, and wait until it is done.")] = False,
    home: Home = None,
    debug: Debug = False,
) -> None:
    """Show which peers would continue without a quorum; with --now, let them do so."""
    from thinwire.node.cli import recovery

    config = _settings(context, debug, {"home": home})
    said, alive = _daemon(config)
    if said is None or not alive:
        raise _none_here(said)
    if run not in ("", said.run_name) and not said.run.startswith(run.lower()):
        raise InputError(
            f"the daemon here trains {said.run_name or 'a run'} {said.run[:8]}, not {run!r}",
            "name that run or none, or give the directory of the other daemon with --home",
        )
    recovery.check(said)
    if not now:
        print(recovery.plan(said, time.time()))
        return
    print(recovery.recover(said, config.directories))


def invite(
    context: typer.Context,
    peer: Annotated[
        str, typer.Option("--for", metavar="PEER-ID", help="Admit this peer only; `thinwire id` prints its id there.")
    ] = "",
    expires: Annotated[
        str, typer.Option("--expires", metavar="TIME", help="End of the admission of new peers, such as 12h or 7d.")
    ] = "",
    home: Home = None,
    debug: Debug = False,
) -> None:
    """Print the command with which others join the run of this machine's daemon."""
    config = _settings(context, debug, {"home": home})
    said, alive = _daemon(config)
    if said is None or not alive:
        raise _none_here(said)
    if not said.invite:
        raise NoDaemonError(
            "the daemon has no reachable address yet, or may not invite others",
            "try again in a moment, or ask the author of the run",
        )
    from thinwire.node.cli.invitations import invitation

    try:
        until = int(time.time()) + seconds_of(expires) if expires else 0
        if until >= 1 << 32:
            raise ValueError(f"{expires} from now is after the year 2105")
    except ValueError as error:
        raise InputError(f"--expires: {error}", "write 12h or 7d, for example") from None
    code, serial = invitation(said, config.directories, peer, until)
    print(f"thinwire join {code}")
    from thinwire.node.runtime.console import warn
    from thinwire.swarm.identity.invite import Invite

    if note := Invite.parse(code).note:
        warn(note)
    if serial and sys.stderr is not None:
        print(f"to take it back: thinwire revoke {serial}", file=sys.stderr)


def doctor(
    context: typer.Context,
    invite: Annotated[str, typer.Argument(metavar="INVITE", help="Ask the peers of this invite.")] = "",
    json: Json = False,
    host: Host = None,
    port: Port = None,
    ports: Ports = None,
    home: Home = None,
    debug: Debug = False,
) -> int:
    """Check port, network, clock, disk, GPU and caches of this machine; exit code 1 if something fails."""
    config = _settings(context, debug, {"home": home, "host": host, "port": port, "ports": ports})
    from thinwire.swarm.identity.invite import Invite

    parsed = Invite.parse(invite) if invite else None
    from thinwire.node.doctor.doctor import examine

    checks = examine(config, parsed)
    if json:
        import msgspec

        print(msgspec.json.encode(checks).decode())
    else:
        print("\n".join(str(check) for check in checks))
    return int(any(check.result == "FAIL" for check in checks))


def revoke(
    context: typer.Context,
    target: Annotated[str, typer.Argument(metavar="ID", help="Peer id, or serial of an invite.")],
    home: Home = None,
    debug: Debug = False,
) -> None:
    """Exclude a peer, or all peers of an invite, for good; only the author of the run can."""
    config = _settings(context, debug, {"home": home})
    said, alive = _daemon(config)
    if said is None:
        raise _none_here(said)
    from thinwire.node.cli.invitations import revoked

    target = revoked(said, config.directories, target)
    when = "in a second" if alive else "at its next start"
    print(f"revoked {target}; the daemon spreads it {when}, and the next round is without it")


def _daemon(config: Config) -> tuple[Status | None, bool]:
    from thinwire.node.peer.status import alive, read_status

    said = read_status(config.directories.status)
    return said, said is not None and alive(said)


def _none_here(said: Status | None) -> NoDaemonError:
    message = "no daemon is running here"
    if said is not None:
        message += f"; the last one ended in round {said.round} of run {said.run_name or said.run[:8]}"
    return NoDaemonError(
        message, "start one with `thinwire start` or `thinwire join`, or give its directory with --home"
    )


def show_id(context: typer.Context, json: Json = False, home: Home = None, debug: Debug = False) -> None:
    """Print this peer's id and the path of its key, which is created if missing."""
    from thinwire.swarm.identity.identity import Identity

    config = _settings(context, debug, {"home": home})
    identity = Identity.load_or_create(config.directories.key)
    _print_pairs([("peer", identity.peer_id.hex()), ("key", str(config.directories.key))], json)


def config_show(context: typer.Context, json: Json = False, home: Home = None, debug: Debug = False) -> None:
    """Print every setting of this machine and the source of its value."""
    from thinwire.node.runtime.config import as_json, rows

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
    run: Annotated[str, typer.Option("--run", metavar="ID", help="The run, by the start of its id.")] = "",
    format: Annotated[
        str, typer.Option("--format", metavar="KIND", help="safetensors (a file) or transformers (a folder).")
    ] = "safetensors",
    homes: Annotated[
        list[Path] | None,
        typer.Option("--with", metavar="DIR", help="Daemon directory with other stages; may be given again."),
    ] = None,
    home: Home = None,
    debug: Debug = False,
) -> None:
    """Write the weights of the newest valid checkpoint."""
    from thinwire.node.training.export import export as write

    config = _settings(context, debug, {"home": home})
    write(config, out, run, format, homes or ())
