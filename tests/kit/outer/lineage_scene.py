"""A peer whose lineage has no quorum, or meets others; without a network."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import numpy as np
from kit.outer.chains import admits, certificate, fork_of, sign, verify, with_tokens
from kit.rounds.fake_keys import FakeKeys
from thinwire.collectives.blocking_work import RationedWork
from thinwire.collectives.consensus.chain import checked, decode, encode, extended, founded
from thinwire.collectives.consensus.members.terms import RoundTerms
from thinwire.collectives.consensus.members.vote_store import MemoryVoteStore
from thinwire.collectives.consensus.paxos import Agreement
from thinwire.collectives.state_sync.state_offers import ReceivedChains
from thinwire.node.outer.lineages import Lineages
from thinwire.node.outer.own_lineage import OwnLineage
from thinwire.node.outer.quorum_wait import QuorumWait
from thinwire.node.outer.session import FragmentRounds
from thinwire.node.state.replica import Replica
from thinwire.swarm.lineage import lineage_of, newest_round
from thinwire.swarm.messages.registry import (
    LIFE,
    ChainEntry,
    Fork,
    Found,
    Head,
)

IDS = tuple(bytes([number]) * 32 for number in range(5))
ME, ANN, BEN, CAT, DAN = IDS
STRANGER = b"r" * 32
LAYOUT = b"l" * 32
PATIENCE, ORPHAN, ROUND = 2.0, 10.0, 3


def life(peer):
    return bytes([100 + peer[0]]) * LIFE


class Store(MemoryVoteStore):
    """Store of the life that a peer has in these tests. `full`: a save fails, and another life begins."""

    full = False

    def __init__(self, peer):
        super().__init__()
        self._lived = life(peer)

    @property
    def life(self):
        return self._lived

    def save(self, record):
        if self.full:
            self._lived = b"m" * LIFE
            raise OSError("no space left on device")
        super().save(record)


def lives(*peers):
    return b"".join(map(life, peers))


def step(replica, *voters, signer=None):
    """Make a round of a replica; all are members after it."""
    before = {peer: replica.known_lives.get(peer, bytes(LIFE)) for peer in replica.members}
    after = {peer: life(peer) for peer in IDS}
    proof = certificate(replica.round + 1, replica.lineage, before, voters or replica.members, after, signer=signer)
    replica.chain = extended(replica.chain, proof)
    replica.advance(IDS, lives(*IDS))


def replica_after(round, members=IDS):
    """Return a replica after rounds in which all of IDS were members."""
    replica = Replica(LAYOUT, np.zeros(10, np.float32), ())
    replica.found(fork_of(0, replica.digest, (), {peer: life(peer) for peer in members}))
    for _ in range(round):
        step(replica)
    return replica


class Scene:
    """Peer `me` after round ROUND, with links to `live`.

    `excluded`: peers that are banned or revoked here. `sent`: (peer, message); `told`: (peer, Head, chain); `events`:
    (name, fields). `verified`: number of checked signatures of chains.
    """

    def __init__(self, live=IDS, *, me=ME, orphan=ORPHAN, patience=PATIENCE, round=ROUND, founder=b""):
        self.now, self.sent, self.told, self.events, self.me, self.patience = 0.0, [], [], [], me, patience
        self.states, self.waiting, self.verified = SimpleNamespace(entered=True), 0, 0
        self.excluded = set()
        self.replica, self.store, self.live = replica_after(round), Store(me), set(live) - {me}
        presence = SimpleNamespace(
            rationed=RationedWork(lambda: self.now),
            live=self.live,
            send_queue=SimpleNamespace(
                control=lambda to, message: self.sent.append((to, message)),
                bulk=lambda to, frame, requested: self.told.append((to, frame.message, decode(frame.payload))),
                requested=lambda to, kind, fragment: self.waiting,
            ),
            roster=SimpleNamespace(
                record=SimpleNamespace(peer_id=me), is_excluded=lambda peer, token: peer in self.excluded
            ),
        )
        self.current = self.next_round()
        self.quorum_wait = QuorumWait(orphan, now=lambda: self.now, current=lambda: self.current)
        rounds = FragmentRounds(
            replica=self.replica,
            presence=presence,
            fragment=0,
            now=lambda: self.now,
            current=lambda: self.current,
        )
        self.lineages = Lineages(
            rounds,
            chains=ReceivedChains(partial(checked, fraction=0.5, verifier=lambda keys: self._verify, admits=admits)),
            quorum_wait=self.quorum_wait,
            states=self.states,
            founder=founder,
        )
        self.own_lineage = OwnLineage(
            rounds,
            self.lineages,
            self.quorum_wait,
            emit=lambda name, fields: self.events.append((name, fields)),
            keyring=SimpleNamespace(sign=lambda message: sign(me, message), key_of=lambda peer: None),
            token_of=lambda peer: peer,
            votes=self.store,
            founded=self.founded,
        )

    def _verify(self, peer, message, signature):
        self.verified += 1
        return verify(peer, message, signature)

    def next_round(self):
        replica = self.replica
        terms = RoundTerms(
            replica.round + 1,
            0,
            tuple(sorted(replica.members)),
            replica.digest,
            bytes(32),
            patience=self.patience,
            seniors=replica.members,
            lives=replica.known_lives,
            lineage=replica.lineage,
        )
        agreement = Agreement(FakeKeys(self.me, sign, verify), terms, live=set(self.live), store=self.store)
        return SimpleNamespace(
            agreement=agreement,
            complete=False,
            unobtainable=lambda without=(): False,
            missing_results=0,
            unclaimed=False,
            progressed_at=self.now,
            follows=False,
            exhausted=False,
        )

    def founded(self, fork):
        self.replica.found(fork)
        self.current = self.next_round()
        self.advance()

    def advance(self):
        """Tell the lineages that a round begins."""
        self.own_lineage.advance()
        self.lineages.advance()

    def lose(self, *peers):
        for peer in peers:
            self.live.discard(peer)
            self.current.agreement.on_link_down(peer, self.now)
            self.lineages.on_link_down(peer)

    def link(self, *peers):
        for peer in peers:
            self.live.add(peer)
            self.current.agreement.reach(peer)
            self.lineages.on_link_up(peer)

    def run(self, seconds):
        """Let time pass, with a tick every half second."""
        until = self.now + seconds
        while self.now < until:
            self.now = min(until, self.now + 0.5)
            self.lineages.on_tick()
            self.own_lineage.on_tick()

    def take(self, kind):
        found = [(to, message) for to, message in self.sent if isinstance(message, kind)]
        self.sent = [entry for entry in self.sent if not isinstance(entry[1], kind)]
        return found

    def hear_found(self, peer, *members):
        message = Found(self.replica.round, 0, self.replica.digest, tuple(sorted(members)), life(peer))
        self.own_lineage.on_found(peer, message, sign(peer, message))

    def on_chain(self, peer, chain):
        """Deliver the Head of a peer with its chain, after a pause."""
        self.now += PATIENCE
        self.lineages.on_head(peer, Head(newest_round(chain[-1]), 0, lineage_of(chain)), encode(chain))

    def chains(self):
        """Return (peer, chain) of the chains that were sent since the last call."""
        found, self.told = [(to, chain) for to, _, chain in self.told], []
        return found

    @property
    def forks(self):
        """Forks of the lineages after the first one."""
        return [entry.fork for entry in self.replica.chain[1:]]


OTHER = b"o" * 32
"""Digest of a state that no peer has."""

FIRST = replica_after(ROUND).chain
"""Chain of the first lineage, after ROUND."""


def branch(*members, chain=FIRST, round=ROUND, base=None, before=IDS):
    """Return the chain of a lineage that these peers founded after `round`."""
    members = tuple(sorted(members))
    base = replica_after(ROUND).digest if base is None else base
    signatures = tuple(sign(peer, Found(round, 0, base, members, life(peer))) for peer in members)
    return founded(chain, with_tokens(Fork(round, base, before, members, lives(*members), signatures)))


def later_chain(*voters, signer=None, rounds=1):
    """Return the chain of the first lineage some rounds later, with the votes of these peers."""
    replica = replica_after(ROUND)
    for _ in range(rounds):
        step(replica, *voters, signer=signer)
    return replica.chain


def long_chain(rounds, size):
    """Return the chain of the first lineage after rounds that each replaced all members, by `size` new ones."""
    entry, before = FIRST[-1], {peer: life(peer) for peer in IDS}
    certificates = []
    for number in range(ROUND + 1, ROUND + 1 + rounds):
        after = {bytes([number, at]) * 16: life(bytes([number])) for at in range(size)}
        certificates.append(certificate(number, lineage_of(FIRST), before, before, after))
        before = after
    return (*FIRST[:-1], ChainEntry(entry.fork, (*entry.certificates, *certificates)))
