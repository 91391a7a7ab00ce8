"""The commands that ask the simulator, which lies above this folder: the one place in node/ that may reach for sims.

Only inside a function: a daemon never loads a simulation, and `tests/test_layers.py` allows no more than this.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .commands import Debug, InputError, Json, Session


def _debug(context: typer.Context, debug: bool) -> None:
    (context.find_object(Session) or Session()).debug = debug


def sim(
    context: typer.Context,
    scenario: Annotated[
        str,
        typer.Argument(metavar="NAME|FILE.toml|new|list", help="A shipped scenario, a file, or what to do instead."),
    ],
    file: Annotated[Path | None, typer.Argument(metavar="[FILE]", help="With new: the scenario to write.")] = None,
    seed: Annotated[
        int | None, typer.Option("--seed", metavar="N", min=0, max=2**53 - 1, help="What is drawn [the scenario's].")
    ] = None,
    peers: Annotated[
        int | None, typer.Option("--peers", metavar="N", min=1, max=10_000, help="So many, each group in proportion.")
    ] = None,
    duration: Annotated[
        float | None,
        typer.Option("--duration", metavar="SECONDS", min=1, max=1e7, help="Of the scenario, not of waiting."),
    ] = None,
    faults: Annotated[
        Path | None, typer.Option("--faults", metavar="FILE", help="JSON list of faults, instead of the scenario's.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="DIR", help="Where the report goes [sims-NAME-SEED].")
    ] = None,
    real: Annotated[bool, typer.Option("--real", help="Real processes behind shaped links, in real time.")] = False,
    namespaces: Annotated[
        bool, typer.Option("--namespaces", help="Real processes in network namespaces; needs root on Linux.")
    ] = False,
    json: Json = False,
    debug: Debug = False,
) -> int:
    """Play a scenario on a fake network: what would a swarm do? `sim list` shows them, `sim new FILE` writes one."""
    _debug(context, debug)
    if (scenario == "new") is not (file is not None):
        raise InputError("new takes the name of a file to write", "thinwire sim new mine.toml")
    if real and namespaces:
        raise InputError("--real and --namespaces are two ways to play it", "choose one of them")
    from thinwire.sims import play

    if file is not None:
        play.new(file)
        return 0
    if scenario == "list":
        print(play.catalogue())
        return 0
    level = "L1" if real else "L2" if namespaces else "L0"
    return play.play(
        scenario, peers=peers, seed=seed, duration=duration, faults=faults, out=out, level=level, json=json
    )


def plan(
    context: typer.Context,
    run: Annotated[Path | None, typer.Argument(metavar="RUN.toml", help="The manifest to plan for.")] = None,
    parameters: Annotated[
        str, typer.Option("--parameters", metavar="N", help="Size of the model, such as 350M [the manifest's].")
    ] = "",
    layers: Annotated[
        int | None, typer.Option("--layers", metavar="N", min=1, max=1024, help="Its layers [the manifest's].")
    ] = None,
    width: Annotated[
        int | None, typer.Option("--width", metavar="N", min=1, help="Its width [the manifest's].")
    ] = None,
    tokens: Annotated[
        int | None, typer.Option("--tokens", metavar="N", min=1, help="Of one inner step of one peer [the manifest's].")
    ] = None,
    step: Annotated[
        float | None, typer.Option("--step", metavar="SECONDS", min=1e-6, help="One inner step of one peer.")
    ] = None,
    speed: Annotated[
        float | None, typer.Option("--speed", metavar="TFLOPS", min=1e-6, help="Of one peer, when --step is not known.")
    ] = None,
    peers: Annotated[
        int | None, typer.Option("--peers", metavar="N", min=2, max=10_000, help="How many [those of --link, or 8].")
    ] = None,
    link: Annotated[
        list[str] | None,
        typer.Option(
            "--link", metavar="[Nx]DOWN/UP[@STEP]", help="Mbit/s, or dsl, fibre …; may be repeated [100/100]."
        ),
    ] = None,
    rtt: Annotated[float, typer.Option("--rtt", metavar="MS", min=0, help="Round trip between two peers.")] = 50.0,
    every: Annotated[
        int | None,
        typer.Option("--every", metavar="H", min=1, max=2**20, help="Inner steps of a round [the manifest's]."),
    ] = None,
    codec: Annotated[str, typer.Option("--codec", metavar="NAME", help="What is sent [the manifest's].")] = "",
    memory: Annotated[
        float | None, typer.Option("--memory", metavar="GIB", min=1e-3, help="What a peer has for training.")
    ] = None,
    site: Annotated[
        str, typer.Option("--site", metavar="NxDOWN/UP", help="N peers share one line of so many Mbit/s.")
    ] = "",
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Say what rounds would cost, and which way to train suits, before anyone starts."""
    _debug(context, debug)
    from thinwire.sims import plan as planner
    from thinwire.sims.question import question

    asked = question(
        _read(run), run.name if run else "", parameters=parameters, layers=layers, width=width, tokens=tokens, step=step,
        speed=speed, peers=peers, links=link or (), rtt=rtt, every=every, codec=codec, memory=memory, site=site,
    )  # fmt: skip
    answer = planner.plan(asked)
    if json:
        import msgspec

        print(msgspec.json.format(msgspec.json.encode(answer)).decode())
        return
    from thinwire.sims.planview import show

    show(answer)


def _read(run: Path | None) -> bytes:
    if run is None:
        return b""
    try:
        return run.read_bytes()
    except OSError as error:
        raise InputError(
            f"cannot read {run}: {error.strerror}", "name a run's TOML, such as examples/demo.toml"
        ) from None
