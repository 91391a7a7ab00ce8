"""Frames that a pipeline host accepts and refuses, without a network."""

import asyncio

import pytest
import torch
from thinwire.collectives.transport.payload_assembly import PayloadAssembly, pieces
from thinwire.compression.boundary_codec import Boundary
from thinwire.node.pipeline.model.section import ModelSection
from thinwire.node.pipeline.model.stage import Stage
from thinwire.node.pipeline.model.stage_optimizer import StageOptimizer
from thinwire.node.pipeline.step.early_activations import EarlyActivations
from thinwire.node.pipeline.step.host import Host
from thinwire.node.pipeline.step.micro_batch_attempt import NO_NEXT, NO_PREVIOUS
from thinwire.node.pipeline.step.step_context import StepContext
from thinwire.node.runtime.asyncio_extra import at_once
from thinwire.node.training.inner_optimizer import InnerConfig
from thinwire.node.training.models.transformer import ModelConfig, Transformer
from thinwire.swarm.frame import Frame
from thinwire.swarm.messages.registry import CHUNK_BYTES, Activation, Apply, Close, GradientSummary, Hop, Passed, Route

CONFIG = ModelConfig(vocab=23, layers=3, width=16, heads=2, context=8)
ME, ORIGIN, BEFORE, AFTER, STRANGER = (bytes([i]) * 32 for i in range(5))
PATH = (Hop(1, BEFORE, True), Hop(2, ME, True), Hop(3, AFTER, True))


class Scene:
    """Host of stage 2; `control` and `bulk` have its sent frames."""

    def __init__(self, **options):
        self.control_sent, self.bulk_sent = [], []
        self.section = ModelSection(Transformer(CONFIG, 1), range(1, 2), ends=False)
        self.boundary = Boundary("fp32", 16, 23, 0)
        self.layers = Stage(self.section)
        inner = InnerConfig(optimizer="sgd", lr=1.0, betas=(0.0, 0.0), weight_decay=0.0, warmup=0)
        self.update = StageOptimizer(self.section.module, inner)
        context = StepContext(ME, self, lambda: 0.0, at_once, lambda name, fields: None)
        self.host = Host(context, ORIGIN, 2, self.layers, self.update, self.boundary, length=8, **options)
        self.task = asyncio.get_running_loop().create_task(self.host.run())

    def control(self, to, message):
        self.control_sent.append((to, message))

    def bulk(self, to, frame, *, requested=False):
        self.bulk_sent.append((to, frame))

    async def tell(self, peer, message, payload=b""):
        self.host.on_frame(peer, Frame(message, payload))
        for _ in range(20):
            await asyncio.sleep(0)
        assert not self.task.done(), self.task.exception()

    async def route(self, micro=0, attempt=0, step=0, batch=2, length=5, path=PATH, sender=ORIGIN):
        await self.tell(sender, Route(step, micro, attempt, batch, length, path))

    async def activation(self, sender=BEFORE, micro=0, attempt=0, step=0, backward=False, piece=0, payload=None):
        x = torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(micro))
        payload = self.boundary.pack(x, backward=backward) if payload is None else payload
        await self.tell(sender, Activation(step, micro, attempt, backward, piece), payload)

    @property
    def reasons(self):
        return [message.reason for _, message in self.control_sent if isinstance(message, Passed)]

    @property
    def gradient(self):
        return [p.grad for p in self.section.module.parameters() if p.grad is not None]


def play(work, **options):
    async def main():
        scene = Scene(**options)
        try:
            await work(scene)
        finally:
            scene.task.cancel()

    asyncio.run(main())


