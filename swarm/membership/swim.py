"""Roster: SWIM with Lifeguard over signed records, without sockets or clocks.

The caller passes in messages and time, and sends the messages that it gets back: `(message, now) -> messages`. Every
parameter `now` is in monotonic seconds; `wall` returns unix seconds and is used for records only.

The caller drains its sockets before it calls `tick`. It reports times in which it did not listen (`stalled`), so that they do
not count against other peers.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Collection, Sequence

from thinwire.swarm.identity.admission_token import AdmissionPolicy
from thinwire.swarm.identity.identity import Identity
from thinwire.swarm.identity.peer_record import PeerRecord
from thinwire.swarm.membership import gossip_items
from thinwire.swarm.membership.broadcast_queue import BroadcastQueue
from thinwire.swarm.membership.gossip_intake import GossipIntake
from thinwire.swarm.membership.gossip_items import Departure
from thinwire.swarm.membership.item_choice import ItemChoice
from thinwire.swarm.membership.peer_table import MembershipEvent
from thinwire.swarm.membership.presets import Preset
from thinwire.swarm.membership.probe import Outgoing, Prober, Rotation
from thinwire.swarm.membership.suspicion import Awareness
from thinwire.swarm.membership.table_exchange import TableExchange
from thinwire.swarm.membership.transitions import Transitions
from thinwire.swarm.messages.registry import Ack, Gossip, Message, Nack, PeerId, Ping, PingRequest, PushPull
from thinwire.swarm.round_trip_times import Distances

DEPARTURE_MESSAGES = 64
"""Maximum number of peers that are informed of this peer's departure directly."""

RECONNECT_PROBES = 4
"""Dead peers that are probed in each reconnect period: one of many may be back."""


