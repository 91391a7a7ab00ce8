"""Invariants of runs with rounds of fragments: those of `CommitInvariants`, for each fragment."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from thinwire.collectives.outcome import Outcome
from thinwire.node.methods.fragments.fragment_replicas import FragmentReplicas
from thinwire.sims.invariants.on_commit import CommitInvariants
from thinwire.sims.invariants.oracles import OnViolation
from thinwire.swarm.manifest.manifest import Manifest
from thinwire.swarm.messages.registry import PeerId


class FragmentInvariants:
    """One `CommitInvariants` for each fragment; `frontier` counts turns that are complete on some peer."""

    together = True

    def __init__(
        self,
        manifest: Manifest,
        honest: Mapping[PeerId, int],
        on_violation: OnViolation,
        forgetful: Callable[[PeerId], bool] = lambda peer: False,
    ) -> None:
        self.turns = manifest.outer.fragment_count
        self._turns: dict[int, int] = {}
        self.each = tuple(
            CommitInvariants(manifest, honest, lambda oracle, peer, detail, number=number: on_violation(  # type: ignore[misc]
                oracle, peer, f"fragment {number}: {detail}"
            ), forgetful)
            for number in range(manifest.outer.fragment_count)
        )  # fmt: skip

    @property
    def frontier(self) -> int:
        """Latest turn of an honest peer that runs."""
        return max(self._turns.values(), default=0)

    def installed(self, index: int, replica: FragmentReplicas, number: int | None = None) -> None:
        """Record a state that a peer did not compute: of one fragment, or of all that it holds."""
        for one, fragment in replica.fragments.items():
            if number in (None, one):
                held = fragment.replica
                self.each[one].installed(index, held.round, held.digest, held.state, held.lineage.hex())
        self._turns[index] = replica.round

    def founded(self, index: int, replica: FragmentReplicas, number: int | None = None) -> None:
        """Record that a peer continues its state in a lineage: of one fragment, or of all that it holds."""
        for one, fragment in replica.fragments.items():
            if number in (None, one):
                held = fragment.replica
                self.each[one].founded(index, held.round, held.digest, held.state, held.lineage.hex())

    def committed(self, index: int, replica: FragmentReplicas, outcome: Outcome) -> None:
        """Check a round that an honest peer has applied."""
        assert outcome.commit is not None
        number = outcome.commit.proposal.fragment
        held = replica.fragments[number].replica
        lineage = held.lineage.hex()
        self.each[number].committed(index, held.round, held.digest, held.state, outcome, lineage)
        self._turns[index] = replica.round

    def ended(self, index: int) -> None:
        """Record that a process ended."""
        self._turns.pop(index, None)
        for one in self.each:
            one.ended(index)
