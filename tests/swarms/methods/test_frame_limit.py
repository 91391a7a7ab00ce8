"""Honest peers at their largest rates stay far below the limit of small frames."""

import pytest
from kit.scenarios import peer, play, swarm_of
from thinwire.collectives.transport.zeromq.limits import FrameLimit, Limits

FRAGMENTS = '[outer]\nmethod = "streaming"\nsync_every = 32\nfragments = 32\noverlap = 5\n'
EVERY_STEP = "[outer]\nsync_every = 1\n"


@pytest.mark.parametrize(
    ("manifest", "peers", "step", "seconds"),
    [(FRAGMENTS, 4, 0.02, 12.0), (EVERY_STEP, 4, 0.02, 12.0), ("[outer]\nsync_every = 4\n", 48, 0.3, 12.0)],
    ids=["many fragments", "a round after each step", "many peers"],
)
def test_honest_peers_use_a_tenth_of_the_limit(monkeypatch, manifest, peers, step, seconds):
    lowest, count = [float(Limits().frame_burst)], [0]

    def admits(self, peer, now, *, payload=0, before=FrameLimit.admits):
        admitted = before(self, peer, now, payload=payload)
        if payload < Limits().small:
            count[0] += 1
            lowest[0] = min(lowest[0], self._buckets._levels[peer][0])
        return admitted

    monkeypatch.setattr(FrameLimit, "admits", admits)
    swarm = [peer(index, step=step, region="Oregon", up=1e8, down=1e8) for index in range(peers)]
    play(swarm_of(swarm, manifest, seconds=seconds, parameters=20_000), stall=None)
    assert count[0] > 1000 and lowest[0] > 0.9 * Limits().frame_burst, (count, lowest)
