"""Families of random scenarios with churn, for every outer method and every collective.

    python -m thinwire.sims.trials.trial 17 --family powersgd      # one seed of one family
    python -m thinwire.sims.trials.trial 0 200 --family all        # seeds 0 to 199, each with the next family
    python -m thinwire.sims.trials.trial 0 200 --mix harsh         # the same with more and worse faults
    python -m thinwire.sims.trials.trial 0 200 --mix departures    # those, and peers that leave or die, also the founder

A seed of a family has one fault of each kind in CHURN, a few more faults of other kinds, late peers, a codec, and for
dense methods a topology.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from thinwire.collectives.costs.access_links import MBIT
from thinwire.node.outer.own_lineage import SETTLE
from thinwire.node.peer.peer import PATIENCE
from thinwire.sims.network.regions import REGIONS
from thinwire.sims.network.translator import KINDS
from thinwire.sims.scenario.faults import HARSH, LIES, QUIET, WIRE, Fault, draw
from thinwire.sims.scenario.scenario import PeerSpec, Scenario
from thinwire.swarm.manifest.tables import Exchange

PEERS = 7
ORPHAN = Exchange().orphan
LATE = 2
"""Number of peers that arrive during the run."""

SECONDS = 30.0
CALM = 12.0
"""Seconds after which no fault is active."""

HARSH_SECONDS, HARSH_CALM = 50.0, 22.0
"""Duration of a harsh scenario, and the seconds after which no fault is active."""

PARAMETERS = 2000

CHURN = ("kill", "restart", "partition", "pause")
"""Kinds of faults of which every seed has one."""

MORE = (
    *("isolate", "one-way", "clog", "swizzle-clog", "loss", "half-open", "reset", "slow-close"),
    *("liar", "bit-rot", "clock-jump"),
)
"""Kinds of which a seed has two."""

DENSE = ("fp32", "int8(block=256)", "int4(block=256)")
TOPK = ("topk(k=16,chunk=256)|2bit|rice",)
TOPOLOGIES = ("butterfly", "ring", "hierarchy")
SITES = ("", "home", "lab")


@dataclass(frozen=True, slots=True)
class Family:
    """Family of runs. `outer`: lines of [outer], one of several; `exchange`: more lines of [exchange].

    `stall`: longest time in seconds without a round while no fault is active: the wait of a swarm that has lost all its
    members, and a round. merge has one round with all peers, and then ends. `begin`: arrival of the first peers; the
    founder waits for those with 0. `translated`: peers from this index on are behind address translators of random kinds.
    `drawn_as`: name in the random draws and in the manifest, if not the family's, so that each seed has the same scenario
    as before the family was renamed.
    """

    outer: Sequence[str]
    codecs: Sequence[str] = DENSE
    exchange: str = ""
    topologies: Sequence[str] = TOPOLOGIES
    steps: int = 4
    grace: float = 1.0
    seconds: float = SECONDS
    stall: float = ORPHAN + SETTLE * PATIENCE + 4.0
    begin: float = 0.05
    translated: int | None = None
    drawn_as: str = ""


def _method(name: str, more: str = "") -> str:
    return f'method = "{name}"\n{more}'


_DENSE = (
    *map(_method, ("diloco", "muloco", "eager", "co2", "buffered-async", "delayed-nesterov")),
    _method("streaming", "fragments = 2\noverlap = 1\n"),
)
_PARTS = tuple(_method("streaming", f"fragments = 3\noverlap = {overlap}\n") for overlap in (0, 1, 3, 4))
_FRAGMENTS = tuple(
    _method("streaming", f"fragments = {count}\noverlap = {more}\n") for count, more in ((2, 8), (3, 6), (4, 12))
)
_NONE = ("",)

FAMILIES: Mapping[str, Family] = {
    "diloco": Family([_method("diloco")]),
    "muloco": Family([_method("muloco")]),
    "noloco": Family([_method("noloco")], DENSE[:2], topologies=_NONE),
    "sparseloco": Family([_method("sparseloco")], TOPK, topologies=_NONE),
    "sparse-butterfly": Family(
        [_method("sparseloco")], TOPK, 'collective = "sparse-butterfly"\n', _NONE, drawn_as="sieve"
    ),
    "demo": Family([_method("demo")], ("demo(k=16,chunk=256)|2bit|rice",), topologies=_NONE),
    "powersgd": Family([_method("powersgd")], ("powersgd(rank=4)", "powersgd(rank=1)")),
    "streaming": Family(_PARTS, steps=12),
    "fragments": Family(_FRAGMENTS, steps=12, drawn_as="chains"),
    "sparse-fragments": Family(_FRAGMENTS, TOPK, topologies=_NONE, steps=12, drawn_as="sparse-chains"),
    "eager": Family([_method("eager")]),
    "co2": Family([_method("co2")]),
    "buffered-async": Family([_method("buffered-async")], grace=0.3),
    "delayed-nesterov": Family([_method("delayed-nesterov")], grace=0.3),
    "merge": Family([_method("merge")], steps=40, grace=8.0, seconds=64.0, stall=45.0, begin=0.0),
    "ring": Family(_DENSE, topologies=("ring",)),
    "hierarchy": Family(_DENSE, topologies=("hierarchy",)),
    "translators": Family(_DENSE, translated=3),
}
"""Name -> family. Dense methods draw a topology, and each topology has a separate family, too."""


def _drawn_as(name: str) -> str:
    return FAMILIES[name].drawn_as or name


def churn(name: str, seed: int, peers: int = PEERS) -> tuple[Fault, ...]:
    """Return the faults of a seed, in order of time. Peers 0 and 1 are not killed for good."""
    rng = random.Random(f"{_drawn_as(name)}/{seed}/churn")
    found = []
    for kind in CHURN:
        at, count = rng.uniform(3.0, CALM - 2.0), rng.randint(1, peers // 2) if kind == "partition" else 1
        chosen = (rng.randrange(2, peers),) if kind == "kill" else tuple(rng.sample(range(peers), count))
        found.append(Fault(at, kind, chosen, 0.0 if kind == "kill" else rng.uniform(1.0, CALM - at)))
    mix = {kind: 6.0 for kind in rng.sample(MORE, 2)}

    found += draw(seed, mix, peers, CALM / QUIET, liars=sorted(LIES))
    return tuple(sorted(found, key=lambda fault: (fault.at, fault.kind, fault.peers)))


def scenario(name: str, seed: int, peers: int = PEERS) -> Scenario:
    """Return the scenario of a seed of a family. Raises KeyError for an unknown family."""
    family, drawn_as = FAMILIES[name], _drawn_as(name)
    rng, nats = random.Random(f"{drawn_as}/{seed}"), random.Random(f"{drawn_as}/{seed}/nat")
    first = peers if family.translated is None else family.translated
    regions = rng.sample(REGIONS, 3)
    specs = tuple(
        PeerSpec(
            index,
            f"peer-{index}",
            regions[index % 3],
            step_seconds=rng.uniform(0.5, 0.55),
            up=rng.choice((20, 50, 300)) * MBIT,
            down=300 * MBIT,
            join=(family.begin if index else 0.0) if index < peers - LATE else rng.uniform(3.0, CALM),
            site=SITES[index % 3],
            nat="none" if index < first else nats.choice(KINDS),
        )
        for index in range(peers)
    )
    topology = rng.choice(family.topologies)
    toml = f'[run]\nname = "{drawn_as}"\n[outer]\n{rng.choice(family.outer)}sync_every = {family.steps}\n[exchange]\n'
    toml += f'codec = "{rng.choice(family.codecs)}"\n{family.exchange}straggler_timeout = {family.grace}\nmax_weight = 100000\n'
    toml += f'topology = "{topology}"\n' if topology else ""
    return Scenario(
        name=name,
        seed=seed,
        duration=family.seconds,
        manifest=toml,
        peers=specs,
        parameters=PARAMETERS,
        jitter=0.2,
        loss=rng.choice((0.0, 0.0, 0.005)),
        faults=churn(name, seed, peers),
        interval=family.seconds,
    )


def harsh(name: str, seed: int, peers: int = PEERS) -> Scenario:
    """Return the scenario of a seed of a family with the faults of HARSH. Raises KeyError."""
    faults = draw(seed, HARSH, peers, HARSH_CALM / QUIET)
    return replace(scenario(name, seed, peers), duration=HARSH_SECONDS, interval=HARSH_SECONDS, faults=faults)


def departures(name: str, seed: int, peers: int = PEERS) -> Scenario:
    """Return the harsh scenario of a seed, with faults of WIRE, and peers that leave or die for good.

    One or two leave or die, in half of the seeds the founder; at least two peers stay. In some of the other seeds the
    founder loses its folder, so that it founds its run again.
    """
    rng, base = random.Random(f"departures/{seed}"), harsh(name, seed, peers)
    faults = [*base.faults, *draw(seed, WIRE, peers, HARSH_CALM / QUIET)]
    dead = {peer for fault in faults if fault.kind in ("kill", "majority-lost") for peer in fault.peers}
    able = [peer.index for peer in base.peers if peer.index not in dead]
    rng.shuffle(able)
    able.sort(key=lambda peer: peer != 0 or rng.random() < 0.5)
    gone = {peer: rng.uniform(4.0, HARSH_CALM) for peer in able[: min(rng.randint(1, 2), max(0, len(able) - 2))]}
    left = {peer for peer in sorted(gone) if rng.random() < 0.5}
    faults += [Fault(at, "kill", (peer,)) for peer, at in gone.items() if peer not in left]
    if 0 not in gone and rng.random() < 0.25:
        at = rng.uniform(4.0, HARSH_CALM)
        faults.append(Fault(at, "lost-folder", (0,), rng.uniform(0.1, 1.0) * (HARSH_CALM - at)))
    leaving = tuple(
        replace(peer, leave=max(peer.join + 3.0, gone[peer.index])) if peer.index in left else peer
        for peer in base.peers
    )
    ordered = tuple(sorted(faults, key=lambda fault: (fault.at, fault.kind, fault.peers)))
    return replace(base, peers=leaving, faults=ordered)