def test_host_forwards_activation_and_returns_gradient():
    async def work(scene):
        await scene.route()
        await scene.activation()
        assert [(to, frame.message) for to, frame in scene.bulk_sent] == [(AFTER, Activation(0, 0, 0, False, 0))]
        await scene.activation(AFTER, backward=True)
        assert scene.bulk_sent[1][0] == BEFORE and scene.bulk_sent[1][1].message == Activation(0, 0, 0, True, 0)
        assert [(to, m.backward, m.reason) for to, m in scene.control_sent] == [(ORIGIN, False, ""), (ORIGIN, True, "")]
        before = [p.detach().clone() for p in scene.section.module.parameters()]
        expected = [p - g / 4 * 0.5 for p, g in zip(before, scene.gradient, strict=True)]
        squares = sum(float((g.double() ** 2).sum()) for g in scene.gradient)
        await scene.tell(ORIGIN, Close(0, (0,)))
        tally = scene.control_sent[-1][1]
        assert (tally.step, tally.tokens, tally.reason) == (0, 10, "") and tally.squares == pytest.approx(squares)
        await scene.tell(ORIGIN, Apply(0, 4.0, 0.5))
        for parameter, value in zip(scene.section.module.parameters(), expected, strict=True):
            torch.testing.assert_close(parameter, value)
        assert scene.host.step == 1 and scene.update.take_tokens() == 10 and scene.update.take_tokens() == 0
        await scene.route(step=0, attempt=1)
        assert scene.reasons[-1] == "step"

    play(work)


def test_early_activation_is_kept_only_from_previous_hop():
    async def work(scene):
        await scene.activation(STRANGER)
        await scene.activation(AFTER)
        await scene.route()
        assert not scene.bulk_sent
        await scene.activation(micro=1, attempt=2)
        await scene.route(micro=1, attempt=2)
        assert [frame.message.micro for _, frame in scene.bulk_sent] == [1]
        await scene.activation(STRANGER)
        await scene.activation(AFTER)
        await scene.activation(ORIGIN)
        assert len(scene.bulk_sent) == 1 and scene.reasons == [""]
        await scene.activation(BEFORE)
        assert len(scene.bulk_sent) == 2

    play(work)


@pytest.mark.parametrize("message", [Close(0, ()), Apply(0, 1.0, 1.0), Passed(0, 0, 0, False, 0.0, "over")])
def test_host_obeys_only_its_origin(message):
    async def work(scene):
        await scene.route(sender=STRANGER)
        await scene.activation()
        assert not scene.bulk_sent and not scene.control_sent
        await scene.route()
        assert len(scene.bulk_sent) == 1
        await scene.tell(STRANGER, message)
        await scene.activation(AFTER, backward=True)
        assert len(scene.bulk_sent) == 2 and scene.layers.counted == {0}

    play(work)


@pytest.mark.parametrize(
    ("route", "reason"),
    [
        ({"step": 1}, "step"),
        ({"path": ()}, "path"),
        ({"path": (Hop(1, BEFORE, True),)}, "path"),
        ({"path": (Hop(1, ME, True),)}, "path"),
        ({"path": (Hop(2, ME, True), Hop(3, ME, True))}, "path"),
        ({"path": (Hop(2, ME, True), Hop(2, AFTER, True))}, "path"),
        ({"batch": 0}, "shape"),
        ({"batch": 65535}, "shape"),
        ({"length": 0}, "shape"),
        ({"length": 9}, "shape"),
    ],
)
def test_host_refuses_invalid_route(route, reason):
    async def work(scene):
        await scene.route(**route)
        assert scene.reasons == [reason]
        await scene.activation()
        assert not scene.bulk_sent

    play(work, batch=2)


@pytest.mark.parametrize("divisor", [0.0, -1.0, 1e-40])
def test_host_drops_gradient_for_zero_divisor(divisor):
    async def work(scene):
        await scene.route()
        await scene.activation()
        await scene.activation(AFTER, backward=True)
        before = [p.detach().clone() for p in scene.section.module.parameters()]
        await scene.tell(ORIGIN, Close(0, (0,)))
        await scene.tell(ORIGIN, Apply(0, divisor, 1.0))
        assert all(torch.equal(a, b) for a, b in zip(before, scene.section.module.parameters(), strict=True))
        assert scene.host.step == 1 and not scene.update.take_tokens()

    play(work)


