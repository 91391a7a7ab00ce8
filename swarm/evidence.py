"""Evidence that a peer has signed two statements of which an honest peer signs at most one.

Two kinds of statement are evidence, in one slot (lineage, fragment, round, ballot):

- two votes: only members vote; a vote is durable before it is sent, so a peer that restarts remembers it, and one that
  has lost its votes is no member of the round any more (see `Open.lives`);
- two proposals of the leader: it stores its own promise for a ballot before it proposes, and never takes a ballot twice.

Two announcements (`Ready`) with one number are none: the number follows from the clock of the peer's process, so a clock
that was set back can repeat it. Rounds without a lineage (averages that a caller asks for) have votes in memory only, so
they give no evidence.
"""

from __future__ import annotations

import msgspec
from thinwire.swarm.frame import verify_message
from thinwire.swarm.identity.identity import peer_id_of
from thinwire.swarm.messages.registry import LIFE, Evidence, PeerId, Vote

_decoder = msgspec.msgpack.Decoder(Evidence)


def conflicting(first: Vote, second: Vote) -> bool:
    """Return True if no honest peer signs both statements."""
    slots = [(one.lineage, one.fragment, one.round, one.ballot, one.digest is None) for one in (first, second)]
    return slots[0] == slots[1] and len(first.lineage) == LIFE and first != second


def convicts(evidence: Evidence, run_id: bytes) -> bool:
    """Return True if the evidence is valid: the peer has signed two conflicting statements.

    Proposals must be those of its own ballot.
    """
    first, second = evidence.first, evidence.second
    leads = first.digest is not None or first.ballot.leader == convicted(evidence)
    return (
        conflicting(first, second)
        and leads
        and verify_message(first, evidence.signatures[0], evidence.key, run_id)
        and verify_message(second, evidence.signatures[1], evidence.key, run_id)
    )


def convicted(evidence: Evidence) -> PeerId:
    """Return the peer that the evidence is against."""
    return peer_id_of(evidence.key)


def told(evidence: Evidence) -> str:
    """Return the reason of a ban, for people."""
    kind = "votes" if evidence.first.digest is not None else "proposals"
    return f"two {kind} in round {evidence.first.round}"


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
