"""The command `thinwire sim`: play a scenario, show it, write its report, and print how it ended."""

from __future__ import annotations

import dataclasses
import shlex
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import msgspec
from thinwire.collectives.costs.access_links import ACCESS, MBIT
from thinwire.node.runtime.console import log_style
from thinwire.sims.invariants.oracles import ORACLES
from thinwire.sims.network.regions import REGIONS
from thinwire.sims.results import report, run_directory
from thinwire.sims.results.live_view import LiveView, Stopped, ending
from thinwire.sims.results.report import PlayResult
from thinwire.sims.scenario.faults import ALL_LIES, KINDS
from thinwire.sims.scenario.parser import load, load_faults, parse, shipped
from thinwire.sims.scenario.scenario import Scenario
from thinwire.sims.scenario.toml_table_reader import ScenarioError
from thinwire.swarm.identity.errors import HintedError

TEMPLATE = Path(__file__).parents[1] / "template.toml"

Player = Callable[[Scenario, LiveView], PlayResult]
"""Play a scenario with reports to the view; return its data without `seconds` and `command`."""


class Violated(HintedError):
    """The simulated swarm violated an invariant."""

    exit_code: ClassVar[int] = 1


def play(
    named: str,
    *,
    peers: int | None = None,
    seed: int | None = None,
    duration: float | None = None,
    faults: Path | None = None,
    out: Path | None = None,
    force: bool = False,
    level: str = "L0",
    json: bool = False,
) -> int:
    """Play a shipped scenario or a file at `level`; return the exit code.

    `force`: replace an earlier report.

    Raises ScenarioError, OutputError, Violated, and errors of a level that cannot run here.
    """
    scenario = load(named, peers=peers).with_(seed=seed, duration=duration)
    if faults is not None:
        scenario = scenario.with_(faults=load_faults(faults, len(scenario.peers)))
    command = _command(named, scenario.seed, level, {"peers": peers, "duration": duration, "faults": faults})
    player = _player(level, scenario)
    usual = Path(f"sims-{scenario.name}-{scenario.seed}")
    directory = out or (usual if force else run_directory.unused(usual))
    run_directory.prepare(directory, force=force)
    view = LiveView(scenario, log_style("auto"), virtual=level == "L0")
    began, played = time.perf_counter(), PlayResult(level, 0.0, finished=False)
    try:
        with _signals(view):
            played = player(scenario, view)
    except (Stopped, KeyboardInterrupt):
        view.signal = view.signal or signal.SIGINT
    finally:
        # Also of a simulation that failed: what there was until then is what explains it.
        view.close()
        played = dataclasses.replace(played, seconds=time.perf_counter() - began, command=command)
        summary = report.summarize(scenario, view.journal, played)
        drawn = run_directory.write(directory, scenario, view.journal, summary)
    _print_summary(summary, directory, json, drawn)
    if view.signal:
        return 128 + view.signal
    if played.violations:
        first = played.violations[0]
        raise Violated(
            f"{len(played.violations)} violations; the first at {first.at:.1f} s: {first.oracle}: {first.detail}",
            f"repeat it with `{command}`",
        )
    return 0


def _command(named: str, seed: int, level: str, options: Mapping[str, object]) -> str:
    parts = ["thinwire", "sim", named, "--seed", str(seed)]
    for name, value in options.items():
        parts += [f"--{name}", f"{value:g}" if isinstance(value, float) else str(value)] if value is not None else []
    return shlex.join([*parts, *{"L1": ["--real"], "L2": ["--namespaces"]}.get(level, [])])


def _player(level: str, scenario: Scenario) -> Player:
    if level == "L0":
        return virtual
    from thinwire.sims.processes.player import player

    return player(level, scenario)


def virtual(scenario: Scenario, view: LiveView) -> PlayResult:
    """Play a scenario in virtual time."""
    from thinwire.sims.simulation.world import simulate

    run = simulate(scenario, watch=view.watch)
    view.journal = run.journal
    return PlayResult("L0", 0.0, run.trace, violations=run.violations)


@contextmanager
def _signals(view: LiveView) -> Iterator[None]:
    before = {
        number: signal.signal(number, lambda number, _: view.stop(number)) for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _print_summary(summary: dict[str, Any], directory: Path, json: bool, drawn: bool) -> None:
    if json:
        print(msgspec.json.encode(summary, enc_hook=str).decode())
        return
    print(ending(summary, directory))
    if not drawn:
        print("  no pictures: pip install 'thinwire[plots]'")


def new(file: Path) -> None:
    """`thinwire sim new`: write a commented scenario. Raises ScenarioError."""
    try:
        with open(file, "xb") as target:
            target.write(TEMPLATE.read_bytes())
    except FileExistsError:
        raise ScenarioError(f"{file} exists", "name another file") from None
    except OSError as error:
        raise ScenarioError(f"cannot write {file}: {error.strerror}", "name another file") from None
    print(f"wrote {file}; play it with: thinwire sim {file}")


def catalogue() -> str:
    """Return the shipped scenarios and the names in scenarios and reports (`thinwire sim list`)."""
    lines = []
    for name, file in shipped().items():
        scenario = parse(file.read_text(encoding="utf-8"), file)
        lines += [f"{name}: {len(scenario.peers)} peers, {scenario.duration:.0f} s", *_wrapped(scenario.about)]
    lines += ["", "links (Mbit/s down/up)"]
    lines += [f"    {name}: {kind.down / MBIT:.0f}/{kind.up / MBIT:.0f}" for name, kind in ACCESS.items()]
    lines += ["", "regions", *_wrapped(", ".join(REGIONS))]
    for title, kinds in (
        ("faults (the kind of an entry of [[faults]], and the keys of [random])", KINDS),
        ("liars (the detail of a liar fault, or the key liar of [[peers]])", ALL_LIES),
        ("invariants (the name of a violation)", ORACLES),
    ):
        lines += ["", title, *(line for kind, text in kinds.items() for line in _wrapped(f"{kind}: {text}"))]
    return "\n".join(lines)


def _wrapped(text: str) -> list[str]:
    import textwrap

    return textwrap.wrap(text, 100, initial_indent="    ", subsequent_indent="    ")
