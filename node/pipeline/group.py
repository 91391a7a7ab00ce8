"""Taking a place in a group that holds the model together: from the manifest and a stage to what a Life trains."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass

from thinwire.collectives.outbox import Outbox
from thinwire.swarm.manifest import Manifest
from thinwire.swarm.protocol import PeerId, Post
from thinwire.swarm.seat import Seat

from ..data import Batches
from ..peer import Peer
from ..power import FRESH
from ..presence import Emit
from ..rounds import GIVE_UP
from ..training import inner_of
from ..waiting import Work
from .crew import Crew
from .holding import Holding
from .host import Host
from .hostlearner import HostLearner
from .muster import Muster
from .origin import Origin
from .originlearner import OriginLearner
from .patience import Patience
from .pilot import Pilot
from .place import home
from .rebalance import Balance
from .rescue import Source, rescue
from .search import MENDING
from .stage import Stage
from .survey import Survey
from .update import Update

FIRST, LEAST = 60.0, 5.0
"""Seconds that a host may take for a micro-batch: of one that nobody has measured, and of any."""

UNLED = 10.0
"""Seconds that an origin which says that it is none is waited for: it may have begun anew, and look for its place."""

ROUND_PATIENCE = 2.0
"""Seconds without progress that a round has patience for; see GIVE_UP."""

MOVES = 2000
"""Tries of a plan, for each micro-batch and stage: what is small is soon searched."""

TOLD = frozenset(
    {"host", "host lost", "stage without holder", "micro-batch failed", "micro-batch given up", "gradient lost"}
    | {"plan", "no plan", "move"}
)
"""Events of a pipeline that are written down; the others come with every micro-batch."""


def learner(
    peer: Peer,
    manifest: Manifest,
    vocab: int,
    seat: Seat,
    *,
    batches: Callable[[], Batches],
    work: Work,
    fits: Collection[int] = (),
) -> HostLearner | OriginLearner:
    """What a peer trains that has this seat, and its Handler: the peer hears of the group from now on. `batches`: of an origin.

    A host whose origin is out of reach makes no steps; when it is no member any more, or has come back as something else, the
    host goes over to another group, with the stage that it has. `fits`: stages that it can hold instead, when its origin wants
    it to (HostLearner.next).
    """
    me, roster = peer.identity.peer_id, peer.presence.roster
    door = Doorway(me, peer.presence.outbox, peer.doors.now, work, peer.emit)
    if not seat.stage:
        origin = origin_learner(manifest, vocab, batches(), door)
        origin.muster.source = lambda stage: _source(peer, manifest.pipeline.stages, stage, origin.muster.missing)
        origin.others = lambda: _speeds(peer)
        peer.presence.stages = origin.muster
        return origin
    host = host_learner(manifest, vocab, seat.stage, seat.origin, door)

    since = math.inf

    def look() -> bool:
        nonlocal since
        now, leads = peer.doors.now(), host.host.origin in peer.seats().groups
        since = math.inf if leads else min(since, now)
        if leads and host.host.origin in peer.presence.live:
            return False
        if roster.alive(host.host.origin) and now < since + UNLED:
            return True
        found = home(peer.seats(), seat.stage)
        if found is None or found == host.host.origin:
            return True
        peer.announce(Seat(seat.stage, found).code())
        peer.emit("group", {"peer": found.hex(), "detail": f"stage {seat.stage} goes over to another group"})
        host.follow(found)
        return False

    def able(stage: int) -> bool:
        others = peer.seats(linked=True).groups.get(host.host.origin, {}).get(seat.stage, ())
        return stage in fits and stage > 0 and any(one != me for one in others)

    host.lacking, host.able = look, able
    peer.presence.stages = host
    return host


def _speeds(peer: Peer) -> list[float]:
    """Tokens per second that others have announced lately who train all of the model, or drive a group."""
    if not peer.ready:
        return []
    said = [(one, speed, round) for one, (_, speed, round) in list(peer.session.stats.items())]
    newest, alive = max((round for _, _, round in said), default=0), peer.presence.roster.alive
    return [speed for one, speed, round in said if speed > 0 and round > newest - FRESH and alive(one)]


def _source(peer: Peer, stages: int, stage: int, lost: Collection[int]) -> Source:
    """Where the parameters of a stage are that no host of ours holds: full replicas and other groups have them too."""
    roster, seats = peer.presence.roster, peer.seats()
    full = [one for one in roster.others if (record := roster.record_of(one)) is not None and not record.capabilities]
    held = [one for group in seats.groups.values() for one in group.get(stage, ())] + list(seats.orphans.get(stage, ()))
    return rescue(stage, stages, lost=lost, holders=len(full) + len(held), recent=0).source


def next_of(learner: object) -> Seat | None:
    """The seat that a peer takes instead of the one it has, if it is to."""
    return learner.next if isinstance(learner, HostLearner) else None


def held_of(learner: object) -> Collection[int] | None:
    """The fragments that what is trained has to do with; None: all."""
    return learner.held if isinstance(learner, HostLearner | OriginLearner) else None


@dataclass(frozen=True, slots=True)
class Doorway:
    """What a learner in a group needs of its peer: who it is, its way to others, its clock (seconds), where it computes."""

    me: PeerId
    outbox: Outbox
    now: Callable[[], float]
    work: Work
    emit: Emit


def host_learner(manifest: Manifest, vocab: int, stage: int, origin: PeerId, door: Doorway) -> HostLearner:
    """What a peer trains that holds stage `stage` of the group of `origin`."""
    holding = Holding(manifest, vocab, stage)
    section, micro = holding.section, manifest.micro
    holding.boundary.warm_up()
    host = Host(
        door.me,
        origin,
        stage,
        Stage(section),
        Update(section, inner_of(manifest)),
        holding.boundary,
        outbox=door.outbox,
        work=door.work,
        now=door.now,
        emit=_quiet(door.emit),
        context=manifest.model.context,
        batch=manifest.inner.batch,
        room=2 * max(manifest.room, manifest.pipeline.window or micro),
    )
    return HostLearner(holding, host, outbox=door.outbox, work=door.work, now=door.now)


def origin_learner(manifest: Manifest, vocab: int, batches: Batches, door: Doorway) -> OriginLearner:
    """What a peer trains that founds a group: it holds stage 0 and the data."""
    holding, pipeline, emit = Holding(manifest, vocab, 0), manifest.pipeline, _quiet(door.emit)
    pilot = _pilot(manifest, door.now, emit) if pipeline.paths == "planned" else None
    holding.boundary.warm_up()
    origin = Origin(
        holding.section,
        Update(holding.section, inner_of(manifest)),
        holding.boundary,
        Crew({}),
        outbox=door.outbox,
        work=door.work,
        now=door.now,
        patience=Patience(door.now, first=FIRST, least=LEAST),
        emit=emit,
        window=pipeline.window or min(pipeline.stages, manifest.micro),
        clip=manifest.inner.clip,
        by_visits=pipeline.gradient == "visits",
        pilot=pilot,
    )
    wait = manifest.exchange.grace + GIVE_UP * ROUND_PATIENCE
    spare = pipeline.stages - pipeline.visited
    muster = Muster(
        door.me, origin, pipeline.stages, outbox=door.outbox, now=door.now, wait=wait, emit=emit, spare=spare
    )
    muster.frozen = lambda: holding.frozen
    moves = pipeline.rebalance and pilot is None

    def order(peer: PeerId, stage: int) -> None:
        door.outbox.control(peer, Post(origin.next_step, origin.next_step, stage))

    return OriginLearner(
        holding,
        muster,
        batches,
        manifest,
        now=door.now,
        emit=emit,
        pilot=pilot,
        balance=Balance(origin.survey, door.now, period=pipeline.rebalance) if moves else None,
        order=order,
    )


def _pilot(manifest: Manifest, now: Callable[[], float], emit: Emit) -> Pilot:
    pipeline, room = manifest.pipeline, manifest.room
    tries = min(2 * MENDING, MOVES * manifest.micro * pipeline.stages)
    return Pilot(Survey(now), skip=pipeline.skip, swaps=pipeline.swaps, room=room, emit=emit, tries=tries)


def _quiet(emit: Emit) -> Emit:
    return lambda name, fields: emit(name, fields) if name in TOLD else None
