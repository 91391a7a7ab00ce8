"""Addresses: "host:port", where host is an IPv4 address, an IPv6 address in brackets, or a name."""

from __future__ import annotations

import ipaddress
import re
from functools import lru_cache
from typing import Literal, TypeAlias

ADDRESS_BYTES = 64
"""Longest address in a record or an invite, in bytes."""

_SPLIT = re.compile(r"(\[[0-9a-fA-F:.]{2,45}\]|[0-9A-Za-z.-]{1,62}):([1-9][0-9]{0,4})", re.ASCII)
_LABEL = re.compile(r"[0-9A-Za-z]([0-9A-Za-z-]*[0-9A-Za-z])?", re.ASCII)

_cached = lru_cache(maxsize=8192)
"""Decorator of pure functions of an address: records and handshakes bring the same ones again."""

Scope: TypeAlias = Literal["machine", "network", "internet"]
"""From where an address can be dialled: this machine, this private network, everywhere."""


@_cached
def scope_of(address: str) -> Scope:
    """Return the scope of "host:port"; a name counts as "internet".

    Raises ValueError as `split_address` does.
    """
    host, _ = split_address(address)
    try:
        ip = ipaddress.ip_address(host)
    except ValueError:
        return "machine" if host == "localhost" else "internet"
    plain = ip.ipv4_mapped or ip if isinstance(ip, ipaddress.IPv6Address) else ip
    # 100.64.0.0/10 is shared by the customers of a provider (RFC 6598), and Python does not call it private.
    local = plain.is_private or (plain.version == 4 and not plain.is_global)
    return "machine" if plain.is_loopback else "network" if local else "internet"


@_cached
def subnet_of(host: str) -> str:
    """Return the subnet that counts as one source: /24 of IPv4, /48 of IPv6.

    Raises ValueError if `host` is no IP address.
    """
    ip = ipaddress.ip_address(host)
    plain = ip.ipv4_mapped or ip if isinstance(ip, ipaddress.IPv6Address) else ip
    return str(ipaddress.ip_network((plain, 24 if plain.version == 4 else 48), strict=False))


@_cached
def source_of(address: str) -> str:
    """Return what counts as one source at "host:port": its subnet, or a name itself.

    Raises ValueError as `split_address` does.
    """
    host, _ = split_address(address)
    try:
        return subnet_of(host)
    except ValueError:
        return host


@_cached
def split_address(address: str) -> tuple[str, int]:
    """Return host (IPv6 without brackets) and port of an address that can be dialled.

    Raises ValueError for anything else: multicast, unspecified, link-local, reserved and broadcast addresses, names
    that a resolver would read as a number ("0x7f.1"), port 0.
    """
    if len(address) > ADDRESS_BYTES:
        raise ValueError(f"address longer than {ADDRESS_BYTES} bytes")
    match = _SPLIT.fullmatch(address)
    if match is None or int(match[2]) > 65535:
        raise ValueError(f"not host:port: {address!r}")
    host = match[1].strip("[]")
    if host == match[1] and ":" not in host and host[host.rfind(".") + 1 :][:1].isalpha():
        if not all(_LABEL.fullmatch(label) for label in host.split(".")):
            raise ValueError(f"not a host name: {host!r}")
        return host, int(match[2])
    try:
        ip = ipaddress.ip_address(host)
    except ValueError:
        raise ValueError(f"not a host: {host!r}") from None
    if (ip.version == 6) != (host != match[1]):
        raise ValueError(f"IPv6 is written in brackets, IPv4 without: {address!r}")
    plain = ip.ipv4_mapped or ip if isinstance(ip, ipaddress.IPv6Address) else ip
    if plain.is_multicast or plain.is_unspecified or plain.is_link_local:
        raise ValueError(f"not an address of one host: {host}")
    if plain.is_reserved and not plain.is_loopback:
        raise ValueError(f"reserved address: {host}")
    return host, int(match[2])


@_cached
def is_ip(address: str) -> bool:
    """Return True if an address can be dialled without resolving a name."""
    try:
        ipaddress.ip_address(split_address(address)[0])
    except ValueError:
        return False
    return True


def join_address(host: str, port: int) -> str:
    """Return "host:port". Raises ValueError as `split_address` does."""
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    split_address(address)
    return address
