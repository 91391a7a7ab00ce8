"""A joiner's state: after the transfer it makes the same outer steps as the members, momentum included."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
import torch
from thinwire.collectives.state_sync.state_sync import FetchedState
from thinwire.node.methods.registry import fitted, method_of
from thinwire.node.state.layout import layout_of
from thinwire.node.state.replica import Replica
from thinwire.swarm.manifest.parser import parse
from thinwire.swarm.messages.registry import StateOffer
from torch import nn

from benchmarks.training.round_table import RoundTable

METHODS = {
    "diloco": "lr = 0.7\nmomentum = 0.9",
    "muloco": "lr = 0.7\nmomentum = 0.9",
    "merge": "",
    "eager": "lr = 0.2\nmomentum = 0.9",
    "co2": "lr = 0.2\nmomentum = 0.9",
    "streaming": "fragments = 2",
}
TRANSFER, END = 4, 8
"""Attempts of a round before the transfer, and in all."""


class RecordingTable(RoundTable):
    """Peers of one process; `outcomes` has every round, in order."""

    def average_of(self, session, sent):
        outcome = super().average_of(session, sent)
        self.outcomes.append(outcome)
        return outcome


def transfer(member: Replica, joiner: Replica) -> None:
    """Install the member's state on the joiner, as a state server fetches it: the chunks that differ."""
    hashes = tuple(member.hashes)
    chunks = {i: bytes(member.chunk(i)) for i, own in enumerate(joiner.hashes) if own != hashes[i]}
    offer = StateOffer(
        member.round, member.digest, member.layout, member.state.nbytes, member.members, lineage=member.lineage
    )
    joiner.install(FetchedState(offer, hashes, chunks, member.members[:1], member.chain))


def join(method: str) -> bool:
    """Play rounds of two peers, with a transfer to a joiner in between; return whether there was momentum to transfer.

    Asserts that the joiner's state stays equal to a member's in all later rounds.
    """
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(30, 40), nn.Linear(40, 50))
    layout, rng = layout_of(module), np.random.default_rng(3)
    text = f'[outer]\nmethod = "{method}"\nsync_every = 2\n{METHODS[method]}\n[exchange]\ncodec = "int8(block=64)"\n'
    manifest = parse(text.encode(), "run.toml")
    first = np.empty(layout.total, np.float32)
    layout.read(module, first)
    models = [first.copy(), first.copy()]

    def learner(theta):
        def read(start, stop, out):
            out[:] = theta[start:stop]

        def write(values, start=0, keep=0.0):
            theta[start : start + values.size] *= np.float32(keep)
            theta[start : start + values.size] += np.float32(1 - keep) * values

        return first, read, write

    def train(index, steps):
        models[index] += rng.standard_normal(layout.total, np.float32) * np.float32(0.01)
        return steps

    table = RecordingTable(manifest, layout, [learner(theta) for theta in models])
    table.outcomes, attempts, moving = [], [], []
    codec, cut = fitted(manifest, layout)
    joiner = method_of(manifest).replica.begin(manifest, layout, codec, cut, first, ())
    members = table.slots[0].replica

    def look():
        attempts.append(1)
        if len(attempts) == TRANSFER:
            for (_, member, _), (_, own, _) in zip(members.each(layout), joiner.each(layout), strict=True):
                transfer(member, own)
                moving.append(bool(member.momentum.any()))

    asyncio.run(table.play(END, train, look))
    for (number, member, _), (_, own, _) in zip(members.each(layout), joiner.each(layout), strict=True):
        before = own.round
        for outcome in table.outcomes:
            proposal = outcome.commit.proposal
            if (proposal.fragment, proposal.round) == (number, own.round + 1) and own.round < member.round:
                own.commit(outcome, b"j" * 32)
        assert own.round == member.round > before
        assert own.momentum.tobytes() == member.momentum.tobytes()
        assert own.state.tobytes() == member.state.tobytes() and own.digest == member.digest
    return all(moving)


@pytest.mark.parametrize("method", METHODS)
def test_joiner_makes_the_outer_steps_of_the_members_after_the_transfer(method):
    assert join(method)


@pytest.mark.parametrize("method", ["diloco", "streaming"])
def test_joiner_that_starts_without_the_transferred_momentum_is_noticed(method, monkeypatch):
    install = Replica.install

    def forgets(replica, fetched):
        changed = install(replica, fetched)
        replica.momentum[:] = 0.0
        return changed

    monkeypatch.setattr(Replica, "install", forgets)
    with pytest.raises(AssertionError):
        join(method)
