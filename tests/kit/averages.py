"""Peers that average outside of training rounds, in virtual time."""

import asyncio
import random

import blake3
import numpy as np
import pytest
from thinwire.collectives.allreduce.element_arithmetic import EXACT, elements, numpy_type
from thinwire.collectives.allreduce.service import AllreduceService, LocalPart, PeerContext
from thinwire.collectives.allreduce.signature import plan_of
from thinwire.collectives.topology.shards import grid
from thinwire.compression.registry import dense
from thinwire.node.membership.handler import Topic
from thinwire.node.membership.presence import Presence
from thinwire.sims.engine import virtual_loop
from thinwire.sims.network.network import SimNet
from thinwire.swarm.identity.identity import Identity
from thinwire.swarm.identity.peer_record import PeerRecord
from thinwire.swarm.keyring import Keyring
from thinwire.swarm.membership.presets import LOCAL
from thinwire.swarm.membership.swim import Roster
from thinwire.swarm.messages.registry import Welcome

RUN = bytes(range(32))


class Member:
    """Peer with links and a roster, without training."""

    def __init__(self, net, index, life=0, address=""):
        self.identity = Identity.generate(bytes([index]) * 32 if index < 256 else index.to_bytes(32, "big"))
        self.id, self.net, loop = self.identity.peer_id, net, virtual_loop.current()
        self.link = (0, 0)
        address = address or f"10.0.{index // 256}.{index % 256}:7000"
        self.transport = net.transport(self.identity, RUN, self._admit, address)
        sequence = 1 + int(loop.time() * 1000)
        self.record = PeerRecord.create(
            self.identity, run_id=RUN, addresses=(address,), sequence=sequence, issued=net.wall()
        )
        self.transport.learn(self.record)
        rng = random.Random(100 * index + life)
        self.roster = Roster(
            self.identity, self.record, run_id=RUN, preset=LOCAL, rng=rng, now=loop.time(), wall=net.wall
        )
        self.presence = Presence(self.transport, self.roster, now=loop.time, emit=lambda kind, fields: None)
        gone = set()
        place = PeerContext(
            Keyring(self.identity, RUN, self.roster.peers.key_of),
            self.presence.send_queue,
            loop.time,
            self.presence.live,
            gone,
            lambda: self.roster.peers.view.peers,
            sequence,
            lambda: self.link,
        )
        self.shares = {}
        self.operations = AllreduceService(place, gone=gone, patience=1.0)
        self.presence.attach(Topic.OPERATIONS, self.operations)
        self.task = loop.create_task(self.presence.run())

    def _admit(self, hello, record, source):
        self.roster.learn(record, virtual_loop.current().time())
        return Welcome(self.record.wire, b"", bytes(32), bytes(64), (), "", "", bytes(32))

    def begin(self, array, *, name="", op="mean", codec=EXACT, element="", least=1, weight=1, grace=5.0):
        element = element or str(array.dtype)
        parts = elements(element, op, codec, dense)
        cut = grid(array.size, parts)
        flat = array.reshape(-1)
        payloads = [parts.encode(flat[slice(*cut.span(i))]) for i in range(len(cut))]
        hashes = b"".join(blake3.blake3(payload).digest() for payload in payloads)
        share = LocalPart(payloads, hashes, weight, cut, parts)
        plan = plan_of(op, element, codec, least, [("", array.shape)])
        operation = self.operations.begin(name, plan, share, grace=grace)
        self.shares[operation] = share
        return operation, array

    def decode(self, operation, ended, out):
        """Decode the results of an operation that this member has begun, into a flat array."""
        share = self.shares.pop(operation)
        for i, payload in enumerate(ended.outcome.results):
            share.elements.decode(payload, out[slice(*share.grid.span(i))])

    async def average(self, array, **options):
        operation, array = self.begin(array, **options)
        ended = await operation.wait()
        if ended.failure:
            return ended, None
        out = np.empty(array.size, numpy_type(options.get("element") or str(array.dtype)))
        self.decode(operation, ended, out)
        return ended, out.reshape(array.shape)

    def kill(self):
        self.net.kill(self.id)
        self.task.cancel()


class Group(list):
    def __init__(self, count, seed=3, **options):
        self.net = SimNet(seed, latency=0.01, bandwidth=50e6, **options)
        super().__init__(Member(self.net, index) for index in range(count))
        for member in self:
            self.acquaint(member)

    def acquaint(self, member):
        for other in self:
            if other is not member:
                member.roster.learn(other.record, virtual_loop.current().time())
                member.transport.learn(other.record)


def play(scene, seed=1, limit=3600.0):
    """Run a scene. `limit`: virtual seconds after which it has failed."""
    return virtual_loop.run(scene(), seed=seed, limit=limit)


def together(members, arrays, **options):
    return asyncio.gather(*(member.average(array, **options) for member, array in zip(members, arrays, strict=True)))


def plan_(length):
    return plan_of("mean", "float64", EXACT, 1, [("", (length,))])


async def fail(member, times, least):
    """Make this number of calls that fail: each uses a number that no other peer has."""
    for _ in range(times):
        operation, _ = member.begin(np.ones(2), op="sum", least=least, grace=0.2)
        await asyncio.sleep(0.1 if least == 1 else 0.3)  # a single caller would be enough
        operation.withdraw()
        assert operation.ended.result().failure


def is_sum_of_those_named(members, ended, out):
    """Return True if the value is the sum of the named contributors, or lacks only missing ones."""
    inside = set(ended.outcome.contributors)
    assert not ended.failure and not inside & ended.missing.keys()
    assert out[0] == sum(2.0**i for i, member in enumerate(members) if member.id in inside)
    return inside


LATER = pytest.mark.trial


def seeds(*mended):
    """Return the seeds of a scene, where the seed draws peers, times, counts and sizes; those mended are always played."""
    marks = {1: LATER, **dict.fromkeys((0, *mended), ())}
    return [pytest.param(seed, marks=marks.get(seed, pytest.mark.soak)) for seed in range(200)]


SEEDS = seeds()


async def rejoin(group, tries=60):
    """Let each peer call until a result has all; a peer that was away first gets the results that it missed."""

    async def loop(member, value):
        for _ in range(tries):
            ended, out = await member.average(np.full(2, value), op="sum", grace=5.0)
            if len(is_sum_of_those_named(group, ended, out)) == len(group):
                return
        raise AssertionError(f"never with all {len(group)} in {tries} averages")

    await asyncio.gather(*(loop(member, 2.0**i) for i, member in enumerate(group)))
