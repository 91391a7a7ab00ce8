"""Training since a split: what a peer contributes when its lineage gives way to another one."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import numpy as np
import pytest
from kit.outer.chains import RESULTS, certificate, fork_of
from thinwire.collectives.consensus.chain import extended, founded
from thinwire.collectives.outcome import Outcome
from thinwire.collectives.state_sync.state_sync import FetchedState
from thinwire.collectives.topology.shards import grid
from thinwire.compression import registry
from thinwire.node.methods.asynchronous.schedule import Asynchronous
from thinwire.node.methods.overlapped.schedule import Overlap
from thinwire.node.outer.outer_loop import OuterLoop, Schedule
from thinwire.node.runtime.asyncio_extra import at_once
from thinwire.node.state.layout import Layout, Piece
from thinwire.node.state.replica import Replica
from thinwire.swarm.lineage import lineage_of
from thinwire.swarm.manifest.parser import parse
from thinwire.swarm.messages.registry import LIFE, Ballot, Commit, Contribution, Proposal, StateOffer

ME, ANN, BEN = (bytes([number]) * 32 for number in range(1, 4))
LIVES = {peer: peer[:LIFE] for peer in (ME, ANN, BEN)}
SIZE, FORK = 1000, 4
LAYOUT = Layout((Piece("a", (SIZE,), "float32", 0, SIZE),), SIZE, b"l" * 32)
WINNER, OWN = np.full(SIZE, 3.0, np.float32), np.full(SIZE, -5.0, np.float32)
"""Outer parameters of the lineage that prevails, and our model."""

ROOT = founded((), fork_of(0, bytes(32), (), {ANN: LIVES[ANN]}))


def joined(round):
    """Return the chain of the run after a round that made all peers members."""
    return extended(ROOT, certificate(round, lineage_of(ROOT), {ANN: LIVES[ANN]}, (ANN,), LIVES))


def branch(*founders, round=FORK):
    return founded(joined(round), fork_of(round, RESULTS, tuple(LIVES), {peer: LIVES[peer] for peer in founders}))


class Scene:
    """Peer ME with a model at OWN in the lineage of `ours`; `newer` is the chain of the state that it fetches."""

    def __init__(self, ours, newer, *, on_split="merge", schedule=None, more=""):
        self.manifest = parse(f'[exchange]\ncodec = "fp32"\non_split = "{on_split}"\n{more}')
        codec = registry.parse("fp32")
        self.model, self.told, self.newer = OWN.copy(), [], newer
        self.replica = Replica.begin(self.manifest, LAYOUT, codec, grid(SIZE, codec), np.zeros(SIZE, np.float32), ())
        self.replica.chain, self.replica.members = ours, tuple(LIVES)
        self.replica.seal()
        session = SimpleNamespace(
            manifest=self.manifest,
            replica=self.replica,
            me=ME,
            patience=1.0,
            grace=1.0,
            current=SimpleNamespace(agreement=SimpleNamespace(commit=None)),
            catch_up=SimpleNamespace(
                behind=asyncio.Event(), newer=self.fetch, fetcher=SimpleNamespace(install=self.install)
            ),
            outcome=self.outcome,
            advance=lambda: self.told.append("advance"),
            report=lambda name, detail, **fields: self.told.append(name),
        )
        session.catch_up.behind.set()
        self.loop = OuterLoop(session, schedule or Schedule(), read=self.read, write=self.write, work=at_once)

    def read(self, start, stop, out):
        out[:] = self.model[start:stop]

    def write(self, theta, start=0, keep=0.0):
        self.model[:] = theta

    async def fetch(self, work):
        offer = StateOffer(9, bytes(32), bytes(32), 4 * SIZE, tuple(LIVES), lineage=lineage_of(self.newer))
        return FetchedState(offer, (), {}, (ANN,), self.newer)

    async def install(self, work, fetched):
        self.replica.theta[:] = WINNER
        self.replica.chain = fetched.chain
        self.replica.seal()

    async def outcome(self, give_up):
        return Outcome()

    def commit(self, weight):
        """Count a round of our lineage to which this peer contributed."""
        proposal = Proposal(
            5,
            0,
            Ballot(1, ME),
            (ME,),
            (ME,),
            (Contribution(ME, 1, weight),),
            (),
            None,
            (),
            lineage=lineage_of(self.replica.chain),
        )
        self.loop.count(Commit(proposal, RESULTS, ()))

    def run(self, weight=7):
        return asyncio.run(self.loop.round(weight, 0.0, 0.0))

    def contribution(self):
        return np.frombuffer(
            b"".join(bytes(one) for one in self.replica.contribution(self.read, attempt=1, peers=2)), np.float32
        )


OURS, THEIRS = branch(ME), branch(ANN, BEN)


def test_next_contribution_after_a_split_leads_from_the_prevailing_state_to_our_model():
    """Averaged with its weight, it moves the prevailing parameters by that part of the way to ours."""
    scene = Scene(OURS, THEIRS)
    scene.commit(20)
    scene.commit(30)
    outcome = scene.run(weight=7)
    assert (outcome.commit, outcome.taken, outcome.kept, outcome.merged) == (None, True, 7, 50)
    assert np.array_equal(scene.model, OWN) and np.array_equal(scene.contribution(), WINNER - OWN)
    assert scene.told == ["advance", "merged"]


def test_rounds_of_a_lineage_that_the_prevailing_one_contains_do_not_count_again():
    scene = Scene(joined(FORK), THEIRS)
    scene.commit(20)
    outcome = scene.run(weight=7)
    assert outcome.taken and outcome.kept == 7 and outcome.merged == 0


def test_rounds_of_an_earlier_lineage_do_not_count():
    scene = Scene(joined(FORK), THEIRS)
    scene.commit(20)
    scene.replica.chain = OURS
    assert scene.run().merged == 0


@pytest.mark.parametrize(
    ("ours", "newer", "options"),
    [
        (OURS, THEIRS, {"on_split": "discard"}),
        (joined(FORK), joined(9), {}),
        ((), THEIRS, {}),
        (OURS, THEIRS, {"schedule": Overlap(last=0)}),
        (OURS, THEIRS, {"schedule": Asynchronous(last=0, staleness=1.0)}),
        (OURS, THEIRS, {"more": "[data]\nexactly_once = true\n"}),
    ],
    ids=["discard", "same lineage", "no state", "overlap", "asynchronous", "samples once"],
)
def test_model_is_set_to_the_fetched_state_otherwise(ours, newer, options):
    scene = Scene(ours, newer, **options)
    outcome = scene.run()
    assert not outcome.taken and not outcome.kept and not outcome.merged
    assert np.array_equal(scene.model, WINNER) and scene.told == ["advance"]
