"""Faults of a simulated swarm as a list of values, scripted in a scenario or drawn from a seed.

A list can be reduced to the faults that a failure needs (see trials/driver.py), so a fault is complete: nothing about
it is drawn later. simulation/fault_injector.py injects them.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import msgspec

KINDS: Mapping[str, str] = {
    "kill": "the process is gone for good; links reset",
    "restart": "killed, and back from its disk after `seconds`; unsynced data is lost, the last 4 KiB may be torn",
    "lost-folder": "killed, and back after `seconds` with its key but without the folder of the run",
    "pause": "stopped for `seconds`, as by SIGSTOP: it neither reads nor sends",
    "outage": "`peers` are killed at different moments and come back in another order, within `seconds`; unsynced data is lost",
    "majority-lost": "`peers`, more than half of all, are gone for good",
    "partition": "`peers` and all others cannot talk for `seconds`",
    "refuse": "as a partition, but links are reset and connections refused at once, for `seconds`",
    "refuse-one-way": "as one-way, from the others named to the first of `peers`; its links to them are reset, and its "
    "connections refused at once",
    "flap": "links of the first of `peers` to the others named are cut and mended, each for 0.2 to 5 s, for `seconds`",
    "one-way": "what the first of `peers` sends does not reach the others named, for `seconds`",
    "isolate": "one peer is cut off from all others for `seconds`",
    "clog": "bytes between the first and the second of `peers` stop for `seconds`, then continue; nothing is lost",
    "swizzle-clog": "`peers` are clogged one after the other, and unclogged in another order, within `seconds`",
    "loss": "for `seconds` a packet from or to `peers` (none named: any packet) is lost with probability `amount`",
    "half-open": "the first of `peers` lost its link to the second, which does not know yet; it learns after `seconds`",
    "reset": "the link between two peers is reset",
    "slow-close": "the link between two peers closes, and data in transit still takes `seconds` to arrive",
    "corrupt": "a relay flips a bit in a frame between two peers, for `seconds`: the link breaks each time",
    "duplicate": "a relay sends a frame between two peers twice, for `seconds`: the link breaks each time",
    "reorder": "a relay swaps frames between two peers, for `seconds`: the link breaks each time",
    "clock-jump": "the wall clock of a peer jumps by `amount` seconds, for good when `seconds` is 0",
    "clock-drift": "a peer's clocks run fast by the fraction `amount`, for `seconds`",
    "slow-disk": "every operation of a peer's disk takes `amount` seconds more, for `seconds`",
    "bit-rot": "one bit of what a peer has on disk flips; it is restarted after `seconds` to find out",
    "no-space": "a peer's disk is full for `seconds`",
    "lying-sync": "for `seconds` a peer's disk reports data as synced that is not; then the machine loses power and restarts",
    "liar": "a peer misbehaves in the way that `detail` names, for `seconds`",
}
"""Kind -> effect."""

LIES: Mapping[str, str] = {
    "hash": "sends chunks that are not those it announced",
    "nan": "announces and sends values that are not numbers",
    "huge": "announces and sends its update a million times as long",
    "flip": "announces and sends its update with the sign turned",
    "zero": "announces and sends an update of nothing but zeros",
    "false-weight": "claims a thousand times the tokens that it has trained on",
    "base": "announces another base than its own: a state that no peer has; in pairs another plan of the exchange",
    "equivocate": "sends other results of its chunks to every second peer than it signs for; in pairs announces other attempts "
    "than it sends",
    "blame": "blames all peers, all the time; in pairs declines all peers",
    "behind": "tells all peers that the swarm is far ahead of them",
    "silent": "announces and sends nothing more",
}
"""Kind of lie -> behaviour of the peer; lies.py implements each."""

VOTE_LIES: Mapping[str, str] = {
    "double-vote": "sends two different votes in each ballot",
    "other-vote": "votes for results that no peer has",
    "report": "reports in each promise a vote for results that no peer has",
    "commit": "sends commits with false signatures, all the time",
    "open": "sends proposals of higher ballots without promises, all the time",
    "prepare": "begins ballots, all the time",
    "announce": "announces other attempts, all the time",
    "two-proposals": "proposes other contributors to every second peer when it leads, and tries to commit both",
    "drop-votes": "answers each proposal with its own ballot, without promises that report a vote, and with another value",
    "half-record": "signs for the results of its chunks to only half of the peers, and does not vote",
    "false-vote": "answers each proposal with its own ballot, and reports for it a vote for huge results",
    "bounded-vote": "as false-vote, for results with usual norms: a negative share of its own contribution",
    "false-claim": "as bounded-vote, and it signs that it has computed these results, and replaces its announcement",
    "false-members": "as false-claim, for results without one of the honest contributors and members",
    "made-members": "makes keys without admission, and names them as new members of each round that it leads",
    "outrun": "sends some members a ballot just above that of a leader, at once; finishes no ballot, and does not vote",
    "strike": "as outrun, to one member, and while the leader waits for promises or votes; also with the highest terms",
    "divide": "lets two members vote for different results of a round, then is silent; does not vote",
    "false-views": "demands leader views, and reports promises that it has not made, all the time; does not vote",
}
"""Kind of lie about the agreement -> behaviour of the peer.

