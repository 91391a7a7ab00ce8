"""Ports of a real peer: the documented default, kept across restarts, and an error if it is taken."""

import asyncio
import socket

import pytest
from thinwire.collectives.transport.zeromq.listener import PortTaken
from thinwire.node.membership.port_file import PortFile
from thinwire.node.peer.bootstrap import arriving
from thinwire.node.runtime.config import PORT, load, member_ports
from thinwire.node.runtime.disk import RealDisk
from thinwire.swarm.identity.identity import Identity
from thinwire.swarm.identity.invite import Invite, Seed
from thinwire.swarm.messages.registry import Refuse

RUN = b"r" * 32


def opened_at(home, **flags):
    """Return the port that a peer with these settings listens on, from one start."""
    config = load({"home": home, "host": "127.0.0.1", **flags}, {})
    found = []

    class Recorder:
        async def arrive(self, invite, opener, search):
            transport = await opener(lambda hello, record: Refuse("busy", ""))
            found.append(transport.port)
            await transport.close()

    invite = Invite(RUN, (Seed("127.0.0.1:1", Identity.generate(b"1" * 32).transport_public),)).code()
    asyncio.run(arriving(invite, config, 1.0).begin(Recorder()))
    return found[0]


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return sock.getsockname()[1]


def test_port_of_a_run_is_kept_across_restarts(tmp_path):
    first = opened_at(tmp_path, port=0)
    assert first and opened_at(tmp_path, port=0) == first
    assert opened_at(tmp_path) == first  # the setting's default gives way to it


def test_given_port_is_kept_too_and_replaced_by_another_given_one(tmp_path):
    one, two = free_port(), free_port()
    assert opened_at(tmp_path, port=one) == one
    assert opened_at(tmp_path, port=two) == two
    assert opened_at(tmp_path) == two


@pytest.mark.parametrize("given", [True, False])
def test_taken_port_is_an_error_with_a_hint(tmp_path, given):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        if not given:
            PortFile(load({"home": tmp_path}, {}).directories.run(RUN).port, RealDisk()).save(port)
        with pytest.raises(PortTaken, match=str(port)) as error:
            opened_at(tmp_path, **({"port": port} if given else {}))
    assert error.value.exit_code == 3 and "--port 0" in error.value.hint


def test_port_zero_takes_another_port_if_the_stored_one_is_taken(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        PortFile(load({"home": tmp_path}, {}).directories.run(RUN).port, RealDisk()).save(port)
        assert opened_at(tmp_path, port=0) not in (0, port)


def test_links_use_the_ports_after_a_fixed_gate(tmp_path):
    settings = load({"home": tmp_path}, {})
    assert settings.port == PORT == 7400 and member_ports(settings) == range(7401, 7500)
    assert member_ports(load({"home": tmp_path, "port": 0}, {})) is None
    assert member_ports(load({"home": tmp_path, "port": 65_535}, {})) is None
    assert member_ports(load({"home": tmp_path, "port": 65_530}, {})) == range(65_531, 65_536)
    assert member_ports(load({"home": tmp_path, "ports": "9000-9001"}, {})) == range(9000, 9002)
