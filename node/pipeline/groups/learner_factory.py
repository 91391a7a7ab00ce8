"""Construction of a group's learners, from the manifest and a stage."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any

import numpy as np
from thinwire.collectives.timing import GIVE_UP
from thinwire.node.membership.handler import Handler, Topic
from thinwire.node.methods.fragments.fragment_replicas import begin_fragment
from thinwire.node.methods.fragments.standby_copy import StandbyCopy
from thinwire.node.methods.registry import fitted
from thinwire.node.outer.round_session import RoundSession
from thinwire.node.peer.peer import Peer
from thinwire.node.pipeline.groups.host_learner import HostLearner
from thinwire.node.pipeline.groups.host_readiness import HostReadiness
from thinwire.node.pipeline.groups.origin_learner import OriginLearner
from thinwire.node.pipeline.groups.rebalance import Rebalancer
from thinwire.node.pipeline.groups.stage_assignment import home
from thinwire.node.pipeline.model.held_stage import HeldStage
from thinwire.node.pipeline.model.stage import Stage
from thinwire.node.pipeline.model.stage_optimizer import StageOptimizer
from thinwire.node.pipeline.model.staged_model import StagedModel
from thinwire.node.pipeline.planner.path_search import MENDING
from thinwire.node.pipeline.recovery.holders import holders
from thinwire.node.pipeline.recovery.neighbour_copy import NeighbourBackup
from thinwire.node.pipeline.recovery.recovery_arbiter import RecoveryArbiter
from thinwire.node.pipeline.recovery.stage_recovery import StageRecovery
from thinwire.node.pipeline.recovery.stage_source import FASTER, SourceKind, rescue
from thinwire.node.pipeline.step.host import Host
from thinwire.node.pipeline.step.measurements import Measurements
from thinwire.node.pipeline.step.origin import Origin
from thinwire.node.pipeline.step.route_planner import RoutePlanner
from thinwire.node.pipeline.step.stage_holders import StageHolders
from thinwire.node.pipeline.step.step_context import StepContext
from thinwire.node.pipeline.step.timeouts import Timeouts
from thinwire.node.runtime.asyncio_extra import Work
from thinwire.node.runtime.event_log import Emit
from thinwire.node.training.batches import Batches
from thinwire.node.training.local_learner import inner_of
from thinwire.node.training.step_balancing import FRESH
from thinwire.swarm.identity.stage_claim import Seat
from thinwire.swarm.manifest.manifest import Manifest
from thinwire.swarm.messages.registry import PeerId, StageAssignment

FIRST, LEAST = 60.0, 5.0
"""Seconds for a micro-batch on an unmeasured host, and the least limit of any host."""

UNLED = 10.0
"""Seconds to wait for a peer that no longer announces itself as origin: it may choose a stage."""

ROUND_PATIENCE = 2.0
"""Patience of a round in seconds without progress; see GIVE_UP."""

MOVES = 2000
"""Attempts of a plan for each micro-batch and stage; a small problem is soon searched completely."""

LOGGED = frozenset(
    {"host_joined", "host_lost", "stage_lost", "micro_batch_failed", "micro_batch_given_up", "gradient_lost"}
    | {"plan", "plan_failed", "host_moved"}
)
"""Pipeline events that are logged; the others occur with every micro-batch."""


def learner(
    peer: Peer,
    model: StagedModel,
    seat: Seat,
    *,
    batches: Callable[[], Batches],
    work: Work,
    fits: Collection[int] = (),
) -> HostLearner | OriginLearner:
    """Create the learner of a peer with this seat, and its Handler, which receives the group's messages.

    `batches`: of an origin. `fits`: stages that a host can hold instead if its origin wants it to (HostLearner.next).
    """
    context = StepContext(peer.identity.peer_id, peer.presence.send_queue, peer.environment.now, work, peer.emit)
    if seat.stage:
        return _host(peer, model, seat, context, fits)
    return _origin(peer, model, batches(), context)


def _origin(peer: Peer, model: StagedModel, batches: Batches, context: StepContext) -> OriginLearner:
    """Create the learner of an origin."""
    manifest = model.manifest
    origin = origin_learner(
        model,
        batches,
        context,
        source=lambda stage: _source(peer, manifest, stage, origin.readiness, backup),
        alone=lambda: _alone(peer),
        others=lambda: _speeds(peer),
    )
    arbiter = RecoveryArbiter(peer, lambda: origin.origin.norms)
    backup = protect(peer, manifest, origin, origin.readiness, arbiter, context.work)
    return origin


def _host(peer: Peer, model: StagedModel, seat: Seat, context: StepContext, fits: Collection[int]) -> HostLearner:
    """Create the learner of a host.

    Without a link to its origin it makes no steps. If the origin is no longer a member, or has returned in another role, the
    host joins another group with its stage.
    """
    me, roster = context.me, peer.presence.roster

    def outdated(origin: PeerId, stage: int) -> None:
        if (
            peer.ready
            and (origin, stage) == (host.host.origin, seat.stage)
            and _session_of(peer, stage).catch_up.outdated()
        ):
            peer.emit(
                "host_outdated", {"peer": origin.hex(), "detail": f"stage {stage} was recovered while we were away"}
            )
            host.rest()

    since = math.inf

    def orphaned() -> bool:
        nonlocal since
        now, leads = peer.environment.now(), host.host.origin in peer.seats().groups
        since = math.inf if leads else min(since, now)
        if leads and host.host.origin in peer.presence.live:
            return False
        if roster.peers.is_live(host.host.origin) and now < since + UNLED:
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

    def round() -> int:
        return _session_of(peer, seat.stage).replica.round if peer.ready else 0

    host = host_learner(model, seat.stage, seat.origin, context, round=round, orphaned=orphaned, able=able)
    protect(peer, model.manifest, host, host, RecoveryArbiter(peer, outdated=outdated), context.work)
    return host


def protect(
    peer: Peer,
    manifest: Manifest,
    learner: HostLearner | OriginLearner,
    handler: Handler,
    arbiter: RecoveryArbiter,
    work: Work,
) -> NeighbourBackup | None:
    """Protect stages against loss: recover our stage if no peer has it, and store a copy of the next one.

    The peer receives the messages of its group and about lost stages from now on.
    """
    (stage,), pipeline, layout = learner.held, manifest.pipeline, learner.layout

    def make(number: int) -> StandbyCopy:
        codec, _ = fitted(manifest, layout)
        # Only the stage's own elements of the zeros are ever touched.
        fragment = begin_fragment(manifest, layout, codec, np.zeros(layout.total, np.float32), number, ())
        return StandbyCopy(fragment, peer.presence.send_queue, peer.environment.now, peer.fragments.ahead.chains)

    def recovered(source: str, reconstructed: bool) -> None:
        learner.source = source
        if reconstructed:
            peer.private = None  # The moments belong to other parameters.
            learner.update.faster = FASTER

    every = pipeline.backup_every
    backup = NeighbourBackup(peer, stage, pipeline.stages, every, make, work) if every else None
    recover = StageRecovery(peer, pipeline, arbiter, make, work, recovered)
    handlers = {Topic.STAGES: handler, Topic.RECOVERY: arbiter}
    peer.hold(learner.held, handlers, recover=recover, tasks=(backup.run,) if backup is not None else ())
    return backup


def _session_of(peer: Peer, stage: int) -> RoundSession:
    return peer.fragments.sessions[stage]


def _alone(peer: Peer) -> bool:
    """Return True if no other announced peer trains: no whole model, and no complete group."""
    roster, groups = peer.presence.roster, peer.seats(linked=True).groups.items()
    able = {origin for origin, held in groups if all(held.values())}
    able |= {one for origin, held in groups if origin in able for peers in held.values() for one in peers}
    for one in peer.session.announced if peer.ready else ():
        record = roster.peers.record_of(one)
        if roster.peers.is_live(one) and record is not None and (not record.capabilities or one in able):
            return False
    return True


def _speeds(peer: Peer) -> list[float]:
    """Return the tokens per second that peers with the whole model and origins have announced recently."""
    if not peer.ready:
        return []
    announced, alive = list(peer.session.announced.items()), peer.presence.roster.peers.is_live
    newest = max((ready.round for _, ready in announced), default=0)
    return [ready.speed for one, ready in announced if ready.speed > 0 and ready.round > newest - FRESH and alive(one)]


def _source(
    peer: Peer, manifest: Manifest, stage: int, readiness: HostReadiness, backup: NeighbourBackup | None
) -> SourceKind:
    """Return the sources of a stage without a host: full replicas, other groups, and copies."""
    held, pipeline = holders(peer, stage) & peer.presence.live, manifest.pipeline
    copied = backup is not None and (backup.held if stage == 1 else bool(readiness.hosts[stage - 1]))
    age = 0 if copied else None
    return rescue(
        stage, pipeline.stages, lost=readiness.missing, holders=len(held), copy=age, recent=pipeline.backup_max_age
    ).source


def next_of(learner: object) -> Seat | None:
    """Return the seat that a peer takes instead of its present one, or None."""
    return learner.next if isinstance(learner, HostLearner) else None


def host_learner(
    model: StagedModel, stage: int, origin: PeerId, context: StepContext, **known: Callable[..., Any]
) -> HostLearner:
    """Create the learner of a peer that holds `stage` in the group of `origin`. `known`: see HostLearner."""
    holding, context = HeldStage(model, stage), _quiet(context)
    section, manifest = holding.section, model.manifest
    micro = manifest.microbatches
    holding.boundary.warm_up()
    host = Host(
        context,
        origin,
        stage,
        Stage(section),
        StageOptimizer(section.module, inner_of(manifest)),
        holding.boundary,
        length=manifest.model.context,
        batch=manifest.inner.batch,
        room=2 * max(manifest.host_capacity, manifest.pipeline.max_in_flight or micro),
    )
    return HostLearner(holding, host, context, **known)


def origin_learner(
    model: StagedModel,
    batches: Batches,
    context: StepContext,
    *,
    source: Callable[[int], SourceKind] = lambda stage: "holder",
    alone: Callable[[], bool] = lambda: False,
    others: Callable[[], list[float]] = list,
) -> OriginLearner:
    """Create the learner of a peer that founds a group: it holds stage 0 and the data.

    `source`, `alone`: see HostReadiness. `others`: see OriginLearner.
    """
    manifest, holding, context = model.manifest, HeldStage(model, 0), _quiet(context)
    pipeline = manifest.pipeline
    route_planner = _route_planner(manifest, context.now, context.emit) if pipeline.paths == "planned" else None
    holding.boundary.warm_up()
    origin = Origin(
        holding.section,
        StageOptimizer(holding.section.module, inner_of(manifest)),
        holding.boundary,
        StageHolders({}),
        context,
        patience=Timeouts(context.now, first=FIRST, least=LEAST),
        window=pipeline.max_in_flight or min(pipeline.stages, manifest.microbatches),
        clip=manifest.inner.clip,
        by_visits=pipeline.gradient == "visits",
        route_planner=route_planner,
    )
    wait = manifest.exchange.timeout_seconds + GIVE_UP * ROUND_PATIENCE
    spare = pipeline.stages - pipeline.visited
    readiness = HostReadiness(
        context,
        origin,
        pipeline.stages,
        wait=wait,
        spare=spare,
        frozen=lambda: holding.frozen,
        source=source,
        alone=alone,
    )
    moves = pipeline.rebalance and route_planner is None

    def order(peer: PeerId, stage: int) -> None:
        context.send_queue.control(peer, StageAssignment(origin.next_step, origin.next_step, stage))

    return OriginLearner(
        holding,
        readiness,
        batches,
        manifest,
        now=context.now,
        emit=context.emit,
        route_planner=route_planner,
        balance=Rebalancer(origin.measurements, context.now, period=pipeline.rebalance) if moves else None,
        order=order,
        others=others,
    )


def _route_planner(manifest: Manifest, now: Callable[[], float], emit: Emit) -> RoutePlanner:
    pipeline, room = manifest.pipeline, manifest.host_capacity
    tries = min(2 * MENDING, MOVES * manifest.microbatches * pipeline.stages)
    return RoutePlanner(
        Measurements(now), skip=pipeline.skip_fraction, swaps=pipeline.max_reorders, room=room, emit=emit, tries=tries
    )


def _quiet(context: StepContext) -> StepContext:
    """Return a context whose event log receives only the events in LOGGED."""
    emit = context.emit
    return replace(context, emit=lambda name, fields: emit(name, fields) if name in LOGGED else None)