The trials draw none of them: with quorums of half the members they can fork a round (docs/design/agreement.md).
"""

ATTACKS: Mapping[str, str] = {
    "flip10": "announces and sends its update with the sign turned, ten times as long",
    "scale900": "announces and sends its update 900 times as long, just within the limit on norms",
    "1e30": "announces and sends an update of nothing but the value 1e30",
    "inf": "announces and sends infinite values",
    "constant": "announces and sends the same value for all parameters, ten times as long as its update",
    "repeat": "announces and sends its first update again and again",
    "mimic": "announces and sends what the first honest peer announces, as all other peers with this lie do",
    "alie": "announces and sends the mean of the honest updates less 1.5 standard deviations in each value",
    "labels": "trains on false labels; the stub model is drawn to the opposite of its optimum",
    "rare": "announces and sends as long an update, of the values that its honest one changes least",
}
"""Further kinds of lie, which only scenarios script; trials draw from LIES."""

OWNER_LIES: Mapping[str, str] = {
    "double-result": "sends all peers the same false results of its chunks, twice as long",
    "left-out": "sends all peers the same results of its chunks without the first contribution",
    "shifted": "sends all peers the same results of its chunks, with every value a little larger",
}
"""Lies about results that only audits find.

Their rounds commit, and the oracle "aggregate" reports them.
"""

ALL_LIES: Mapping[str, str] = {**LIES, **VOTE_LIES, **ATTACKS, **OWNER_LIES}
"""Every kind of lie, with the behaviour of the peer."""

QUIET = 0.75
"""Fraction of a run after which no fault occurs, so that the swarm has time to recover."""

Mix: TypeAlias = Mapping[str, float]
"""Kind -> expected faults per virtual minute in the whole swarm."""

SEVERE: Mix = {
    **{"refuse": 5.0, "refuse-one-way": 4.0, "flap": 4.0},
    **{"outage": 1.0, "majority-lost": 0.5, "lying-sync": 0.5},
}
"""Kinds that only HARSH has: the trials draw none of them by default."""

HARSH: Mix = {
    **SEVERE,
    **{"kill": 3.0, "restart": 7.0, "lost-folder": 2.0, "pause": 2.0, "bit-rot": 2.0},
    **{"partition": 5.0, "isolate": 3.0, "one-way": 2.0, "clog": 2.0, "swizzle-clog": 2.0, "loss": 2.0},
    **{"half-open": 2.0, "reset": 2.0, "slow-close": 2.0, "clock-jump": 2.0, "slow-disk": 2.0, "no-space": 2.0},
}
"""Mix of more and worse faults than the trials draw by default."""

WIRE: Mix = {"clock-drift": 2.0, "corrupt": 2.0, "duplicate": 2.0, "reorder": 2.0}
"""Mix of faults of clocks and connections that HARSH lacks."""

ALL, MAJORITY = -1, -2
"""Values of `_Shape.peers`."""

FLAP = (0.2, 5.0)
"""Range of the seconds after which links that flap are cut or mended."""


class Fault(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One fault. `at`: virtual seconds since the start. `peers`: indices. See KINDS for the other fields."""

    at: float
    kind: str
    peers: tuple[int, ...] = ()
    seconds: float = 0.0
    amount: float = 0.0
    detail: str = ""

    @property
    def until(self) -> float:
        """Virtual time at which the fault ends."""
        return self.at + self.seconds


def flaps(fault: Fault) -> tuple[float, ...]:
    """Return the moments, in seconds since the start, at which a flap cuts and mends links by turns.

    Their number is even: at the end of the fault at the latest the links are mended.
    """
    rng, moments = random.Random(f"{fault.at}/{fault.peers}"), [0.0]
    while (at := moments[-1] + rng.uniform(*FLAP)) < fault.seconds:
        moments.append(at)
    return tuple(moments if len(moments) % 2 == 0 else [*moments, fault.seconds])


