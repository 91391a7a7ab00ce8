"""Speed measurement of a background peer whose rounds are scripted."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest
from thinwire.collectives.outcome import Outcome
from thinwire.node.api.background_peer import BackgroundPeer

COMMIT = SimpleNamespace(proposal=SimpleNamespace(contributors=()))


async def nothing(*given, **options):
    pass


async def for_ever(*given):
    await asyncio.Event().wait()


class FakeSinks:
    """Outputs that keep only the speed that the peer reports, and the last event."""

    def __init__(self, *given, **options):
        self.report = SimpleNamespace(speed=0.0, phase="", device="", emit=self._emit, last=None)
        self.publish_repeatedly, self.publish, self.close = for_ever, self._publish, lambda: None

    def _emit(self, kind, fields):
        self.report.last = kind, fields

    def _publish(self, peer):
        peer.last = self.report.last


def services(outcomes, replica, speeds):
    """Return the class of a peer's services, whose exchanges end with these outcomes."""

    class FakeServices:
        def __init__(self, peer, report, *, meanwhile, work):
            self._peer, self._report, self._meanwhile = peer, report, meanwhile
            self.trouble, self.follow = for_ever, lambda: None
            self.gather = self.leave = nothing
            self.checkpoints = SimpleNamespace(begin_if_due=nothing, written=nothing)

        async def exchange(self, *, steps, weight, loss):
            speeds.append(self._report.speed)
            if self._peer.manifest.overlap:
                await self._meanwhile()
            outcome = next(outcomes)
            if outcome is not None:
                replica.contents = (0, replica.contents[1] + 1)
            return Outcome(commit=outcome if outcome != "adopted" else None), 0.0

    return FakeServices


@pytest.mark.parametrize("overlap", [0, 2])
def test_speed_counts_weight_without_round_once(tmp_path, monkeypatch, overlap):
    """The loop passes the weight again with later training; the speed is that of the later steps."""
    clock, speeds = SimpleNamespace(now=0.0), []
    replica = SimpleNamespace(contents=(0, 0), round=0)
    peer = SimpleNamespace(
        replica=replica,
        environment=SimpleNamespace(now=lambda: clock.now),
        manifest=SimpleNamespace(overlap=overlap),
        workload=SimpleNamespace(steps=lambda speed: 4),
        traffic=lambda: (0, 0),
        rounds=SimpleNamespace(settled=nothing, follows=False),
        take_up=nothing,
    )
    outcomes = iter([None, None, COMMIT, None, "adopted", None])
    place = "thinwire.node.api.background_peer."
    monkeypatch.setattr(place + "ReportSinks", FakeSinks)
    monkeypatch.setattr(place + "PeerServices", services(outcomes, replica, speeds))
    monkeypatch.setattr(place + "operations_of", lambda peer: None)
    monkeypatch.setattr(place + "compile_kernels", nothing)
    entry = SimpleNamespace(
        config=SimpleNamespace(directories=SimpleNamespace(lock=tmp_path / "lock", log=tmp_path / "log")),
        identity=SimpleNamespace(peer_id=bytes(32)),
        run_id=bytes(32),
        peer=lambda emit: peer,
        begin=nothing,
    )
    background_peer = BackgroundPeer(entry)
    try:
        background_peer.open()
        background_peer.take_up(
            SimpleNamespace(total=1),
            None,
            read=None,
            write=None,
            synchronize=lambda: None,
            private=lambda: None,
            devices=(),
        )
        for weight in (40, 80, 120, 40, 80, 40):  # 40 samples in every 4 seconds
            clock.now += 4.0
            background_peer.exchange(steps=4, weight=weight)
        background_peer.ask(lambda: asyncio.get_running_loop().call_soon(lambda: 1 / 0))
    finally:
        background_peer.close()
    assert speeds == [10.0] * 6
    kind, fields = peer.last
    assert kind == "alarm" and "ZeroDivisionError" in fields["detail"]
