"""Commands that start a daemon, and those that need none.

Each one collects its arguments and passes them on; heavy modules are imported inside the functions.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from thinwire.node.cli import completion
from thinwire.node.cli.arguments import (
    Advertise,
    Bootstrap,
    CliSession,
    Compile,
    Data,
    Debug,
    Device,
    EvaluateEvery,
    GradientCheckpointing,
    Home,
    Host,
    InputError,
    Json,
    Lan,
    Log,
    MapPort,
    Memory,
    Model,
    Monitor,
    Name,
    NoRelay,
    Place,
    Port,
    Ports,
    Public,
    Rounds,
    Search,
    Site,
    Stage,
    Threads,
    Up,
    memory_bytes,
    settings,
)
from thinwire.node.daemon.options import Options
from thinwire.node.runtime.disk import present

if TYPE_CHECKING:
    from thinwire.node.runtime.load_settings import Config, Flags
    from thinwire.swarm.manifest.manifest import Manifest


def _shared(
    context: typer.Context,
    rounds: Rounds = None,
    data: Data = None,
    model: Model = None,
    device: Device = None,
    compile: Compile = False,
    gradient_checkpointing: GradientCheckpointing = False,
    evaluate_every: EvaluateEvery = None,
    monitor: Monitor = None,
    threads: Threads = None,
    host: Host = None,
    port: Port = None,
    ports: Ports = None,
    advertise: Advertise = None,
    map_port: MapPort = False,
    up: Up = None,
    no_relay: NoRelay = False,
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
        data=data, model=model, device=device, threads=threads, host=host, port=port, ports=ports, advertise=advertise,
        up=up, relay="false" if no_relay else None, site=site, name=name, bootstrap=bootstrap, home=home,
        evaluate_every=evaluate_every, monitor=monitor, compile="true" if compile else None,
        gradient_checkpointing="true" if gradient_checkpointing else None, map_port="true" if map_port else None,
    )  # fmt: skip
    config = settings(context, debug, flags)
    (context.find_object(CliSession) or CliSession()).serves = True
    options = Options(rounds=rounds, place=place, public=public, lan=lan, log=_log(log), debug=debug)
    return config, options


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
        int, typer.Option("--weak", metavar="N", min=0, max=64, help="With --local: N more peers, with --memory each.")
    ] = 0,
    memory: Annotated[
        str | None,
        typer.Option("--memory", metavar="SIZE", help="With --weak: memory of each of them, such as 512MiB."),
    ] = None,
    chaos: Annotated[bool, typer.Option("--chaos", help="With --local: kill one peer, let another join late.")] = False,
    wait_for: Annotated[
        int,
        typer.Option("--wait-for", metavar="N", min=1, max=256, help="Start training with N peers, or after a minute."),
    ] = 1,
    weights: Annotated[
        list[Path] | None,
        typer.Option(
            "--from",
            metavar="FILE",
            help="First weights: an export, a checkpoint's directory, a folder of transformers; several with different stages.",
        ),
    ] = None,
    new: Annotated[
        bool, typer.Option("--new", help="Begin another run if RUN.toml has changed since the run of this name.")
    ] = False,
    **shared: Any,
) -> int:
    """Start a run, and print the command with which others join."""
    config, options = _shared(context, **shared)
    options = replace(
        options,
        local=local,
        weak=weak,
        memory=memory_bytes(memory),
        chaos=chaos,
        wait_for=wait_for,
        weights=tuple(weights or ()),
        new=new,
    )
    if bool(weak) is not (memory is not None) or (weak and not local):
        raise InputError(
            "--weak and --memory must be used together, with --local: the founder of a run holds the whole model",
            "for example --local 2 --weak 3 --memory 512MiB",
        )
    if chaos and local < 2:
        raise InputError("--chaos needs at least two local peers", "add --local 4")
    manifest = _read_manifest(run)
    if not config.model:  # The author of a manifest trusts the model that it names.
        from thinwire.node.runtime.settings import model_setting

        config = replace(config, model=model_setting(manifest.model.kind, manifest.model.name, run.parent))
    _check_machine(config)
    if local:
        if config.data is None:
            from thinwire.node.runtime.console import warn
            from thinwire.node.training.text_source import DEFAULT_DATA

            warn(DEFAULT_DATA)
        from thinwire.node.local_swarm.launcher import start_local

        return start_local(run, config, options)
    from thinwire.node.daemon import daemon

    return daemon.start(run, config, options)


def _read_manifest(file: Path) -> Manifest:
    """Return the manifest in a file: mistakes in it are reported at once, before torch is loaded."""
    from thinwire.swarm.identity.invite import is_invite
    from thinwire.swarm.identity.regular_file import content_of
    from thinwire.swarm.manifest.parser import parse

    try:
        toml = content_of(file)
    except OSError as error:
        if is_invite(file.name) and file.suffix != ".toml":
            raise InputError(f"{file} is an invite, not a manifest", f"`thinwire join {file}` joins its run") from None
        raise InputError(
            f"cannot read {file}: {error.strerror}", "give the path of a run's TOML file, such as examples/demo.toml"
        ) from None
    return parse(toml, file.name)


@_with_shared
def join(
    context: typer.Context,
    invite: Annotated[
        str,
        typer.Argument(
            metavar="INVITE|RUN",
            autocompletion=completion.runs,
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
    options = replace(options, memory=memory_bytes(memory), stage=stage, search=search)
    from thinwire.node.cli.runs import find, is_run
    from thinwire.swarm.identity.invite import Invite

    by_name = is_run(invite)
    if invite.endswith(".toml") and (not by_name or present(Path(invite))):
        raise InputError(
            f"{invite} is a manifest, not an invite",
            f"`thinwire start {invite}` begins the run, and prints the line with which others join it",
        )
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
    """List the runs here, and those in a directory.

    It is the public one or, with --lan, the local network.
    """
    from thinwire.node.cli.runs import show

    show(settings(context, debug, {"home": home, "bootstrap": bootstrap}), lan=lan, as_json=json)


def _log(style: str) -> str:
    if style not in ("auto", "rich", "plain", "json"):
        raise InputError(f"unknown log style {style!r}", "choose auto, rich, plain or json")
    return style


def _check_machine(config: Config) -> None:
    """Check the data and device before anything starts."""
    if config.data is not None:
        from thinwire.node.training.text_source import source_of

        source, path = config.sources["data"], source_of(config.data).path
        if path is not None and not present(path):
            raise InputError(f"{source}: {path} does not exist", "give a file or directory with text")
        files = [] if path is None else path.rglob("*") if path.is_dir() else [path]
        if path is not None and not any(file.is_file() and file.stat().st_size for file in files):
            raise InputError(f"{source}: {path} contains no data", "give a file or directory with text")
    if config.device.startswith("cuda"):
        from thinwire.node.runtime.device import choose_device

        choose_device(config.device)


def doctor(
    context: typer.Context,
    invite: Annotated[str, typer.Argument(metavar="INVITE", help="Ask the peers of this invite.")] = "",
    json: Json = False,
    host: Host = None,
    port: Port = None,
    ports: Ports = None,
    map_port: MapPort = False,
    home: Home = None,
    debug: Debug = False,
) -> int:
    """Check ports, network, clock, disk and GPU of this machine.

    Exit code 1: something failed.
    """
    mapped = "true" if map_port else None
    config = settings(context, debug, {"home": home, "host": host, "port": port, "ports": ports, "map_port": mapped})
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


def show_id(context: typer.Context, json: Json = False, home: Home = None, debug: Debug = False) -> None:
    """Print this peer's id and the path of its key.

    A missing key is created.
    """
    from thinwire.swarm.identity.identity import Identity

    config = settings(context, debug, {"home": home})
    identity = Identity.load_or_create(config.directories.key)
    _print_pairs([("peer", identity.peer_id.hex()), ("key", str(config.directories.key))], json)


def config_show(context: typer.Context, json: Json = False, home: Home = None, debug: Debug = False) -> None:
    """Print every setting of this machine and the source of its value."""
    from thinwire.node.cli.settings_table import as_json, rows

    config = settings(context, debug, {"home": home})
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
