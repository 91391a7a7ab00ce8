"""Fault injection on a testbed that only records requests, and the switch between TUN devices."""

import asyncio
import os
import random
import signal
import socket

import pytest
from thinwire.sims.network.toxics import Toxics
from thinwire.sims.processes.fault_injector import NEVER, ProcessFaultInjector
from thinwire.sims.processes.testbed import Unplayable
from thinwire.sims.processes.tun_switch import TunSwitch
from thinwire.sims.scenario.faults import KINDS, Fault

PEERS = 4


class Ground:
    def __init__(self):
        self.held, self.said, self.loss, self.spoilt = {}, [], 0.0, {}

    def hold(self, i, j):
        self.held[i, j] = self.held.get((i, j), 0) + 1

    def release(self, i, j):
        self.held[i, j] -= 1
        assert self.held[i, j] >= 0

    def lose(self, probability):
        self.loss = probability

    def disturb(self, kind, i, j, seconds):
        self.said.append((kind, i, j, seconds))

    def spoil(self, kind, i, j):
        self.spoilt[i, j] = kind

    @property
    def cut(self):
        return {pair for pair, count in self.held.items() if count}


class Processes:
    def __init__(self):
        self.done = []

    def kill(self, index, *, again):
        self.done.append(("kill", index, again))
        return True

    def send(self, index, number):
        self.done.append((number, index))
        return True

    def revive(self, index):
        self.done.append(("revive", index))

    def rot(self, index, rng):
        assert isinstance(rng, random.Random)
        self.done.append(("rot", index))

    def __len__(self):
        return PEERS


@pytest.fixture
def stage():
    ground, processes, later = Ground(), Processes(), []
    faults = ProcessFaultInjector(ground, processes, 7, lambda seconds, action: later.append((seconds, action)))
    return ground, processes, later, faults


@pytest.mark.parametrize("kind", KINDS)
def test_injector_plays_and_undoes_or_refuses_every_fault_kind(stage, kind):
    ground, processes, later, faults = stage
    fault = Fault(1.0, kind, (2, 0), 5.0, 0.1)
    if kind in NEVER:
        with pytest.raises(Unplayable):
            faults.begin(fault)
        return
    faults.begin(fault)
    for _, action in sorted(later, key=lambda one: one[0]):
        action()
    assert ground.held or ground.said or ground.loss or ground.spoilt or processes.done
    faults.end(fault)
    assert not ground.cut and not ground.loss and not any(ground.spoilt.values())
    # Killed peers return, and stopped peers continue.
    if processes.done and kind not in ("kill", "majority-lost"):
        assert processes.done[-1] in (("revive", 2), ("revive", 0), (signal.SIGCONT, 2))


def test_partitions_cut_the_right_pairs(stage):
    ground, _, _, faults = stage
    faults.begin(Fault(0.0, "partition", (1, 3), 5.0))
    assert ground.cut == {(1, 0), (0, 1), (1, 2), (2, 1), (3, 0), (0, 3), (3, 2), (2, 3)}
    # Two cuts of one link: it opens when both are over.
    faults.begin(Fault(0.0, "one-way", (1, 0), 5.0))
    faults.end(Fault(0.0, "partition", (1, 3), 5.0))
    assert ground.cut == {(1, 0)}
    faults.end(Fault(0.0, "one-way", (1, 0), 5.0))
    assert not ground.cut
    faults.begin(Fault(0.0, "clog", (2, 3), 5.0))
    assert ground.cut == {(2, 3), (3, 2)}


def test_swizzle_clogs_peers_in_turn_and_ends_on_time(stage):
    ground, _, later, faults = stage
    faults.begin(Fault(0.0, "swizzle-clog", (0, 1, 2), 10.0))
    assert len(later) == 6 and all(0 <= seconds <= 10 for seconds, _ in later)
    assert sum(seconds <= 5 for seconds, _ in later) == 3
    for _, action in sorted(later, key=lambda one: one[0])[:3]:
        action()
    assert {(0, 1), (1, 2), (2, 3)} <= ground.cut


