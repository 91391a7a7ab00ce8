"""Table of the known peers: an entry for each other peer, with its state.

Code outside this package only reads it.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Iterable, Iterator
from typing import Literal, NamedTuple, TypeAlias

import msgspec
from thinwire.swarm.identity.peer_record import PeerRecord
from thinwire.swarm.membership.self_record import OwnRecord
from thinwire.swarm.membership.view import LivePeers, View
from thinwire.swarm.messages.registry import PeerId

State: TypeAlias = Literal["alive", "suspect", "dead", "left", "banned"]
"""State of a peer.

suspect: some peer could not reach it; dead: its time to answer is over, and we or k others could not reach it; left: it
announced its departure; banned: it signed two records with the same sequence, or two conflicting statements in one round, or
a quorum has stated that it sent a false result, or the author of the run has revoked its admission.
"""


EventKind: TypeAlias = Literal[
    "joined", "updated", "suspect", "refuted", "dead", "left", "banned", "pardoned", "revoked", "duplicate", "yielded"
]


class MembershipEvent(NamedTuple):
    """Event that concerns `peer`.

    Kinds: joined, updated (its record), suspect, refuted, dead, left; banned, with the reason, also of this peer itself;
    pardoned: its ban has ended, with the lineage of a verdict or with the records of a proof. revoked: `peer` is the id, or
    the start of the id, of a peer or an invite whose admission the author has revoked. duplicate: another process uses our
    key and its record is newer, so this process should stop. yielded: another process that used our key has stopped because
    this one started later.
    """

    kind: EventKind
    peer: PeerId
    detail: str = ""


class PeerEntry(msgspec.Struct, gc=False):  # a thousand simulated peers have a million entries, in no reference cycle
    """Entry of one peer.

    record: the newest one. since: time at which `state` began. void_sequence: records with a sequence up to this one are
    ignored. state_item: the signed item that explains a state other than alive. progress: round that the peer last reported.
    reason: of a ban. authenticated: the peer has proved its keys to this one; otherwise only others have reported it. linked:
    a message has arrived from it over a link. network: that from which it came to our gate, or that of its first public
    address; empty if unknown.
    """

    record: PeerRecord
    state: State
    since: float
    void_sequence: int = 0
    state_item: bytes = b""
    progress: int = 0
    reason: str = ""
    authenticated: bool = False
    linked: bool = False
    network: str = ""

    @property
    def live(self) -> bool:
        """True if the peer is in the view: alive or suspected."""
        return self.state in ("alive", "suspect")

    @property
    def ban_is_proved(self) -> bool:
        """True if the peer is banned by a signed item that others can check, so not by a verdict only."""
        return self.state == "banned" and bool(self.state_item)

    def is_older_than(self, record: PeerRecord) -> bool:
        """Return True if a record of the peer is newer than its last one, and than its departure."""
        return record.sequence > max(self.void_sequence, self.record.sequence)


class PeerTable:
    """All known peers: an entry for each other one, and the `own` record.

    `live`: the other peers in the view. `known_items`: items that spread the records, and the proofs of two records with one
    sequence, that are in the table.
    """

    def __init__(self, me: PeerId, own: OwnRecord) -> None:
        self.me, self.own = me, own
        self.entries: dict[PeerId, PeerEntry] = {}
        self.live = LivePeers(me)
        self.known_items: set[bytes] = set()
        self.protected: Collection[PeerId] = ()
        """Peers whose entry is never removed for a newcomer."""
        self.failed: Collection[PeerId] = ()
        """Peers on trial whose place any other newcomer may take, and that take the place of none."""
        self._banned: dict[PeerId, None] = {}

    # --- queries

    @property
    def view(self) -> View:
        """Current view. A new one, with the next number, is made when a peer joins, dies or leaves."""
        return self.live.view()

    @property
    def others(self) -> list[PeerId]:
        """Other peers in the view, sorted."""
        return self.live.others()

    @property
    def dead(self) -> list[PeerId]:
        """Peers that have died and not come back, sorted."""
        return sorted(peer for peer, _ in self.dead_entries())

    @property
    def any_absent(self) -> bool:
        """True if a known peer is not in the view; usually all known peers are in it."""
        return self.live.size <= len(self.entries)

    @property
    def banned(self) -> list[PeerId]:
        """Peers whose state is "banned", in the order of their bans."""
        return list(self._banned)

    def is_live(self, peer: PeerId) -> bool:
        """Return True if a peer is in the view."""
        entry = self.entries.get(peer)
        return entry.live if entry is not None else peer == self.me

    def authenticated(self, peer: PeerId) -> bool:
        """Return True if a peer has proved its keys to this one; False if only others have reported it."""
        entry = self.entries.get(peer)
        return entry is not None and entry.authenticated

    def record_of(self, peer: PeerId) -> PeerRecord | None:
        """Return the newest record of a peer, alive or not."""
        entry = self.entries.get(peer)
        if entry is not None:
            return entry.record
        return self.own.record if peer == self.me else None

    def key_of(self, peer: PeerId) -> bytes | None:
        """Return the public key of a peer, None if it is unknown."""
        record = self.record_of(peer)
        return record.public_key if record else None

    def records(self, peers: Iterable[PeerId] | None = None) -> Iterator[PeerRecord]:
        """Yield the newest records of other known peers, alive or not: of all, or of these."""
        found = self.entries.values() if peers is None else map(self.entries.get, peers)
        return (entry.record for entry in found if entry is not None)

    def states(self, *, absent: int | None = None) -> dict[PeerId, State]:
        """Return the state of every other known peer, in order of id.

        absent: most peers that are not in the view, the last ones to depart; None: all.
        """
        gone = sorted((entry.since, peer) for peer, entry in self.entries.items() if not entry.live)
        left_out = {peer for _, peer in gone[: max(0, len(gone) - absent)]} if absent is not None else set()
        return {peer: self.entries[peer].state for peer in sorted(self.entries.keys() - left_out)}

    def progress_of(self, peer: PeerId) -> int:
        """Return the round that a peer last reported, or 0."""
        entry = self.entries.get(peer)
        return entry.progress if entry is not None else 0

    def ban_reason(self, peer: PeerId) -> str:
        """Return why a peer is banned; empty if it is not."""
        entry = self.entries.get(peer)
        return entry.reason if entry is not None else ""

    def sample(self, rng: random.Random, most: int, *, but: PeerId) -> list[PeerId]:
        """Return at most `most` other peers in the view, drawn at random, without the peer `but`."""
        return self.live.sample(rng, most, but=but)

    def dead_entries(self) -> Iterator[tuple[PeerId, PeerEntry]]:
        """Yield the peers that have died and not come back, with their entries."""
        if not self.any_absent:
            return iter(())  # fast, because each gossip message needs these entries
        return ((peer, entry) for peer, entry in self.absent_entries() if entry.state == "dead")

    def absent_entries(self) -> Iterator[tuple[PeerId, PeerEntry]]:
        """Yield the known peers that are not in the view, with their entries."""
        if not self.any_absent:
            return iter(())
        return ((peer, entry) for peer, entry in self.entries.items() if not entry.live)

    # --- changes

    def add(
        self, record: PeerRecord, state: State, now: float, *, authenticated: bool = False, network: str = ""
    ) -> PeerEntry:
        """Add an entry for a new peer."""
        entry = PeerEntry(record, state, now, authenticated=authenticated, network=network)
        self.entries[record.peer_id] = entry
        if entry.live:
            self.live.add(record.peer_id)
        return entry

    def set_state(self, entry: PeerEntry, state: State, now: float) -> None:
        """Change the state of an entry, and with it the view and the list of bans."""
        peer, was_live = entry.record.peer_id, entry.live
        entry.state, entry.since = state, now
        if was_live and not entry.live:
            entry.linked = False
            self.live.remove(peer)
        elif entry.live and not was_live:
            self.live.add(peer)
        if state == "banned":
            self._banned[peer] = None

    def remove(self, peer: PeerId) -> None:
        """Remove the entry of a peer."""
        entry = self.entries.pop(peer)
        self.known_items -= {entry.record.item, entry.state_item}
        self._banned.pop(peer, None)
        if entry.live:
            self.live.remove(peer)
