"""How a weak peer comes to its stage: it says that it waits for one, looks who else does, and takes what falls to it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from thinwire.swarm.manifest import Manifest, ManifestError
from thinwire.swarm.seat import WAITING, Seat, Seating

from ..knock import SEARCH_SECONDS, NoSwarm
from ..peer import Peer
from .place import fitting, gaps, home, memory, share

SETTLE_SECONDS = 3.0
"""How long news of a member takes to be known to nearly all."""

TRIES = 6
"""Times that a place is looked for, where several have come to the same one."""

PATIENT = 2
"""Of these, the first ones, in which an origin whom nobody has joined waits for those that are one too many elsewhere."""


async def seat(peer: Peer, manifest: Manifest, vocab: int, *, limit: float, stage: int | None = None) -> Seat | None:
    """Take a place in the swarm for one that has `limit` bytes for training; None: the whole model fits. `stage`: this one.

    The peer's record says it from now on. Raises ManifestError when nothing fits, or there are no stages; NoSwarm when there
    is no group for `stage`. What a model of someone's own takes nobody knows: it is taken to fit.
    """
    stages, known = manifest.pipeline.stages, manifest.model.kind == "transformer"
    if stage is None and (not known or limit >= (needed := memory(manifest, vocab, None))):
        return None
    if not stages and stage is None:
        raise ManifestError(
            f"to train this model takes about {needed / 2**20:.0f} MiB, more than the {limit / 2**20:.0f} MiB of --memory",
            "raise --memory; in a run with [pipeline] this peer could hold a stage of the model",
        )
    if not stages:
        raise ManifestError("nobody holds a stage of this run's model", "the run has no [pipeline]; leave --stage out")
    if stage is not None:
        found = await _told(peer, stage, stages)
        peer.announce(found.code())
        return found
    return await _found(peer, manifest, share(manifest, vocab, limit)[1], limit)


async def _told(peer: Peer, stage: int, stages: int) -> Seat:
    me = peer.identity.peer_id
    if not 0 <= stage < stages:
        raise ManifestError(f"there is no stage {stage}", f"the model has stages 0 to {stages - 1}")
    if not stage:
        return Seat(0, me)
    until = peer.doors.now() + SEARCH_SECONDS
    while (origin := home(peer.seats(linked=True), stage)) is None:
        if peer.doors.now() > until:
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
        seats = peer.seats(linked=True)  # who died a moment ago is still a member, and out of reach
        empty = gaps(seats, fits, me)
        if taken is not None and not crowded(seats, taken, me, empty):
            break
        if taken is not None and not taken.stage and attempt <= PATIENT:
            continue
        if taken is not None and empty:
            # By chance: others may be one too many at the same place, or at another, and look for one now.
            taken = empty[int.from_bytes(me[attempt : attempt + 8], "big") % len(empty)]
        else:
            taken = fitting(anew(seats, me), stages, fits, me, manifest.pipeline.holders)
        if taken is None:
            raise NoSwarm("no peer here holds stage 0, which does not fit here", "raise --memory")
        peer.announce(taken.code())
    assert taken is not None
    return taken


def crowded(seats: Seating, taken: Seat, me: bytes, empty: Sequence[Seat]) -> bool:
    """Whether a peer should look for another place, where it could have those of `empty`: it is not the first at its own, or
    drives a group that nobody has joined; or its origin is gone.
    """
    held = seats.groups.get(taken.origin, {})
    if not taken.stage:
        return bool(empty) and not any(held.values())
    return taken.origin not in seats.groups or (bool(empty) and min(held.get(taken.stage, (me,)), default=me) < me)


def anew(seats: Seating, me: bytes) -> Seating:
    """The same where `me` has no stage yet."""
    groups = {
        origin: {stage: tuple(peer for peer in peers if peer != me) for stage, peers in held.items()}
        for origin, held in seats.groups.items()
        if origin != me
    }
    return Seating(groups, seats.orphans, tuple(sorted({*seats.waiting, me})))
