"""Keys of a peer: an Ed25519 key that signs, and a Curve25519 key that its transport encrypts with.

The two keys are separate; a signed PeerRecord binds the second to the first. Ed25519: RFC 8032; Curve25519: RFC 7748.
"""

from __future__ import annotations

import errno
import hashlib
import os
import secrets
import stat
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import ClassVar

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from thinwire.swarm.identity.errors import HintedError
from thinwire.swarm.identity.regular_file import open_regular
from thinwire.swarm.messages.registry import PeerId

SIGNATURE_BYTES = 64
REMEMBERED = 8192
"""Largest number of valid signatures to cache, at about 100 bytes each."""

_FILE_MARK = "thinwire-identity-1"
_FILE_LIMIT = 4096


class IdentityError(HintedError):
    """Error for a key file that cannot be used as it is."""

    exit_code: ClassVar[int] = 3


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Identity:
    """Keys of a peer.

    `transport_public` and `transport_secret` are raw 32-byte Curve25519 keys, as CURVE uses them.
    """

    peer_id: PeerId
    public_key: bytes
    transport_public: bytes
    transport_secret: bytes
    _signer: Ed25519PrivateKey
    _signing_secret: bytes

    @classmethod
    def generate(cls, seed: bytes | None = None) -> Identity:
        """Return new keys: random ones, or those derived from a 32-byte `seed` (simulations).

        Raises ValueError if the seed has another length.
        """
        if seed is None:
            return cls._of(secrets.token_bytes(32), secrets.token_bytes(32))
        if len(seed) != 32:
            raise ValueError(f"a seed has 32 bytes, not {len(seed)}")
        signing, transport = (
            hashlib.blake2b(seed, digest_size=32, person=use).digest() for use in (b"tw-signing", b"tw-transport")
        )
        return cls._of(signing, transport)

    @classmethod
    def _of(cls, signing: bytes, transport: bytes) -> Identity:
        signer = Ed25519PrivateKey.from_private_bytes(signing)
        public = signer.public_key().public_bytes_raw()
        transport_public = X25519PrivateKey.from_private_bytes(transport).public_key().public_bytes_raw()
        return cls(peer_id_of(public), public, transport_public, transport, signer, signing)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Identity:
        """Read a key file. Raises IdentityError if it is absent, readable by others, or not a key file."""
        path = Path(path)
        try:
            with open_regular(path) as file:
                status = os.fstat(file.fileno())
                if os.name == "posix" and status.st_mode & 0o077:
                    mode = stat.S_IMODE(status.st_mode)
                    raise IdentityError(f"{path} can be read by other users (mode {mode:04o})", f"chmod 600 {path}")
                data = file.read(_FILE_LIMIT + 1)
        except OSError as error:
            raise IdentityError(
                f"cannot read the key file {path}: {error.strerror}", "check the path and its owner"
            ) from error
        try:
            mark, signing, transport = data.decode("ascii").split()
            keys = bytes.fromhex(signing), bytes.fromhex(transport)
            if mark != _FILE_MARK or any(len(key) != 32 for key in keys):
                raise ValueError("not a key file")
        except ValueError:
            # Without a cause, because its text could contain parts of a secret.
            raise IdentityError(
                f"{path} is not a thinwire key file, or it is damaged",
                "restore it from a copy, or move it away: a new identity is then made",
            ) from None
        return cls._of(*keys)

    @classmethod
    def load_or_create(cls, path: str | os.PathLike[str]) -> Identity:
        """Read the key file, or create one (mode 0600, in a directory created with mode 0700).

        If two processes start at the same time, both get the keys of the first. Raises IdentityError as `load` does.
        """
        path = Path(path)
        if os.path.lexists(path):
            return cls.load(path)
        identity = cls.generate()
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            _write_new(path, identity._text().encode("ascii"))
        except FileExistsError:
            pass
        except OSError as error:
            raise IdentityError(
                f"cannot write the key file {path}: {error.strerror}",
                "make room on that disk, or name a directory where there is room: --home DIR"
                if error.errno in (errno.ENOSPC, errno.EDQUOT)
                else "name a directory that you may write to: --home DIR",
            ) from error
        return cls.load(path)

    def _text(self) -> str:
        return f"{_FILE_MARK}\n{self._signing_secret.hex()}\n{self.transport_secret.hex()}\n"

    def sign(self, domain: str, *parts: bytes) -> bytes:
        """Return a signature (64 bytes) over the parts, each with its length, for the use named by `domain`."""
        statement = _statement(domain, parts)
        signature = self._signer.sign(statement)
        _VALID.add(_name(self.public_key, signature, statement))
        return signature

    def __repr__(self) -> str:
        return f"Identity({short(self.peer_id)})"


