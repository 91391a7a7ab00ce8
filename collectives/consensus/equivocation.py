"""Detection of peers that sign two conflicting statements, see swarm/evidence.py."""

from __future__ import annotations

from collections.abc import Callable

from thinwire.swarm.evidence import Statement, conflicting
from thinwire.swarm.messages.registry import PeerId, Vote

EACH = 4
"""Number of statements of each kind that are stored of a peer in a round, the latest ones."""

Accuse = Callable[[PeerId, tuple[Statement, bytes], tuple[Statement, bytes]], None]
"""Called with a peer and two conflicting statements, each with its signature."""


class Equivocation:
    """Signed statements of one round, by peer. accuse: called for each peer once."""

    def __init__(self, accuse: Accuse) -> None:
        self._accuse = accuse
        self._known: dict[tuple[PeerId, type, bool], list[tuple[Statement, bytes]]] = {}
        self._accused: set[PeerId] = set()

    def note(self, peer: PeerId, statement: Statement, signature: bytes) -> None:
        """Compare a statement, whose signature is valid, with the earlier ones of its peer."""
        known = self._known.setdefault((peer, *_kind(statement)), [])
        other = next((one for one in known if conflicting(one[0], statement)), None)
        if other is not None and peer not in self._accused:
            self._accused.add(peer)
            self._accuse(peer, other, (statement, signature))
        if all(one != statement for one, _ in known):
            known[:] = [*known[1 - EACH :], (statement, signature)]

    def signature_of(self, peer: PeerId, statement: Statement) -> bytes | None:
        """Return the signature of a statement that was noted, if it is still stored."""
        known = self._known.get((peer, *_kind(statement)), ())
        return next((signature for one, signature in known if one == statement), None)


def _kind(statement: Statement) -> tuple[type, bool]:
    return type(statement), isinstance(statement, Vote) and statement.digest is None
