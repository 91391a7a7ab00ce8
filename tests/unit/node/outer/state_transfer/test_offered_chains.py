"""Chains of offered states, from many holders: equal ones are checked once, and long ones leave time for other work."""

import asyncio
import time
from types import SimpleNamespace

import numpy as np
import pytest
from kit.outer.chains import admits, certificate, fork_of, verify
from thinwire.collectives.blocking_work import BURST
from thinwire.collectives.consensus.chain import checked, encode, end_of
from thinwire.collectives.consensus.members.lives import lives_in_order
from thinwire.collectives.state_sync.state_offers import ReceivedChains, matches, state_digest
from thinwire.node.outer.state_transfer.state_fetcher import StateFetcher
from thinwire.node.runtime.asyncio_extra import at_once
from thinwire.node.state.replica import Replica
from thinwire.swarm.frame import Frame
from thinwire.swarm.lineage import name_of_fork
from thinwire.swarm.messages.registry import LIFE, ChainEntry, StateAsk, StateChunk, StateFetch, StateOffer

ME = bytes([255]) * 32
SIZE = 140_000


def ids(count):
    return [bytes([1, number // 256, number % 256]) + bytes(29) for number in range(count)]


def chain_of(members, certificates, *, spoiled=0):
    """Return the chain of a run that its first member has founded, in which all vote. spoiled: certificate without votes."""
    everyone = {peer: peer[:3] + bytes(LIFE - 3) for peer in members}
    before = dict([next(iter(everyone.items()))])
    fork, found = fork_of(0, bytes(32), (), before), []
    for round in range(1, certificates + 1):
        signer = ME if round == spoiled else None
        found.append(certificate(round, name_of_fork(fork), before, before, everyone, signer=signer))
        before = everyone
    return (ChainEntry(fork, tuple(found)),)


class Joiner:
    """A peer without a state that asks holders. `chains`: by holder, those that they offer; all have the same values."""

    def __init__(self, chains):
        self.checked = self.turns = 0
        self.chains = {peer: (chain, encode(chain)) for peer, chain in chains.items()}
        self.held = Replica(bytes(32), np.ones(SIZE, np.float32), (ME,))
        self.replica = Replica(bytes(32), np.zeros(SIZE, np.float32), (ME,))
        self.received = ReceivedChains(
            lambda chain, fragment, trusted: checked(
                chain, fragment, trusted, fraction=0.5, verifier=lambda keys: self._verify, admits=admits
            )
        )
        self.fetcher = StateFetcher(self.replica, SimpleNamespace(), self, lambda: 0.0, chains=self.received)

    def _verify(self, peer, message, signature):
        self.checked += 1
        return verify(peer, message, signature)

    def control(self, peer, message):
        asyncio.get_running_loop().call_soon(self._answer, peer, message)

    def _answer(self, peer, message):
        if isinstance(message, StateAsk):
            self.fetcher.on_frame(peer, self._offer(peer))
        elif isinstance(message, StateFetch):
            self.fetcher.on_frame(peer, Frame(StateChunk(message.round, message.index), self.held.chunk(message.index)))

    def _offer(self, peer):
        chain, encoded = self.chains[peer]
        end, held = end_of(chain), self.held
        lives = lives_in_order(end.members, dict(end.lives))
        digest = state_digest(end.round, held.layout, end.members, held.hashes, lives, end.lineage)
        offer = StateOffer(end.round, digest, held.layout, held.state.nbytes, end.members, 0, lives, end.lineage)
        return Frame(offer, b"".join(held.hashes) + encoded)

    def accept(self, offered):
        return matches(offered.offer, (yield from offered.received.prove(lambda fork: True)))

    async def _turn(self):
        while True:
            self.turns += 1
            await asyncio.sleep(0)

    async def fetch(self, patience=60.0):
        turning = asyncio.create_task(self._turn())
        try:
            return await self.fetcher.fetch(list(self.chains), at_once, patience=patience, accept=self.accept)
        finally:
            turning.cancel()


@pytest.mark.parametrize(("holders", "certificates"), [(256, 3), (16, 144)])
def test_honest_holders_with_one_chain_cost_one_check(holders, certificates):
    """Each of them alone would take a third of a second, or of all of them a minute and a half."""

    async def main():
        members = ids(holders)
        joiner = Joiner(dict.fromkeys(members, chain_of(members, certificates)))
        fetched = await joiner.fetch()
        assert fetched is not None and set(fetched.sources) > set(members[: holders // 2])
        assert 0 < joiner.checked <= 1 + 1 + holders * (certificates - 1)

    asyncio.run(main())


def test_long_chain_leaves_turns_of_the_event_loop_for_other_work():
    async def main():
        members = ids(64)
        joiner = Joiner({members[1]: chain_of(members, 1)})
        await joiner.fetch()
        short = joiner.turns
        joiner = Joiner({members[1]: chain_of(members, 65)})
        assert await joiner.fetch() is not None
        assert joiner.checked == 2 + 64 * 64 and joiner.turns - short >= joiner.checked / (BURST + 64) - 1

    asyncio.run(main())


def test_liars_with_long_chains_of_their_own_do_not_keep_a_joiner_out():
    async def main():
        members, liars = ids(16), ids(24)[16:]
        chains = {liar: chain_of(members, 40 + place, spoiled=40) for place, liar in enumerate(liars)}
        joiner = Joiner({**chains, **dict.fromkeys(members, chain_of(members, 30))})
        fetched = await joiner.fetch()
        assert fetched is not None and fetched.offer.round == 30 and set(fetched.sources) <= set(members)

    asyncio.run(main())


def test_check_that_takes_longer_than_the_wait_for_offers_ends_and_counts():
    async def main():
        members = ids(4)
        joiner, checks = Joiner({members[1]: chain_of(members, 2)}), []

        def accept(offered):
            checks.append(offered.offer.round)
            for _ in range(10):
                yield SimpleNamespace(cost=BURST + 1)
                time.sleep(0.05)
            return True

        joiner.accept = accept
        assert await joiner.fetch(patience=0.2) is not None and checks == [2]

    asyncio.run(main())
