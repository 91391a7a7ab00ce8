"""Honest peers at their largest rates stay far below the limit of small frames."""

import pytest
from kit.scenarios import peer, play, swarm_of
from thinwire.collectives.transport.frame_limit import FrameLimit, FrameLimits
from thinwire.sims.engine import virtual_loop
from thinwire.sims.network import inbox

from benchmarks.pipeline import pipeline
from benchmarks.pipeline.hollow_section import HollowSection

FRAGMENTS = '[outer]\nmethod = "streaming"\nsync_every = 32\nfragments = 32\noverlap = 5\n'
EVERY_STEP = "[outer]\nsync_every = 1\n"


@pytest.mark.parametrize(
    ("manifest", "peers", "step"),
    [(FRAGMENTS, 4, 0.02), (EVERY_STEP, 4, 0.02), ("[outer]\nsync_every = 4\n", 48, 0.3)],
    ids=["many fragments", "a round after each step", "many peers"],
)
def test_half_of_the_limit_is_enough_for_honest_peers(monkeypatch, manifest, peers, step):
    limits, admitted = FrameLimits(), []
    monkeypatch.setattr(
        inbox, "FRAMES", FrameLimits(burst=limits.burst // 2, rate=limits.rate / 2, round=limits.round // 2)
    )

    def admits(self, peer, now, *, payload=0, before=FrameLimit.admits):
        admitted.append(before(self, peer, now, payload=payload))
        return admitted[-1]

    monkeypatch.setattr(FrameLimit, "admits", admits)
    swarm = [peer(index, step=step, region="Oregon", up=1e8, down=1e8) for index in range(peers)]
    play(swarm_of(swarm, manifest, seconds=12.0, parameters=20_000), stall=None)
    assert len(admitted) > 10_000 and all(admitted)


@pytest.mark.parametrize("count", [2, 4])
def test_half_of_the_limit_is_enough_for_a_pipeline_of_quick_stages(monkeypatch, count):
    """Some five hundred micro-batches a second, of which each stage reports twice."""
    limits, made = FrameLimits(), []
    monkeypatch.setattr(
        inbox, "FRAMES", FrameLimits(burst=limits.burst // 2, rate=limits.rate / 2, round=limits.round // 2)
    )

    def begin(self, limits, before=FrameLimit.__init__):
        before(self, limits)
        made.append(self)

    monkeypatch.setattr(FrameLimit, "__init__", begin)
    monkeypatch.setattr(pipeline, "STAGES", count)
    stages = [HollowSection(pipeline.VOCABULARY, 64) for _ in range(count)]
    step = pipeline.step(
        stages, "rows(bits=8)", 64, 64, count, rate=125e6, latency=0.0002, unit=0.0005, window=8, steps=40
    )
    virtual_loop.run(step, seed=1, limit=1e6)
    assert made and not any(one.pauses for one in made)
