"""Open runs in virtual time: peers with invites of the author, and lies about contributions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from kit.scenarios import events_of, identity_of
from thinwire.collectives.rounds.data_planes.contributions import ContributionSummary
from thinwire.sims.peers.false_messages import sessions
from thinwire.sims.peers.machine import Process
from thinwire.sims.simulation.world import SimulatedRun, SimWorld
from thinwire.swarm.identity.admission_token import Inviter
from thinwire.swarm.identity.invite import Invite


def name_of(peer: int) -> str:
    """Return the id of a peer in hexadecimal."""
    return identity_of(peer).peer_id.hex()


def opinions_of(run: SimulatedRun, member: int, other: int) -> list[Any]:
    """Return the opinions of a member about another peer, in order of time."""
    return [event.fields for event in events_of(run, "trial", member) if event.fields["peer"] == name_of(other)]


def invite(patch: pytest.MonkeyPatch, count: int) -> None:
    """Give the first peers an invite of the author for their key, so that they need no trial, and the others a plain one."""

    def contacts(self: SimWorld, me: int) -> Invite:
        author, plain = self.machines[0].identity, Invite(self.run_id, real(self, me).seeds)
        inviter = Inviter(author, b"", self.manifest.admission.policy(self.run_id, author.public_key))
        return inviter.invite(plain, identity_of(me).peer_id) if me < count else plain

    real = SimWorld.contacts
    patch.setattr(SimWorld, "contacts", contacts)


def told_at(at: float, told: list[dict[str, str]], patch: pytest.MonkeyPatch) -> None:
    """Store the remarks on all peers in the status of the first one at some second."""
    original = SimWorld.play

    def look(world: SimWorld) -> None:
        process = world.machines[0].process
        assert process is not None and process.lifecycle is not None
        told.append({one.peer: one.reason for one in process.lifecycle.report.snapshot(process.peer).peers})

    async def play(self: SimWorld) -> None:
        self.net.at(at, look, self)
        await original(self)

    patch.setattr(SimWorld, "play", play)


def replaces(change: Callable[[Process, np.ndarray], np.ndarray]) -> Callable[[Process], None]:
    """Return a lie that replaces each fp32 contribution before it is announced."""

    def lie(process: Process) -> None:
        (session,) = sessions(process)
        average = session.average

        async def lying(source: Any, *, summary: ContributionSummary | None = None, **rest: Any) -> Any:
            values = [np.frombuffer(bytes(chunk), np.float32) for chunk in source]
            return await average([change(process, one).astype(np.float32).data.cast("B") for one in values], **rest)

        session.average = lying

    return lie


def noise(process: Process, values: np.ndarray) -> np.ndarray:
    """Return noise of the same length."""
    drawn = np.random.default_rng(process.peer.replica.round).standard_normal(values.size)
    return drawn * np.sqrt(np.mean(values.astype(np.float64) ** 2))


def update_of(process: Process, index: int, size: int) -> np.ndarray:
    """Return what another peer would send now: an honest contribution, trained on the data of that peer."""
    other = process.machine.world.machines[index].process
    assert other is not None and other.learner is not None
    return (process.peer.replica.theta - other.learner.parameters())[:size]
