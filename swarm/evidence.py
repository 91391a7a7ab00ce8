"""Evidence that a peer has signed two statements of which an honest peer signs at most one.

Two statements in one slot (lineage, fragment, round, ballot) are evidence:

- two votes: only members vote; a vote is durable before it is sent, so a peer that restarts remembers it, and one that
  has lost its votes is no member of the round any more (see `Proposal.lives`);
- two proposals of the leader: it stores its own promise for a ballot before it proposes, and never takes a ballot twice.

So are two announcements with one number in one round and one life. A peer stores that a number is used before it signs with
it. If the store is lost, the peer begins another life, which its announcements name. So no honest peer signs a number twice,
even if its clock was set back.

Rounds without a lineage (averages that a caller asks for) have votes in memory only, and announcements without a life, so
they give no evidence.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec
from thinwire.swarm.frame import verify_message
from thinwire.swarm.identity.identity import peer_id_of
from thinwire.swarm.messages.registry import LIFE, Announced, Evidence, PeerId, Vote

Statement = Vote | Announced
"""Signed statement that can be evidence."""

EACH = 4
"""Number of statements of each kind that are stored for each peer in a round: the latest ones."""

ReportEquivocation = Callable[[PeerId, tuple[Statement, bytes], tuple[Statement, bytes]], None]
"""Called with a peer and two conflicting statements, each with its signature."""

_decoder = msgspec.msgpack.Decoder(Evidence)


def conflicting(first: Statement, second: Statement) -> bool:
    """Return True if no honest peer signs both statements."""
    if isinstance(first, Announced) or isinstance(second, Announced):
        return (
            isinstance(first, Announced)
            and isinstance(second, Announced)
            and msgspec.structs.replace(first, base=second.base, digest=second.digest) == second != first
            and len(first.life) == LIFE
        )
    slots = [(one.lineage, one.fragment, one.round, one.ballot, one.digest is None) for one in (first, second)]
    return slots[0] == slots[1] and len(first.lineage) == LIFE and first != second


def is_valid(evidence: Evidence, run_id: bytes) -> bool:
    """Return True if the evidence is valid: the peer has signed two conflicting statements.

    Proposals must be those of its own ballot.
    """
    first, second = evidence.first, evidence.second
    proposal = isinstance(first, Vote) and first.digest is None
    leads = not proposal or (isinstance(first, Vote) and first.ballot.leader == signer(evidence))
    return (
        conflicting(first, second)
        and leads
        and verify_message(first, evidence.signatures[0], evidence.key, run_id)
        and verify_message(second, evidence.signatures[1], evidence.key, run_id)
    )


def signer(evidence: Evidence) -> PeerId:
    """Return the peer that the evidence is against."""
    return peer_id_of(evidence.key)


def describe(evidence: Evidence) -> str:
    """Return the reason of a ban, for people."""
    first = evidence.first
    kind = "announcements" if isinstance(first, Announced) else "votes" if first.digest is not None else "proposals"
    return f"two {kind} in round {first.round}"


def encode(evidence: Evidence) -> bytes:
    """Return the encoded evidence."""
    return msgspec.msgpack.encode(evidence)


def decode(data: bytes) -> Evidence | None:
    """Return encoded evidence, which is not checked; None for another form."""
    try:
        evidence = _decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    return evidence if encode(evidence) == data else None


class Equivocation:
    """Signed statements of one round, by peer.

    report_equivocation: called once for each peer that contradicts itself.
    """

    def __init__(self, report_equivocation: ReportEquivocation) -> None:
        self._report_equivocation = report_equivocation
        self._known: dict[tuple[PeerId, type, bool], list[tuple[Statement, bytes]]] = {}
        self._accused: set[PeerId] = set()

    def note(self, peer: PeerId, statement: Statement, signature: bytes) -> None:
        """Compare a statement, whose signature is valid, with the earlier ones of its peer."""
        known = self._known.setdefault((peer, *_kind(statement)), [])
        other = next((one for one in known if conflicting(one[0], statement)), None)
        if other is not None and peer not in self._accused:
            self._accused.add(peer)
            self._report_equivocation(peer, other, (statement, signature))
        if all(one != statement for one, _ in known):
            known[:] = [*known[1 - EACH :], (statement, signature)]


def _kind(statement: Statement) -> tuple[type, bool]:
    return type(statement), isinstance(statement, Vote) and statement.digest is None
