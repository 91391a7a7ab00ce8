"""What rounds of peers that share lines move through these lines: every peer for itself, or each site as one.

Bytes are of the payloads, without the headers and the messages of the agreement. Peers of a site are near to each other: its
line is what binds, not their own links, unless those are slower than what the members of a site have to pass among themselves.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec


class Sites(msgspec.Struct, frozen=True):
    """Peers at `sites` sites, at most `members` at each, behind a line of `down` and `up` bytes/s.

    `flat`, `tall`: bytes that the busiest line carries each way in a round, as a butterfly and as a hierarchy; and the seconds
    that it takes.
    """

    sites: int
    members: int
    down: float
    up: float
    flat: float
    tall: float
    flat_seconds: float
    tall_seconds: float

    @property
    def factor(self) -> float:
        """How many times as fast the data of a hierarchy goes."""
        return self.flat_seconds / self.tall_seconds


def sizes(peers: int, members: int) -> list[int]:
    """As many full sites as there are, and one with the rest."""
    return [min(members, peers - first) for first in range(0, peers, members)]


def flat_bytes(nbytes: float, groups: Sequence[int]) -> float:
    """Bytes out of the busiest site, and into it, when each peer sends to every owner: 2 n (1 - n/N) of the payload."""
    total = sum(groups)
    return max((2 * n * (1 - n / total) * nbytes for n in groups), default=0.0)


def tall_bytes(nbytes: float, groups: Sequence[int]) -> float:
    """The same when each site sends one value of every chunk: 2 (1 - 1/G), whatever the members of the sites."""
    return 2 * (1 - 1 / len(groups)) * nbytes if groups else 0.0


def sites(nbytes: float, peers: int, members: int, line: tuple[float, float], link: float, latency: float) -> Sites:
    """A round of `nbytes` of payload; `line`: bytes/s down and up of a site, `link`: of a peer's own, `latency`: one way."""
    groups = sizes(peers, members)
    flat, tall, slow = flat_bytes(nbytes, groups), tall_bytes(nbytes, groups), min(line)
    # In a butterfly every peer passes 2 (1 - 1/N) of the payload through its own link; in a hierarchy it hands on within its
    # site what crosses once, so twice 1 - 1/n, and its share of what crosses.
    apart = 2 * (1 - 1 / peers) * nbytes / link
    inside = max(2 * (1 - 1 / n) * nbytes / link for n in groups)
    return Sites(
        len(groups),
        max(groups),
        line[0],
        line[1],
        flat,
        tall,
        max(flat / slow, apart) + 2 * latency,
        max(tall / slow, inside) + 2 * latency,
    )
