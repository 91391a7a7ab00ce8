"""Congestion control follows the measurements of a connection."""

import socket
import sys

import pytest
from thinwire.collectives.transport import tcp_options
from thinwire.collectives.transport.tcp_options import CONGESTION, NEARBY, adapt, congestion_for, has_congestion_control

AVAILABLE = "/proc/sys/net/ipv4/tcp_available_congestion_control"


@pytest.mark.parametrize(
    ("round_trip", "lost", "expected"),
    [
        (0.0002, 0.0, NEARBY),
        (0.0002, 0.05, CONGESTION),
        (0.08, 0.0, CONGESTION),
        (0.08, 0.01, CONGESTION),
        ((2**32 - 1) / 1e6, 0.0, CONGESTION),  # the kernel has no measurement yet
    ],
)
def test_congestion_control_follows_round_trip_and_loss(round_trip, lost, expected):
    assert congestion_for(round_trip, lost) == expected


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="measurements of Linux")
def test_connection_of_one_machine_gets_the_control_of_near_links():
    with open(AVAILABLE) as file:
        if NEARBY not in file.read() or not has_congestion_control():
            pytest.skip("this kernel has not both")
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as near:
        accepted, _ = server.accept()
        with accepted:
            near.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, CONGESTION.encode())
            assert adapt(near, CONGESTION) == NEARBY
            assert near.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0") == NEARBY.encode()
            assert adapt(near, NEARBY) == NEARBY


def test_socket_without_measurements_keeps_its_control():
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as other:
        assert adapt(other, CONGESTION) == CONGESTION


def test_kernel_that_does_not_know_the_congestion_control_is_noticed_and_connections_work(monkeypatch):
    """Its name is one that no kernel has."""
    monkeypatch.setattr(tcp_options, "CONGESTION", "no-such")
    assert not has_congestion_control()
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as near:
        accepted, _ = server.accept()
        with accepted:
            assert not tcp_options.tune(near)
            assert near.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)  # the other options are set
            present = adapt(near, "no-such")
            assert present in ("no-such", NEARBY)
            near.sendall(b"works")
            assert accepted.recv(5) == b"works"


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the kernel's list is that of Linux")
def test_congestion_control_of_this_kernel_is_noticed():
    with open(AVAILABLE) as file:
        if CONGESTION not in file.read().split():
            pytest.skip("this kernel may load it when it is asked for")
    assert has_congestion_control()
