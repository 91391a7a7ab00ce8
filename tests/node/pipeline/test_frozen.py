"""How the frozen rows of an embedding come to the hosts of a group."""

import asyncio
from types import SimpleNamespace

import numpy as np
import torch
from thinwire.node.pipeline.frozen import Frozen
from thinwire.node.pipeline.group import Doorway, host_learner, origin_learner
from thinwire.node.pipeline.muster import SETTLED
from thinwire.node.pipeline.parcel import pieces
from thinwire.node.waiting import at_once
from thinwire.swarm.frame import Frame
from thinwire.swarm.manifest import parse
from thinwire.swarm.protocol import FrozenRows, Post

MANIFEST = parse(
    "[model]\nlayers = 3\nwidth = 8\nheads = 2\ncontext = 8\n[outer]\nmethod = 'streaming'\n"
    "[pipeline]\nstages = 3\ncodec = 'subspace(k=2)'\n"
)
VOCAB, ORIGIN, HOST, STRANGER = 11, b"o" * 32, b"h" * 32, b"s" * 32


class Outbox:
    """Keeps what is sent."""

    def __init__(self):
        self.said, self.sent = [], []

    def control(self, peer, message):
        self.said.append((peer, message))

    def bulk(self, peer, frame, later=False):
        self.sent.append((peer, frame))

    @property
    def posts(self):
        return [message.frozen for _, message in self.said if isinstance(message, Post)]


def door(me, now=lambda: 0.0):
    return Doorway(me, Outbox(), now, at_once, lambda name, fields: None)


def rows(seed):
    return Frozen.encode(torch.randn(VOCAB, 8, generator=torch.Generator().manual_seed(seed)))


def frames(frozen, tag=None):
    return [
        Frame(FrozenRows(tag or frozen.tag, number), bytes(one)) for number, one in enumerate(pieces(frozen.payload))
    ]


def test_a_host_takes_up_what_its_origin_sends_and_says_so():
    here, first, second = door(HOST), rows(1), rows(2)
    learner = host_learner(MANIFEST, VOCAB, 1, ORIGIN, here)
    boundary, tokens = learner.host._boundary, torch.zeros(1, 1, dtype=torch.long)

    async def settled():
        for _ in range(20):
            await asyncio.sleep(0)

    async def play():
        stop = asyncio.Event()
        working = asyncio.ensure_future(learner.steps(1, stop))
        await settled()
        for frozen, sender in ((first, ORIGIN), (second, STRANGER)):
            for frame in frames(frozen):
                learner.routed(sender, frame)
            await settled()
        assert here.outbox.posts == [0, first.tag]  # strangers have nothing to say
        assert torch.equal(boundary.unpack(bytes(6), 1, 1, backward=False)[0][0, 0], first.rows(VOCAB, 8)[0])
        bad = Frozen(bytes([255]) * len(second.payload), 7)
        for frame in frames(bad):
            learner.routed(ORIGIN, frame)
        await settled()
        assert here.outbox.posts[2:] == [first.tag]  # no such rows: what it had
        for frame in frames(second):
            learner.routed(ORIGIN, frame)
            learner.routed(ORIGIN, frame)
        await settled()
        assert here.outbox.posts[3:] == [second.tag]
        stop.set()
        await working

    asyncio.run(play())
    assert torch.equal(
        boundary.unpack(boundary.pack(torch.zeros(1, 1, 8), tokens, backward=False), 1, 1, backward=False)[1], tokens
    )


def test_an_origin_hands_them_out_once_over_each_link_and_counts_nobody_ready_without():
    clock = SimpleNamespace(now=0.0)
    here = door(ORIGIN, lambda: clock.now)
    batches = SimpleNamespace(cursor=None)
    learner = origin_learner(MANIFEST, VOCAB, batches, here)
    muster, outbox = learner.muster, here.outbox
    tag = muster.frozen().tag
    assert tag

    def post(frozen, stage=1):
        muster.routed(HOST, Frame(Post(0, 6, stage, frozen)))

    post(0)
    post(0)
    assert [(peer, frame.message) for peer, frame in outbox.sent] == [(HOST, FrozenRows(tag, 0))]
    assert Frozen.of(b"".join(bytes(frame.payload) for _, frame in outbox.sent)) == muster.frozen()
    assert muster._ready() == {1: [], 2: []}
    muster.lost(HOST, gone=False)
    post(0)
    assert len(outbox.sent) == 2
    post(tag)
    assert muster._ready() == {1: [HOST], 2: []} and len(outbox.sent) == 2
    clock.now = SETTLED
    post(0, stage=2)  # it has moved, and begins there with nothing
    assert len(outbox.sent) == 3
    post(tag, stage=2)
    assert muster._ready() == {1: [], 2: [HOST]} and len(outbox.sent) == 3
    theta = np.random.default_rng(1).normal(0, 0.1, learner.layout.total).astype(np.float32)
    piece = next(one for one in learner.layout.pieces if one.name == "embedding.weight")
    learner.write(theta[piece.start : piece.stop], piece.start)
    assert muster.frozen().tag != tag and muster._ready() == {1: [], 2: []}  # after the embedding's outer step
    post(tag, stage=2)
    assert [frame.message.tag for _, frame in outbox.sent[3:]] == [muster.frozen().tag]
