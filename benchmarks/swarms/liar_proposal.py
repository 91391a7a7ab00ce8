"""CPU seconds that one `Propose` of a lying leader costs each member.

    python -m benchmarks.swarms.liar_proposal              16 earlier proposals with 236 new members each; ten seconds
    python -m benchmarks.swarms.liar_proposal --earlier 1 --newcomers 12

One of 20 members leads a later ballot. Its message has the largest justification: earlier proposals, each with other keys
that it has made, which have tokens by one invite for any peer. "decode" is the frame with the leader's signature, "check"
all that the agreement of an honest member does. "liar": only the liar's promise names one of the earlier proposals. "all": a
promise names each of them, which needs as many lying members.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import random
import statistics
import sys
import time
from typing import Any

import msgspec
from thinwire.collectives.consensus.justification import justify, sealed
from thinwire.collectives.consensus.members.lives import lives_in_order
from thinwire.collectives.consensus.members.peer_standing import PeerStanding
from thinwire.collectives.consensus.members.terms import RoundTerms
from thinwire.collectives.consensus.paxos import Agreement
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
    MemberProof,
    Message,
    PeerId,
    Promise,
    Proposal,
    Propose,
)

from benchmarks.support import machine

MEMBERS = 20
BASE, PLAN, LINEAGE = b"b" * 32, b"p" * 32, b"l" * LIFE
"""State and plan of the round, and its lineage."""


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
        self.lives = {peer: self.rng.randbytes(LIFE) for peer in self.members}
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

    def proposal(self, term: int, newcomers: int) -> Proposal:
        """Return a proposal of the liar that brings in newcomers."""
        new = self._identities(newcomers)
        lives = self.lives | {peer: self.rng.randbytes(LIFE) for peer in new}
        peers, proofs = tuple(sorted(lives)), []
        for peer, identity in new.items():
            digest = self.rng.randbytes(32)
            said = Announced(self.terms.round, 0, 1, lives[peer], BASE, digest)
            signature = sign_message(said, b"", identity, self.run_id)
            proofs.append(MemberProof(1, digest, identity.public_key, signature, token_of(self.invite, identity)))
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


def frame_of(seed: int, earlier: int, newcomers: int, every: bool) -> bytes:
    """Return the frame of one message."""
    run = Run(seed)
    return encode(Frame(run.message(earlier, newcomers, every=every)), run.members[run.liar], run.run_id)


def measure(seed: int, data: bytes) -> dict[str, float]:
    """Return bytes and CPU seconds of one message at an honest member."""
    run = Run(seed)
    keys = {peer: identity.public_key for peer, identity in run.members.items()}
    keyring, standing = Keyring(run.members[run.me], run.run_id, keys.get), Standing(run.policy)
    agreement = Agreement(keyring, run.terms, live=run.members, standing=standing)
    began = time.process_time()
    header = parse_header(data[:HEADER_BYTES])
    frame = decode(header, data[HEADER_BYTES:], b"", public_key=keys[run.liar], run_id=run.run_id)
    decoded = time.process_time()
    agreement.on_message(run.liar, frame.message, frame.signature, 1.0)
    return {"bytes": len(data), "decode": decoded - began, "check": time.process_time() - decoded}


def main() -> None:
    """Parse the options, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--earlier", type=int, default=16)
    parser.add_argument("--newcomers", type=int, default=256 - MEMBERS)
    parser.add_argument("--turns", type=int, default=5)
    options = parser.parse_args()
    print(machine.describe(), file=sys.stderr)
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
