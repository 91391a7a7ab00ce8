"""Port mappings against a router that the test runs on loopback, and against garbage."""

from __future__ import annotations

import asyncio
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
from thinwire.node.doctor.network import check_mapping
from thinwire.node.membership.router import gateway_requests
from thinwire.node.membership.router.gateway_requests import default_gateway
from thinwire.node.membership.router.mapping_protocols import mapped_ports, routers
from thinwire.node.membership.router.nat_pmp import NatPmp
from thinwire.node.membership.router.pcp import Pcp
from thinwire.node.membership.router.port_mapping import (
    AGAIN_SECONDS,
    LEASE,
    LOOK_SECONDS,
    MappingFailed,
    PortMapping,
    map_by_any,
)
from thinwire.node.membership.router.upnp import Upnp, outside_host
from thinwire.node.runtime.asyncio_extra import cancelled
from thinwire.node.runtime.load_settings import load
from thinwire.sims.engine import virtual_loop

ROUTER = str(Path(__file__).parents[4] / "kit" / "programs" / "router.py")
OUTSIDE = "9.9.9.9"
PORTS = (7400, 7401, 7402)
LINUX = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="loopback has no multicast here")
WITH_UPNP = pytest.mark.skipif(importlib.util.find_spec("miniupnpc") is None, reason="it needs the extra [nat]")


@pytest.fixture
def router():
    """Starts a router; returns the port that it listens on, and a function that reads its next line."""
    started = []

    def start(mode, *more, outside=OUTSIDE):
        process = subprocess.Popen(
            [sys.executable, ROUTER, "127.0.0.1", outside, mode, *more], stdout=subprocess.PIPE, text=True
        )
        started.append(process)
        return int(process.stdout.readline().split()[1]), lambda: process.stdout.readline().strip()

    yield start
    for process in started:
        process.kill()
        process.wait()


def failure(work):
    """Run a request that fails; return its reason, one line."""
    with pytest.raises(MappingFailed) as caught:
        asyncio.run(work)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_nat_pmp_maps_and_removes_ports(router):
    port, said = router("nat-pmp", "0")
    ours = NatPmp("127.0.0.1", port)
    assert asyncio.run(ours.map(PORTS, 600)) == OUTSIDE
    assert [said() for _ in PORTS] == [f"map {one} 600" for one in PORTS]
    asyncio.run(ours.unmap(PORTS))
    assert [said() for _ in PORTS] == [f"unmap {one}" for one in PORTS]


def test_nat_pmp_with_another_outside_port_fails_and_removes_what_it_has_mapped(router):
    port, said = router("other-port", "0")
    assert "maps port 7402 instead of 7401" in failure(map_by_any((NatPmp("127.0.0.1", port),), PORTS, 600))
    said_all = [said() for _ in range(4)]
    assert said_all == ["map 7400 600", "map 7402 600", "unmap 7400", "unmap 7402"], said_all


def test_nat_pmp_refuses_garbage_and_silence(router):
    port, _ = router("garbage", "0")
    assert failure(NatPmp("127.0.0.1", port).map(PORTS, 600))
    assert "does not speak it" in failure(NatPmp("127.0.0.1", 9).map(PORTS, 600))


def test_pcp_maps_and_removes_ports(router):
    port, said = router("pcp", "0")
    ours, other = Pcp("127.0.0.1", port), Pcp("127.0.0.1", port)
    assert asyncio.run(ours.map(PORTS, 600)) == OUTSIDE
    assert [said() for _ in PORTS] == [f"map {one} 600" for one in PORTS]
    asyncio.run(other.unmap(PORTS))  # It has mapped none.
    asyncio.run(ours.unmap(PORTS))
    assert [said() for _ in PORTS] == [f"unmap {one}" for one in PORTS]


def test_router_without_pcp_is_asked_by_nat_pmp(router):
    port, said = router("nat-pmp", "0")
    both = Pcp("127.0.0.1", port), NatPmp("127.0.0.1", port)
    assert "it speaks NAT-PMP only" in failure(both[0].map(PORTS, 600))
    chosen, address = asyncio.run(map_by_any(both, PORTS, 600))
    assert chosen is both[1] and address == f"{OUTSIDE}:7400"
    assert [said() for _ in PORTS] == [f"map {one} 600" for one in PORTS]


@pytest.mark.parametrize(
    ("mode", "reason"), [("garbage", ""), ("garbage-pcp", "does not answer"), ("short-lease", "1 s only")]
)
def test_pcp_refuses_garbage_silence_and_short_leases(router, mode, reason, monkeypatch):
    monkeypatch.setattr(gateway_requests, "WAITS", (0.1, 0.1))
    port, _ = router(mode, "0")
    assert reason in failure(Pcp("127.0.0.1", port).map(PORTS, 600))
    assert "does not speak it" in failure(Pcp("127.0.0.1", 9).map(PORTS, 600))


