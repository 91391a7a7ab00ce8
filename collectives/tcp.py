"""What is asked of the kernel for a TCP connection, and what it tells about one."""

from __future__ import annotations

import fcntl
import socket
import struct
import sys
import termios

CONGESTION = "bbr"
"""With 1 % loss and 80 ms, cubic leaves a 100 Mbit/s link 99 % empty and BBR fills it (BBR: Cardwell et al., 2016)."""


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


def unacknowledged(sock: socket.socket) -> int:
    """Bytes given to the kernel that the other side's has not confirmed yet (Linux), else 0."""
    if sys.platform != "linux":
        return 0
    try:
        found = fcntl.ioctl(sock.fileno(), termios.TIOCOUTQ, bytes(4))
    except OSError:
        return 0
    return int.from_bytes(found, sys.byteorder)
