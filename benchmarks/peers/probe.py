"""Rate and round trip of a link between two namespaces: probe.py '{"host": "10.77.0.1", "port": 7500, "listens": true}'.

The dialling side reads `size`, sends that many bytes, and reports their seconds and the round trip before.
"""

import json
import socket
import statistics
import sys
import time

from benchmarks.peers.turns import listen, say


def serve(server: socket.socket) -> None:
    """Echo single bytes, and confirm announced ones when all have arrived."""
    while True:
        connection, _ = server.accept()
        with connection:
            while head := connection.recv(1):
                if head == b"e":
                    connection.sendall(b"e")
                    continue
                left = int.from_bytes(connection.recv(8, socket.MSG_WAITALL))
                while left:
                    left -= len(connection.recv(min(left, 1 << 16)))
                connection.sendall(b"!")


def dial(address: tuple[str, int], size: int) -> tuple[float, float]:
    """Round trip, and bytes per second without it."""
    with socket.create_connection(address) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        trips = []
        for _ in range(5):
            began = time.monotonic()
            connection.sendall(b"e")
            connection.recv(1)
            trips.append(time.monotonic() - began)
        trip, began = statistics.median(trips), time.monotonic()
        connection.sendall(b"d" + size.to_bytes(8) + bytes(size))
        connection.recv(1)
        return trip, size / (time.monotonic() - began - trip)


options = json.loads(sys.argv[1])
address = options["host"], options["port"]
if options["listens"]:
    with socket.create_server(address) as server:
        say(ready=True)
        serve(server)
else:
    trip, rate = dial(address, listen()["size"])
    say(trip=trip, rate=rate)
