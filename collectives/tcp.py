"""What is asked of the kernel for a TCP connection, and what it tells about one."""

from __future__ import annotations

import socket
import struct

CONGESTION = "bbr"
"""With 1 % loss and 80 ms, cubic leaves a 100 Mbit/s link 99 % empty and BBR fills it (BBR: Cardwell et al., 2016)."""

MAX_PACING_RATE = 47
"""SO_MAX_PACING_RATE of Linux, which Python has no name for."""

AHEAD, LEAST_AHEAD = 0.1, 1 << 16
"""Seconds' worth of bytes that the kernel holds unsent, and bytes at least: half of it bridges what our loop does meanwhile."""


def tune(sock: socket.socket) -> bool:
    """Set a socket for long links; True when the kernel grants CONGESTION control.

    Keep-alive holds the mappings of address translators open through minutes of local steps. Buffer sizes are left to
    the kernel, whose automatic tuning reaches further than what a process may ask for.
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
    """Whether this kernel grants CONGESTION control; without it more parallel streams help on long, lossy links."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as sock:
        return tune(sock)


def round_trip(sock: socket.socket) -> float | None:
    """The kernel's smoothed round-trip time in seconds (Linux), else None."""
    try:
        info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 104)
    except (AttributeError, OSError):
        return None
    # struct tcp_info: tcpi_rtt, microseconds, at offset 68.
    return float(struct.unpack_from("=I", info, 68)[0]) / 1e6 if len(info) >= 72 else None


def confirmed(sock: socket.socket) -> int | None:
    """Bytes that the other side's kernel has acknowledged (Linux), else None."""
    try:
        info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 128)
    except (AttributeError, OSError):
        return None
    # struct tcp_info: tcpi_bytes_acked, at offset 120.
    return int(struct.unpack_from("=Q", info, 120)[0]) if len(info) >= 128 else None


def pace(sock: socket.socket, rate: int) -> None:
    """Let the kernel send no more than so many bytes per second (Linux); elsewhere nothing happens."""
    try:
        sock.setsockopt(socket.SOL_SOCKET, MAX_PACING_RATE, min(rate, 2**32 - 1))
    except OSError:
        pass


def hold_back(sock: socket.socket) -> None:
    """Let the kernel take little more than it is about to send (Linux, TCP_NOTSENT_LOWAT): what waits with us goes to the
    stream that gets on, can be overtaken, and can be called back. Elsewhere nothing happens.
    """
    try:
        info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 112)
        # struct tcp_info: tcpi_pacing_rate, bytes/s, at offset 104. Without BBR the kernel reckons one, too.
        rate = struct.unpack_from("=Q", info, 104)[0] if len(info) >= 112 else 0
        if rate:
            most = min(2**31 - 1, max(LEAST_AHEAD, int(AHEAD * rate)))
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, most)
    except (AttributeError, OSError):
        pass
