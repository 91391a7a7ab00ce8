"""The manifest of a checkpoint.

It has the contents, the hash of every file, and this peer's signature over both.
"""

from __future__ import annotations

from typing import Annotated, TypeAlias

import msgspec
from blake3 import blake3
from msgspec import Meta
from thinwire.swarm.identity.identity import Identity, peer_id_of, short, verify

FORMAT = 5
"""Version of the checkpoint format; the error for another version names both numbers."""

CHUNK_BYTES = 4 << 20
"""Bytes hashed as one chunk, so that damage is located and a part can be fetched separately."""

Value: TypeAlias = None | bool | int | float | str

_Hex = Annotated[str, Meta(pattern="^([0-9a-f]{64})$")]
_Lives = Annotated[str, Meta(pattern="^([0-9a-f]{32})*$")]
_Chain = Annotated[str, Meta(pattern="^([0-9a-f]{2})*$")]
_DOMAIN = "checkpoint"


class CheckpointManifestError(ValueError):
    """A manifest, or a file that it describes, differs from what this peer wrote.

    The message names the difference.
    """


class OtherFormat(CheckpointManifestError):
    """This peer wrote the manifest with a version of thinwire that has another checkpoint format."""


class FileEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One file: its length in bytes, its blake3, and the blake3 of each CHUNK_BYTES of it."""

    name: str
    nbytes: Annotated[int, Meta(ge=0)]
    blake3: _Hex
    chunks: tuple[_Hex, ...]

    def check(self, data: bytes) -> None:
        """Check that `data` is the file's content.

        Raises CheckpointManifestError, naming the first chunk that differs.
        """
        if len(data) == self.nbytes and blake3(data).hexdigest() == self.blake3:
            return
        view = memoryview(data)
        for index, digest in enumerate(self.chunks):
            if blake3(view[index * CHUNK_BYTES : (index + 1) * CHUNK_BYTES]).hexdigest() != digest:
                raise CheckpointManifestError(
                    f"{self.name}: chunk {index + 1} of {len(self.chunks)} differs from its hash"
                )
        raise CheckpointManifestError(f"{self.name} differs from its hash")


class Hasher:
    """Hashes a file while it is written."""

    def __init__(self) -> None:
        self._whole = blake3()
        self._chunk = blake3()
        self._chunks: list[str] = []
        self._nbytes = 0

    def update(self, data: bytes | memoryview) -> None:
        """Add the next bytes of the file."""
        view = memoryview(data)
        self._whole.update(view)
        while view:
            room = CHUNK_BYTES - self._nbytes % CHUNK_BYTES
            part, view = view[:room], view[room:]
            self._chunk.update(part)
            self._nbytes += len(part)
            if self._nbytes % CHUNK_BYTES == 0:
                self._end_chunk()

    def _end_chunk(self) -> None:
        self._chunks.append(self._chunk.hexdigest())
        self._chunk = blake3()

    def entry(self, name: str) -> FileEntry:
        """Return the manifest entry of the complete file."""
        if self._nbytes % CHUNK_BYTES:
            self._end_chunk()
        return FileEntry(name, self._nbytes, self._whole.hexdigest(), tuple(self._chunks))


class StandingEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Last round of a fragment with separate rounds, its members, their lives, and the chain."""

    round: Annotated[int, Meta(ge=0)]
    members: tuple[_Hex, ...]
    lives: _Lives = ""
    chain: _Chain = ""


class CheckpointContents(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The signed contents.

    `serial` counts this store's checkpoints, `written` is wall time in seconds since 1970.

    `previous` is the blake3 of the manifest before this one, "" for the first; hashes and ids are hexadecimal.
    `standings`: by fragment number, if fragments have separate rounds. `lives`: of the members, see Proposal.
    `chain`: proves round and members, see collectives/consensus/chain.py; in hexadecimal.
    """

    format: int = FORMAT
    serial: Annotated[int, Meta(ge=1)]
    run_id: _Hex
    round: Annotated[int, Meta(ge=0)]
    digest: _Hex
    members: tuple[_Hex, ...]
    written: float
    previous: Annotated[str, Meta(pattern="^([0-9a-f]{64})?$")]
    files: tuple[FileEntry, ...]
    values: dict[str, Value]
    standings: dict[int, StandingEntry] | msgspec.UnsetType = msgspec.UNSET
    lives: _Lives = ""
    chain: _Chain = ""


class _Sealed(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    body: msgspec.Raw
    signer: _Hex
    signature: Annotated[str, Meta(pattern="^[0-9a-f]{128}$")]


def seal(body: CheckpointContents, identity: Identity) -> bytes:
    """Return the manifest as written.

    It is JSON with the body, the signer's public key and its signature over the body's bytes.
    """
    raw = msgspec.json.encode(body)
    signature = identity.sign(_DOMAIN, raw).hex()
    return msgspec.json.encode(_Sealed(msgspec.Raw(raw), identity.public_key.hex(), signature))


class _Listed(msgspec.Struct, frozen=True):
    """The part of the contents that is equal in all formats."""

    files: tuple[FileEntry, ...]


def files_of(data: bytes) -> tuple[FileEntry, ...]:
    """Return the files that a manifest of any peer and any format lists.

    Raises CheckpointManifestError unless the signature fits these bytes and the key in the manifest.
    """
    try:
        sealed = msgspec.json.decode(data, type=_Sealed)
        raw = bytes(sealed.body)
        files = msgspec.json.decode(raw, type=_Listed).files
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise CheckpointManifestError(f"the manifest is damaged: {error}") from None
    if not verify(bytes.fromhex(sealed.signer), _DOMAIN, bytes.fromhex(sealed.signature), raw):
        raise CheckpointManifestError("the manifest's signature does not match its content")
    return files


def unseal(data: bytes, identity: Identity) -> CheckpointContents:
    """Check and read a manifest.

    Raises CheckpointManifestError unless `identity` signed exactly these bytes.
    """
    try:
        sealed = msgspec.json.decode(data, type=_Sealed)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise CheckpointManifestError(f"the manifest is damaged: {error}") from None
    if sealed.signer != identity.public_key.hex():
        signer = short(peer_id_of(bytes.fromhex(sealed.signer)))
        raise CheckpointManifestError(f"signed by peer {signer}, not by this one ({short(identity.peer_id)})")
    raw = bytes(sealed.body)
    if not verify(identity.public_key, _DOMAIN, bytes.fromhex(sealed.signature), raw):
        raise CheckpointManifestError("the manifest's signature does not match its content")
    try:
        version = msgspec.json.decode(raw, type=dict[str, msgspec.Raw]).get("format", b"none")
        if bytes(version) != str(FORMAT).encode():
            raise OtherFormat(f"written in format {bytes(version).decode()}; this version reads format {FORMAT}")
        return msgspec.json.decode(raw, type=CheckpointContents)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise CheckpointManifestError(f"the manifest is damaged: {error}") from None