def outages(fault: Fault) -> Mapping[int, tuple[float, float]]:
    """Return peer -> moments of its death and its return, in seconds since the start of an outage.

    The deaths are in the first half of the outage, the returns in the second half.
    """
    rng, half = random.Random(f"{fault.at}/{fault.peers}"), 0.5 * fault.seconds
    deaths, returns = (rng.sample(fault.peers, len(fault.peers)) for _ in range(2))
    step = half / max(1, len(fault.peers))
    return {peer: (step * turn, half + step * returns.index(peer)) for turn, peer in enumerate(deaths)}


@dataclass(frozen=True, slots=True)
class _Shape:
    """Drawn values of a kind: peers, longest duration in seconds, range of the amount.

    `peers`: 0 means up to half; or ALL, or MAJORITY.
    """

    peers: int
    seconds: float = 0.0
    amount: tuple[float, float] = (0.0, 0.0)


SHAPES = {
    "kill": _Shape(1),
    "restart": _Shape(1, 20.0),
    "lost-folder": _Shape(1, 20.0),
    "pause": _Shape(1, 60.0),
    "outage": _Shape(ALL, 20.0),
    "majority-lost": _Shape(MAJORITY),
    "partition": _Shape(0, 40.0),
    "refuse": _Shape(0, 40.0),
    "refuse-one-way": _Shape(2, 20.0),
    "flap": _Shape(2, 20.0),
    "one-way": _Shape(2, 20.0),
    "isolate": _Shape(1, 30.0),
    "clog": _Shape(2, 20.0),
    "swizzle-clog": _Shape(0, 20.0),
    "loss": _Shape(0, 20.0, (0.02, 0.2)),
    "half-open": _Shape(2, 20.0),
    "reset": _Shape(2),
    "slow-close": _Shape(2, 5.0),
    "corrupt": _Shape(2, 5.0),
    "duplicate": _Shape(2, 5.0),
    "reorder": _Shape(2, 5.0),
    "clock-jump": _Shape(1, 60.0, (-3600.0, 3600.0)),
    "clock-drift": _Shape(1, 60.0, (-0.05, 0.05)),
    "slow-disk": _Shape(1, 30.0, (0.01, 1.0)),
    "bit-rot": _Shape(1, 5.0),
    "no-space": _Shape(1, 30.0),
    "lying-sync": _Shape(1, 20.0),
    "liar": _Shape(1, 3600.0),
}


def draw(seed: int, mix: Mix, peers: int, duration: float, *, liars: Sequence[str] = ()) -> tuple[Fault, ...]:
    """Draw random faults in order of time; all end before QUIET of `duration`. Equal for equal arguments.

    Each kind has a separate random stream, so that a change of one rate leaves the faults of other kinds unchanged.
    Peers 0 and 1 are exempt from "kill" and "liar", which affect at most a third of the others, so that enough honest
    peers remain, and from "majority-lost", of which there is at most one. Peer 0 is exempt from "lost-folder" and
    "lying-sync": a founder without its folder starts its run again. `liars`: kinds of lies to choose from. Raises
    ValueError for an unknown kind.
    """
    unknown = sorted(mix.keys() - SHAPES.keys())
    if unknown:
        raise ValueError(f"no fault is called {unknown[0]!r}; there are {', '.join(sorted(SHAPES))}")
    end = QUIET * duration
    doomed = random.Random(f"{seed}/doomed").sample(range(2, peers), max(0, peers - 2) // 3)
    faults: list[Fault] = []
    drawn: set[str] = set()
    for kind in sorted(mix):
        rng, at, shape = random.Random(f"{seed}/{kind}"), 0.0, SHAPES[kind]
        spare = doomed[::2] if kind == "kill" else doomed[1::2] if kind == "liar" else None
        while mix[kind] > 0 and (at := at + rng.expovariate(mix[kind] / 60.0)) < end:
            if spare is not None:
                chosen = [spare.pop()] if spare else []
            elif shape.peers == ALL:
                chosen = list(range(peers))
            elif shape.peers == MAJORITY:
                count = peers // 2 + 1
                chosen = rng.sample(range(2, peers), count) if count <= peers - 2 and kind not in drawn else []
            else:
                count = shape.peers or rng.randint(1, max(1, peers // 2))
                able = range(kind in ("lost-folder", "lying-sync"), peers)
                chosen = rng.sample(able, count) if count <= len(able) else []
            if not chosen or (kind == "liar" and not liars):
                break
            longest = shape.seconds if kind != "liar" else end
            seconds = min(end - at, longest * rng.uniform(0.1, 1.0))
            detail = rng.choice(liars) if kind == "liar" else ""
            drawn.add(kind)
            faults.append(Fault(at, kind, tuple(chosen), seconds, rng.uniform(*shape.amount), detail))
    return tuple(sorted(faults, key=lambda fault: (fault.at, fault.kind, fault.peers)))
