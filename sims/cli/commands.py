"""Commands `thinwire sim` and `thinwire plan`, entry points of `thinwire.commands` (pyproject.toml).

The simulator is imported inside the functions, so that the help of a command does not wait for it.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from thinwire.node.cli.arguments import (
    LAST_SEED,
    CliSession,
    Debug,
    Home,
    InputError,
    Json,
    finite,
    memory_bytes,
    settings,
)
from thinwire.sims.cli.plan_options import (
    Codec,
    Every,
    Layers,
    Links,
    Memory,
    Outcome,
    ParameterCount,
    Peers,
    Picture,
    Pipeline,
    RoundTripTime,
    RunFile,
    SharedLine,
    Speed,
    StepSeconds,
    Tokens,
    Tries,
    Width,
)

if TYPE_CHECKING:
    from thinwire.collectives.costs.cost_question import Question
    from thinwire.collectives.costs.plan_outcome import RunOutcome
    from thinwire.sims.planner.plan import Plan


def _debug(context: typer.Context, debug: bool) -> None:
    (context.find_object(CliSession) or CliSession()).debug = debug


def sim(
    context: typer.Context,
    scenario: Annotated[
        str,
        typer.Argument(metavar="NAME|FILE.toml|new|list", help="A shipped scenario, a file, or what to do instead."),
    ],
    file: Annotated[Path | None, typer.Argument(metavar="[FILE]", help="With new: the scenario to write.")] = None,
    seed: Annotated[
        int | None,
        typer.Option("--seed", metavar="N", min=0, max=LAST_SEED, help="Seed of all draws [the scenario's]."),
    ] = None,
    peers: Annotated[
        int | None,
        typer.Option("--peers", metavar="N", min=1, max=10_000, help="Number of peers; groups grow in proportion."),
    ] = None,
    duration: Annotated[
        float | None,
        typer.Option(
            "--duration",
            metavar="SECONDS",
            min=1,
            max=1e7,
            callback=finite,
            help="Length of the scenario, in its own time.",
        ),
    ] = None,
    faults: Annotated[
        Path | None, typer.Option("--faults", metavar="FILE", help="JSON list of faults, instead of the scenario's.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="DIR", help="Folder of the report [sims-NAME-SEED, or -2, …].")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the report of an earlier run.")] = False,
    real: Annotated[bool, typer.Option("--real", help="Real processes behind shaped links, in real time.")] = False,
    namespaces: Annotated[
        bool, typer.Option("--namespaces", help="Real processes in network namespaces; needs root on Linux.")
    ] = False,
    json: Json = False,
    debug: Debug = False,
) -> int:
    """Play a scenario on a simulated network.

    `sim list` shows the scenarios, `sim new FILE` writes one.
    """
    _debug(context, debug)
    if (scenario == "new") is not (file is not None):
        raise InputError("new takes the name of a file to write", "thinwire sim new mine.toml")
    if real and namespaces:
        raise InputError("--real and --namespaces are two ways to play it", "choose one of them")
    from thinwire.sims.cli import play

    if file is not None:
        play.new(file)
        return 0
    if scenario == "list":
        print(play.catalogue())
        return 0
    level = "L1" if real else "L2" if namespaces else "L0"
    return play.play(
        scenario, peers=peers, seed=seed, duration=duration, faults=faults, out=out, force=force, level=level, json=json
    )


def plan(
    context: typer.Context,
    run: RunFile = None,
    parameters: ParameterCount = "",
    layers: Layers = None,
    width: Width = None,
    tokens: Tokens = None,
    step: StepSeconds = None,
    speed: Speed = None,
    peers: Peers = None,
    link: Links = None,
    rtt: RoundTripTime = 50.0,
    every: Every = None,
    codec: Codec = "",
    memory: Memory = None,
    shared_line: SharedLine = "",
    pipeline: Pipeline = None,
    picture: Picture = None,
    tries: Tries = None,
    outcome: Outcome = "",
    home: Home = None,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Estimate what rounds would cost, and which method suits.

    It needs no swarm.
    """
    _debug(context, debug)
    if pipeline is not None:
        if run is not None:
            raise InputError("a manifest and --pipeline are two plans", "ask for one of them")
        _only_pipeline(context)
        _pipeline(pipeline, picture, tries, json)
        return
    if picture is not None or tries is not None:
        raise InputError("--picture and --tries go with --pipeline", "thinwire plan --pipeline FILE --picture plan.png")
    from thinwire.sims.planner import plan as planner
    from thinwire.sims.planner.question import question

    past = _outcome(context, outcome, home, debug) if outcome else None
    if past is not None:
        step = step or (None if speed else past.step)
    asked = question(
        _read(run), run.name if run else "", parameters=parameters, layers=layers, width=width, tokens=tokens, step=step,
        speed=speed, peers=peers, usual=past.peers if past else 8, links=link or (), rtt=rtt, every=every, codec=codec,
        memory=memory_bytes(memory) or 0, line=shared_line,
        here=run.parent if run else Path(),
    )  # fmt: skip
    _show_plan(asked, planner.plan(asked), past, json)


