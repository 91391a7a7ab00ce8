"""Scripted faults that every kind of `kit.swarm.Swarm` has to survive, with their checks."""

from __future__ import annotations

import numpy as np
from thinwire.compression.sparse.topk import HEADER
from thinwire.sims.engine import virtual_loop
from thinwire.swarm.frame import Frame
from thinwire.swarm.messages.registry import Ask, Ballot, Chunk, Prepare, Result, Vote


async def lose(s, dying):
    """Let some peers die in round 3, at their phases in `dying`; return the others, which finish."""
    for index, phase in dying.items():
        s.fail_at(index, 3, phase)
    s.start()
    rest = [index for index in s.nodes if index not in dying]
    await s.finish(rest)
    s.check(rest)
    return rest


def soon(s, indices, rounds=(4,)):
    """Check that these rounds took less than three times as long as a normal one on these nodes."""
    times = s.nodes[indices[0]].committed_at
    normal = times[2] - times[1]
    for index in indices:
        times = s.nodes[index].committed_at
        assert max(times[number] - times[number - 1] for number in rounds) < 3 * normal


async def join(s, phase):
    """Let a peer join the first three at this phase of round 3; all finish."""
    s.fail_at(1, 3, phase, lambda node: s.join(7))
    s.start()
    await s.finish([0, 1, 2])
    await s.finish([7])
    s.check()
    return s.nodes[7]


async def come_back(s, phase, life=1):
    """Of four the third is killed at this phase of round 3, and is back 1.5 s later."""

    def crash(node):
        node.kill()
        virtual_loop.current().call_later(1.5, s.join, node.index, life)

    s.fail_at(2, 3, phase, crash)
    s.start()
    await s.finish([0, 1, 3])
    await s.finish([2])
    s.check()


async def part(s, groups, seconds, before=lambda: None, after=lambda: None):
    """From round 4 on groups of nodes do not reach each other for so long; `before` and `after` look on."""
    ids = [[s.nodes[index].id for index in group] for group in groups]

    def heal():
        after()
        s.net.heal()

    def split(node):
        before()
        s.net.partition(ids)
        virtual_loop.current().call_later(seconds, heal)

    s.fail_at(0, 4, "announce", split)
    s.start()
    await s.finish(limit=400)
    s.check()


async def differ(s, index, at):
    """Change a node's outer parameters at one index after round 2, and check the states that it reports."""

    def corrupt(node):
        node.replica.theta[at] += 1.0

    s.fail_at(index, 2, "applied", corrupt)
    s.start()
    await s.finish()
    return [fields for _, name, fields in s.nodes[index].log if name == "synced"]


async def spoil(s):
    """Make the training of the second of four nodes not finite in round 3: it reports that, and the others continue."""

    def poison(round, delta):
        if round == 3:
            delta[777] = float("inf")
        return delta

    s.nodes[1].spoil = poison
    s.start()
    await s.finish()
    s.check()
    assert any(name == "unsent" for _, name, _ in s.nodes[1].log)
    assert s.nodes[0].contributors[3] == sorted(s.nodes[i].id for i in (0, 2, 3))


async def replay(s, *, stored=False):
    """Let one of three nodes send another one frames of past and distant rounds: they are counted and dropped.

    `stored`: the victim still has the results of the past round, and takes its frames for questions about it.
    """
    liar, victim = s.nodes[2], s.nodes[0]
    ballot = Ballot(1, liar.id)
    old = [Chunk(1, 0, 1, 0), Result(1, 0, ballot, 0), Vote(1, 0, ballot, bytes(32), bytes(32)), Ask(1, 0)]
    new = [Chunk(99, 0, 1, 0), Result(99, 0, ballot, 0), Prepare(99, 0, ballot)]

    def send_all(node):
        async def send():
            for message in (*old, *new):
                await liar.transport.send(victim.id, Frame(message, b"x" if type(message).payload else b""))

        virtual_loop.current().create_task(send())

    s.fail_at(2, 4, "announce", send_all)
    s.start()
    await s.finish()
    s.check()
    assert (
        victim.session.dropped_frames == len(new) + (0 if stored else len(old))
        and s.nodes[1].session.dropped_frames == 0
    )
    assert not any(node.missing[r] for node in s.nodes.values() for r in range(2, 7))
    assert not any(name == "synced" for _, name, _ in victim.log)


def _nan(chunks):
    spoiled = np.frombuffer(chunks[2], np.float32).copy()
    spoiled[5] = np.nan
    return [*chunks[:2], spoiled.view(np.uint8).data, *chunks[3:]]


def _short(chunks):
    return [*chunks[:2], chunks[2][:-4], *chunks[3:]]


def _huge(chunks):
    return [(np.frombuffer(chunk, np.float32) * np.float32(1e8)).view(np.uint8).data for chunk in chunks]


BAD = [(_nan, "not finite"), (_short, "length"), (_huge, "norm")]
"""Functions that spoil chunks of codec fp32, with the reason for the sender's exclusion."""


async def send_bad(s, liar, change, reason):
    """Let a node contribute invalid data to round 3: it is excluded from that round, and included in the next."""
    s.nodes[liar].forge(3, change)
    s.start()
    await s.finish()
    s.check()
    for node in s.nodes.values():
        assert node.missing[3] == {s.nodes[liar].id: reason}
        assert node.missing[4] == {}


def levels(payload, value):
    """Change the levels of the first section of a sparse payload to this value."""
    changed = bytearray(payload)
    mode, rice, _, _, unary = HEADER.unpack_from(changed)
    bits = int(np.float16(value).view(np.uint16))
    HEADER.pack_into(changed, 0, mode, rice, bits, bits, unary)
    return memoryview(bytes(changed))
