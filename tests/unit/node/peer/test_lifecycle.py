"""The lifecycle of a peer with scripted rounds."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest
from thinwire.collectives.outcome import Outcome
from thinwire.compression.device import HOST
from thinwire.node.peer import lifecycle
from thinwire.node.peer.lifecycle import PeerLifecycle
from thinwire.node.runtime.asyncio_extra import at_once
from thinwire.node.state.checkpoint_store import SaveFailed
from thinwire.node.training.learner import StepReport, WorkShare
from thinwire.sims.engine import virtual_loop


async def nothing(*arguments, **more):
    pass


class Services:
    """Services of a peer whose exchanges have these outcomes. `weights`: those that were given."""

    follow = staticmethod(lambda *arguments: None)
    gather = leave = staticmethod(nothing)
    checkpoints = SimpleNamespace(
        save=lambda private: None, saved=lambda outcome: None, begin_if_due=nothing, written=nothing
    )

    def __init__(self, outcomes):
        self.outcomes, self.weights = iter(outcomes), []

    async def trouble(self):
        await asyncio.Event().wait()

    async def exchange(self, *, steps, weight, loss):
        self.weights.append(weight)
        return next(self.outcomes), 0.0


class Learner:
    """Learner whose steps have ten tokens together."""

    layout, device, score, private = SimpleNamespace(total=1), HOST, None, None
    read = write = assign = parameters = staticmethod(lambda *arguments: None)

    async def steps(self, count, stop):
        return StepReport(count, 1.0, 1.0, 10, 1.0)


def training_peer():
    """Return a peer that founds a run."""
    return SimpleNamespace(
        identity=SimpleNamespace(peer_id=bytes(32)),
        run_id=bytes(32),
        manifest=SimpleNamespace(run=SimpleNamespace(rounds=0)),
        known_peers=SimpleNamespace(founds=False),
        invite=lambda: None,
        private=None,
        ready=True,
        take_up=nothing,
        workload=SimpleNamespace(steps=lambda speed: 1, share=lambda made: WorkShare((), bytes(32), 0), idle_weight=0),
        replica=SimpleNamespace(round=0, newest=(0, b""), contents=(0, b"")),
        rounds=SimpleNamespace(settled=nothing, judge=nothing, follows=False, overtaken=False),
    )


async def begin(peer):
    return False


async def learn(manifest):
    return Learner()


def test_tokens_missing_in_late_round_count_in_the_next(monkeypatch):
    """The first two calls reach no round; the third one applies the announcement of the first."""
    commit = SimpleNamespace()
    services = Services([Outcome(), Outcome(), Outcome(commit=commit, kept=20), Outcome(commit=commit), Outcome()])
    monkeypatch.setattr(lifecycle, "PeerServices", lambda *arguments, **more: services)
    peer = training_peer()
    report = SimpleNamespace(speed=0.0, loss=None, emit=lambda name, fields: None)
    life = PeerLifecycle(
        peer, report, begin=begin, learn=learn, work=at_once, moves=lambda learner: len(services.weights) == 5
    )
    asyncio.run(life.run())
    assert services.weights == [10, 20, 30, 30, 10]


@pytest.mark.parametrize(
    ("outcome", "others", "unsaved"),
    [(SaveFailed("no space"), (), "no space"), (SaveFailed("no space"), (b"peer",), ""), (None, (), "")],
)
def test_state_is_lost_if_it_cannot_be_written_and_no_other_peer_has_it(monkeypatch, outcome, others, unsaved):
    services = Services([Outcome(commit=SimpleNamespace())])
    services.checkpoints = SimpleNamespace(**vars(Services.checkpoints) | {"save": lambda private: outcome})
    monkeypatch.setattr(lifecycle, "PeerServices", lambda *arguments, **more: services)
    report = SimpleNamespace(speed=0.0, loss=None, emit=lambda name, fields: None)
    peer = training_peer()
    peer.presence = SimpleNamespace(live=others)
    life = PeerLifecycle(peer, report, begin=begin, learn=learn, work=at_once, moves=lambda learner: True)
    asyncio.run(life.run())
    assert life.unsaved == unsaved


def test_joiner_without_a_state_stops_at_once(monkeypatch):
    """Its session exists, but no round is in progress here."""
    monkeypatch.setattr(lifecycle, "PeerServices", lambda *arguments, **more: Services([]))

    async def main():
        joining, loop = asyncio.Event(), asyncio.get_running_loop()

        async def take_up(*arguments, **more):
            joining.set()
            await asyncio.Event().wait()

        async def begin(peer):
            return True

        async def learn(manifest):
            return Learner()

        identity = SimpleNamespace(peer_id=bytes(32))
        peer = SimpleNamespace(identity=identity, run_id=bytes(32), manifest=None, ready=True, take_up=take_up)
        report = SimpleNamespace(emit=lambda name, fields: None)
        life = PeerLifecycle(peer, report, begin=begin, learn=learn, work=at_once)
        running = asyncio.ensure_future(life.run())
        await joining.wait()
        assert report.phase == "joining" and not life.takes_part
        life.stop()
        began = loop.time()
        await running
        return loop.time() - began

    assert virtual_loop.run(main(), seed=1) == 0.0
