"""CPU seconds that proposals of a lying member cost each other member.

    python -m benchmarks.swarms.liar_proposal              16 earlier proposals with 236 new members each; ten seconds
    python -m benchmarks.swarms.liar_proposal --earlier 1 --newcomers 12
    python -m benchmarks.swarms.liar_proposal --flood      25 messages a second, each with another proposal; half a minute

One of 20 members leads a later ballot. Its message has the largest justification: earlier proposals, each with other keys
that it has made, which have tokens by one invite for any peer. "decode" is the frame with the leader's signature, "check"
all that the agreement of an honest member does. "liar": only the liar's promise names one of the earlier proposals. "all": a
promise names each of them, which needs as many lying members.

With --flood, each message has another proposal with as many new members, 25 in a second, and the row has the computing time
in each second. "ballots": the liar prepares and proposes, in a higher ballot each time. "stolen": first ballots, which belong
to another leader. "repeated": its own first ballot, each time with another proposal. The proposals of "ballots" and "repeated"
also have a forged farewell. "promises": votes in answer to a ballot of the honest member. "farewells": votes in farewells, for
proposals without a valid admission of the last new member.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import multiprocessing
import random
import statistics
import sys
import time
from typing import Any

import msgspec
from thinwire.collectives.consensus.farewells import signed
from thinwire.collectives.consensus.justification import justify, sealed
from thinwire.collectives.consensus.members.lives import lives_in_order
from thinwire.collectives.consensus.members.peer_standing import PeerStanding
from thinwire.collectives.consensus.members.terms import RoundTerms
from thinwire.collectives.consensus.members.vote_store import MemoryVoteStore
from thinwire.collectives.consensus.paxos import Agreement
from thinwire.collectives.consensus.proposal import name_of
from thinwire.swarm.frame import HEADER_BYTES, Frame, decode, encode, parse_header, sign_message
from thinwire.swarm.identity.admission_token import AdmissionPolicy, Inviter, token_of
from thinwire.swarm.identity.identity import Identity
from thinwire.swarm.identity.invite import Invite
from thinwire.swarm.keyring import Keyring
from thinwire.swarm.messages.registry import (
    LIFE,
    Announced,
    Ballot,
    Contribution,
    Farewell,
    Leave,
    MemberProof,
    Message,
    PeerId,
    Prepare,
    Promise,
    Proposal,
    Propose,
    Ready,
)

from benchmarks.support import machine

MEMBERS = 20
RATE = 25
"""Proposals in one second of a flood."""

FLOODS = ("ballots", "stolen", "repeated", "promises", "farewells")

BASE, PLAN, LINEAGE = b"b" * 32, b"p" * 32, b"l" * LIFE
"""State and plan of the round, and its lineage."""


def votes_of(peer: PeerId) -> MemoryVoteStore:
    """Return an empty vote store, with a life that is always the same."""
    return MemoryVoteStore(random.Random(peer))


class Standing(PeerStanding):
    """Standing of peers in a run whose policy is given."""

    def __init__(self, policy: AdmissionPolicy) -> None:
        self._policy = policy

    def is_admitted(self, peer: PeerId, token: bytes) -> bool:
        return not self._policy.refusal(token, peer)


class Run:
    """Round of MEMBERS members, and the messages of a liar among them."""

    def __init__(self, seed: int) -> None:
        self.rng, self.run_id = random.Random(seed), bytes([seed]) * 32
        self.members = self._identities(MEMBERS)
        self.lives = {peer: votes_of(peer).life for peer in self.members}
        ids = tuple(self.members)
        self.terms = RoundTerms(9, 0, ids, BASE, PLAN, fraction=2 / 3, lives=self.lives, lineage=LINEAGE)
        self.me, self.liar = ids[0], ids[1]
        author = Identity.generate(bytes(32))
        self.policy = AdmissionPolicy(self.run_id, author.public_key, longest=2)
        self.invite = Inviter(author, b"", self.policy).invite(Invite(self.run_id, ()))

    def _identities(self, count: int) -> dict[PeerId, Identity]:
        made = [Identity.generate(self.rng.randbytes(32)) for _ in range(count)]
        return {one.peer_id: one for one in sorted(made, key=lambda one: one.peer_id)}

    def sign(self, peer: PeerId, message: Message) -> bytes:
        """Return the signature of a member."""
        return sign_message(message, b"", self.members[peer], self.run_id)

    def proposal(
        self, term: int, newcomers: int, *, admitted: bool = True, farewells: tuple[Farewell, ...] = ()
    ) -> Proposal:
        """Return a proposal of the liar that brings in newcomers. admitted: False if the last one has no valid token."""
        new = self._identities(newcomers)
        lives = self.lives | {peer: self.rng.randbytes(LIFE) for peer in new}
        peers, proofs = tuple(sorted(lives)), []
        for peer, identity in new.items():
            digest = self.rng.randbytes(32)
            said = Announced(self.terms.round, 0, 1, lives[peer], BASE, digest)
            signature = sign_message(said, b"", identity, self.run_id)
            proofs.append(MemberProof(1, digest, identity.public_key, signature, token_of(self.invite, identity)))
        if not admitted:
            proofs[-1] = msgspec.structs.replace(proofs[-1], token=b"")
        found = Proposal(
            self.terms.round,
            0,
            Ballot(term, self.liar),
            peers,
            peers,
            (Contribution(self.liar, 1, 1, self.rng.randbytes(32)),),
            (),
            None,
            (),
            lives=lives_in_order(peers, lives),
            member_proofs=tuple(proofs),
            lineage=LINEAGE,
            farewells=farewells,
            electorate=self.terms.electorate,
        )
        return sealed(found, lambda message: self.sign(self.liar, message))

    def message(self, earlier: int, newcomers: int, *, every: bool) -> Propose:
        """Return a later proposal with its justification; every: promises name all earlier proposals, or only the first."""
        voted = [self.proposal(1 + number, newcomers) for number in range(earlier)]
        ours, promises = self.proposal(2 + earlier, 0), {}
        signed = [self.liar, *(peer for peer in self.members if peer not in (self.me, self.liar))]
        named = voted if every else voted[:1]
        for number, peer in enumerate(signed):
            value = named[number] if number < len(named) else None
            digest = self.rng.randbytes(32) if value is not None else None
            promise = Promise(self.terms.round, 0, ours.ballot, value, digest, LINEAGE)
            promises[peer] = promise, self.sign(peer, promise)
        message = justify(ours, promises, ())
        if message is None:
            raise RuntimeError("too many earlier proposals")
        message = msgspec.structs.replace(message, earlier=(*message.earlier, *voted[len(named) :]))
        return msgspec.structs.replace(message, keys=tuple(one.public_key for one in self.members.values()))

    def flood(self, kind: str, number: int, newcomers: int) -> list[Message]:
        """Return the messages of the liar with one proposal of a flood."""
        round, digest = self.terms.round, self.rng.randbytes(32)
        # Until the farewell is found to be forged, nothing is wrong with the proposal.
        forged = (Farewell(self.me, Ballot(0, self.me), None, None, bytes(64)),)
        if kind == "ballots":
            ours = self.proposal(2 + number, newcomers, farewells=forged)
            promise = Promise(round, 0, ours.ballot, None, None, LINEAGE)
            proposal = justify(ours, {self.liar: (promise, self.sign(self.liar, promise))}, ())
            return [Prepare(round, 0, ours.ballot, LINEAGE), *([proposal] if proposal is not None else [])]
        voted = self.proposal(1, newcomers, admitted=kind != "farewells")
        if kind == "promises":
            return [Promise(round, 0, Ballot(2, self.me), voted, digest, LINEAGE)]
        if kind == "farewells":
            said = Farewell(self.liar, voted.ballot, name_of(voted), digest, b"")
            leave = Leave(round, 0, LINEAGE, said, voted)
            return [signed(leave, lambda message: self.sign(self.liar, message))]
        if kind == "repeated":
            return [Propose(self.proposal(1, newcomers, farewells=forged))]
        return [Propose(voted)]


def frame_of(seed: int, earlier: int, newcomers: int, every: bool) -> bytes:
    """Return the frame of one message."""
    run = Run(seed)
    return encode(Frame(run.message(earlier, newcomers, every=every)), run.members[run.liar], run.run_id)


def measure(seed: int, data: bytes) -> dict[str, float]:
    """Return bytes and CPU seconds of one message at an honest member."""
    run = Run(seed)
    keys = {peer: identity.public_key for peer, identity in run.members.items()}
    keyring, standing = Keyring(run.members[run.me], run.run_id, keys.get), Standing(run.policy)
    agreement = Agreement(keyring, run.terms, live=run.members, store=votes_of(run.me), standing=standing)
    began = time.process_time()
    header = parse_header(data[:HEADER_BYTES])
    frame = decode(header, data[HEADER_BYTES:], b"", public_key=keys[run.liar], run_id=run.run_id)
    decoded = time.process_time()
    agreement.on_message(run.liar, frame.message, frame.signature, 1.0)
    return {"bytes": len(data), "decode": decoded - began, "check": time.process_time() - decoded}


def flood_of(seed: int, kind: str, seconds: int, newcomers: int) -> list[bytes]:
    """Return the frames of a flood."""
    run = Run(seed)
    messages = [one for number in range(RATE * seconds) for one in run.flood(kind, number, newcomers)]
    return [encode(Frame(one), run.members[run.liar], run.run_id) for one in messages]


def measure_flood(seed: int, kind: str, seconds: int, frames: list[bytes]) -> list[float]:
    """Return the CPU seconds of each second of a flood at an honest member."""
    run = Run(seed)
    keys = {peer: identity.public_key for peer, identity in run.members.items()}
    # A ballot that waits for promises needs a leader that is gone, and time.
    first = run.liar if kind == "repeated" else next(peer for peer in keys if peer not in (run.me, run.liar))
    preparing = kind == "promises"
    terms = dataclasses.replace(
        run.terms,
        members=(first, run.me, *(peer for peer in keys if peer not in (first, run.me))),
        seniors=run.terms.members,
        patience=1e6 if preparing else run.terms.patience,
    )
    keyring, live = Keyring(run.members[run.me], run.run_id, keys.get), set(keys) - {first if preparing else b""}
    agreement = Agreement(keyring, terms, live=live, store=votes_of(run.me), standing=Standing(run.policy))
    for peer in sorted(live) if preparing else ():
        ready = Ready(terms.round, 0, 1, BASE, PLAN, 1, b"", True, 0.0, 0.0, life=run.lives[peer])
        agreement.announce(ready, 0.0) if peer == run.me else agreement.on_message(peer, ready, b"", 0.0)
    agreement.tick(20.0)
    each = len(frames) // seconds
    rows = []
    for second in range(seconds):
        before = time.process_time()
        for number in range(each):
            data = frames[each * second + number]
            header = parse_header(data[:HEADER_BYTES])
            frame = decode(header, data[HEADER_BYTES:], b"", public_key=keys[run.liar], run_id=run.run_id)
            agreement.on_message(run.liar, frame.message, frame.signature, 20.0 + second + number / each)
        rows.append(round(time.process_time() - before, 3))
    return rows


def flood(seconds: int, newcomers: int) -> None:
    """Measure and print floods."""
    for seed, kind in enumerate(FLOODS):
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            frames = pool.apply(flood_of, (seed, kind, seconds, newcomers))
        print(json.dumps({"flood": kind, "seconds": measure_flood(seed, kind, seconds, frames)}), flush=True)


def main() -> None:
    """Parse the options, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--earlier", type=int, default=16)
    parser.add_argument("--newcomers", type=int, default=256 - MEMBERS)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--flood", action="store_true")
    parser.add_argument("--seconds", type=int, default=4, help="of each flood")
    options = parser.parse_args()
    print(machine.describe(), file=sys.stderr)
    if options.flood:
        flood(options.seconds, options.newcomers)
        return
    for name, every in (("liar", False), ("all", True)):
        work = [
            (turn + options.turns * every, options.earlier, options.newcomers, every) for turn in range(options.turns)
        ]
        # Valid signatures are cached, those that a process has made as well: other keys in each turn, made elsewhere.
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            rows = [measure(one[0], data) for one, data in zip(work, pool.starmap(frame_of, work), strict=True)]
        row: dict[str, Any] = {"promises": name, "bytes": int(statistics.median(one["bytes"] for one in rows))}
        row |= {key: round(statistics.median(one[key] for one in rows), 3) for key in ("decode", "check")}
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
