"""Interfaces of sessions: to the peer (`Session`), and to the loop of one replica (`ReplicaSession`)."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from thinwire.collectives.consensus.members.vote_store import OpenVotes, open_in_memory
from thinwire.collectives.rounds.round import Round
from thinwire.collectives.state_sync.state_sync import FetchedState, OtherModelState
from thinwire.collectives.timing import TICK
from thinwire.collectives.topology.shards import Grid
from thinwire.node.membership.presence import Presence
from thinwire.node.outer.state_transfer.state_fetcher import StateFetcher
from thinwire.node.outer.state_transfer.state_server import StateServer
from thinwire.node.runtime.asyncio_extra import Result, Work
from thinwire.node.runtime.event_log import Emit
from thinwire.node.state.replica import Replica
from thinwire.swarm.frame import Frame
from thinwire.swarm.identity.identity import Identity
from thinwire.swarm.manifest.manifest import Manifest
from thinwire.swarm.messages.registry import Digest, PeerId, Ready


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionContext:
    """Peer and run of a session, for all methods alike.

    `entered`: True if our state is that of the swarm, False if it must be compared with the others' first. `patience`:
    seconds without progress before a peer acts; adapts to the duration of rounds. `votes`: opens the memory of our votes in a
    fragment. `on_commit`: called when training on the old state may stop. `founder`: see Lineages.
    """

    identity: Identity
    manifest: Manifest
    run_id: Digest
    presence: Presence
    now: Callable[[], float]
    emit: Emit
    entered: bool = True
    patience: float = 2.0
    votes: OpenVotes = open_in_memory
    on_commit: Callable[[], None] = lambda: None
    founder: bytes = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class FragmentRounds:
    """Replica, peers and round in progress of one fragment, for the parts of a RoundSession.

    now: monotonic seconds. current: returns the round in progress.
    """

    replica: Replica
    presence: Presence
    fragment: int
    now: Callable[[], float]
    current: Callable[[], Round]


class Session(ABC):
    """Rounds of one peer, and handler of their frames. It has one session for each replica (`sessions`)."""

    def __init__(self, context: SessionContext) -> None:
        self.identity, self.manifest, self.run_id = context.identity, context.manifest, context.run_id
        self.me, self.presence = context.identity.peer_id, context.presence
        self.roster, self.live = context.presence.roster, context.presence.live
        self._send_queue, self._emit, self._now = context.presence.send_queue, context.emit, context.now
        self.announced: dict[PeerId, Ready] = {}
        """Latest announcement of each peer, of any fragment."""

    @property
    @abstractmethod
    def sessions(self) -> Mapping[int, ReplicaSession]:
        """Session of each replica, by the number of its fragment."""

    @property
    @abstractmethod
    def ready(self) -> Collection[PeerId]:
        """Peers that hold the state and take part in the round in progress."""

    @property
    @abstractmethod
    def overtaken(self) -> bool:
        """True if training on the old state should end, because the swarm has continued without us."""

    @property
    @abstractmethod
    def dropped_frames(self) -> int:
        """Number of frames that were dropped: of past or distant rounds, or of unknown fragments."""

    @abstractmethod
    def waiting_for(self) -> Collection[PeerId]:
        """Return the peers that the round in progress waits for."""

    @abstractmethod
    def sizes(self) -> dict[str, tuple[int, int]]:
        """Return size and limit of each buffer, by name."""

    def stalled(self) -> str:
        """Return why the round does not end, awaited peers, and until when; empty if it makes progress."""
        return ""

    @property
    def fruitless(self) -> bool:
        """True if the round in progress cannot be made, because no peer that is here has a contribution."""
        return False

    def leave(self) -> None:  # noqa: B027
        """Send a farewell in rounds in progress that need votes, so that no peer waits for ours."""

    def report(self, name: str, detail: str, **fields: object) -> None:
        """Emit an event about this peer."""
        self._emit(name, {"peer": self.me.hex(), "detail": detail, **fields})

    # --- frame handler

    @abstractmethod
    def on_link_up(self, peer: PeerId) -> None:
        """Handle a new link to a peer."""

    @abstractmethod
    def on_link_down(self, peer: PeerId, *, gone: bool) -> None:
        """Handle a broken link; `gone` if the process at its other end is dead."""

    @abstractmethod
    def on_frame(self, peer: PeerId, frame: Frame) -> None:
        """Handle a checked frame of a round, or about a state or a lineage."""

    @abstractmethod
    def on_tick(self) -> None:
        """Let time pass."""


class StateCatchUp(Protocol):
    """Decision to replace our state by a newer one, and its transfer: CatchUp, GossipCatchUp."""

    foreign: OtherModelState | None
    """The mismatch, if the asked peers train another model."""

    fetcher: StateFetcher
    """Client that fetches the newer state."""

    @property
    def alone(self) -> bool:
        """True if no peer offered a state at the last attempt."""

    @property
    def newest(self) -> bool:
        """True if the last attempt has shown that no other peer has a newer state than ours."""

    @property
    def replays(self) -> bool:
        """True if to follow the rounds since our state takes less than to fetch the state of the swarm."""

    async def newer(self, work: Work) -> FetchedState | None:
        """Fetch a newer state; return None if no peer offers a suitable one."""


class ReplicaSession(Session):
    """Rounds of one replica. Its loop calls `change` for each outer step, then `advance`."""

    catch_up: StateCatchUp
    states: StateServer

    def __init__(self, context: SessionContext, replica: Replica, fragment: int = 0) -> None:
        super().__init__(context)
        self.replica, self.fragment = replica, fragment

    @property
    def sessions(self) -> Mapping[int, ReplicaSession]:
        return {self.fragment: self}

    @property
    def codec(self) -> Any:
        return self.replica.codec

    @property
    def grid(self) -> Grid:
        """Chunk grid of the round in progress."""
        return self.replica.grid

    @property
    @abstractmethod
    def patience(self) -> float:
        """Seconds to wait for an answer or for progress before this peer acts."""

    async def wait_before_retry(self) -> None:
        """Wait for one patience; less if no peer was here and one appears."""
        alone, until = not self.live, self._now() + self.patience
        while self._now() < until and not (alone and self.live):
            await asyncio.sleep(TICK)

    @abstractmethod
    async def change(self, work: Work, how: Callable[[], Result]) -> Result:
        """Run `how`, which changes the replica, in `work`. The state is not offered until `advance`."""

    @abstractmethod
    def advance(self) -> None:
        """Begin the next round after a change of the state."""
