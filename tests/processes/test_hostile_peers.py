"""Every collective on real sockets, with lying peers and links that stall, break and corrupt."""

from __future__ import annotations

import asyncio
import json
import math
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest
from thinwire.collectives.transport.zeromq.sockets.limits import Limits
from thinwire.node.peer.status import read_status
from thinwire.node.runtime.directories import directories
from thinwire.sims.processes.proxy_testbed import ProxyTestbed
from thinwire.sims.scenario.faults import LIES
from thinwire.sims.scenario.scenario import PeerSpec, Scenario

PLANES = {
    "butterfly": {},
    "ring": {"exchange": 'topology = "ring"'},
    "hierarchy": {"exchange": 'topology = "hierarchy"'},
    "gather": {"method": "sparseloco"},
    "sparse-butterfly": {"method": "sparseloco", "exchange": 'collective = "sparse-butterfly"'},
    "pairs": {"method": "noloco"},
}
SITES = ("home", "lab", "lab")
LIAR = str(Path(__file__).parents[1] / "kit" / "programs" / "lying_process.py")
FLOODER = str(Path(__file__).parents[2] / "benchmarks" / "peers" / "flooder.py")

FOUND_OUT = ("hash", "nan", "base", "silent")
"""Lies after which a round excludes the liar and reports it."""

CALM = pytest.mark.trial
LONG = pytest.mark.soak


def planes(often):
    """All of them, these in `make trial` already."""
    return [pytest.param(name, marks=pytest.mark.trial if name in often else pytest.mark.soak) for name in PLANES]


def go_on(daemon, after, rounds):
    """Wait until the daemon has committed this number of rounds after `after`; return the time of the last."""
    for _ in range(rounds):
        after = daemon.wait("round", after=after)["at"]
    return after


def together(plane, living, after):
    """Wait for a round of each after `after` with all of them; in pairs, with a partner."""
    everybody = {} if plane == "pairs" else {"contributors": len(living)}
    for daemon in living:
        found = daemon.wait("round", after=after, **everybody)
        while found["contributors"] < 2:
            found = daemon.wait("round", after=found["at"])


def well(living):
    """Check that no daemon was harmed."""
    for daemon in living:
        assert daemon.process.poll() is None and "Traceback" not in daemon.stderr and not daemon.alarms()
        assert all(event["loss"] is None or event["loss"] < 6.0 for event in daemon.of("round"))  # 5.5 at first


@pytest.mark.parametrize("plane", planes(()))
def test_lying_daemon_does_not_stop_rounds_and_is_left_out(machine, plane):
    """One liar after the other: rounds continue with it, and have all honest peers after its end."""
    here = machine(steps=12, grace=1.0, **PLANES[plane])
    founder = here.found("peer0", "--wait-for", 3, "--site", SITES[0])
    honest = [founder, *(here.join(f"peer{n}", founder.newest_invite(), "--site", SITES[n]) for n in (1, 2))]
    together(plane, honest, 0.0)
    for kind in LIES:
        liar = here.daemon(kind)
        liar.script = (LIAR, kind)
        here.join(kind, founder.newest_invite(), "--site", SITES[0])
        lied = liar.wait("ready")["at"]
        for daemon in honest:
            go_on(daemon, lied, 4)
        if kind in FOUND_OUT and plane != "pairs":
            absent = {who for daemon in honest for event in daemon.of("round") for who in event["missing"]}
            assert liar.id[:8] in absent, f"nobody noticed {kind}"
        assert "Traceback" not in liar.stderr
        liar.end()
        del here.daemons[kind]  # the liar's state does not matter
        together(plane, honest, founder.of("round")[-1]["at"])
        well(honest)
    if plane != "pairs":
        assert here.check() > 4


class Wires:
    """Mesh on a separate loop. Peers that listen at `place` reach each other only through it."""

    def __init__(self, peers):
        specs = tuple(PeerSpec(n, f"peer{n}", "Iowa", 0.1, 125e6, 125e6) for n in range(peers))
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._mesh = ProxyTestbed(Scenario("wires", 1, math.inf, "", specs))
        self._sites = self._wait(self._mesh.open())

    def _wait(self, work):
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(60)

    def place(self, n):
        site = self._sites[n]
        first, last = site.ports
        return "--host", site.host, "--port", site.port, "--ports", f"{first}-{last}", "--advertise", site.advertise

    def do(self, name, *arguments):
        """Run a function of Ground on its loop."""

        async def said():
            getattr(self._mesh, name)(*arguments)

        self._wait(said())

    def close(self):
        self._wait(self._mesh.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(60)
        self._loop.close()


@pytest.fixture
def wires():
    made = Wires(3)
    yield made
    made.close()


THERE, BACK, BOTH = (1, 2), (2, 1), (1, 2)
TROUBLES = {
    "corrupt": ([("spoil", "corrupt", *BOTH)], [("spoil", "", *BOTH)]),
    "duplicate": ([("spoil", "duplicate", *BOTH)], [("spoil", "", *BOTH)]),
    "reorder": ([("spoil", "reorder", *BOTH)], [("spoil", "", *BOTH)]),
    "stall": ([("hold", *THERE), ("hold", *BACK)], [("release", *THERE), ("release", *BACK)]),
    "one-way": ([("hold", *THERE)], [("release", *THERE)]),
    "reset": ([("disturb", "reset", *BOTH, 0.0)], []),
    "half-open": ([("disturb", "half-open", *BOTH, 1.0)], []),
}
"""Faults of the links between the second and the third of three, with their ends."""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="loopback has the many addresses that this takes")
@pytest.mark.parametrize("plane", planes(("sparse-butterfly",)))
def test_swarm_survives_links_that_corrupt_stall_and_break(machine, wires, plane):
    """In the middle of a round: at least one peer continues during the fault, and all do afterwards."""
    here = machine(steps=12, grace=1.0, **PLANES[plane])
    living = [here.daemon(f"peer{n}") for n in range(3)]

    def begins(n, started):
        wires.do("meet", {i: daemon.process.pid for i, daemon in enumerate(living[: n + 1])})
        return started

    founder = begins(0, here.found("peer0", "--wait-for", 3, "--site", SITES[0], *wires.place(0)))
    for n in (1, 2):
        begins(n, here.join(f"peer{n}", founder.newest_invite(), "--site", SITES[n], *wires.place(n)))
    together(plane, living, 0.0)
    for begin, end in TROUBLES.values():
        newest = living[1].of("round")[-1]["at"]
        at = living[1].wait("phase", phase="announce" if plane == "pairs" else "open", after=newest)["at"]
        for word in begin:
            wires.do(*word)
        go_on(founder, at, 30 if plane == "pairs" else 3)  # pairs take as long as the wait for a partner
        for word in end:
            wires.do(*word)
        together(plane, living, founder.of("round")[-1]["at"])
    well(living)
    if plane != "pairs":
        assert here.check() > 4


