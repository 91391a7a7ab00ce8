"""Announcements of contributions, which peers send before the data (commit, then send)."""

from __future__ import annotations

from functools import cached_property
from typing import Annotated, ClassVar

import blake3
import msgspec
from msgspec import Meta
from thinwire.swarm.messages.base import LIFE, MAX_CHUNKS, U16, U32, U53, Digest, Id, Message, Signature, Site

SPAN_PREFIX = 8
"""Bytes of an id that name a peer in a Span; finding two ids with equal prefixes takes 2**64 tries."""

MAX_SPANS = 24
"""Maximum number of links in one announcement."""

MAX_STEP = 240
"""Highest step of a round-trip time or a rate, see quantized_links.py."""

MAX_ENDORSED = 64
"""Maximum number of peers on trial at a peer, and that one announcement endorses.

It is a quarter of MAX_GROUP.
"""

MAX_DISTRUSTED = 128
"""Maximum number of contributors that one announcement distrusts: half of MAX_GROUP."""


class Span(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """Measured link from the sender to the peer whose id begins with `peer`.

    rtt, rate: in the steps of quantized_links.py; 0 means unknown.
    """

    peer: Annotated[bytes, Meta(min_length=SPAN_PREFIX, max_length=SPAN_PREFIX)]
    rtt: Annotated[int, Meta(ge=0, le=MAX_STEP)]
    rate: Annotated[int, Meta(ge=0, le=MAX_STEP)]


class Announced(Message, frozen=True, tag=54):
    """Statement of a peer about its announcement number `attempt` in this life, see `Ready.statement`.

    `base`: its state digest, which covers the lineage. `digest`: see `Ready.digest`. It is what the sender of a Ready signs,
    and is never sent alone. The number of its message type precedes the fields, as in Vote.
    """

    round: U32
    fragment: U16
    attempt: U32
    life: Annotated[bytes, Meta(max_length=LIFE)]
    base: Digest
    digest: Digest


class Ready(Message, frozen=True, dict=True):
    """Announcement of a contribution, before its data is sent (commit, then send).

    `attempt` is the number of the announcement: a peer uses each number once in a life, and a later one is higher. `base`
    is its state digest after the previous round; in pairs it is the digest of its slow weights (see `Base`). `plan` is the
    digest of layout, codec, chunk grid and aggregation. `hashes` is the concatenated blake3 of each encoded chunk.
    `norms`: L2 norm of each chunk, as float32 in little-endian order, where peers check results by them; otherwise empty.
    `loss` is for display; so is `speed` (tokens per second), unless inner steps are balanced by it. `weight` 0 means that the
    sender takes part but contributes nothing. `voter` False means that the sender will not vote in this round.
    `up` and `down`: known capacity of its link in bytes per second; 0 means unknown. `site`: name of the fast network
    that the sender shares with all peers of the same site; empty means none. `spans`: its measured links to some peers,
    with preference to the nearest. `life` is the sender's (see `Proposal.lives`); empty in rounds without votes.
    `endorses`: peers on trial that may become members, in the opinion of the sender; `distrusts`: peers whose contributions
    should not count, see Electorate.uncounted.
    """

    limit: ClassVar[int] = 45_000

    round: U32
    fragment: U16
    attempt: U32
    base: Digest
    plan: Digest
    weight: U53
    hashes: Annotated[bytes, Meta(max_length=32 * MAX_CHUNKS)]
    voter: bool
    loss: float
    speed: float
    up: U53 = 0
    down: U53 = 0
    site: Site = ""
    spans: Annotated[tuple[Span, ...], Meta(max_length=MAX_SPANS)] = ()
    life: Annotated[bytes, Meta(max_length=LIFE)] = b""
    endorses: Annotated[tuple[Id, ...], Meta(max_length=MAX_ENDORSED)] = ()
    distrusts: Annotated[tuple[Id, ...], Meta(max_length=MAX_DISTRUSTED)] = ()
    norms: Annotated[bytes, Meta(max_length=4 * MAX_CHUNKS)] = b""

    @cached_property
    def digest(self) -> Digest:
        """Blake3 of the encoded announcement, which a proposal names (`Contribution.announced`)."""
        return blake3.blake3(msgspec.msgpack.encode(self)).digest()

    def statement(self) -> Announced:
        """Return the statement that the sender signs: short, because two of them with one number are evidence."""
        return Announced(self.round, self.fragment, self.attempt, self.life, self.base, self.digest)


class Base(Message, frozen=True):
    """Announcement of the slow weights that a partner has at the start of a round, before it trains.

    `attempt` and `plan` are as in Ready, whose `base` names the slow weights. `hashes` is the concatenated blake3 of
    each encoded chunk.
    """

    limit: ClassVar[int] = 34_000

    round: U32
    fragment: U16
    attempt: U32
    plan: Digest
    hashes: Annotated[bytes, Meta(max_length=32 * MAX_CHUNKS)]


class SignedAnnouncement(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """Announcement that a peer has signed, as another peer shows it."""

    statement: Announced
    signature: Signature


class ShownReady(Message, frozen=True):
    """Announcement of a peer, with its signature of `Ready.statement`, as another peer shows it."""

    limit: ClassVar[int] = 45_200

    peer: Id
    ready: Ready
    signature: Signature

    @property
    def round(self) -> int:
        """Round of the announcement."""
        return self.ready.round

    @property
    def fragment(self) -> int:
        """Fragment of the announcement."""
        return self.ready.fragment
