"""Invites: one line to paste with the run id and the peers to contact first.

"tw1", then base32 (RFC 4648, lower case, unpadded) of: run id, 32 bytes; number of seeds, 1 byte; each seed: transport
key, 32 bytes, host with its kind and length, port, 2 bytes; unless the run is open, an admission token with its length in 2
bytes, and the secret of its key, 32 bytes or none; CRC-32 of everything before. A wrong letter changes 5 adjacent bits, two
swapped neighbours change 10; CRC-32 detects every change within 32 bits, so each of these errors is reported as a typo at
once instead of as a time-out later.
"""

from __future__ import annotations

import base64
import binascii
import ipaddress
import re
import zlib
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from thinwire.swarm.identity.address import join_address, scope_of, split_address
from thinwire.swarm.identity.errors import HintedError

PREFIX = "tw1"
MAX_SEEDS = 4
_GROUP = 8
_LONGEST = 2048
_IGNORED = re.compile(r"[\s\u200b\u2010-\u2015-]+")


class InviteError(HintedError):
    """Error for a code that is not an invite, or that has a typo."""

    exit_code: ClassVar[int] = 2


class Seed(NamedTuple):
    """A peer to contact first: gate address "host:port" and Curve25519 transport key (32 bytes)."""

    address: str
    transport_key: bytes


@dataclass(frozen=True, slots=True)
class Invite:
    """Run id (32 bytes) and 1 to MAX_SEEDS seeds, best first.

    If the run is not open, also a token and the secret of its last subject, see admission_token.py.
    """

    run_id: bytes
    seeds: tuple[Seed, ...]
    token: bytes = b""
    secret: bytes = b""

    @property
    def note(self) -> str:
        """Sentence for the user on where the invite works; "" if one address can be dialled from everywhere."""
        scopes = {scope_of(seed.address) for seed in self.seeds}
        if "internet" in scopes:
            return ""
        where = "in this network: its addresses are private" if "network" in scopes else "on this machine"
        return f"this invite works only {where}"

    def code(self) -> str:
        """Return the line to paste. Raises ValueError for wrong lengths, addresses or numbers of seeds."""
        if len(self.run_id) != 32 or not 1 <= len(self.seeds) <= MAX_SEEDS:
            raise ValueError(f"an invite has a run id of 32 bytes and 1 to {MAX_SEEDS} seeds")
        data = self.run_id + bytes([len(self.seeds)]) + b"".join(_pack(seed) for seed in self.seeds)
        if self.token:
            data += len(self.token).to_bytes(2, "big") + self.token + self.secret
        data += zlib.crc32(data).to_bytes(4, "big")
        text = base64.b32encode(data).decode().rstrip("=").lower()
        return "-".join([PREFIX, *(text[i : i + _GROUP] for i in range(0, len(text), _GROUP))])

    @classmethod
    def parse(cls, code: str) -> Invite:
        """Parse a code. Case, spaces, line breaks and dashes do not matter. Raises InviteError."""
        text = _IGNORED.sub("", code[:_LONGEST]).lower()
        if len(code) > _LONGEST or not text.isascii() or not is_invite(text):
            raise InviteError("this is not an invite", f"an invite starts with {PREFIX}; copy the whole line")
        letters = text[len(PREFIX) :]
        try:
            data = base64.b32decode(letters.upper() + "=" * (-len(letters) % 8))
        except binascii.Error:
            raise _typo() from None
        # The last letter has spare bits, which a lenient decoder ignores.
        if base64.b32encode(data).decode().rstrip("=").lower() != letters:
            raise _typo()
        if len(data) < 4 or zlib.crc32(data[:-4]) != int.from_bytes(data[-4:], "big"):
            raise _typo()
        try:
            return cls._unpack(data[:-4])
        except (ValueError, IndexError):
            raise InviteError("the invite has an unknown form", "it may be from another version of thinwire") from None

    @classmethod
    def _unpack(cls, data: bytes) -> Invite:
        run_id, count, rest = data[:32], data[32], data[33:]
        seeds = []
        for _ in range(count):
            key, kind, length = rest[:32], rest[32], rest[33]
            host, port, rest = rest[34 : 34 + length], rest[34 + length : 36 + length], rest[36 + length :]
            if len(port) != 2 or (kind, length) not in ((4, 4), (6, 16), (0, length)):
                raise ValueError("cut short, or of an unknown kind")
            name = str(ipaddress.ip_address(host)) if kind else host.decode("ascii")
            seeds.append(Seed(join_address(name, int.from_bytes(port, "big")), key))
        size = 2 + int.from_bytes(rest[:2], "big")
        token, secret = rest[2:size], rest[size:]
        whole = not rest or (size > 2 and len(token) == size - 2 and len(secret) in (0, 32))
        if not whole or not 1 <= count <= MAX_SEEDS:
            raise ValueError("wrong number of seeds, or a damaged token")
        return cls(run_id, tuple(seeds), token, secret)


def is_invite(text: str) -> bool:
    """Return True if a text begins like an invite; it may have typos."""
    return text.lower().startswith(PREFIX)


def _typo() -> InviteError:
    return InviteError("the invite has a typo", "a letter is wrong, missing or swapped; copy the whole line again")


def _pack(seed: Seed) -> bytes:
    if len(seed.transport_key) != 32:
        raise ValueError("a transport key has 32 bytes")
    host, port = split_address(seed.address)
    try:
        ip = ipaddress.ip_address(host)
        name = bytes([ip.version, len(ip.packed)]) + ip.packed
    except ValueError:
        name = bytes([0, len(host)]) + host.encode("ascii")
    return seed.transport_key + name + port.to_bytes(2, "big")
