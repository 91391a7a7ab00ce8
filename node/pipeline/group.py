"""Taking a place in a group that holds the model together: from the manifest and a stage to what a Life trains."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass

import numpy as np
from thinwire.collectives.outbox import Outbox
from thinwire.node.chainsession import ChainedSession, ChainSession
from thinwire.swarm.manifest import Manifest
from thinwire.swarm.protocol import PeerId, Post
from thinwire.swarm.seat import Seat

from ..chains import chain_of
from ..copies import Copy
from ..data import Batches
from ..methods import fitted
from ..peer import Peer
from ..power import FRESH
from ..presence import Emit
from ..rounds import GIVE_UP
from ..training import inner_of
from ..waiting import Work
from .buddy import Buddy
from .crew import Crew
from .holders import holders
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
from .rescue import FASTER, Source, rescue
from .salvage import Salvage
from .search import MENDING
from .stage import Stage
from .steward import Steward
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
        buddy = keep(peer, manifest, origin, Steward(peer, origin.muster, lambda: origin.drives.norms), work)
        origin.muster.source = lambda stage: _source(peer, manifest, stage, origin.muster, buddy)
        origin.muster.alone = lambda: _alone(peer)
        origin.others = lambda: _speeds(peer)
        return origin
    host = host_learner(manifest, vocab, seat.stage, seat.origin, door)
    steward = Steward(peer, host)
    keep(peer, manifest, host, steward, work)
    host.round = lambda: _chain(peer, seat.stage).replica.round if peer.ready else 0

    def outdated(origin: PeerId, stage: int) -> None:
        if (
            peer.ready
            and (origin, stage) == (host.host.origin, seat.stage)
            and _chain(peer, stage).following.outdated()
        ):
            peer.emit(
                "outdated", {"peer": origin.hex(), "detail": f"stage {stage} was brought back while we were away"}
            )
            host.rest()

    steward.outdated = outdated

    since = math.inf

    def look() -> bool:
        nonlocal since
        now, leads = peer.doors.now(), host.host.origin in peer.seats().groups
        since = math.inf if leads else min(since, now)
        if leads and host.host.origin in peer.presence.live:
            return False
        if roster.alive(host.host.origin) and now < since + UNLED:
            return not _alone(peer)
        found = home(peer.seats(), seat.stage)
        if found is None or found == host.host.origin:
            return not _alone(peer)
        peer.announce(Seat(seat.stage, found).code())
        peer.emit("group", {"peer": found.hex(), "detail": f"stage {seat.stage} goes over to another group"})
        host.follow(found)
        return False

    def able(stage: int) -> bool:
        others = peer.seats(linked=True).groups.get(host.host.origin, {}).get(seat.stage, ())
        return stage in fits and stage > 0 and any(one != me for one in others)

    host.lacking, host.able = look, able
    return host


def keep(
    peer: Peer, manifest: Manifest, learner: HostLearner | OriginLearner, steward: Steward, work: Work
) -> Buddy | None:
    """What this peer does against the loss of a stage: its own is brought back, if nobody has it; of the next one it keeps a
    copy. From now on it hears of the group.
    """
    (stage,), pipeline, layout = learner.held, manifest.pipeline, learner.layout

    def make(number: int) -> Copy:
        codec, _ = fitted(manifest, layout)
        # Only the stage's own elements of the zeros are ever touched.
        chain = chain_of(manifest, layout, codec, np.zeros(layout.total, np.float32), number, ())
        return Copy(chain, peer.presence.outbox, peer.doors.now)

    def brought(source: str, anew: bool) -> None:
        learner.source = source
        if anew:
            peer.private = None  # the moments are those of other parameters
            learner.update.faster = FASTER

    peer.presence.stages = steward
    peer.lost = Salvage(peer, pipeline, steward, make, work, brought)
    if not pipeline.buddy:
        return None
    buddy = Buddy(peer, stage, pipeline.stages, pipeline.buddy, make, work)
    peer.beside.append(buddy.run)
    return buddy


def _chain(peer: Peer, stage: int) -> ChainSession:
    assert isinstance(peer.session, ChainedSession)
    return peer.session.links[stage]


def _alone(peer: Peer) -> bool:
    """Whether nobody trains who has told us of it, all of the model or in a group that lacks nothing."""
    roster, groups = peer.presence.roster, peer.seats(linked=True).groups.items()
    able = {origin for origin, held in groups if all(held.values())}
    able |= {one for origin, held in groups if origin in able for peers in held.values() for one in peers}
    for one in peer.session.stats if peer.ready else ():
        record = roster.record_of(one)
        if roster.alive(one) and record is not None and (not record.capabilities or one in able):
            return False
    return True


def _speeds(peer: Peer) -> list[float]:
    """Tokens per second that others have announced lately who train all of the model, or drive a group."""
    if not peer.ready:
        return []
    said = [(one, speed, round) for one, (_, speed, round) in list(peer.session.stats.items())]
    newest, alive = max((round for _, _, round in said), default=0), peer.presence.roster.alive
    return [speed for one, speed, round in said if speed > 0 and round > newest - FRESH and alive(one)]


def _source(peer: Peer, manifest: Manifest, stage: int, muster: Muster, buddy: Buddy | None) -> Source:
    """Where the parameters of a stage are that no host of ours holds: full replicas and other groups have them too, and the
    peers of the stage before it may have a copy.
    """
    held, pipeline = holders(peer, stage) & peer.presence.live, manifest.pipeline
    copied = buddy is not None and (buddy.held if stage == 1 else bool(muster.hosts[stage - 1]))
    age = 0 if copied else None
    return rescue(
        stage, pipeline.stages, lost=muster.missing, holders=len(held), copy=age, recent=pipeline.recent
    ).source


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
    wait = manifest.exchange.seconds + GIVE_UP * ROUND_PATIENCE
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