def test_orders_of_one_origin_do_not_block_another():
    async def work(scene):
        scene.task.cancel()  # between two turns orders wait
        await asyncio.sleep(0)
        for message in (Close(2**32 - 1, ()), Apply(2**32 - 1, 0.0, 1.0)):
            scene.host.on_frame(ORIGIN, Frame(message))
        assert scene.host.ordered == 2**32 - 1
        scene.host.follow(STRANGER)
        assert scene.host.ordered == 0
        scene.task = asyncio.get_running_loop().create_task(scene.host.run())
        await scene.tell(STRANGER, Close(0, ()))
        await scene.tell(STRANGER, Apply(0, 0.0, 1.0))
        assert scene.host.step == 1

    play(work)


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize(
    "bad", [{"payload": b""}, {"payload": bytes(641)}, {"piece": 1}, {"payload": b"\xff" * 640}, {"twice": True}]
)
def test_host_refuses_invalid_payload(backward, bad):
    async def work(scene):
        await scene.route()
        if backward:
            await scene.activation()
        if bad.get("twice"):
            # The second comes while the first is still waiting to be computed.
            frame = Frame(
                Activation(0, 0, 0, backward, 0), scene.boundary.pack(torch.ones(2, 5, 16), backward=backward)
            )
            for _ in range(2):
                scene.host.on_frame(AFTER if backward else BEFORE, frame)
            await scene.tell(STRANGER, Apply(0, 1.0, 1.0))
        else:
            await scene.activation(AFTER if backward else BEFORE, backward=backward, **bad)
        assert scene.reasons[-1] == "payload" and len(scene.bulk_sent) == backward
        assert not scene.gradient and scene.layers.holds == 0 and not scene.layers.counted

    play(work)


def test_host_refuses_gradient_before_activation():
    async def work(scene):
        await scene.route()
        await scene.activation(AFTER, backward=True)
        assert scene.reasons == ["order"] and not scene.gradient

    play(work)


def test_later_attempt_replaces_earlier_and_counts_once():
    async def work(scene):
        await scene.route(attempt=1)
        await scene.activation(attempt=1)
        await scene.activation(AFTER, attempt=1, backward=True)
        once = [g.clone() for g in scene.gradient]
        await scene.route(attempt=1)
        await scene.route(attempt=0)
        await scene.activation(attempt=1)
        assert len(scene.bulk_sent) == 2, "what is over is over"
        await scene.route(attempt=2)
        await scene.activation(attempt=2)
        await scene.activation(AFTER, attempt=2, backward=True)
        assert len(scene.bulk_sent) == 4 and scene.bulk_sent[3][1].payload == scene.bulk_sent[1][1].payload
        assert all(torch.equal(a, b) for a, b in zip(once, scene.gradient, strict=True))
        assert scene.layers.counted == {0}

    play(work)


def test_host_drops_gradient_of_other_micro_batches():
    async def work(scene):
        for micro in (0, 1):
            await scene.route(micro)
            await scene.activation(micro=micro)
            await scene.activation(AFTER, micro=micro, backward=True)
        before = [p.detach().clone() for p in scene.section.module.parameters()]
        await scene.tell(ORIGIN, Close(0, (0,)))
        assert scene.control_sent[-1][1] == GradientSummary(0, 0.0, 0, "other micro-batches") and not scene.gradient
        await scene.tell(ORIGIN, Apply(0, 1.0, 1.0))
        assert all(torch.equal(a, b) for a, b in zip(before, scene.section.module.parameters(), strict=True))
        assert scene.host.step == 1 and scene.update.tokens == 0

    play(work)


def test_host_that_missed_steps_continues_at_swarm_step():
    async def work(scene):
        await scene.route()
        await scene.activation()
        await scene.activation(AFTER, backward=True)
        await scene.tell(ORIGIN, Close(6, ()))
        await scene.tell(ORIGIN, Apply(6, 0.0, 1.0))
        assert scene.host.step == 7 and not scene.gradient
        await scene.route(step=7)
        await scene.activation(step=7)
        assert len(scene.bulk_sent) == 3

    play(work)


