"""Addresses that a machine announces, in network namespaces of the kernel."""

import subprocess
import sys

import pytest
from thinwire.sims.processes import netns_testbed

REASON = netns_testbed.obstacle()

ASK = "from thinwire.collectives.transport.zeromq.listener import own_addresses; print(*own_addresses('0.0.0.0'))"


def addresses_in_a_namespace(*commands):
    script = "\n".join(("set -e", "ip link set lo up", *commands, '"$0" -c "$1"'))
    command = ["unshare", "--net", "sh", "-c", script, sys.executable, ASK]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout.split()


CABLE = ("ip link add cable type veth peer name other", "ip addr add 10.5.0.1/24 dev cable", "ip link set other up")


@pytest.mark.skipif(bool(REASON), reason=REASON)
def test_machine_without_a_default_route_announces_the_addresses_of_its_interfaces():
    """Two machines on one cable need no router."""
    assert addresses_in_a_namespace() == ["127.0.0.1"]
    assert addresses_in_a_namespace(*CABLE) == ["127.0.0.1"], "the interface is down"
    assert addresses_in_a_namespace(*CABLE, "ip link set cable up") == ["10.5.0.1"]
    second = ("ip addr add 10.6.0.1/24 dev other", "ip link set cable up")
    assert addresses_in_a_namespace(*CABLE, *second) == ["10.5.0.1", "10.6.0.1"]
    assert addresses_in_a_namespace(*CABLE, *second, "ip route add default via 10.6.0.9") == ["10.6.0.1"]
