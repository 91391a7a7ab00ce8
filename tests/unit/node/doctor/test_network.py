"""Checks of the network, with gates on loopback, and with claims of peers."""

import asyncio
import socket
import time

import pytest
from kit.wire import RUN, Wire
from thinwire.collectives.transport.addresses.observed_addresses import Sighting
from thinwire.node.doctor.network import check_network, check_rate, judged
from thinwire.node.runtime.load_settings import load
from thinwire.swarm import frame
from thinwire.swarm.identity.identity import Identity
from thinwire.swarm.identity.invite import Invite, Seed
from thinwire.swarm.messages.registry import Observed, Refuse

LOCAL, OUT = "192.168.0.5:50000", "45.9.9.9"


def results(checks):
    return {check.name: check.result for check in checks}


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return sock.getsockname()[1]


def settings(home, port=0):
    return load({"home": home, "host": "127.0.0.1", "port": port}, {})


def test_port_and_peers_on_loopback(tmp_path):
    wire, port = Wire(), free_port()

    async def work():
        hosts = [await wire.peer(seed) for seed in (2, 3)]
        seeds = tuple(Seed(host.contact.address, host.contact.transport_key) for host in hosts)
        found = await check_network(settings(tmp_path, port), Invite(RUN, seeds), 0, time.time)
        assert results(found) == {name: "OK" for name in ("port", "reached", "nat", "clock", "rate")}
        assert f"127.0.0.1:{port}" in found[1].detail and not any(host.hellos for host in hosts)
        # The clocks of the others are right, and ours is not.
        found = await check_network(settings(tmp_path, port), Invite(RUN, seeds), 0, lambda: time.time() + 300)
        assert results(found)["clock"] == "FAIL" and "ahead" in found[3].detail
        assert not (tmp_path / "identity.key").exists(), "a check creates no key"

    wire.run(work)


def test_peers_of_another_version_are_no_fault_of_the_firewall(tmp_path, monkeypatch):
    wire, encode = Wire(), frame.encode

    def encode_as_old_gate(sent, identity, run_id):
        data = bytearray(encode(sent, identity, run_id))
        data[len(frame.MAGIC)] -= isinstance(sent.message, Observed)
        return bytes(data)

    async def work():
        host = await wire.peer(2)
        monkeypatch.setattr(frame, "encode", encode_as_old_gate)
        seeds = (Seed(f"127.0.0.1:{free_port()}", bytes(32)), Seed(host.contact.address, host.contact.transport_key))
        found = await check_network(settings(tmp_path), Invite(RUN, seeds), 0, time.time)
        assert results(found)["reached"] == "FAIL" and "protocol version" in found[1].detail
        assert found[1].fix == "install the version of thinwire that the swarm runs"

    wire.run(work)


def test_gate_of_the_daemon_that_runs_here_is_reached(tmp_path):
    """The daemon holds the port, and only its key proves that its gate was reached."""
    wire = Wire()

    async def work():
        identity = Identity.load_or_create(tmp_path / "daemon" / "identity.key")
        daemon, host = await wire.peer(1, identity=identity), await wire.peer(2)
        seeds = tuple(Seed(one.contact.address, one.contact.transport_key) for one in (daemon, host))
        found = await check_network(settings(tmp_path), Invite(RUN, seeds[1:]), daemon.port, time.time)
        assert results(found)["reached"] == "FAIL"  # another key
        found = await check_network(settings(tmp_path / "daemon"), Invite(RUN, seeds), daemon.port, time.time)
        assert results(found)["reached"] == "OK" and "daemon listens" in found[0].detail

    wire.run(work)


def test_taken_port_and_silent_peers_fail(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        found = asyncio.run(check_network(settings(tmp_path, port), None, 0, time.time))
        assert found[0].result == "FAIL" and "--port 0" in found[0].fix
    assert {check.result for check in found[1:]} == {"SKIP"}
    silent = Invite(RUN, (Seed(f"127.0.0.1:{free_port()}", Identity.generate(b"5" * 32).transport_public),))
    found = asyncio.run(check_network(settings(tmp_path), silent, 0, time.time))
    assert results(found) == {"port": "OK", "reached": "FAIL", "nat": "SKIP", "clock": "SKIP", "rate": "SKIP"}
    assert "no process listens" in found[1].detail
    found = asyncio.run(check_network(settings(tmp_path), None, 0, time.time))
    assert results(found) == {"port": "OK", "reached": "SKIP", "nat": "SKIP", "clock": "SKIP", "rate": "SKIP"}


def sight(by, port, reached, wall=1000):
    return Sighting(f"{by}:7400", LOCAL, f"{OUT}:{port}", reached, 7400, wall)


@pytest.mark.parametrize(
    ("sightings", "wall", "reached", "nat", "clock"),
    [
        ([sight("45.1.1.1", 1, True), sight("45.2.1.1", 1, True)], 1001.0, "OK", "cone", "OK"),
        ([sight("45.1.1.1", 1, False), sight("45.2.1.1", 2, False)], 1001.0, "FAIL", "symmetric", "OK"),
        ([sight("45.1.1.1", 1, None)], 900.0, "SKIP", "two networks", "FAIL"),
        ([sight("45.1.1.1", 1, None), sight("45.2.1.1", 1, None, 5000), sight("45.3.1.1", 1, None)], 1000.0,
         "SKIP", "cone", "OK"),  # one wrong clock among three
    ],
)  # fmt: skip
def test_judgement_of_sightings(sightings, wall, reached, nat, clock):
    found = {check.name: check for check in judged(sightings, 7400, wall)}
    assert found["reached"].result == reached and found["clock"].result == clock and nat in found["nat"].detail
    assert reached != "FAIL" or "7400" in found["reached"].fix


def test_rate_of_a_peer():
    one = Sighting("45.1.1.1:7400", LOCAL, LOCAL, None)
    assert check_rate([one]).result == check_rate([Refuse("busy", "")]).result == check_rate([]).result == "SKIP"
    fast, slow = (Sighting("45.1.1.1:7400", LOCAL, LOCAL, None, rate=rate) for rate in (1e7, 1e4))
    assert check_rate([fast]).result == "OK" and "80 Mbit/s" in check_rate([fast]).detail
    assert check_rate([slow]).result == "FAIL"