@pytest.mark.parametrize("result", [1, 2, 8, 11, 12, 200])
def test_refusal_of_pcp_has_a_reason(result):
    """Also one without the content of the request."""

    async def work():
        class Refusing(asyncio.DatagramProtocol):
            def connection_made(self, transport):
                self.transport = transport

            def datagram_received(self, data, sender):
                self.transport.sendto(bytes((2, 129, 0, result)) + bytes(20), sender)

        loop = asyncio.get_running_loop()
        transport, _ = await loop.create_datagram_endpoint(Refusing, local_addr=("127.0.0.1", 0))
        try:
            await Pcp("127.0.0.1", transport.get_extra_info("sockname")[1]).map(PORTS, 600)
        finally:
            transport.close()

    assert failure(work()).startswith("127.0.0.1: ")


def test_default_gateway_is_read_from_the_route_table(tmp_path):
    table = tmp_path / "route"
    head = "Iface\tDestination\tGateway\tFlags\tRefCnt\tUse\tMetric\tMask\n"
    table.write_text(head + "eth0\t0000A8C0\t00000000\t0001\t0\t0\t0\t00FFFFFF\n")
    with pytest.raises(MappingFailed, match="no default gateway"):
        default_gateway(table)
    with open(table, "a") as file:
        file.write("eth0\t00000000\t0100A8C0\t0003\t0\t0\t0\t00000000\n")
    assert default_gateway(table) == "192.168.0.1"
    with pytest.raises(MappingFailed, match="not known"):
        default_gateway(tmp_path / "none")


@LINUX
@WITH_UPNP
def test_upnp_maps_and_removes_ports(router):
    _, said = router("upnp")
    ours = Upnp("127.0.0.1")
    assert asyncio.run(ours.map(PORTS, 600)) == OUTSIDE
    assert [said() for _ in PORTS] == [f"map {one} 600" for one in PORTS]
    asyncio.run(ours.unmap(PORTS))
    assert [said() for _ in PORTS] == [f"unmap {one}" for one in PORTS]


@LINUX
@WITH_UPNP
def test_upnp_refuses_garbage_and_silence(router):
    assert "no router answers" in failure(Upnp("127.0.0.1").map(PORTS, 600))
    router("garbage-upnp")
    assert failure(Upnp("127.0.0.1").map(PORTS, 600))


@pytest.mark.skipif(importlib.util.find_spec("miniupnpc") is not None, reason="the extra [nat] is installed")
def test_upnp_without_its_package_names_the_extra():
    assert "thinwire[nat]" in failure(Upnp().map(PORTS, 600))


class Planned:
    """Router with planned outcomes: an outside host, or a reason for a failure."""

    def __init__(self, name, *outcomes):
        self.name, self.outcomes, self.calls = name, list(outcomes), []

    async def map(self, ports, seconds):
        self.calls.append(("map", tuple(ports), seconds))
        outcome = self.outcomes.pop(0) if len(self.outcomes) > 1 else self.outcomes[0]
        if outcome.startswith("no"):
            raise MappingFailed(outcome)
        return outcome

    async def unmap(self, ports):
        self.calls.append(("unmap", tuple(ports), 0))


@pytest.mark.parametrize("outside", ["10.0.0.2", "100.64.1.1", "0.0.0.0", "", "x y"])
def test_mapping_with_an_outside_address_that_is_not_on_the_internet_is_removed(outside):
    first, second = Planned("first", outside), Planned("second", "no room")
    reason = failure(map_by_any((first, second), PORTS, 600))
    assert reason.startswith("first: ") and reason.endswith("second: no room")
    assert first.calls[-1] == ("unmap", PORTS, 0)


def test_mapping_is_renewed_reported_once_and_removed_at_the_end():
    async def play():
        events, addresses = [], []
        first, second = Planned("first", "no answer"), Planned("second", OUTSIDE, OUTSIDE, "no more", "9.9.9.10")
        mapping = PortMapping((first, second), PORTS, lambda *event: events.append(event), addresses.append, tuple)
        task = asyncio.create_task(mapping.keep())
        await asyncio.sleep(LEASE / 2 + 1.0)
        assert addresses == [f"{OUTSIDE}:7400"] and [kind for kind, _ in events] == ["mapped"]
        assert [call[0] for call in first.calls] == ["map", "unmap"] and len(second.calls) == 2
        await asyncio.sleep(LEASE / 2)
        assert addresses[1:] == [""] and [kind for kind, _ in events] == ["mapped", "alarm"]
        await asyncio.sleep(AGAIN_SECONDS)
        assert addresses[2:] == ["9.9.9.10:7400"]
        task.cancel()
        before = [call[0] for call in second.calls].count("unmap")
        await mapping.release()
        assert [call[0] for call in second.calls].count("unmap") == before + 1

    virtual_loop.run(play(), seed=1, limit=3 * LEASE)


