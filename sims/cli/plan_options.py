"""Options of `thinwire plan`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from thinwire.node.cli.arguments import MOST, finite
from thinwire.node.cli.completion import runs

RunFile = Annotated[Path | None, typer.Argument(metavar="RUN.toml", help="The manifest to plan for.")]
ParameterCount = Annotated[
    str, typer.Option("--parameters", metavar="N", help="Size of the model, such as 350M [the manifest's].")
]
Layers = Annotated[
    int | None, typer.Option("--layers", metavar="N", min=1, max=1024, help="Layers of the model [the manifest's].")
]
Width = Annotated[
    int | None,
    typer.Option("--width", metavar="N", min=1, max=MOST, help="Width of the model [the manifest's]."),
]
Tokens = Annotated[
    int | None,
    typer.Option("--tokens", metavar="N", min=1, max=MOST, help="Tokens of an inner step of a peer [the manifest's]."),
]
StepSeconds = Annotated[
    float | None,
    typer.Option(
        "--step", metavar="SECONDS", min=1e-6, max=MOST, callback=finite, help="Duration of an inner step of a peer."
    ),
]
Speed = Annotated[
    float | None,
    typer.Option(
        "--speed",
        metavar="TFLOPS",
        min=1e-6,
        max=MOST,
        callback=finite,
        help="Speed of a peer, if --step is not known.",
    ),
]
Peers = Annotated[
    int | None,
    typer.Option("--peers", metavar="N", min=2, max=10_000, help="Number of peers [those of --link, or 8]."),
]
Links = Annotated[
    list[str] | None,
    typer.Option(
        "--link", metavar="[Nx]DOWN/UP[@STEP]", help="Links in Mbit/s, or dsl, fibre …; may be repeated [100/100]."
    ),
]
RoundTripTime = Annotated[
    float,
    typer.Option("--rtt", metavar="MS", min=0, max=MOST, callback=finite, help="Round-trip time between two peers."),
]
Every = Annotated[
    int | None,
    typer.Option("--every", metavar="H", min=1, max=2**20, help="Inner steps of a round [the manifest's]."),
]
Codec = Annotated[str, typer.Option("--codec", metavar="NAME", help="Codec of contributions [the manifest's].")]
Memory = Annotated[
    str | None, typer.Option("--memory", metavar="SIZE", help="Memory of a peer for training, such as 24GiB.")
]
SharedLine = Annotated[
    str, typer.Option("--shared-line", metavar="NxDOWN/UP", help="N peers share one line, rates in Mbit/s.")
]
Pipeline = Annotated[
    Path | None, typer.Option("--pipeline", metavar="FILE", help="Plan paths over the stages of this JSON instead.")
]
Picture = Annotated[
    Path | None, typer.Option("--picture", metavar="FILE", help="With --pipeline: write the plan as a PNG.")
]
Tries = Annotated[
    int | None,
    typer.Option("--tries", metavar="N", min=1, max=MOST, help="With --pipeline: number of plans to try."),
]
Outcome = Annotated[
    str,
    typer.Option(
        "--outcome",
        metavar="RUN",
        autocompletion=runs,
        help="Compare with the rounds of this run; gives --step, --peers.",
    ),
]
