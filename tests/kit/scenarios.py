"""Scenarios of simulated swarms, and readers of their journals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from itertools import chain
from typing import Any

from thinwire.collectives.health.diagnosis import FLOOD
from thinwire.sims.results.journal import Event
from thinwire.sims.scenario.faults import Fault
from thinwire.sims.scenario.scenario import PeerSpec, Scenario
from thinwire.sims.simulation.world import SimulatedRun, simulate
from thinwire.sims.trials.trial import PACE, STALL
from thinwire.swarm.identity.identity import Identity
from thinwire.swarm.membership.presets import Preset

INT8 = "int8(block=256)"
TOPK = "topk(k=64,chunk=4096)|2bit|rice"

SPARSE = {"outer": "method = 'sparseloco'\nsync_every = 4", "codec": TOPK}
"""Keys of a run with sparse payloads; arguments of `manifest_of`."""

CHURN = (
    Fault(5.0, "kill", (3,)),
    Fault(8.2, "restart", (2,), seconds=5.0),
    Fault(11.1, "partition", (4, 5), seconds=4.0),
    Fault(16.3, "restart", (0,), seconds=3.0),
    Fault(17.2, "isolate", (6,), seconds=3.0),
)
"""One peer dies, two restart from their checkpoints, and three are cut off for a while: for swarms of eight peers."""

EARLY = 0.05
"""Virtual second at which peers other than the founder join at the start; the founder starts at 0."""


def peer(index: int, *, step: float = 0.5, region: str = "Oregon", up: float = 2.5e6, **more: Any) -> PeerSpec:
    """Return one peer with a home connection. `step`: seconds of an inner step, `up`: bytes/s, `more`: fields of PeerSpec."""
    return PeerSpec(index, f"peer-{index}", region, step_seconds=step, up=up, **{"down": 37.5e6, **more})


@cache
def identity_of(index: int) -> Identity:
    """Return the identity of a simulated peer."""
    return Identity.generate(index.to_bytes(32, "big"))


def manifest_of(outer: str = "", *, codec: str = INT8, grace: float = 1.0, exchange: str = "", tables: str = "") -> str:
    """Return a manifest's TOML. `outer`, `exchange`: lines of these tables; `tables`: other tables."""
    given = f'codec = "{codec}"\nstraggler_timeout = {grace}\nmax_weight = 1000000\n{exchange}'
    return f"[outer]\n{outer}\n[exchange]\n{given}\n{tables}"


def swarm_of(
    peers: int | Sequence[PeerSpec],
    manifest: str,
    *,
    seconds: float = 40.0,
    seed: int = 3,
    step: float | Sequence[float] = 0.5,
    late: int = 0,
    joins: Mapping[int, float] | None = None,
    spread: Mapping[str, Sequence[Any]] | None = None,
    faults: Sequence[Fault] = (),
    mix: Mapping[str, float] | None = None,
    compute: str = "stub",
    parameters: int = 9_000,
    **link: Any,
) -> Scenario:
    """Return the scenario of a swarm.

    - `peers`: how many, or the peers themselves; then `step`, `late`, `joins`, `spread` and `link` do not apply
    - `step`: seconds of an inner step; a sequence is dealt out to the peers in turn
    - `late`: how many of the last peers join in the midst of the run, at 2 s plus their index
    - `joins`: seconds at which peers of these indices join instead
    - `spread`: fields of PeerSpec whose values are dealt out to the peers in turn
    - `link`: fields of PeerSpec that all peers have in common
    """
    if isinstance(peers, int):
        steps = (step,) if isinstance(step, int | float) else step
        given, count = joins or {}, peers
        peers = tuple(
            peer(
                index,
                step=steps[index % len(steps)],
                join=given.get(index, 0.0 if not index else EARLY if index < count - late else 2.0 + index),
                **{name: values[index % len(values)] for name, values in (spread or {}).items()},
                **link,
            )
            for index in range(count)
        )
    return Scenario(
        "swarm",
        seed,
        seconds,
        manifest,
        tuple(peers),
        compute=compute,
        parameters=parameters,
        faults=tuple(faults),
        mix=dict(mix or {}),
        interval=seconds,
    )


