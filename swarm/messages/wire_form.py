"""Encoding of messages that contain proposals, with each proposal in its wire form.

`encode` and `decode` are inverse: a decoded message has been checked to be the only one with this encoding, as far as its
proposals go (`PackedProposal.open`). All other messages are encoded as they are.
"""

from __future__ import annotations

from types import UnionType
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta
from thinwire.swarm.messages.agreement import Commit, Leave, Promise, Proof, Propose
from thinwire.swarm.messages.base import MAX_GROUP, Digest
from thinwire.swarm.messages.lineage import Certificate, Chain, ChainEntry
from thinwire.swarm.messages.proposal import Bits, PackedProposal, Proposal, bits_of, named_by

Kind = TypeVar("Kind")


class PackedCommit(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """Wire form of a Commit.

    voters: bitmap over `proposal.peers`. signatures: of their votes, 64 bytes each.
    """

    proposal: PackedProposal
    digest: Digest
    voters: Bits
    signatures: Annotated[bytes, Meta(max_length=64 * MAX_GROUP)]

    def commit(self) -> Commit:
        """Return the commit. Raises ValueError if this is not its wire form."""
        proposal = self.proposal.open()
        return Commit(proposal, self.digest, proofs_of(self.voters, self.signatures, self.proposal.table))


def packed_commit(commit: Commit) -> PackedCommit:
    """Return the wire form of a commit.

    Raises ValueError if its votes are not sorted, or of peers that it does not name.
    """
    proposal = commit.proposal.packed
    return PackedCommit(proposal, commit.digest, *votes_of(commit.votes, proposal.table))


def votes_of(votes: tuple[Proof, ...], table: tuple[bytes, ...]) -> tuple[bytes, bytes]:
    """Return a bitmap over `table` and the signatures.

    Raises ValueError if the votes are not sorted, or not of these peers.
    """
    place = {peer: at for at, peer in enumerate(table)}
    return bits_of([proof.peer for proof in votes], place), b"".join(proof.signature for proof in votes)


def proofs_of(voters: bytes, signatures: bytes, table: tuple[bytes, ...]) -> tuple[Proof, ...]:
    """Return the votes with these signatures. Raises ValueError for another form than `votes_of` returns."""
    peers = named_by(voters, table)
    proofs = tuple(Proof(peer, signatures[64 * at : 64 * at + 64]) for at, peer in enumerate(peers))
    if len(peers) > MAX_GROUP or votes_of(proofs, table) != (voters, signatures) or len(signatures) != 64 * len(peers):
        raise ValueError("not the wire form of votes")
    return proofs


PACKED: dict[type, type[msgspec.Struct]] = {Proposal: PackedProposal, Commit: PackedCommit}
"""Type of a message part -> its wire form, for types whose wire form has other fields."""

_FORMS: dict[type, Any] = dict(PACKED)
"""Wire form of each type that contains proposals.

It has the same fields, in their wire forms, except for PACKED.
"""

_CONTENTS: dict[Any, type] = {}
"""Wire form -> type; the inverse of _FORMS, except for PACKED."""


def _form(hint: Any) -> Any:
    """Return the annotation of a field in the wire form."""
    if get_origin(hint) is Annotated:
        inner, *meta = get_args(hint)
        return Annotated[(_form(inner), *meta)]
    if get_origin(hint) in (Union, UnionType):
        return Union[tuple(map(_form, get_args(hint)))]  # noqa: UP007  the members are computed
    if get_origin(hint) is tuple and get_args(hint)[1:] == (...,):
        return tuple[_form(get_args(hint)[0]), ...]  # type: ignore[misc]
    return _FORMS.get(hint, hint) if isinstance(hint, type) else hint


for _kind in (Promise, Leave, Propose, Certificate, ChainEntry):
    _hints = get_type_hints(_kind, include_extras=True)
    _FORMS[_kind] = msgspec.defstruct(
        f"Packed{_kind.__name__}",
        [(name, _form(_hints[name])) for name in _kind.__struct_fields__],
        array_like=True,
        frozen=True,
        forbid_unknown_fields=True,
    )
    _CONTENTS[_FORMS[_kind]] = _kind

_decoders: dict[Any, msgspec.msgpack.Decoder[Any]] = {
    kind: msgspec.msgpack.Decoder(_form(kind)) for kind in (*_FORMS, Chain)
}
_encoder = msgspec.msgpack.Encoder()


def encode(value: object) -> bytes:
    """Return the encoding of a message or a chain. Raises ValueError for a proposal without a wire form."""
    return _encoder.encode(_packed(value))


def decode(kind: type[Kind], body: bytes) -> Kind:
    """Return a message of this kind, or a chain. Raises ValueError and the errors of the decoder."""
    if kind not in _decoders:
        _decoders[kind] = msgspec.msgpack.Decoder(kind)
    found: Kind = unpack(_decoders[kind].decode(body))
    return found


def decode_packed(kind: Any, body: bytes) -> Any:
    """Return a message of this kind, or a chain, in its wire form, for `unpack`.

    Raises the errors of the decoder.
    """
    return _decoders[kind].decode(body)


def _packed(value: Any) -> Any:
    if isinstance(value, Proposal):
        return value.packed
    if isinstance(value, Commit):
        return packed_commit(value)
    if isinstance(value, tuple):
        return tuple(map(_packed, value))
    if type(value) in _FORMS:
        return _FORMS[type(value)](*(_packed(getattr(value, name)) for name in value.__struct_fields__))
    return value


def unpack(value: Any) -> Any:
    """Return a message, or a part of one, from its wire form.

    Raises ValueError for another encoding of the same content.
    """
    if isinstance(value, PackedProposal):
        return value.open()
    if isinstance(value, PackedCommit):
        return value.commit()
    if isinstance(value, tuple):
        return tuple(map(unpack, value))
    if type(value) in _CONTENTS:
        return _CONTENTS[type(value)](*(unpack(getattr(value, name)) for name in value.__struct_fields__))
    return value
