"""Route of one attempt of a micro-batch from the point of view of one of its stages."""

from __future__ import annotations

from thinwire.collectives.transport.payload_assembly import PayloadAssembly
from thinwire.compression.boundary_codec import Boundary
from thinwire.swarm.messages.registry import Hop, PeerId, Route


class RouteHop:
    """Predecessor and successor on the route, and the data that has arrived. `me` is on the route.

    `there` and `back`: assemblies of the forward and backward payloads; `forwarded`: whether the first has been passed
    on.
    """

    def __init__(self, route: Route, me: PeerId, origin: PeerId, boundary: Boundary) -> None:
        peers = [hop.peer for hop in route.path]
        at = peers.index(me)
        self.route = route
        self.hop: Hop = route.path[at]
        self.before = peers[at - 1] if at else origin
        self.after = peers[at + 1] if at + 1 < len(peers) else origin
        self.there = PayloadAssembly(boundary.nbytes(route.batch, route.length, backward=False))
        self.back = PayloadAssembly(boundary.nbytes(route.batch, route.length, backward=True))
        self.forwarded = False
