"""Stage choice of a joining weak peer: it announces that it waits, and takes its assigned stage."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial

from thinwire.node.membership.join import SEARCH_SECONDS, NoSwarm
from thinwire.node.peer.peer import Peer
from thinwire.node.pipeline.groups.stage_assignment import fitting, gaps, home, memory, share
from thinwire.node.pipeline.model.staged_model import StagedModel
from thinwire.node.runtime.asyncio_extra import Work, at_once
from thinwire.swarm.identity.stage_claim import WAITING, Seat, Seating
from thinwire.swarm.manifest.manifest import Manifest, ManifestError

SETTLE_SECONDS = 3.0
"""Seconds after which nearly all peers know a new member."""

TRIES = 6
"""Attempts to find a place if several peers have taken the same one."""

PATIENT = 2
"""Number of first attempts in which an origin without hosts waits for surplus hosts."""


async def seat(
    peer: Peer, model: StagedModel, *, limit: float, stage: int | None = None, work: Work = at_once
) -> Seat | None:
    """Take a place with `limit` bytes for training; None if the whole model fits.

    `stage`: the wanted one. `work`: runs computations. The peer's record announces the place from then on. Raises
    ManifestError if nothing fits or the run has no stages, and NoSwarm if there is no group for `stage`. The memory of a
    user's model in a run without stages is unknown: it is assumed to fit.
    """
    stages = model.manifest.pipeline.stages
    known = bool(stages) or model.manifest.model.kind == "transformer"
    if stage is None and (not known or limit >= (needed := await work(partial(memory, model, None)))):
        return None
    if not stages and stage is None:
        raise ManifestError(
            f"to train this model takes about {needed / 2**20:.0f} MiB, more than the {limit / 2**20:.0f} MiB of --memory",
            "raise --memory; in a run with [pipeline] this peer could hold a stage of the model",
        )
    if not stages:
        raise ManifestError("no peer holds a stage of this run's model", "the run has no [pipeline]; leave --stage out")
    if stage is not None:
        found = await _find_seat(peer, stage, stages)
        peer.announce(found.code())
        return found
    return await _found(peer, model.manifest, share(model, limit)[1], limit)


async def _find_seat(peer: Peer, stage: int, stages: int) -> Seat:
    me = peer.identity.peer_id
    if not 0 <= stage < stages:
        raise ManifestError(f"there is no stage {stage}", f"the model has stages 0 to {stages - 1}")
    if not stage:
        return Seat(0, me)
    until = peer.environment.now() + SEARCH_SECONDS
    while (origin := home(peer.seats(linked=True), stage)) is None:
        if peer.environment.now() > until:
            raise NoSwarm("no peer here holds stage 0", "begin a group with --stage 0")
        await asyncio.sleep(SETTLE_SECONDS)
    return Seat(stage, origin)


async def _found(peer: Peer, manifest: Manifest, fits: tuple[int, ...], limit: float) -> Seat:
    me, stages = peer.identity.peer_id, manifest.pipeline.stages
    if not fits:
        raise ManifestError(
            f"no stage of this model fits {limit / 2**20:.0f} MiB", "raise --memory, or pipeline.stages in a new run"
        )
    peer.announce(WAITING)
    taken: Seat | None = None
    for attempt in range(TRIES):
        await asyncio.sleep(SETTLE_SECONDS)
        seats = peer.seats(linked=True)  # A peer that has just died is still a member, but out of reach.
        empty = gaps(seats, fits, me)
        if taken is not None and not crowded(seats, taken, me, empty):
            break
        if taken is not None and not taken.stage and attempt <= PATIENT:
            continue
        if taken is not None and empty:
            # Choose at random: other peers may be surplus at the same place or at another one, and choose now, too.
            taken = empty[int.from_bytes(me[attempt : attempt + 8], "big") % len(empty)]
        else:
            taken = fitting(unseated(seats, me), stages, fits, me, manifest.pipeline.peers_per_stage)
        if taken is None:
            raise NoSwarm("no peer here holds stage 0, which does not fit here", "raise --memory")
        peer.announce(taken.code())
    assert taken is not None
    return taken


def crowded(seats: Seating, taken: Seat, me: bytes, empty: Sequence[Seat]) -> bool:
    """Return True if a peer should choose another of the places `empty`.

    It should if it is not the first one at its own place, drives a group without hosts, or has lost its origin.
    """
    held = seats.groups.get(taken.origin, {})
    if not taken.stage:
        return bool(empty) and not any(held.values())
    return taken.origin not in seats.groups or (bool(empty) and min(held.get(taken.stage, (me,)), default=me) < me)


def unseated(seats: Seating, me: bytes) -> Seating:
    """Return the same seating without a stage of `me`."""
    groups = {
        origin: {stage: tuple(peer for peer in peers if peer != me) for stage, peers in held.items()}
        for origin, held in seats.groups.items()
        if origin != me
    }
    return Seating(groups, seats.orphans, tuple(sorted({*seats.waiting, me})))
