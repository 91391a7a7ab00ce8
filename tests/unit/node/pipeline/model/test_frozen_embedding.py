"""Distribution of the frozen embedding rows to the hosts of a group."""

import asyncio
from types import SimpleNamespace

import numpy as np
import torch
from thinwire.collectives.transport.payload_assembly import pieces
from thinwire.node.pipeline.groups.host_readiness import SETTLED
from thinwire.node.pipeline.groups.learner_factory import host_learner, origin_learner
from thinwire.node.pipeline.model.frozen_embedding import FrozenEmbedding
from thinwire.node.pipeline.model.staged_model import StagedModel
from thinwire.node.pipeline.step.step_context import StepContext
from thinwire.node.runtime.asyncio_extra import at_once
from thinwire.swarm.frame import Frame
from thinwire.swarm.manifest.parser import parse
from thinwire.swarm.messages.registry import FrozenRows, StageAssignment

MANIFEST = parse(
    "[model]\nlayers = 3\nwidth = 8\nheads = 2\ncontext = 8\n[outer]\nmethod = 'streaming'\n"
    "[pipeline]\nstages = 3\ncodec = 'subspace(k=2)'\n"
)
VOCAB, ORIGIN, HOST, STRANGER = 11, b"o" * 32, b"h" * 32, b"s" * 32


class Outbox:
    """Stores sent frames."""

    def __init__(self):
        self.said, self.sent = [], []

    def control(self, peer, message):
        self.said.append((peer, message))

    def bulk(self, peer, frame, requested=False):
        self.sent.append((peer, frame))

    @property
    def posts(self):
        return [message.frozen for _, message in self.said if isinstance(message, StageAssignment)]


def context_of(me, now=lambda: 0.0):
    return StepContext(me, Outbox(), now, at_once, lambda name, fields: None)


def rows(seed):
    return FrozenEmbedding.encode(torch.randn(VOCAB, 8, generator=torch.Generator().manual_seed(seed)))


def frames(frozen, tag=None):
    return [
        Frame(FrozenRows(tag or frozen.tag, number), bytes(one)) for number, one in enumerate(pieces(frozen.payload))
    ]


def test_host_stores_frozen_rows_and_acknowledges():
    here, first, second = context_of(HOST), rows(1), rows(2)
    learner = host_learner(StagedModel(MANIFEST, VOCAB), 1, ORIGIN, here)
    boundary, tokens = learner.boundary, torch.zeros(1, 1, dtype=torch.long)

    async def settled():
        for _ in range(20):
            await asyncio.sleep(0)

    async def play():
        stop = asyncio.Event()
        working = asyncio.ensure_future(learner.steps(1, stop))
        await settled()
        for frozen, sender in ((first, ORIGIN), (second, STRANGER)):
            for frame in frames(frozen):
                learner.on_frame(sender, frame)
            await settled()
        assert here.send_queue.posts == [0, first.tag]  # messages of strangers are ignored
        assert torch.equal(boundary.unpack(bytes(6), 1, 1, backward=False)[0][0, 0], first.rows(VOCAB, 8)[0])
        bad = FrozenEmbedding(bytes([255]) * len(second.payload), 7)
        for frame in frames(bad):
            learner.on_frame(ORIGIN, frame)
        await settled()
        assert here.send_queue.posts[2:] == [first.tag]  # invalid rows: the old ones stay
        for frame in frames(second):
            learner.on_frame(ORIGIN, frame)
            learner.on_frame(ORIGIN, frame)
        await settled()
        assert here.send_queue.posts[3:] == [second.tag]
        stop.set()
        await working

    asyncio.run(play())
    assert torch.equal(
        boundary.unpack(boundary.pack(torch.zeros(1, 1, 8), tokens, backward=False), 1, 1, backward=False)[1], tokens
    )


def test_origin_sends_frozen_rows_once_per_link_before_readiness():
    clock = SimpleNamespace(now=0.0)
    here = context_of(ORIGIN, lambda: clock.now)
    batches = SimpleNamespace(cursor=None)
    learner = origin_learner(StagedModel(MANIFEST, VOCAB), batches, here)
    readiness, send_queue = learner.readiness, here.send_queue
    tag = readiness.frozen().tag
    assert tag

    def ready():
        holders = readiness.origin.stage_holders
        holders.holders = {}
        readiness.refresh()
        return holders.holders

    def post(frozen, stage=1):
        readiness.on_frame(HOST, Frame(StageAssignment(0, 6, stage, frozen)))

    post(0)
    post(0)
    assert [(peer, frame.message) for peer, frame in send_queue.sent] == [(HOST, FrozenRows(tag, 0))]
    assert FrozenEmbedding.of(b"".join(bytes(frame.payload) for _, frame in send_queue.sent)) == readiness.frozen()
    assert ready() == {1: [], 2: []}
    readiness.on_link_down(HOST, gone=False)
    post(0)
    assert len(send_queue.sent) == 2
    post(tag)
    assert ready() == {1: [HOST], 2: []} and len(send_queue.sent) == 2
    clock.now = SETTLED
    post(0, stage=2)  # it has moved, and has no rows there
    assert len(send_queue.sent) == 3
    post(tag, stage=2)
    assert ready() == {1: [], 2: [HOST]} and len(send_queue.sent) == 3
    theta = np.random.default_rng(1).normal(0, 0.1, learner.layout.total).astype(np.float32)
    piece = next(one for one in learner.layout.pieces if one.name == "embedding.weight")
    learner.write(theta[piece.start : piece.stop], piece.start)
    assert readiness.frozen().tag != tag and ready() == {1: [], 2: []}  # after the embedding's outer step
    post(tag, stage=2)
    assert [frame.message.tag for _, frame in send_queue.sent[3:]] == [readiness.frozen().tag]