def test_outage_kills_each_process_and_revives_it_later(stage):
    _, processes, later, faults = stage
    faults.begin(Fault(0.0, "outage", (0, 1, 2, 3), 8.0))
    assert not processes.done
    for _, action in sorted(later, key=lambda one: one[0]):
        action()
    killed, revived = processes.done[:4], processes.done[4:]
    assert sorted(killed) == [("kill", index, True) for index in range(4)]
    assert sorted(revived) == [("revive", index) for index in range(4)]


def test_lost_majority_is_killed_and_does_not_return(stage):
    _, processes, _, faults = stage
    faults.begin(Fault(0.0, "majority-lost", (1, 2, 3)))
    assert processes.done == [("kill", index, False) for index in (1, 2, 3)]


def test_flap_holds_and_releases_links_of_first_peer(stage):
    ground, _, later, faults = stage
    faults.begin(Fault(0.0, "flap", (0, 1, 2), 20.0))
    for turn, (_, action) in enumerate(sorted(later, key=lambda one: one[0])):
        action()
        assert ground.cut == (set() if turn % 2 else {(0, 1), (1, 0), (0, 2), (2, 0)})
    assert not ground.cut


# --- the switch


def packet(target, text):
    return b"\x45" + bytes(15) + bytes(int(part) for part in target.split(".")) + text


def switched(scene, ways=None):
    """Run scene(ends, switch, ways): bytes written to ends[i] come from peer i; peer i receives bytes read there."""

    async def main():
        addresses = ["10.77.0.1", "10.77.0.2", "10.77.0.3"]
        every = {(i, j): Toxics() for i in range(3) for j in range(3) if i != j} | (ways or {})
        pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM) for _ in addresses]
        for ours, theirs in pairs:
            ours.setblocking(False)
            theirs.setblocking(False)
        switch = TunSwitch(every, [1e6] * 3, addresses, seed=1)
        switch.start([ours.fileno() for ours, _ in pairs])
        try:
            async with asyncio.timeout(60):
                await scene([theirs for _, theirs in pairs], switch, every)
        finally:
            switch.stop()
            for ours, theirs in pairs:
                ours.close()
                theirs.close()

    asyncio.run(main())


def test_tun_switch_delivers_packets_after_latency():
    async def scene(ends, switch, ways):
        loop = asyncio.get_running_loop()
        ways[0, 2].latency = 0.1
        began = loop.time()
        for word in (b"far", b"farther"):
            ends[0].send(packet("10.77.0.3", word))
        ends[0].send(packet("10.77.0.2", b"near"))
        ends[0].send(packet("10.77.0.9", b"nobody"))
        ends[0].send(b"\x60" + packet("10.77.0.2", b"another protocol")[1:])
        assert (await loop.sock_recv(ends[1], 100))[20:] == b"near"
        assert (await loop.sock_recv(ends[2], 100))[20:] == b"far" and loop.time() - began >= 0.1
        assert (await loop.sock_recv(ends[2], 100))[20:] == b"farther"
        ends[0].send(packet("10.77.0.2", b"last"))
        assert (await loop.sock_recv(ends[1], 100))[20:] == b"last" and switch.dropped == 0

    switched(scene)


def test_tun_switch_drops_held_lost_and_excess_packets():
    async def scene(ends, switch, ways):
        loop = asyncio.get_running_loop()
        ways[0, 1].hold()
        ends[0].send(packet("10.77.0.2", b"held"))
        ways[2, 1].loss = 1.0
        ends[2].send(packet("10.77.0.2", b"lost"))
        while switch.dropped < 2:
            await asyncio.sleep(0.001)
        ways[0, 1].release()
        ends[0].send(packet("10.77.0.2", b"free"))
        assert (await loop.sock_recv(ends[1], 100))[20:] == b"free"
        # A path of 10 kB/s queues half a second: the rest of 8 kB is dropped.
        ways[0, 1].bandwidth = 10_000.0
        for _ in range(8):
            os.write(ends[0].fileno(), packet("10.77.0.2", bytes(980)))
            await asyncio.sleep(0)
        while switch.dropped < 5:
            await asyncio.sleep(0.001)

    switched(scene)