def _show_plan(asked: Question, answer: Plan, past: RunOutcome | None, json: bool) -> None:
    """Print a plan, beside the outcome of a past run if there is one."""
    from thinwire.collectives.costs.plan_outcome import comparison
    from thinwire.sims.planner import plan_view

    compared = () if past is None else comparison(asked, answer.round, past)
    if json:
        import msgspec

        whole = answer if past is None else {"plan": answer, "outcome": past, "comparison": compared}
        print(msgspec.json.format(msgspec.json.encode(whole)).decode())
    elif past is None:
        plan_view.show(answer)
    else:
        plan_view.show_comparison(past, compared)


def _outcome(context: typer.Context, run: str, home: Path | None, debug: bool) -> RunOutcome:
    """Return the outcome of a run stored on this machine. Raises NoRunError, PlanError."""
    from thinwire.collectives.costs.cost_question import PlanError
    from thinwire.collectives.costs.plan_outcome import FEWEST, outcome_of
    from thinwire.node.runtime.event_log import read_events

    directory, _ = settings(context, debug, {"home": home}).directories.only_run(run)
    found = outcome_of(read_events(directory.events).events)
    if found is None:
        raise PlanError(
            f"fewer than {FEWEST} rounds can be compared",
            "train longer; a round counts if another peer contributed and the same process made the round before",
        )
    return found


def _only_pipeline(context: typer.Context) -> None:
    """Raise InputError for an option of `plan` that a plan of a pipeline has no use for."""
    used = {"pipeline", "picture", "tries", "home", "json", "debug"}
    sources = {
        option.opts[0]: context.get_parameter_source(option.name or "")
        for option in context.command.params
        if option.name not in used
    }
    given = [name for name, source in sources.items() if source is not None and source.name == "COMMANDLINE"]
    if given:
        raise InputError(
            f"{' and '.join(given)} cannot go with --pipeline",
            "the file has all figures of the plan: docs/guides/pipelines.md describes it",
        )


def _pipeline(file: Path, picture: Path | None, tries: int | None, json: bool) -> None:
    """Plan the paths of micro-batches over stages, and print the plan; it takes some seconds."""
    from shutil import get_terminal_size

    import msgspec
    from thinwire.node.pipeline.planner import gantt_text, path_search, plan_summary, problem

    asked = problem.load(_read(file, "docs/guides/pipelines.md describes it; examples/pipelines has some"))
    if picture is not None:
        from thinwire.node.runtime.plotting import check

        check()
    made, timeline, found = plan_summary.look(asked, tries=tries or path_search.TRIES)
    if json:
        print(msgspec.json.format(msgspec.json.encode(found)).decode())
    else:
        print(gantt_text.text(made, timeline, found, max(get_terminal_size((120, 24)).columns, 60)))
    if picture is not None:
        from thinwire.node.pipeline.planner import gantt_plot

        try:
            gantt_plot.draw(picture, made, timeline, found)
        except OSError as error:
            raise InputError(
                f"cannot write {picture}: {error.strerror}", "name a PNG in a folder that is there"
            ) from None


def _read(file: Path | None, hint: str = "name a run's TOML, such as examples/demo.toml") -> bytes:
    from thinwire.swarm.identity.regular_file import content_of

    if file is None:
        return b""
    try:
        return content_of(file)
    except OSError as error:
        raise InputError(f"cannot read {file}: {error.strerror}", hint) from None
