"""Verdicts that others bring, with the votes that prove them."""

from __future__ import annotations

from collections.abc import Callable

from thinwire.collectives.consensus.electorate import Electorate
from thinwire.collectives.consensus.proposal import gone_in, name_of, sound
from thinwire.swarm.messages.registry import Commit, Digest, Message, PeerId, Vote


class CertificateCollector:
    """Keeps the best proved verdict that cannot be believed yet: who is gone may become clear later."""

    def __init__(self, verify: Callable[[PeerId, Message, bytes], bool]) -> None:
        self._verify = verify
        self._pending: tuple[Commit, set[PeerId]] | None = None
        self._voided: set[Digest] = set()

    def void(self, digest: Digest) -> None:
        """Results that cannot be had: no verdict on them is believed any more."""
        self._voided.add(digest)
        self._pending = None

    def on_message(self, message: Commit, electorate: Electorate) -> None:
        """Check a verdict's votes, each once."""
        opened, named, terms = message.opened, [proof.peer for proof in message.votes], electorate.terms
        if message.digest in self._voided or not sound(opened, terms):
            return
        if named != sorted(set(named)) or not set(named) <= set(opened.alive):
            return
        if not self._better(message, set(named), electorate):
            return
        vote = Vote(terms.round, terms.fragment, opened.ballot, name_of(opened), message.digest)
        voters = {proof.peer for proof in message.votes if self._verify(proof.peer, vote, proof.signature)}
        if self._better(message, voters, electorate):
            self._pending = (message, voters)

    def believed(self, electorate: Electorate) -> Commit | None:
        """The verdict, when its votes are a quorum as far as we can tell who is gone."""
        if self._pending is None or not _enough(*self._pending, electorate):
            return None
        return self._pending[0]

    def _better(self, message: Commit, voters: set[PeerId], electorate: Electorate) -> bool:
        """Whether a verdict with these votes is to be kept: many who have no say here shall not hide a few who decide."""
        return self._pending is None or len(voters) > len(self._pending[1]) or _enough(message, voters, electorate)


def _enough(message: Commit, voters: set[PeerId], electorate: Electorate) -> bool:
    gone = {peer for peer in gone_in(message.opened) if peer not in electorate.live or peer in electorate.gone}
    return electorate.enough(voters, gone, message.opened.alive)
