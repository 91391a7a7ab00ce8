"""Durable memory of an acceptor: the ballot it has promised and its last vote, for one fragment.

A quorum of votes decides a round only if no acceptor forgets a promise or a vote. So an acceptor saves its record before
it sends the promise or the vote, and sends nothing if the record cannot be saved. If the memory is lost, the acceptor
gets a new life. A member of a round is a peer and its life, so the new life has no vote until a commit makes it a member.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Protocol

from msgspec import Meta
from thinwire.swarm.messages.base import LIFE, U32
from thinwire.swarm.messages.registry import Ballot, Digest, Proposal


def new_life(rng: random.Random, wall: float) -> bytes:
    """Return a new life, LIFE bytes.

    It begins with the time in milliseconds since 1970, so older lives are smaller. wall: seconds since 1970.
    """
    return (int(wall * 1000) % 2**48).to_bytes(6, "big") + rng.randbytes(LIFE - 6)


@dataclass(frozen=True, slots=True)
class VoteRecord:
    """State of an acceptor in one round.

    lineage: empty or LIFE bytes. promised: no lower ballot gets a vote. voted, digest: the last vote, with the proposal
    voted for and the digest of its results; None before the first vote. left: the acceptor has sent a farewell, so it
    neither promises nor votes any more. Raises ValueError if the fields contradict each other.
    """

    lineage: Annotated[bytes, Meta(max_length=LIFE)]
    round: U32
    promised: Ballot
    voted: Proposal | None
    digest: Digest | None
    left: bool = False

    def __post_init__(self) -> None:
        if len(self.lineage) not in (0, LIFE):
            raise ValueError(f"a lineage has {LIFE} bytes or none, not {len(self.lineage)}")
        if (self.voted is None) != (self.digest is None):
            raise ValueError("a vote without results, or results without a vote")
        if self.voted is not None and self.voted.round != self.round:
            raise ValueError(f"a vote of round {self.voted.round} in the record of round {self.round}")


class VoteStore(Protocol):
    """The stored record of one acceptor."""

    @property
    def life(self) -> bytes:
        """The acceptor's life, LIFE bytes, see `Proposal.lives`.

        It changes whenever a record may have been lost.
        """
        ...

    @property
    def record(self) -> VoteRecord | None:
        """The last saved record of this life; None before the first one."""
        ...

    @property
    def numbers(self) -> int:
        """Upper bound of the numbers of this life's announcements, those of earlier processes included."""
        ...

    def use_number(self, number: int) -> None:
        """Note that an announcement of this life may have this number; that is durable when this returns.

        Raises OSError. Then another life has begun, in memory, in which the number is used.
        """
        ...

    def save(self, record: VoteRecord) -> None:
        """Store a record; it is durable when this returns.

        Raises OSError. Then the caller must not send what the new record contains, and has no vote until its life, which
        may be a new one, is a member.
        """
        ...

    def renew(self) -> None:
        """Begin a new life without a record."""
        ...


class MemoryVoteStore(VoteStore):
    """VoteStore in memory, for tests and for callers without rounds that outlive a process.

    rng: draws lives; None: the life is empty, which stands for any.
    """

    def __init__(self, rng: random.Random | None = None) -> None:
        self._rng = rng
        self._life = b"" if rng is None else rng.randbytes(LIFE)
        self._record: VoteRecord | None = None
        self._numbers = 0

    @property
    def life(self) -> bytes:
        return self._life

    @property
    def numbers(self) -> int:
        return self._numbers

    def use_number(self, number: int) -> None:
        self._numbers = max(self._numbers, number)

    @property
    def record(self) -> VoteRecord | None:
        return self._record

    def save(self, record: VoteRecord) -> None:
        self._record = record

    def renew(self) -> None:
        self._life, self._record = b"" if self._rng is None else self._rng.randbytes(LIFE), None
        self._numbers = 0


OpenVotes = Callable[[int], VoteStore]
"""Opens the store of a fragment."""


def open_in_memory(fragment: int) -> VoteStore:
    """Return a store for a caller without a disk."""
    return MemoryVoteStore()
