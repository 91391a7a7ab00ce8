"""Traffic through lines that several peers share, in a butterfly or a hierarchy.

A butterfly is between all peers, a hierarchy between sites. Bytes are those of the payloads, without headers and
messages of the agreement. Peers of a site are near each other: the shared line is the bottleneck, unless their own
links are slower than the traffic within the site requires.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec


class SiteBytes(msgspec.Struct, frozen=True):
    """Peers at `sites` sites, at most `members` each, behind lines of `down` and `up` bytes/s.

    flat, tall: bytes per direction on the busiest line in a round, as a butterfly and as a hierarchy. flat_seconds,
    tall_seconds: time of the data.
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
        """Speed of a hierarchy's data relative to a butterfly's."""
        return self.flat_seconds / self.tall_seconds


def sizes(peers: int, members: int) -> list[int]:
    """Return the sizes of the sites: full sites, and one with the rest."""
    return [min(members, peers - first) for first in range(0, peers, members)]


def butterfly_bytes(nbytes: float, groups: Sequence[int]) -> float:
    """Return the bytes out of the busiest site, and into it, if each peer sends to every owner.

    With n of N peers at the site this is 2 n (1 - n/N) of the payload.
    """
    total = sum(groups)
    return max((2 * n * (1 - n / total) * nbytes for n in groups), default=0.0)


def hierarchy_bytes(nbytes: float, groups: Sequence[int]) -> float:
    """Return the same if each site sends one value per chunk: 2 (1 - 1/G) of the payload for G sites.

    It does not depend on the number of members.
    """
    return 2 * (1 - 1 / len(groups)) * nbytes if groups else 0.0


def sites(nbytes: float, peers: int, members: int, line: tuple[float, float], link: float, latency: float) -> SiteBytes:
    """Compare butterfly and hierarchy for a round with a payload of `nbytes`.

    line: bytes/s down and up of a site. link: bytes/s of a peer's own link. latency: seconds one way.
    """
    groups = sizes(peers, members)
    flat, tall, slow = butterfly_bytes(nbytes, groups), hierarchy_bytes(nbytes, groups), min(line)
    # In a butterfly of N peers, 2 (1 - 1/N) of the payload passes through each peer's own link. In a hierarchy it is
    # 2 (1 - 1/n), within its site of n peers. Its share of the traffic to other sites is left out: the line limits that.
    own_flat = 2 * (1 - 1 / peers) * nbytes / link
    own_tall = max(2 * (1 - 1 / n) * nbytes / link for n in groups)
    return SiteBytes(
        len(groups),
        max(groups),
        line[0],
        line[1],
        flat,
        tall,
        max(flat / slow, own_flat) + 2 * latency,
        max(tall / slow, own_tall) + 2 * latency,
    )