def play(scenario: Scenario, *, preset: Preset = PACE, stall: float | None = STALL) -> SimulatedRun:
    """Play a scenario, by default at the pace of short runs; no invariant is violated, no peer sends too many frames."""
    run = simulate(scenario, preset=preset, stall=stall)
    assert run.violations == (), run.violations
    assert FLOOD not in [event.fields["cause"] for event in run.journal.of("unhealthy")]
    return run


def violated(scenario: Scenario) -> set[str]:
    """Play a scenario; return the names of the invariants that were violated."""
    return {violation.oracle for violation in simulate(scenario, preset=PACE, stall=STALL).violations}


def events_of(run: SimulatedRun, name: str, *peers: int) -> list[Event]:
    """Return the events of a name, of these peers or of all, in order of time."""
    return [event for event in run.journal.of(name) if not peers or event.peer in peers]


def rounds_of(run: SimulatedRun, *names: str) -> dict[int, dict[int, str]]:
    """Return peer -> {round: digest}, from events of these names, or from all with a round's digest.

    Events named "round" are the rounds that a peer committed; others are states that it fetched, restored or left with.
    """
    found: dict[int, dict[int, str]] = {}
    for event in chain.from_iterable(map(run.journal.of, names)) if names else run.journal.events:
        if "digest" in event.fields and "round" in event.fields:
            found.setdefault(event.peer, {})[event.fields["round"]] = event.fields["digest"]
    return found


def last_round(found: Mapping[int, Mapping[int, str]]) -> int:
    """Return the newest round of `rounds_of`."""
    return max(map(max, found.values()))


def one_state(found: Mapping[int, Mapping[int, str]]) -> Mapping[int, Mapping[int, str]]:
    """Check that each round of `rounds_of` has one digest on all peers. Return the argument."""
    for number in range(1, last_round(found) + 1):
        assert len({digests[number] for digests in found.values() if number in digests}) <= 1, number
    return found


UNEVEN = tuple(0.5 + 0.01 * part for part in range(4))
"""Seconds of an inner step, by turns."""

UNEQUAL = (0.25, 0.3, 0.5, 0.25, 1.0, 0.3, 0.6, 0.3)
"""Seconds of an inner step of peers as unequal as machines are, by turns."""


def one_round_late(method: str, *, peers: int = 8, late: int = 2, **more: Any) -> Scenario:
    """Return a swarm of eager or co2."""
    return swarm_of(
        peers, manifest_of(f'method = "{method}"\nlr = 0.2\nsync_every = 4'), step=UNEVEN, late=late, **more
    )


def streaming(
    fragments: int = 3,
    overlap: int = 2,
    *,
    steps: int = 12,
    outer: str = "",
    codec: str = INT8,
    exchange: str = "",
    tables: str = "",
    grace: float = 1.0,
    peers: int = 8,
    late: int = 2,
    **more: Any,
) -> Scenario:
    """Return a swarm of streaming DiLoCo; with much overlap several rounds run at once."""
    lines = f'method = "streaming"\nsync_every = {steps}\nfragments = {fragments}\noverlap = {overlap}\n{outer}'
    toml = manifest_of(lines, codec=codec, grace=grace, exchange=exchange, tables=tables)
    return swarm_of(peers, toml, **{"step": UNEVEN, "late": late, **more})


def asynchronous(method: str, *, outer: str = "", peers: int = 6, late: int = 2, **more: Any) -> Scenario:
    """Return a swarm of buffered-async or delayed-nesterov, whose peers are unequal."""
    toml = manifest_of(f'method = "{method}"\nlr = 0.4\nsync_every = 4\n{outer}', grace=0.3)
    return swarm_of(peers, toml, **{"step": UNEQUAL, "late": late, "seconds": 36.0, **more})


def two_levels(outer: str = "sync_every = 4", *, codec: str = INT8, peers: int = 8, **more: Any) -> Scenario:
    """Return a swarm of two sites, and of peers that are alone, with the hierarchy as its topology."""
    return swarm_of(
        peers,
        manifest_of(outer, codec=codec, exchange='topology = "hierarchy"'),
        step=tuple(0.25 + 0.005 * part for part in range(4)),
        late=2,
        spread={"region": ("Oregon", "London", "Iowa"), "site": ("", "home", "lab")},
        **{"seconds": 26.0, **more},
    )
