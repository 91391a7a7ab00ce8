"""Addresses that a machine announces, in network namespaces of the kernel."""

import subprocess
import sys

import pytest
from thinwire.sims.processes import netns_testbed

REASON = netns_testbed.obstacle()

ASK = (
    "from thinwire.collectives.transport.zeromq.sockets.listener import own_addresses; print(*own_addresses('0.0.0.0'))"
)


def addresses_in_a_namespace(*commands):
    script = "\n".join(("set -e", "ip link set lo up", *commands, '"$0" -c "$1"'))
    command = ["unshare", "--net", "sh", "-c", script, sys.executable, ASK]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout.split()


def cable(name, address):
    """Return commands that make a cable to nowhere; its end here is down."""
    far = f"far{name}"
    return (
        f"ip link add {name} type veth peer name {far}",
        f"ip addr add {address} dev {name}",
        f"ip link set {far} up",
    )


@pytest.mark.skipif(bool(REASON), reason=REASON)
def test_machine_without_a_default_route_announces_the_addresses_of_its_interfaces():
    """Two machines on one cable need no router."""
    one, two = cable("eth0", "10.5.0.1/24"), cable("eth1", "10.6.0.1/24")
    up = ("ip link set eth0 up",)
    assert addresses_in_a_namespace() == ["127.0.0.1"]
    assert addresses_in_a_namespace(*one) == ["127.0.0.1"], "the interface is down"
    assert addresses_in_a_namespace(*one, *up) == ["10.5.0.1"]
    both = (*one, *two, *up, "ip link set eth1 up")
    assert addresses_in_a_namespace(*both) == ["10.5.0.1", "10.6.0.1"]
    assert addresses_in_a_namespace(*both, "ip route add default via 10.6.0.9") == ["10.6.0.1"]
    containers = (*cable("docker0", "172.17.0.1/16"), "ip link set docker0 up")
    assert addresses_in_a_namespace(*containers, *one, *up) == ["10.5.0.1", "172.17.0.1"]
