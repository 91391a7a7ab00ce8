"""Oracles of a swarm whose fragments have rounds of their own: what `Oracles` promises holds of each by itself."""

from __future__ import annotations

from collections.abc import Mapping

from thinwire.collectives.outcome import Outcome
from thinwire.node.chains import ChainedReplica
from thinwire.sims.oracles import Oracles, Tell
from thinwire.swarm.manifest import Manifest
from thinwire.swarm.protocol import PeerId


class Lineages:
    """One of `Oracles` for each fragment; `frontier` counts turns that are over somewhere."""

    together = True

    def __init__(self, manifest: Manifest, honest: Mapping[PeerId, int], tell: Tell) -> None:
        self.frontier, self.turns = 0, manifest.outer.fragments
        self.each = tuple(
            Oracles(manifest, honest, lambda oracle, peer, detail, number=number: tell(  # type: ignore[misc]
                oracle, peer, f"fragment {number}: {detail}"
            ))
            for number in range(manifest.outer.fragments)
        )  # fmt: skip

    def installed(self, index: int, replica: ChainedReplica, number: int | None = None) -> None:
        """A peer has a state that it did not compute: of one fragment, or of all that it holds."""
        for one, chain in replica.chains.items():
            if number in (None, one):
                self.each[one].installed(index, chain.replica.round, chain.replica.digest, chain.replica.state)
        self.frontier = max(self.frontier, replica.round)

    def committed(self, index: int, replica: ChainedReplica, outcome: Outcome) -> None:
        """An honest peer has applied a round."""
        assert outcome.commit is not None
        number = outcome.commit.opened.fragment
        chain = replica.chains[number].replica
        self.each[number].committed(index, chain.round, chain.digest, chain.state, outcome)
        self.frontier = max(self.frontier, replica.round)

    def ended(self, index: int) -> None:
        """A process is gone, and what it knew with it."""
        for one in self.each:
            one.ended(index)
