"""Kernel options and measurements of TCP connections."""

from __future__ import annotations

import socket
import struct

CONGESTION, NEARBY = "bbr", "cubic"
"""Congestion control of far or lossy links, and of near ones.

With 1 % loss and 80 ms, cubic leaves a 100 Mbit/s link 99 % empty and BBR fills it (Cardwell et al., 2016). Without latency
cubic fills more of a link of 100 Mbit/s than BBR (benchmarks/exchange/reallinks.py).
"""

NEAR_SECONDS, FEW_LOSSES = 0.005, 0.01
"""A link is near if its round trip, and its share of retransmitted packets, are below these."""

MAX_PACING_RATE = 47
"""Linux' SO_MAX_PACING_RATE, which Python does not define."""

AHEAD, LEAST_AHEAD = 0.1, 1 << 16
"""Unsent data that the kernel holds: seconds' worth, and least bytes.

Half of it bridges pauses of the event loop.
"""


def tune(sock: socket.socket) -> bool:
    """Set a socket's options for long links; return whether the kernel grants CONGESTION control.

    Keep-alive preserves NAT mappings through minutes of inner steps. Buffer sizes are left to the kernel, whose
    automatic tuning goes beyond what a process may request.
    """
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 30), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    try:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, CONGESTION.encode())
    except (AttributeError, OSError):
        return False
    return True


def has_congestion_control() -> bool:
    """Return True if this kernel grants CONGESTION control.

    Without it more streams help on long, lossy links.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as sock:
        return tune(sock)


def congestion_for(round_trip: float, lost: float) -> str:
    """Return the congestion control for a link.

    `round_trip`: its shortest one in seconds; `lost`: share of packets that had to be sent again. Loss-based control
    fills a near link: after a loss its window is back within some round trips.
    """
    return NEARBY if round_trip < NEAR_SECONDS and lost < FEW_LOSSES else CONGESTION


def adapt(sock: socket.socket, present: str) -> str:
    """Set the congestion control that suits the measurements of the kernel (Linux); return the one in use.

    `present`: the one in use until now.
    """
    try:
        info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 160)
        if len(info) < 160:
            return present
        # struct tcp_info: tcpi_total_retrans at offset 100, tcpi_min_rtt (microseconds) at 148, tcpi_data_segs_out at 156.
        again, shortest, sent = (struct.unpack_from("=I", info, offset)[0] for offset in (100, 148, 156))
        wanted = congestion_for(shortest / 1e6, again / max(sent, 1))
        if wanted != present:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, wanted.encode())
        return wanted
    except (AttributeError, OSError):
        return present


def round_trip(sock: socket.socket) -> float | None:
    """Return the kernel's smoothed round-trip time in seconds (Linux), else None."""
    try:
        info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 104)
    except (AttributeError, OSError):
        return None
    # struct tcp_info: tcpi_rtt, microseconds, at offset 68.
    return float(struct.unpack_from("=I", info, 68)[0]) / 1e6 if len(info) >= 72 else None


def confirmed(sock: socket.socket) -> int | None:
    """Return the bytes that the other side's kernel has acknowledged (Linux), else None."""
    try:
        info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 128)
    except (AttributeError, OSError):
        return None
    # struct tcp_info: tcpi_bytes_acked, at offset 120.
    return int(struct.unpack_from("=Q", info, 120)[0]) if len(info) >= 128 else None


def pace(sock: socket.socket, rate: int) -> None:
    """Limit the kernel's sending to `rate` bytes/s (Linux); elsewhere do nothing."""
    try:
        sock.setsockopt(socket.SOL_SOCKET, MAX_PACING_RATE, min(rate, 2**32 - 1))
    except OSError:
        pass


class DirectSocket:
    """Second descriptor of a socket, to write in a thread while the event loop may close the first."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = socket.fromfd(sock.fileno(), sock.family, sock.type)
        self._socket.setblocking(False)

    def fileno(self) -> int:
        """Descriptor, for the event loop."""
        return self._socket.fileno()

    def send(self, data: memoryview) -> int:
        """Send what the kernel takes now; return its bytes. Raises OSError if the connection is broken."""
        try:
            return self._socket.send(data)
        except BlockingIOError:
            return 0

    def close(self) -> None:
        """Close this descriptor. The connection stays as long as the other one."""
        self._socket.close()


def hold_back(sock: socket.socket) -> None:
    """Let the kernel buffer little more than it is about to send (Linux, TCP_NOTSENT_LOWAT).

    Data that waits in this process goes to the first stream that makes progress, can be overtaken, and can be withdrawn. On
    other systems do nothing.
    """
    try:
        info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 112)
        # struct tcp_info: tcpi_pacing_rate, bytes/s, at offset 104. The kernel computes one without BBR, too.
        rate = struct.unpack_from("=Q", info, 104)[0] if len(info) >= 112 else 0
        if rate:
            most = min(2**31 - 1, max(LEAST_AHEAD, int(AHEAD * rate)))
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, most)
    except (AttributeError, OSError):
        pass