class Flood:
    """Process that keeps 5,000 half-open connections to these ports: silent ones, and handshakes that stop half-way."""

    COUNT = 5000

    def __init__(self, *ports):
        targets = [f"127.0.0.1:{port}" for port in ports]
        self._process = subprocess.Popen(
            [sys.executable, FLOODER, *targets, "--count", str(self.COUNT)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def report(self):
        """Return the next report: connections opened so far, and held by the other side."""
        return json.loads(self._process.stdout.readline())

    def close(self):
        self._process.stdin.close()
        self._process.wait(60)


def flooded_connections(process):
    """Return the number of connections that a process has accepted from the addresses of a `Flood`."""
    return sum(1 for c in process.net_connections("tcp") if c.raddr and c.raddr.ip.startswith("127.0.7."))


@pytest.mark.trial
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="loopback has the many addresses that this takes")
def test_swarm_trains_and_admits_a_peer_under_5000_half_open_connections(machine):
    """Connections, descriptors and memory of the flooded daemon stay bounded, and all states are equal."""
    here = machine(steps=12)
    bulk = range(21_000, 29_000)  # the loopback sockets of libzmq have other ports
    founder = here.found("peer0", "--wait-for", 2, "--ports", f"{bulk[0]}-{bulk[-1]}")
    living = [founder, here.join("peer1", founder.newest_invite())]
    together("butterfly", living, 0.0)
    process, bounds = psutil.Process(founder.process.pid), Limits()
    gate = int(read_status(directories(founder.home).status).addresses[0].rsplit(":", 1)[1])
    listening = {c.laddr.port for c in process.net_connections("tcp") if c.status == "LISTEN"}
    ports = {gate, *listening.intersection(bulk)}
    assert len(ports) > 1
    resident = process.memory_info().rss
    flood = Flood(*sorted(ports))
    try:
        assert flood.report()["opened"] == flood.COUNT
        begun = time.monotonic()
        for daemon in living:
            go_on(daemon, begun, 2)
        living.append(here.join("peer2", founder.newest_invite()))
        together("butterfly", living, living[2].wait("ready")["at"])
        said = flood.report()
        assert said["opened"] > flood.COUNT, "closed connections are not opened again"
        # The least of some counts: a connection that is refused or replaced closes in the next turn of the event loop.
        accepted = [flooded_connections(process) for _ in range(10)]
        assert 0 < min(accepted) <= bounds.visits + bounds.half_open
        assert process.memory_info().rss < resident + (100 << 20)
        go_on(founder, time.monotonic(), 2)
    finally:
        flood.close()
    together("butterfly", living, time.monotonic())
    well(living)
    assert not [event for daemon in living for event in daemon.of("dead")]
    assert here.check() > 4


@pytest.mark.trial
def test_daemon_that_falsifies_its_results_is_excluded(machine):
    """It sends all peers the same false results, so that they commit; audits find them."""
    here = machine(steps=12, grace=1.0, exchange="audit = 1.0")
    founder = here.found("peer0", "--wait-for", 3)
    honest = [founder, *(here.join(f"peer{n}", founder.newest_invite()) for n in (1, 2))]
    together("butterfly", honest, 0.0)
    liar = here.daemon("liar")
    liar.script = (LIAR, "left-out")
    here.join("liar", founder.newest_invite())
    liar.wait("ready")
    for daemon in honest:
        banned = daemon.wait("banned")
        assert banned["peer"] == liar.id and "a false result of chunk" in banned["detail"]
    assert liar.process.wait(60) == 5 and "false result" in liar.stderr
    del here.daemons["liar"]
    together("butterfly", honest, founder.of("round")[-1]["at"])
    assert all(daemon.process.poll() is None and "Traceback" not in daemon.stderr for daemon in honest)
    assert here.check() > 4
