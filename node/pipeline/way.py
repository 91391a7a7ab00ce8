"""The way of one attempt of a micro-batch, as one stage on it sees it."""

from __future__ import annotations

from thinwire.swarm.protocol import Hop, PeerId, Route

from .boundary import Boundary
from .parcel import Parcel


class Way:
    """Who it comes from and goes to, and what has come of it. `me` is on the route.

    `there` and `back`: what is to come forward and backward; `forwarded`: whether the first has been passed on.
    """

    def __init__(self, route: Route, me: PeerId, origin: PeerId, boundary: Boundary) -> None:
        peers = [hop.peer for hop in route.path]
        at = peers.index(me)
        self.route = route
        self.hop: Hop = route.path[at]
        self.before = peers[at - 1] if at else origin
        self.after = peers[at + 1] if at + 1 < len(peers) else origin
        self.there = Parcel(boundary.nbytes(route.batch, route.length, backward=False))
        self.back = Parcel(boundary.nbytes(route.batch, route.length, backward=True))
        self.forwarded = False
