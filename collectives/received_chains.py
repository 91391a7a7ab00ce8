"""Chains that other peers send: equal ones are decoded and checked once, in parts that leave time for other work."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Generator

import blake3
from thinwire.collectives.blocking_work import Part, SharedWork
from thinwire.collectives.consensus.chain import Check, Configuration, Proving, Trusted, decoded
from thinwire.swarm.messages.lineage import CHAIN_BYTES
from thinwire.swarm.messages.registry import Chain

KNOWN, MOST_KNOWN = 4 * CHAIN_BYTES, 256
"""Most bytes of encoded chains that are remembered, and most chains."""


def unchecked(chain: Chain, fragment: int, trusted: Trusted) -> Proving:
    """Check of chains in runs without any: none proves anything."""
    yield from ()
    return None


class ReceivedChain:
    """A chain that other peers have sent. It is decoded and checked once, in parts, for all that have sent the same bytes."""

    def __init__(self, data: bytes, fragment: int, check: Check) -> None:
        self._fragment, self._check = fragment, check
        self._decoding = SharedWork(decoded(data))
        self._proving: SharedWork[Configuration | None] | None = None

    def decode(self) -> Generator[Part, None, Chain | None]:
        """Return the chain, or None if the bytes have another form."""
        return self._decoding.parts()

    def prove(self, trusted: Trusted) -> Generator[Part, None, Configuration | None]:
        """Return what the chain proves if its beginning is trusted. Only a chain that is decoded can prove anything."""
        chain = self._decoding.result
        if not chain or not trusted(chain[0].fork):
            return None
        if self._proving is None:
            self._proving = SharedWork(self._check(chain, self._fragment, lambda fork: True))
        return (yield from self._proving.parts())

    @property
    def refuted(self) -> bool:
        """True if the check has found an error. It may lack a key that this peer learns later."""
        return self._proving is not None and self._proving.done and self._proving.result is None


class ReceivedChains:
    """Chains that other peers have sent, the latest ones. check: see ReceivedChain."""

    def __init__(self, check: Check) -> None:
        self._check = check
        self._known: OrderedDict[tuple[int, bytes], tuple[ReceivedChain, int]] = OrderedDict()

    def find(self, data: bytes, fragment: int) -> ReceivedChain:
        """Return the chain with this encoding: a known one, if it was not refuted."""
        key = fragment, blake3.blake3(data).digest()
        found = self._known.pop(key, None)
        if found is None or found[0].refuted:
            found = ReceivedChain(data, fragment, self._check), len(data)
        self._known[key] = found
        while sum(size for _, size in self._known.values()) > KNOWN or len(self._known) > MOST_KNOWN:
            self._known.popitem(last=False)
        return found[0]
