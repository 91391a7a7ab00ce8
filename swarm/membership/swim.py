"""Roster: SWIM with Lifeguard over signed records, without sockets or clocks.

The caller passes in messages and time, and sends the messages that it gets back: `(message, now) -> messages`. Every
parameter `now` is in monotonic seconds; `wall` returns unix seconds and is used for records only.

The caller drains its sockets before it calls `tick`. It reports times in which it did not listen (`stalled`), so that they do
not count against other peers.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

from thinwire.swarm.identity.admission_token import AdmissionPolicy
from thinwire.swarm.identity.identity import Identity
from thinwire.swarm.identity.peer_record import PeerRecord
from thinwire.swarm.membership import gossip_items
from thinwire.swarm.membership.broadcast_queue import Broadcast
from thinwire.swarm.membership.gossip_intake import Intake
from thinwire.swarm.membership.gossip_items import Departure
from thinwire.swarm.membership.item_choice import ItemChoice
from thinwire.swarm.membership.member import Event, Member, State
from thinwire.swarm.membership.member_table import Members
from thinwire.swarm.membership.presets import Preset
from thinwire.swarm.membership.probe import Letters, Prober, Rotation
from thinwire.swarm.membership.suspicion import Awareness
from thinwire.swarm.membership.table_exchange import TableExchange
from thinwire.swarm.membership.view import View
from thinwire.swarm.messages.registry import Ack, Gossip, Message, Nack, PeerId, Ping, PingRequest, PushPull
from thinwire.swarm.round_trip_times import Distances

FAREWELLS = 64
"""Maximum number of peers that are informed of this peer's departure directly."""

RECONNECTS = 4
"""Dead peers that are probed in each reconnect period: one of many may be back."""


