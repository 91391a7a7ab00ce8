"""Many Rosters and a lossy network on one event queue: virtual time without asyncio, for speed."""

import heapq
import math
import random
from collections import deque
from collections.abc import Callable

import msgspec
from thinwire.swarm.identity.identity import Identity
from thinwire.swarm.identity.peer_record import PeerRecord
from thinwire.swarm.membership.peer_table import MembershipEvent
from thinwire.swarm.membership.presets import WAN, Preset
from thinwire.swarm.membership.probe import Outgoing
from thinwire.swarm.membership.swim import Roster
from thinwire.swarm.messages.registry import Message, PeerId

RUN = b"r" * 32
EPOCH = 1_750_000_000
IDENTITIES = [Identity.generate(i.to_bytes(32, "big")) for i in range(1024)]


def record(index: int, sequence: int = 1, port: int = 4000, issued: int = EPOCH) -> PeerRecord:
    address = f"10.0.{index // 250}.{index % 250 + 1}:{port}"
    return PeerRecord.create(IDENTITIES[index], run_id=RUN, addresses=(address,), sequence=sequence, issued=issued)


class RosterWorld:
    """World of rosters. `names[i]`: id of peer i. `drop(sender, receiver)` decides on each message.

    `log` stores every event.
    """

    def __init__(
        self, seed: int = 1, preset: Preset = WAN, latency: tuple[float, float] = (0.02, 0.08), loss: float = 0.0
    ) -> None:
        self.now = 0.0
        self.preset, self.latency, self.loss = preset, latency, loss
        self.rng = random.Random(seed)
        self.rosters: dict[PeerId, Roster] = {}
        self.names: list[PeerId] = [identity.peer_id for identity in IDENTITIES]
        self.stalled: dict[PeerId, deque[tuple[PeerId, Message]]] = {}
        self.log: list[tuple[float, PeerId, MembershipEvent]] = []
        self.sent = 0
        self.drop: Callable[[PeerId, PeerId], bool] = lambda sender, receiver: False
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0
        self._timer: dict[PeerId, float] = {}

    def add(self, index: int, *, sequence: int = 1, port: int = 4000, seeds: list[int] | None = None) -> Roster:
        """Start peer `index`; it and each of `seeds` exchange records, as by Hello and Welcome."""
        mine = record(index, sequence, port, EPOCH + int(self.now))
        peer = mine.peer_id
        self.rosters[peer] = roster = Roster(
            IDENTITIES[index],
            mine,
            run_id=RUN,
            preset=self.preset,
            rng=random.Random(self.rng.random()),
            now=self.now,
            wall=lambda: EPOCH + int(self.now),
        )
        for seed in seeds or []:
            other = self.rosters[self.names[seed]]
            roster.learn(other.record, self.now)
            other.learn(mine, self.now)
            self._arm(self.names[seed])
        self._arm(peer)
        return roster

    def full(self, count: int) -> None:
        """Start `count` peers that all know each other."""
        for i in range(count):
            self.add(i)
        for i in range(count):
            for j in range(count):
                if i != j:
                    self.rosters[self.names[i]].learn(self.rosters[self.names[j]].record, self.now)
        for roster in self.rosters.values():
            roster.events.clear()

    def crash(self, index: int) -> None:
        del self.rosters[self.names[index]]

    def stall(self, index: int, seconds: float) -> None:
        """Stop a peer's event loop for a while; afterwards it drains its sockets, then its timers run."""
        peer = self.names[index]
        self.stalled[peer] = deque()

        def resume() -> None:
            waiting = self.stalled.pop(peer)
            for sender, message in waiting:
                self._receive(sender, peer, message)
            if peer in self.rosters and seconds > self.preset.lag_limit:
                self.rosters[peer].stalled(seconds, self.now)
            self._tick(peer)

        self.at(self.now + seconds, resume)

    def at(self, when: float, action: Callable[[], None]) -> None:
        self._count += 1
        heapq.heappush(self._queue, (when, self._count, action))

    def send(self, sender: PeerId, messages: Outgoing) -> None:
        for receiver, message in messages:
            self.sent += 1
            assert receiver != sender
            assert len(msgspec.msgpack.encode(message)) <= message.limit, type(message)
            if self.rng.random() < self.loss or self.drop(sender, receiver):
                continue
            delay = self.rng.uniform(*self.latency)
            self.at(self.now + delay, lambda s=sender, r=receiver, m=message: self._receive(s, r, m))  # type: ignore[misc]

    def _receive(self, sender: PeerId, receiver: PeerId, message: Message) -> None:
        if receiver in self.stalled:
            self.stalled[receiver].append((sender, message))
        elif receiver in self.rosters:
            roster = self.rosters[receiver]
            self.send(receiver, roster.handle(sender, message, self.now))
            assert roster.due == -math.inf or not roster.events, "the next tick would not pass the events on"
            self._arm(receiver)

    def _arm(self, peer: PeerId) -> None:
        roster = self.rosters[peer]
        self.log += [(self.now, peer, event) for event in roster.events]
        roster.events.clear()
        when = roster.next_deadline()
        if when < self._timer.get(peer, float("inf")):
            self._timer[peer] = when
            self.at(max(when, self.now), lambda: self._due(peer, when))

    def _due(self, peer: PeerId, when: float) -> None:
        if self._timer.get(peer) == when:
            del self._timer[peer]
            if peer in self.rosters and peer not in self.stalled:
                self._tick(peer)

    def _tick(self, peer: PeerId) -> None:
        if peer in self.rosters:
            self.send(peer, self.rosters[peer].tick(self.now))
            self._arm(peer)

    def run(self, until: float, done: Callable[[], bool] | None = None) -> bool:
        """Run until a time, or until `done`. True when it was done."""
        while self._queue and self._queue[0][0] <= until:
            self.now, _, action = heapq.heappop(self._queue)
            action()
            if done is not None and done():
                return True
        self.now = until
        return done is not None and done()

    def agreed(self) -> bool:
        """Every roster has exactly the running peers in its view."""
        running = tuple(sorted(self.rosters))
        return all(roster.peers.view.peers == running for roster in self.rosters.values())

    def events(self, kind: str) -> list[tuple[float, PeerId, MembershipEvent]]:
        return [entry for entry in self.log if entry[2].kind == kind]
