"""Flood of half-open connections: opens them to the ports of a peer and reopens each one that is closed, until stdin ends.

    python -m benchmarks.peers.flooder HOST:PORT... [--count 5000] [--rate 100]

Every second connection stays silent; the others send half of a handshake. The sources are 16 loopback addresses, so that
limits per source do not hit the honest peers of this machine. The first `count` connections are opened at once, later
ones at `rate` per second. Prints one JSON line when the first `count` are opened, and then one each second: connections
opened so far, and those that the other side holds open now.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import selectors
import socket
import sys
import time

SOURCES = 16
PARTIAL = b"\xff" + bytes(8) + b"\x7f\x03"
"""Eleven of 64 bytes of a ZeroMQ greeting. On a bulk port they are an unfinished record."""


def main() -> None:
    """Parse the options and flood."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("targets", nargs="+", help="HOST:PORT")
    parser.add_argument("--count", type=int, default=5000)
    parser.add_argument("--rate", type=float, default=100.0)
    options = parser.parse_args()
    os.nice(19)  # a real flood takes no processor time of the machine that it hits
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    targets = [(host, int(port)) for host, _, port in (target.rpartition(":") for target in options.targets)]
    Flood(targets, options.count).run(options.rate)


class Flood:
    """Connections of one flood."""

    def __init__(self, targets: list[tuple[str, int]], count: int) -> None:
        self._targets, self._count = targets, count
        self._selector = selectors.DefaultSelector()
        self._held: set[socket.socket] = set()
        self._opened = 0

    def run(self, rate: float) -> None:
        """Flood until stdin ends."""
        self._selector.register(sys.stdin, selectors.EVENT_READ)
        while self._opened < self._count:
            self._open()
            if self._opened % 64 == 0 and not self._read(0.0):
                return
        self._report()
        began, reported = time.monotonic(), time.monotonic()
        while self._read(0.02):
            now = time.monotonic()
            allowed = self._count + int(rate * (now - began))
            while self._opened < allowed and len(self._held) < self._count:
                self._open()
            if now > reported + 1.0:
                reported = now
                self._report()

    def _report(self) -> None:
        print(json.dumps({"opened": self._opened, "held": len(self._held)}), flush=True)

    def _open(self) -> None:
        number, self._opened = self._opened, self._opened + 1
        sock = socket.socket()
        sock.setblocking(False)
        sock.bind((f"127.0.7.{1 + number % SOURCES}", 0))
        sock.connect_ex(self._targets[number // 2 % len(self._targets)])
        self._held.add(sock)
        # A silent connection is watched for its end, the other one first for the moment when it can be written to.
        self._selector.register(sock, selectors.EVENT_WRITE if number % 2 else selectors.EVENT_READ)

    def _read(self, seconds: float) -> bool:
        """Wait for events; return False if stdin has ended."""
        for key, events in self._selector.select(seconds):
            sock = key.fileobj
            if not isinstance(sock, socket.socket):
                return False
            try:
                if events & selectors.EVENT_WRITE:
                    sock.send(PARTIAL)
                    self._selector.modify(sock, selectors.EVENT_READ)
                elif not sock.recv(4096):
                    raise ConnectionResetError
            except OSError:
                self._selector.unregister(sock)
                self._held.discard(sock)
                sock.close()
        return True


if __name__ == "__main__":
    main()