class Roster:
    """Membership of one run, as known to this peer.

    record: our first record; its sequence must be above those of earlier processes with this identity (unix
    milliseconds will do). progress: round of this peer; set it to publish it. events: events since the caller last
    emptied the list.
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
        news = Broadcast()
        self._members = Members(identity, record, preset, news, self.awareness, wall, rng)
        self._items = ItemChoice(self._members, news, preset)
        self._intake = Intake(self._members, run_id, wall, now)
        self.distances = Distances()
        """Measured round-trip times to other peers."""
        self._prober = Prober(preset, rng, self.awareness, self._helpers, self._items.piggyback, self.distances.add)
        self._rotation = Rotation(rng)
        self.due = -math.inf
        """Time before which `tick` changes nothing.

        It is the next deadline, or the past after an input that may change it or has caused an event.
        """
        self._gone = False
        self._probe_at = now + rng.random() * preset.probe_period
        self._gossip_at = now
        self._tables = TableExchange(preset, rng, now)
        self._reconnect_at = now + preset.reconnect_period
        self._refresh_at = now + record.ttl / 2

    # --- queries

    @property
    def view(self) -> View:
        """Current view. A new one, with the next number, is made when a peer joins, dies or leaves."""
        live = self._members.live
        return live.view() if live.current is None else live.current

    @property
    def others(self) -> list[PeerId]:
        """Other peers in the view, sorted."""
        return self._members.live.others()

    @property
    def dead(self) -> list[PeerId]:
        """Peers that have died and not come back, sorted."""
        return sorted(peer for peer, _ in self._dead())

    @property
    def banned(self) -> list[PeerId]:
        """Peers that are out for good, or with a verdict for as long as its lineage continues.

        They have signed two records with one sequence, two statements about one ballot, or a false result.
        """
        return list(self._members.banned)

    def set_policy(self, policy: AdmissionPolicy | None) -> None:
        """Set the rule of admission; None, while it is unknown: all records are ignored."""
        self._members.excluded.policy = policy

    def on_trial(self, peer: PeerId) -> bool:
        """Return True if a peer has no token of the author, in a run with a trial of newcomers."""
        policy, record = self._members.excluded.policy, self.record_of(peer)
        return policy is not None and bool(policy.trial) and (record is None or policy.on_trial(record.token, peer))

    def keep(self, members: Collection[PeerId]) -> None:
        """Set the peers whose place no newcomer takes: members, now or before.

        The collection may change later.
        """
        self._members.kept = members

    def refusal(self, record: PeerRecord) -> str:
        """Return why the peer of a validated record is not admitted; empty if it is. Expiry is not checked."""
        return self._members.excluded.refusal(record)

    @property
    def bans(self) -> tuple[bytes, ...]:
        """Evidence against peers, verdicts on others, and revocations, as items; `convict` takes them.

        A verdict on this peer ends with its process: others may be in a lineage without it, and repeat it if they are not.
        """
        excluded, me = self._members.excluded, self._members.me
        found = [item for peer, item in excluded.convicted.items() if peer != me or not excluded.judged(peer)]
        return (*found, *excluded.revoked.values())

    def ban_item(self, peer: PeerId) -> bytes | None:
        """Return the item that shows a peer why it is banned; None for two records with one sequence."""
        member = self._members.table.get(peer)
        note = member.note if member is not None and member.note[:1] == bytes([gossip_items.REVOCATION]) else None
        return self._members.excluded.convicted.get(peer, note)

    def reason_of(self, peer: PeerId) -> str:
        """Return why a peer is banned; empty if it is not."""
        member = self._members.table.get(peer)
        return member.reason if member is not None else ""

    @property
    def record(self) -> PeerRecord:
        """Current record of this peer."""
        return self._members.own.record

    @property
    def events(self) -> list[Event]:
        return self._members.events

    @property
    def unspread(self) -> int:
        """Number of gossip items that wait to be spread."""
        return self._items.unspread

    @property
    def progress(self) -> int:
        return self._prober.progress

    @progress.setter
    def progress(self, value: int) -> None:
        self._prober.progress = value

    def alive(self, peer: PeerId) -> bool:
        """Return True if a peer is in the view."""
        member = self._members.table.get(peer)
        return member.live if member is not None else peer == self._members.me

    def met(self, peer: PeerId) -> bool:
        """Return True if a peer has proved its keys to this one; False if we know it from others only."""
        member = self._members.table.get(peer)
        return member is not None and member.met

    def record_of(self, peer: PeerId) -> PeerRecord | None:
        """Return the newest record of a peer, alive or not."""
        member = self._members.table.get(peer)
        if member is not None:
            return member.record
        return self.record if peer == self._members.me else None

    def draw(self, rng: random.Random, most: int, *, but: PeerId) -> list[PeerId]:
        """Return at most `most` other peers in the view, drawn at random, without the peer `but`."""
        return self._members.live.draw(rng, most, but=but)

    def records_of(self, peers: Iterable[PeerId]) -> Iterator[PeerRecord]:
        """Yield the newest records of other known peers, alive or not."""
        table = self._members.table
        return (table[peer].record for peer in peers if peer in table)

    def known(self) -> Iterator[PeerRecord]:
        """Yield the newest records of all other known peers, alive or not."""
        return (member.record for member in self._members.table.values())

    def states(self) -> dict[PeerId, State]:
        """Return the state of every other known peer, in order of id."""
        return {peer: self._members.table[peer].state for peer in sorted(self._members.table)}

    def progress_of(self, peer: PeerId) -> int:
        """Return the round that a peer last reported, or 0."""
        member = self._members.table.get(peer)
        return member.progress if member is not None else 0

    # --- inputs

    def learn(self, record: PeerRecord, now: float, *, met: bool = False, admits: bool = False) -> None:
        """Process a validated record from a Welcome or Hello.

        met: it is that of the peer at the other end. admits: this peer has admitted us.
        """
        self.due = -math.inf
        alone = self._members.live.alone
        if joined := self._members.accept(record, now, met=met):
            self._rotation.insert(record.peer_id)
        if alone and not self._members.live.alone:
            self._tables.found_first(now)
        elif joined and admits:
            self._tables.found(record.peer_id, now)

    def convict(self, items: tuple[bytes, ...], now: float) -> None:
        """Process evidence, revocations and verdicts.

        They were found here, or stored by an earlier process of this peer.
        """
        self.due = -math.inf
        self._intake.recall(items, now)

    def lift_verdict(self, peer: PeerId) -> None:
        """Remove the ban of a verdict against a peer, if there is one."""
        self.due = -math.inf
        self._members.lift_verdict(peer)

    def update(self, addresses: tuple[str, ...], now: float) -> None:
        """Publish a new record of this peer with these addresses."""
        self.due = -math.inf
        self._members.update(now, addresses)

    def announce(self, capabilities: int, now: float) -> None:
        """Publish a new record of this peer with these capabilities (its stage claim)."""
        self.due = -math.inf
        self._members.update(now, capabilities=capabilities)

    def on_link_down(self, peer: PeerId, now: float) -> Letters:
        """Probe a peer at once because a link to it broke. A broken link alone does not make it dead."""
        self.due = -math.inf
        return self._prober.start(peer, now) if self.alive(peer) and not self._gone else []

    def leave(self, now: float) -> Letters:
        """Return messages that announce our departure. Afterwards the roster is silent.

        There are none if another process uses our key: the peer stays.
        """
        self.due = -math.inf
        if self._members.own.superseded:
            self._gone = True
            return []
        departure = Departure(self._members.me, self.record.sequence)
        item = gossip_items.sign(departure, self._identity, self.record.run_id)
        others = self._members.live.others()
        self._gone = True
        return [(peer, Gossip((item,))) for peer in self._rng.sample(others, min(FAREWELLS, len(others)))]

    def stalled(self, lag: float, now: float) -> None:
        """Move the timers that wait for others: our event loop stood still for the last `lag` seconds."""
        self.due = -math.inf
        self.awareness.add(1)
        self._prober.shift(lag, now)
        self._members.shift(lag, now)

    @property
    def left(self) -> bool:
        """True after `leave`."""
        return self._gone

    def on_link_up(self, peer: PeerId) -> None:
        """Note that a link to this peer works."""
        member = self._members.table.get(peer)
        if member is not None:
            member.met = member.linked = True

    def handle(self, sender: PeerId, message: Message, now: float) -> Letters:
        """Process a message whose signature is verified. Returns messages to send.

        Raises TypeError for message types that do not belong to the roster.
        """
        if self._gone:
            return []
        member = self._members.table.get(sender)
        if member is not None:
            member.met = member.linked = True
        match message:
            case Gossip():  # most messages of a large swarm
                self._ingest(sender, message.items, now)
            case Ping():
                self._ingest(sender, message.items, now)
                if member is not None:
                    member.progress = message.progress
                return [(sender, Ack(message.sequence, self.progress, self._items.piggyback(sender)))]
            case PingRequest():
                self._ingest(sender, message.items, now)
                if message.target == self._members.me:
                    return [(sender, Ack(message.sequence, self.progress, self._items.piggyback(sender)))]
                if message.target not in self._members.table:
                    return [(sender, Nack(message.sequence))]
                self.due = -math.inf
                return self._prober.ask(sender, message, now)
            case Ack():
                self.due = -math.inf
                self._ingest(sender, message.items, now)
                reached, letters = self._prober.acknowledge(sender, message, now)
                if reached is not None:
                    self._members.reached(reached, now)
                    if reached in self._members.table:
                        self._members.table[reached].progress = message.progress
                return letters
            case Nack():
                self._prober.refuse(sender, message)
            case PushPull():
                self._ingest(sender, message.items, now, table=True)
                if self._intake.incomplete:
                    self._tables.continues(now)
                if not message.reply and self._tables.answers(sender, now):
                    return self._table(sender, now, reply=True)
            case _:
                raise TypeError(f"{type(message).__name__} is no message of the roster")
        return []

    def _ingest(self, sender: PeerId, items: tuple[bytes, ...], now: float, *, table: bool = False) -> None:
        if self._members.items.issuperset(items):
            return  # nearly always: each peer gets each record from many others
        self.due = -math.inf
        for peer in self._intake.take(sender, items, now, table=table):
            self._rotation.insert(peer)

    def next_deadline(self) -> float:
        """Return the time of the next required call of `tick`, on the clock of `now`.

        It is exact until the next input, see `due`, but for a jump of the wall clock, which is noticed with the next tick.
        """
        if self._gone:
            return math.inf
        times = [self._probe_at, self._prober.deadline(), self._members.deadline()]
        times += [self._tables.due, self._reconnect_at, self._refresh_at]
        return min(*times, self._gossip_at if self._items.has_news(self._gossip_at) else math.inf)

    def tick(self, now: float) -> Letters:
        """Run all timers that are due. Returns messages to send."""
        if self._gone:
            return []
        if now >= self._refresh_at:
            self._members.update(now)
            self._refresh_at = now + self.record.ttl / 2
        self._members.publish(now)
        letters, failed, silent = self._prober.tick(now)
        for peer in failed:
            self._members.failed(peer, now)
        if silent:  # They may have gone together with the peer that they were asked to probe.
            self._rotation.hasten(silent)
        for peer in self._members.expire(now):
            letters += self._prober.start(peer, now)
        if now >= self._probe_at:
            target = self._rotation.next(self._members.live)
            if target is not None:
                letters += self._prober.start(target, now)
            self._probe_at = now + self._prober.period()
        if now >= self._tables.due:
            letters += self._push_pull(now)
        if now >= self._reconnect_at:
            letters += self._reconnect(now)
        if now >= self._gossip_at and self._items.has_news(self._gossip_at):
            letters += self._gossip(now)
        self.due = self.next_deadline()
        return letters

    # --- timers

    def _sample(self, pool: Sequence[PeerId], count: int) -> list[PeerId]:
        return self._rng.sample(pool, min(count, len(pool)))

    def _dead(self) -> Iterator[tuple[PeerId, Member]]:
        table = self._members.table
        if self._members.live.size > len(table):
            return iter(())  # All are in the view, as nearly always.
        return ((peer, member) for peer, member in table.items() if member.state == "dead")

    def _helpers(self, target: PeerId) -> list[PeerId]:
        """Return the peers that may be asked to probe a target: those that are not under suspicion themselves."""
        table = self._members.table
        return [peer for peer in self._members.live.others() if peer != target and table[peer].state == "alive"]

    def _gossip(self, now: float) -> Letters:
        self._gossip_at = now + self.preset.gossip_period
        pool, table, behind = self._members.live.sorted, self._members.table, self._members.behind
        if dead := [peer for peer, member in self._dead() if now - member.since < self.preset.gossip_to_dead]:
            pool = [*pool, *dead]
        recent = now - self.preset.gossip_to_dead
        for peer in [
            one for one in behind if not ((member := table.get(one)) and (member.live or member.since > recent))
        ]:
            del behind[peer]  # It gets no gossip.
        letters: Letters = []
        for peer in self._sample(pool, self.preset.gossip_fanout):
            if items := self._items.batch(peer):
                letters.append((peer, Gossip(items)))
        return letters

    def _push_pull(self, now: float) -> Letters:
        """Send our table to another peer, which answers with its own, and forget peers that departed long ago."""
        for peer in self._members.purge(now):
            self._prober.forget(peer)
            self.distances.forget(peer)
        source = self._tables.begin(self._members.live, now)
        if source is None:
            return []
        self._intake.ask(source)
        return self._table(source, now, reply=False)

    def _table(self, to: PeerId, now: float, *, reply: bool) -> Letters:
        return [(to, PushPull(reply, page)) for page in gossip_items.pages(self._items.table(now))]

    def _reconnect(self, now: float) -> Letters:
        """Probe some dead peers. Without this, the halves of a partition would never meet again."""
        self._reconnect_at = now + self.preset.reconnect_period
        dead = self._sample([peer for peer, _ in self._dead()], RECONNECTS)
        return [letter for peer in dead for letter in self._prober.start(peer, now)]
