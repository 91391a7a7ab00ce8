"""Size of the chain of a long run, and seconds that a newcomer takes to check it.

    python -m benchmarks.swarms.certificate_chain     10,000 rounds of 16 peers, one replaced every 10 rounds; ten seconds
    python -m benchmarks.swarms.certificate_chain --peers 256 --rounds 1000

The founder leaves first; otherwise the chain would have one certificate. The members that stay vote. Only the rounds in
which the members change are made: the others decide the same members, and a later certificate replaces theirs. "check" is
decoding and `checked`; each turn has other keys, because valid signatures are cached.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Mapping
from typing import Any

from thinwire.collectives.consensus.chain import Configuration, Proving, checked, decode, encode, extended, founded
from thinwire.collectives.consensus.members.lives import by_seniority, electorate_digest, lives_in_order
from thinwire.collectives.consensus.proposal import vote_for
from thinwire.swarm.frame import sign_message, verify_message
from thinwire.swarm.identity.identity import Identity, peer_id_of
from thinwire.swarm.lineage import Verify, lineage_of, newest_round
from thinwire.swarm.lineage_founding import Founding
from thinwire.swarm.messages.registry import (
    LIFE,
    Ballot,
    Certificate,
    Chain,
    Commit,
    Contribution,
    Message,
    PeerId,
    Proof,
    Proposal,
)

from benchmarks.support import machine

Members = Mapping[PeerId, Identity]
"""Members of a round, by seniority."""


def chain_of(options: argparse.Namespace, turn: int, run_id: bytes) -> Chain:
    """Return the chain of a run whose oldest member is replaced every `options.every` rounds."""
    rng = random.Random(turn)
    changes = options.rounds // options.every
    identities = [Identity.generate(rng.randbytes(32)) for _ in range(options.peers + changes)]
    lives = {one.peer_id: rng.randbytes(LIFE) for one in identities}
    founder = identities[0]

    def sign(message: Message) -> bytes:
        return sign_message(message, b"", founder, run_id)

    place = 0, 0, bytes(32), ()
    proofs = sign, lambda peer: founder.public_key, lambda peer: b""
    founding = Founding(founder.peer_id, *place, lives[founder.peer_id], *proofs)
    founding.update(0.0, (), (), 0.0)
    assert founding.fork is not None
    chain, members = founded((), founding.fork), {founder.peer_id: founder}
    for change in range(changes + 1):
        after = {one.peer_id: one for one in identities[change : change + options.peers]}
        number = max(1, change * options.every)
        chain = extended(chain, certificate(number, lineage_of(chain), members, after, lives, run_id))
        members = {peer: after[peer] for peer in by_seniority(after, tuple(members))}
    return chain


def certificate(
    number: int, lineage: bytes, before: Members, after: Members, lives: Mapping[PeerId, bytes], run_id: bytes
) -> Certificate:
    """Return the certificate of a round that decides the members `after`; those of `before` that stay have voted for it."""
    seniors, decided = tuple(before), tuple(sorted(after))
    electorate = lives_in_order(seniors, lives)
    voters = sorted({*seniors}.intersection(decided))
    contributors = tuple(Contribution(peer, 1, 1 << 20, peer) for peer in voters)
    proposal = Proposal(
        number,
        0,
        Ballot(1, voters[0]),
        decided,
        decided,
        contributors,
        (),
        None,
        (),
        kept=decided,
        lives=lives_in_order(decided, lives),
        lineage=lineage,
        electorate=electorate_digest(seniors, electorate),
    )
    digest = number.to_bytes(32, "big")
    vote = vote_for(proposal, digest)
    proofs = tuple(Proof(peer, sign_message(vote, b"", before[peer], run_id)) for peer in voters)
    keys = tuple(before[peer].public_key for peer in voters)
    return Certificate(seniors, electorate, Commit(proposal, digest, proofs), keys)


def result(parts: Proving) -> Configuration | None:
    """Run a check to its end."""
    while True:
        try:
            next(parts)
        except StopIteration as end:
            found: Configuration | None = end.value
            return found


def check(data: bytes, run_id: bytes) -> tuple[float, int]:
    """Decode and check a chain. Returns the seconds and the number of signatures checked."""
    verified = 0

    def with_keys(keys: tuple[bytes, ...]) -> Verify:
        known = {peer_id_of(key): key for key in keys}

        def verify(peer: PeerId, message: Message, signature: bytes) -> bool:
            nonlocal verified
            verified += 1
            return peer in known and verify_message(message, signature, known[peer], run_id)

        return verify

    began = time.perf_counter()
    here = result(
        checked(decode(data), 0, lambda fork: True, fraction=0.5, verifier=with_keys, admits=lambda peer, token: True)
    )
    seconds = time.perf_counter() - began
    if here is None or here.round != newest_round(decode(data)[-1]):
        raise RuntimeError("the chain is not valid")
    return seconds, verified


def main() -> None:
    """Parse the options, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10_000)
    parser.add_argument("--peers", type=int, default=16)
    parser.add_argument("--every", type=int, default=10, help="rounds after which one member is replaced")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--quiet", type=float, default=0.0, help="seconds to wait for a quiet machine before each turn")
    options = parser.parse_args()
    own, times, loads = machine.family([os.getpid()]), [], []
    row: dict[str, Any] = {"rounds": options.rounds, "peers": options.peers, "every": options.every}
    for turn in range(options.turns):
        run_id = turn.to_bytes(32, "big")
        chain = chain_of(options, turn, run_id)
        data, certificates = encode(chain), chain[-1].certificates
        machine.wait_until_quiet(0.1, options.quiet, own)
        load = machine.Load(own)
        seconds, signatures = check(data, run_id)
        times.append(seconds)
        loads.append(load.foreign())
        row |= {"certificates": len(certificates), "signatures": signatures, "bytes": len(data)}
        print(f"turn {turn}: {seconds:.3f} s", file=sys.stderr)
    row |= {"seconds": round(statistics.median(times), 3), "foreign": round(statistics.median(loads), 3)}
    report = {"machine": machine.describe(), "row": row, "all_seconds": [round(each, 3) for each in times]}
    size, each = row["bytes"] / 1e6, row["bytes"] / 1e3 / max(1, row["certificates"])
    print(f"\n{report['machine']}; median of {options.turns} turns\n")
    print("| rounds | peers | certificates | size | each | signatures | check | foreign CPU |")
    print("|---|---|---|---|---|---|---|---|")
    cells = [row["rounds"], row["peers"], row["certificates"], f"{size:.2f} MB", f"{each:.1f} kB", row["signatures"]]
    print("| " + " | ".join(map(str, [*cells, f"{row['seconds']:.2f} s", f"{row['foreign']:.0%}"])) + " |")
    print("\n" + json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