def test_mapping_is_renewed_at_once_by_any_router_when_this_machine_has_another_address():
    async def play():
        own, addresses = ("192.168.0.5:7400",), []
        first, second = Planned("first", OUTSIDE, OUTSIDE, "gone"), Planned("second", "9.9.9.10", "9.9.9.10")
        mapping = PortMapping((first, second), PORTS, lambda *event: None, addresses.append, lambda: own)
        task = asyncio.create_task(mapping.keep())
        await asyncio.sleep(100.0)
        own = ()
        await asyncio.sleep(100.0)
        assert len(first.calls) == 1, "unknown addresses are no other ones"
        own = ("192.168.0.9:7400",)
        await asyncio.sleep(2 * LOOK_SECONDS)
        assert len(first.calls) == 2 and addresses == [f"{OUTSIDE}:7400"]
        own = ("10.0.0.9:7400",)
        await asyncio.sleep(2 * LOOK_SECONDS)
        assert addresses[1:] == ["9.9.9.10:7400"]
        await asyncio.sleep(100.0)
        assert len(second.calls) == 1
        await asyncio.sleep(LEASE / 2)
        assert len(second.calls) == 2
        task.cancel()

    virtual_loop.run(play(), seed=1, limit=LEASE)


def test_mapping_that_is_cancelled_while_a_router_hangs_ends_and_removes_what_may_be_mapped():
    class Hanging(Planned):
        async def map(self, ports, seconds):
            self.calls.append(("map", tuple(ports), seconds))
            await asyncio.sleep(1e6)

    async def play():
        router = Hanging("slow")
        mapping = PortMapping((router,), PORTS, lambda *event: None, lambda address: None, tuple)
        task = asyncio.create_task(mapping.keep())
        await asyncio.sleep(1.0)
        await cancelled(task)
        await mapping.release()
        assert [call[0] for call in router.calls] == ["map", "unmap"]

    virtual_loop.run(play(), seed=1, limit=100.0)


def test_outside_host_that_is_a_name_is_refused():
    assert "no outside address" in failure(map_by_any((Planned("first", "evil.example.com"),), PORTS, 600))


def test_doctor_shows_the_mapping(tmp_path):
    off = load({"home": tmp_path}, {})
    on = load({"home": tmp_path}, {"THINWIRE_MAP_PORT": "true"})

    def check(config, router, *, listening=False):
        return asyncio.run(check_mapping(config, 7400, listening=listening, by=(router,)))

    good = Planned("NAT-PMP", OUTSIDE)
    assert check(off, good).result == check(on, good, listening=True).result == "SKIP" and not good.calls
    assert asyncio.run(check_mapping(on, 0, listening=False, by=(good,))).result == "SKIP" and not good.calls
    found = check(on, good)
    assert found.result == "OK" and f"{OUTSIDE}:7400 (NAT-PMP)" in found.detail
    assert [call[0] for call in good.calls] == ["map", "unmap"]
    assert check(on, Planned("UPnP", "no room")).result == "FAIL"


def test_mapped_ports_are_those_that_peers_dial(tmp_path):
    def ports(gate, **flags):
        return mapped_ports(load({"home": tmp_path, **flags}, {"THINWIRE_MAP_PORT": "true"}), gate)

    assert ports(7400) == tuple(range(7400, 7416))
    assert ports(5000, port=0) == ()
    assert ports(5000, port=0, ports="6000-6001") == (5000, 6000, 6001)
    assert ports(6000, ports="6000-6999") == tuple(range(6000, 6015))
    assert [one.name for one in routers("0.0.0.0")] == ["PCP", "NAT-PMP", "UPnP"]


@pytest.mark.parametrize(
    ("output", "reason"),
    [
        (b"[" * 4096, "without a reason"),
        (b"[]", "without a reason"),
        (b"", "without a reason"),
        (b'{"error": "\\ud800\\u001b[2J"}', r"\?\?\[2J"),
    ],
)
def test_odd_answer_of_the_upnp_process_is_a_failure_in_printable_letters(output, reason):
    with pytest.raises(MappingFailed, match=reason):
        outside_host(output)
    assert outside_host(b'{"address": "9.9.9.9"}') == OUTSIDE