def _write_new(path: Path, data: bytes) -> None:
    """Create `path` with `data`, atomically; never overwrite an existing file (FileExistsError)."""
    draft = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with open(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(descriptor)
        # Unlike a rename, a link fails if another process has created the file in the meantime.
        os.link(draft, path)
    finally:
        os.unlink(draft)
    directory = os.open(path.parent, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def _statement(domain: str, parts: tuple[bytes, ...]) -> bytes:
    pieces = [b"thinwire/", domain.encode("ascii"), b"/1\0"]
    for part in parts:
        pieces += (len(part).to_bytes(8, "big"), part)
    return b"".join(pieces)


class RecentHashes:
    """Set of the newest hashes, at most `limit` and one more for each thread that adds at the same time.

    It has two halves, the newest hashes and those before them. Threads may share it, because hashes are never deleted
    one by one.
    """

    def __init__(self, limit: int) -> None:
        self._limit, self._halves = limit, (set[bytes](), set[bytes]())

    def __contains__(self, name: bytes) -> bool:
        newest, older = self._halves
        return name in newest or name in older

    def __len__(self) -> int:
        return sum(map(len, self._halves))

    def add(self, name: bytes) -> None:
        """Add a hash; if the newer half is full, it replaces the older one."""
        newest, _ = self._halves
        newest.add(name)
        if len(newest) >= self._limit // 2:
            self._halves = set(), newest


_VALID = RecentHashes(REMEMBERED)
"""Hashes of valid signatures, checked or made by this process.

Threads share it, because certificates are checked beside the event loop.
"""


def _name(public_key: bytes, signature: bytes, statement: bytes) -> bytes:
    return hashlib.blake2b(b"".join((public_key, signature, statement)), digest_size=32).digest()


@lru_cache(maxsize=4096)
def _verifier(public_key: bytes) -> Ed25519PublicKey:
    return Ed25519PublicKey.from_public_bytes(public_key)


@lru_cache(maxsize=8192)
def peer_id_of(public_key: bytes) -> PeerId:
    """Return the blake2b-256 hash of a raw Ed25519 public key.

    Cached, because the peer of each record is compared with the author of the run.
    """
    return hashlib.blake2b(public_key, digest_size=32).digest()


def verify(public_key: bytes, domain: str, signature: bytes, *parts: bytes) -> bool:
    """Return True if `signature` is a valid signature of the parts for this key and domain.

    Returns False for malformed input. Valid signatures are cached by hash, because a vote arrives alone and again in a
    certificate, and gossip arrives many times. The signatures of this process are cached when they are made: they come back
    in certificates and gossip, and in a simulation all peers are in one process.
    """
    if len(public_key) != 32 or len(signature) != SIGNATURE_BYTES:
        return (
            False  # With other lengths, another key and signature could have the same concatenation, and so its hash.
        )
    statement = _statement(domain, parts)
    name = _name(public_key, signature, statement)
    if name in _VALID:
        return True
    try:
        _verifier(public_key).verify(signature, statement)
    except (InvalidSignature, ValueError):
        return False
    _VALID.add(name)
    return True


def short(peer_id: PeerId) -> str:
    """Return the first 8 hexadecimal digits of a peer id, for display only."""
    return peer_id[:4].hex()