def test_host_capacity_is_bounded_and_freed_by_finished_attempts():
    async def work(scene):
        for micro in range(3):
            await scene.route(micro)
        assert scene.reasons == ["full"]
        await scene.tell(ORIGIN, Passed(0, 1, 0, False, 0.0, "over"))
        await scene.route(2, attempt=1)
        await scene.activation(micro=2, attempt=1)
        assert len(scene.bulk_sent) == 1

    play(work, room=2)


def test_host_reports_gone_neighbour():
    async def work(scene):
        await scene.route()
        await scene.route(1)
        await scene.activation()
        scene.host.on_link_down(STRANGER, gone=False)
        assert scene.reasons == [""]
        scene.host.on_link_down(AFTER, gone=True)
        assert scene.reasons == ["", NO_NEXT, NO_NEXT] and scene.layers.holds == 0
        await scene.route(attempt=1)
        scene.host.on_link_down(BEFORE, gone=False)
        assert scene.reasons[3:] == [NO_PREVIOUS]

    play(work)


def test_payload_assembly_takes_each_piece_once_with_right_length():
    payload = bytes(range(256)) * 9000
    parts = list(pieces(payload))
    assert [len(part) for part in parts] == [CHUNK_BYTES, CHUNK_BYTES, len(payload) - 2 * CHUNK_BYTES]
    assembly = PayloadAssembly(len(payload))
    assert not assembly.add(3, b"") and not assembly.add(2, parts[0]) and not assembly.add(0, parts[2])
    assert (
        assembly.add(2, parts[2])
        and not assembly.add(2, parts[2])
        and assembly.add(0, parts[0])
        and not assembly.complete
    )
    assert assembly.add(1, parts[1]) and assembly.complete and assembly.payload() == payload
    assert [len(part) for part in pieces(b"")] == [0] and PayloadAssembly(0).add(0, b"")


def test_early_activations_are_bounded_per_peer():
    early = EarlyActivations()
    kept = Frame(Activation(3, 0, 0, False, 0), bytes(10))
    early.put(BEFORE, kept)
    for number in range(40):
        early.put(STRANGER, Frame(Activation(3, 0, 0, False, number), bytes(CHUNK_BYTES)))
    found = early.take(3, 0, 0)
    assert [peer for peer, _ in found] == [BEFORE] + [STRANGER] * 32 and found[0][1] is kept
    assert found[1][1].message.piece == 8 and not early.take(3, 0, 0)
    early.put(BEFORE, kept)
    early.older(4)
    early.put(AFTER, kept)
    early.forget(AFTER)
    assert not early.take(3, 0, 0)


def test_early_activations_are_bounded_in_total():
    early, crowd = EarlyActivations(), [bytes([i]) * 32 for i in range(10, 40)]
    early.put(BEFORE, Frame(Activation(3, 0, 0, False, 0), bytes(10)))
    for number in range(20):
        for peer in crowd:
            early.put(peer, Frame(Activation(3, 0, 0, False, number), bytes(CHUNK_BYTES)))
    found = early.take(3, 0, 0)
    assert len(found) == 128 and found[0][0] == BEFORE  # the peer with most bytes pays, not one with few


def test_frames_during_fragment_averaging_wait():
    """This is between two calls of `run`, the first of which ends with the turn."""

    async def work(scene):
        loop = asyncio.get_running_loop()
        scene.task.cancel()
        scene.task = resting = loop.create_task(asyncio.Event().wait())
        turn = loop.create_task(scene.host.run(lambda: scene.host.step > 0))
        await scene.tell(ORIGIN, Close(0, ()))
        await scene.tell(ORIGIN, Apply(0, 0.0, 1.0))
        assert turn.done() and scene.host.step == 1
        await scene.route(step=1)
        await scene.activation(step=1)
        assert not scene.bulk_sent and not scene.reasons
        resting.cancel()
        scene.task = loop.create_task(scene.host.run())
        await scene.route(1, step=1)
        assert len(scene.bulk_sent) == 1 and scene.reasons == [""]

    play(work)