class Roster:
    """Membership of one run, as known to this peer.

    record: our first record; its sequence must be above those of earlier processes with this identity (unix milliseconds
    will do). peers: all known peers, to be read only. progress: round of this peer; set it to publish it. events: events
    since the caller last emptied the list.
    """

    def __init__(
        self,
        identity: Identity,
        record: PeerRecord,
        *,
        run_id: bytes,
        preset: Preset,
        rng: random.Random,
        now: float,
        wall: Callable[[], int],
    ) -> None:
        if record.peer_id != identity.peer_id or record.run_id != run_id:
            raise ValueError("the record is not ours, or of another run")
        self.awareness = Awareness(preset.awareness_max)
        self._identity, self.preset, self._rng = identity, preset, rng
        queue = BroadcastQueue()
        self._transitions = Transitions(identity, record, preset, queue, self.awareness, wall, rng)
        self.peers = self._transitions.table
        self._items = ItemChoice(self._transitions, queue, preset)
        self._intake = GossipIntake(self._transitions, run_id, wall, now)
        self.distances = Distances()
        """Measured round-trip times to other peers."""
        self._prober = Prober(preset, rng, self.awareness, self._helpers, self._items.piggyback, self.distances.add)
        self._rotation = Rotation(rng)
        self.due = -math.inf
        """Time before which `tick` changes nothing.

        It is the next deadline, or the past after an input that may change it or has caused an event.
        """
        self._left = False
        self._probe_at = now + rng.random() * preset.probe_period
        self._gossip_at = now
        self._tables = TableExchange(preset, rng, now)
        self._reconnect_at = now + preset.reconnect_period
        self._refresh_at = now + record.ttl / 2

    # --- queries

    @property
    def record(self) -> PeerRecord:
        """Current record of this peer."""
        return self.peers.own.record

    @property
    def events(self) -> list[MembershipEvent]:
        return self._transitions.events

    @property
    def queued(self) -> int:
        """Number of gossip items in the queue."""
        return self._items.queued

    @property
    def progress(self) -> int:
        return self._prober.progress

    @progress.setter
    def progress(self, value: int) -> None:
        self._prober.progress = value

    @property
    def left(self) -> bool:
        """True after `leave`."""
        return self._left

    # --- admission

    def set_policy(self, policy: AdmissionPolicy | None) -> None:
        """Set the rule of admission; None, while it is unknown: all records are ignored."""
        self._transitions.exclusions.policy = policy

    def protect(self, peers: Collection[PeerId], failed: Collection[PeerId] = ()) -> None:
        """Set the peers whose entry is never removed for a newcomer: members, now or before.

        failed: peers on trial that have failed here, so that others may take their places. The collections may change later.
        """
        self.peers.protected, self.peers.failed = peers, failed

    def on_trial(self, peer: PeerId) -> bool:
        """Return True if a peer has no token of the author, in a run with a trial of newcomers."""
        policy = self._transitions.exclusions.policy
        if policy is None or not policy.trial:
            return False
        record = self.peers.record_of(peer)
        return record is None or policy.on_trial(record.token, peer)

    def token_of(self, peer: PeerId) -> bytes:
        """Return the admission token in the record of a peer; empty without a record."""
        record = self.peers.record_of(peer)
        return record.token if record is not None else b""

    def is_excluded(self, peer: PeerId, token: bytes) -> bool:
        """Return True if a peer with this token is banned, or a revocation that is known here excludes it."""
        return peer in self.peers.banned or self._transitions.exclusions.revokes(token, peer)

    def is_admitted(self, peer: PeerId, token: bytes) -> bool:
        """Return True if the rule of admission admits a peer with this token.

        Expiry and revocations are not checked.
        """
        policy = self._transitions.exclusions.policy
        return policy is not None and not policy.refusal(token, peer)

    def refusal(self, record: PeerRecord) -> str:
        """Return why the peer of a validated record is not admitted; empty if it is. Expiry is not checked."""
        return self._transitions.exclusions.refusal(record)

    @property
    def ban_items(self) -> tuple[bytes, ...]:
        """Evidence against peers, verdicts on others, and revocations; `apply_ban_items` takes them.

        A verdict on this peer ends with its process: others may be in a lineage without it, and repeat it if they are not.
        """
        exclusions, me = self._transitions.exclusions, self.peers.me
        found = [item for peer, item in exclusions.ban_items.items() if peer != me or not exclusions.by_verdict(peer)]
        return (*found, *exclusions.revoked.values())

    def ban_item_of(self, peer: PeerId) -> bytes | None:
        """Return the item that shows a peer why it is banned; None for two records with one sequence."""
        entry = self.peers.entries.get(peer)
        revoked = entry is not None and entry.state_item[:1] == bytes([gossip_items.REVOCATION])
        default = entry.state_item if entry is not None and revoked else None
        return self._transitions.exclusions.ban_items.get(peer, default)

    # --- inputs

    def learn(
        self, record: PeerRecord, now: float, *, authenticated: bool = False, admits: bool = False, source: str = ""
    ) -> None:
        """Process a validated record from a Welcome or Hello.

        authenticated: the record is that of the peer at the other end. admits: that peer has admitted us. source: IP address
        from which it has come to our gate.
        """
        alone, known = self.peers.live.alone, record.item in self.peers.known_items
        if joined := self._transitions.accept(record, now, authenticated=authenticated, source=source):
            self._rotation.insert(record.peer_id)
        if alone and not self.peers.live.alone:
            self._tables.on_first_peer(now)
        elif joined and admits:
            self._tables.on_admission(record.peer_id, now)
        if not known or self.events:
            self.due = -math.inf

    def apply_ban_items(self, items: tuple[bytes, ...], now: float) -> None:
        """Process evidence, revocations and verdicts.

        They were found here, or stored by an earlier process of this peer.
        """
        self.due = -math.inf
        self._intake.take_own(items, now)

    def end_verdict(self, peer: PeerId) -> None:
        """End the ban of a verdict against a peer, if there is one."""
        self.due = -math.inf
        self._transitions.bans.end_verdict(peer)

    def update(self, addresses: tuple[str, ...], now: float) -> None:
        """Publish a new record of this peer with these addresses."""
        self.due = -math.inf
        self._transitions.update(now, addresses)

    def announce(self, capabilities: int, now: float) -> None:
        """Publish a new record of this peer with these capabilities (its stage claim)."""
        self.due = -math.inf
        self._transitions.update(now, capabilities=capabilities)

    def use_token(self, token: bytes, now: float) -> None:
        """Publish a new record of this peer with this token; empty: without one."""
        self.due = -math.inf
        self._transitions.update(now, token=token)

    def on_link_down(self, peer: PeerId, now: float) -> Outgoing:
        """Probe a peer at once because a link to it broke. A broken link alone does not make it dead."""
        self.due = -math.inf
        return self._prober.start(peer, now) if self.peers.is_live(peer) and not self._left else []

    def leave(self, now: float) -> Outgoing:
        """Return messages that announce our departure. Afterwards the roster is silent.

        There are none if another process uses our key: the peer stays.
        """
        self.due = -math.inf
        if self.peers.own.superseded:
            self._left = True
            return []
        departure = Departure(self.peers.me, self.record.sequence)
        item = gossip_items.sign(departure, self._identity, self.record.run_id)
        others = self.peers.live.others()
        self._left = True
        return [(peer, Gossip((item,))) for peer in self._rng.sample(others, min(DEPARTURE_MESSAGES, len(others)))]

    def stalled(self, lag: float, now: float) -> None:
        """Postpone the timers that wait for others: our event loop stood still for the last `lag` seconds."""
        self.due = -math.inf
        self.awareness.add(1)
        self._prober.shift(lag, now)
        self._transitions.shift(lag, now)

    def on_link_up(self, peer: PeerId) -> None:
        """Note that a link to this peer works."""
        entry = self.peers.entries.get(peer)
        if entry is not None:
            entry.authenticated = entry.linked = True

    def handle(self, sender: PeerId, message: Message, now: float) -> Outgoing:
        """Process a message whose signature is verified. Returns messages to send.

        Raises TypeError for message types that do not belong to the roster.
        """
        if self._left:
            return []
        entry = self.peers.entries.get(sender)
        if entry is not None:
            entry.authenticated = entry.linked = True
        match message:
            case Gossip():  # most messages of a large swarm
                self._ingest(sender, message.items, now)
            case Ping():
                self._ingest(sender, message.items, now)
                if entry is not None:
                    entry.progress = message.progress
                return [(sender, Ack(message.sequence, self.progress, self._items.piggyback(sender)))]
            case PingRequest():
                self._ingest(sender, message.items, now)
                if message.target == self.peers.me:
                    return [(sender, Ack(message.sequence, self.progress, self._items.piggyback(sender)))]
                if message.target not in self.peers.entries:
                    return [(sender, Nack(message.sequence))]
                self.due = -math.inf
                return self._prober.probe_for(sender, message, now)
            case Ack():  # As a rule it only ends a probe, so no deadline comes sooner.
                self._ingest(sender, message.items, now)
                reached, messages = self._prober.on_ack(sender, message, now)
                if reached is not None:
                    if self._transitions.on_answer(reached, now):
                        self.due = -math.inf
                    if reached in self.peers.entries:
                        self.peers.entries[reached].progress = message.progress
                return messages
            case Nack():
                self._prober.on_nack(sender, message)
            case PushPull():
                self._ingest(sender, message.items, now, table=True)
                if self._intake.incomplete:
                    self._tables.request_rest(now)
                if not message.reply and self._tables.admits(sender, now):
                    return self._table(sender, now, reply=True)
            case _:
                raise TypeError(f"{type(message).__name__} is no message of the roster")
        return []

    def _ingest(self, sender: PeerId, items: tuple[bytes, ...], now: float, *, table: bool = False) -> None:
        if self.peers.known_items.issuperset(items):
            return  # nearly always: each peer gets each record from many others
        self.due = -math.inf
        for peer in self._intake.take(sender, items, now, table=table):
            self._rotation.insert(peer)

    def next_deadline(self) -> float:
        """Return the time of the next required call of `tick`, on the clock of `now`.

        It is exact until the next input, see `due`, except after a jump of the wall clock, which the next tick notices.
        """
        if self._left:
            return math.inf
        times = [self._probe_at, self._prober.deadline(), self._transitions.deadline()]
        times += [self._tables.due, self._reconnect_at, self._refresh_at]
        return min(*times, self._gossip_at if self._items.any_due(self._gossip_at) else math.inf)

    def tick(self, now: float) -> Outgoing:
        """Run all timers that are due. Returns messages to send."""
        if self._left:
            return []
        if now >= self._refresh_at:
            self._transitions.update(now)
            self._refresh_at = now + self.record.ttl / 2
        self._transitions.publish(now)
        messages, failed, silent = self._prober.tick(now)
        for peer in failed:
            self._transitions.on_probe_failed(peer, now)
        if silent:  # They may have failed together with the peer that they were asked to probe.
            self._rotation.prioritize(silent)
        for peer in self._transitions.expire(now):
            messages += self._prober.start(peer, now)
        if now >= self._probe_at:
            target = self._rotation.next(self.peers.live)
            if target is not None:
                messages += self._prober.start(target, now)
            self._probe_at = now + self._prober.period()
        if now >= self._tables.due:
            messages += self._push_pull(now)
        if now >= self._reconnect_at:
            messages += self._reconnect(now)
        if now >= self._gossip_at and self._items.any_due(self._gossip_at):
            messages += self._gossip(now)
        self.due = self.next_deadline()
        return messages

    # --- timers

    def _sample(self, pool: Sequence[PeerId], count: int) -> list[PeerId]:
        return self._rng.sample(pool, min(count, len(pool)))

    def _helpers(self, target: PeerId) -> list[PeerId]:
        """Return the peers that may be asked to probe a target: those that are not under suspicion themselves."""
        table = self.peers.entries
        return [peer for peer in self.peers.live.others() if peer != target and table[peer].state == "alive"]

    def _gossip(self, now: float) -> Outgoing:
        self._gossip_at = now + self.preset.gossip_period
        pool, table, stale = self.peers.live.sorted, self.peers.entries, self._transitions.stale_receivers
        if dead := [
            peer for peer, entry in self.peers.dead_entries() if now - entry.since < self.preset.gossip_to_dead
        ]:
            pool = [*pool, *dead]
        recent = now - self.preset.gossip_to_dead
        for peer in [one for one in stale if not ((entry := table.get(one)) and (entry.live or entry.since > recent))]:
            del stale[peer]  # It gets no gossip.
        messages: Outgoing = []
        for peer in self._sample(pool, self.preset.gossip_fanout):
            if items := self._items.batch(peer):
                messages.append((peer, Gossip(items)))
        return messages

    def _push_pull(self, now: float) -> Outgoing:
        """Send our table to another peer, which answers with its own, and forget peers that departed long ago."""
        for peer in self._transitions.purge(now):
            self._prober.forget(peer)
            self.distances.forget(peer)
        source = self._tables.begin(self.peers.live, now)
        if source is None:
            return []
        self._intake.expect_table(source)
        return self._table(source, now, reply=False)

    def _table(self, to: PeerId, now: float, *, reply: bool) -> Outgoing:
        return [(to, PushPull(reply, page)) for page in gossip_items.pages(self._items.table(now))]

    def _reconnect(self, now: float) -> Outgoing:
        """Probe some dead peers. Without this, the halves of a partition would never meet again."""
        self._reconnect_at = now + self.preset.reconnect_period
        dead = self._sample([peer for peer, _ in self.peers.dead_entries()], RECONNECT_PROBES)
        return [message for peer in dead for message in self._prober.start(peer, now)]
