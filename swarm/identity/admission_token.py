"""Admission tokens: chains of signed grants from the run's author to a peer.

A token is part of a peer's record, so that each member checks it by itself, wherever the record comes from. The first grant
is signed by the author of the manifest, each later one by the subject of the grant before, and the last subject is the peer.
A subject is the id of a peer, or of the key in an invite: the holder of that key signs the last grant to itself, so an invite
for unknown peers discloses nothing that others could use. `further` falls from grant to grant and bounds the chain.

The mode of admission is the length of the longest chain: 2 for closed runs, an invite of the author and the grant to its
holder; more if members may invite, too; 0 for open runs, which need no token.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, ClassVar

import msgspec
from msgspec import Meta
from thinwire.swarm.identity.errors import HintedError
from thinwire.swarm.identity.identity import Identity, peer_id_of, short, verify
from thinwire.swarm.identity.invite import Invite
from thinwire.swarm.messages.registry import U32, Id, PeerId, Signature

MAX_GRANTS = 4
"""Longest chain: the author invites B, and B invites C; an invite and its use are a grant each."""

PREFIX = 8
"""Least bytes of a revoked id; the bytes of an id that are displayed as its serial."""

_GRANT, _REVOCATION = "admission", "revocation"


class TokenError(HintedError):
    """A token that does not admit its holder, or that the owner of a key may not issue."""

    exit_code: ClassVar[int] = 5


class Grant(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """Permission for `subject` to join, until `expires` (seconds since 1970; 0: for ever).

    At most `further` grants may follow it. key: Ed25519 key of the issuer; empty: the author's.
    """

    subject: Id
    expires: U32
    further: Annotated[int, Meta(ge=0, lt=MAX_GRANTS)]
    key: Annotated[bytes, Meta(max_length=32)]
    signature: Signature


Chain = tuple[Grant, ...]

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Annotated[Chain, Meta(max_length=MAX_GRANTS)])


def encode(chain: Chain) -> bytes:
    """Return the token of a chain; empty for an empty one."""
    return _encoder.encode(chain) if chain else b""


def decode(token: bytes) -> Chain:
    """Return the grants of a token without checking signatures; () for no token. Raises TokenError."""
    if not token:
        return ()
    try:
        chain: Chain = _decoder.decode(token)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        raise TokenError("the admission token is malformed", "ask for a new invite") from None
    if encode(chain) != token or not chain:
        raise TokenError("the admission token is malformed", "ask for a new invite")
    return chain


def _signed(grant: Grant) -> tuple[bytes, ...]:
    return grant.subject, grant.expires.to_bytes(4, "big"), bytes([grant.further])


def _issue(issuer: Identity, run_id: bytes, chain: Chain, subject: PeerId, expires: int, further: int) -> Chain:
    grant = Grant(subject, expires, further, issuer.public_key if chain else b"", bytes(64))
    return (*chain, msgspec.structs.replace(grant, signature=issuer.sign(_GRANT, run_id, *_signed(grant))))


def expiry(token: bytes) -> int:
    """Return until when a token admits its peer, in seconds since 1970; 0: for ever. Raises TokenError."""
    return min((grant.expires for grant in decode(token) if grant.expires), default=0)


def preferred(stored: bytes, offered: bytes, peer: PeerId, wall: float) -> bytes:
    """Return the stored or the offered token of a peer: the one that more grants may follow.

    A stored token that has expired does not count. Each return by an invite of another member would otherwise make the chain
    of a peer longer, until it may not invite others.
    """
    try:
        ours, theirs = decode(stored), decode(offered)
    except TokenError:
        return offered
    usable = bool(ours) and ours[-1].subject == peer and not 0 < expiry(stored) < wall
    return stored if usable and (not theirs or ours[-1].further > theirs[-1].further) else offered


def is_revoked(token: bytes, peer: PeerId, target: bytes) -> bool:
    """Return True if the revocation of `target` excludes a peer with this token.

    The target is the id, or the start of the id, of the peer or of a subject of its chain: an invite, or a member that has
    invited it. True for a malformed token.
    """
    try:
        return any(one.startswith(target) for one in (peer, *(grant.subject for grant in decode(token))))
    except TokenError:
        return True


@dataclass(frozen=True, slots=True)
class AdmissionPolicy:
    """Rule by which each member judges the records of others.

    author: Ed25519 public key. longest: longest chain of grants; 0: none is needed. trial, per_network: see the manifest's
    `admission`; trial 0: newcomers need no endorsement.
    """

    run_id: bytes
    author: bytes
    longest: int = 0
    trial: int = 0
    per_network: int = 0

    def on_trial(self, token: bytes, peer: PeerId) -> bool:
        """Return True if a peer needs an endorsement of the members: it has no token of the author."""
        if not self.trial or peer == peer_id_of(self.author):
            return False
        return bool(_refusal(token, peer, self.run_id, self.author, 2))

    def refusal(self, token: bytes, peer: PeerId) -> str:
        """Return why a peer with this token is not admitted; empty if it is.

        Expiry and revocations are not checked.
        """
        if not self.longest or peer == peer_id_of(self.author):
            return ""
        return _refusal(token, peer, self.run_id, self.author, self.longest)

    def revocation(self, item: bytes) -> bytes:
        """Return the revoked id, or the start of it, of a revocation that the author has signed; else empty."""
        target, signature = item[:-64], item[-64:]
        valid = PREFIX <= len(target) <= 32 and verify(self.author, _REVOCATION, signature, self.run_id, target)
        return target if valid else b""


@lru_cache(maxsize=8192)
def _refusal(token: bytes, peer: PeerId, run_id: bytes, author: bytes, longest: int) -> str:
    try:
        chain = decode(token)
    except TokenError as error:
        return str(error)
    if not chain:
        return "this run admits peers with an invite only"
    if len(chain) > longest or chain[-1].subject != peer:
        return "the admission token is for another peer or mode of admission"
    key, further = author, MAX_GRANTS
    for place, grant in enumerate(chain):
        if place:
            key = grant.key
            if peer_id_of(key) != chain[place - 1].subject:
                return "the admission token is not a chain"
        elif grant.key:
            return "the admission token is not the author's"
        if grant.further >= further or not verify(key, _GRANT, grant.signature, run_id, *_signed(grant)):
            return "the admission token has a wrong signature"
        further = grant.further
    return ""


def revoke(author: Identity, run_id: bytes, target: bytes) -> bytes:
    """Return the author's signed statement that excludes all ids that begin with `target`.

    Raises ValueError for a target with fewer than PREFIX or more than 32 bytes.
    """
    if not PREFIX <= len(target) <= 32:
        raise ValueError(f"an id to revoke has {PREFIX} to 32 bytes")
    return target + author.sign(_REVOCATION, run_id, target)


def token_of(invite: Invite, identity: Identity) -> bytes:
    """Return the token with which the owner of `identity` joins by an invite; empty if it has none.

    Raises TokenError if the invite is for another peer.
    """
    chain = decode(invite.token)
    if not chain or chain[-1].subject == identity.peer_id:
        return invite.token
    holder = Identity.generate(invite.secret) if invite.secret else None
    if holder is None or holder.peer_id != chain[-1].subject or not chain[-1].further:
        raise TokenError(
            f"the invite is for peer {short(chain[-1].subject)}, and this is {short(identity.peer_id)}",
            "ask for an invite with the id that `thinwire id` prints",
        )
    return encode(_issue(holder, invite.run_id, chain, identity.peer_id, 0, chain[-1].further - 1))


@dataclass(frozen=True, slots=True)
class Inviter:
    """A peer that may or may not invite others.

    It has its keys, its own token, the policy of the run, and the time since 1970.
    """

    identity: Identity
    token: bytes
    policy: AdmissionPolicy
    wall: float = 0.0

    def invite(self, invite: Invite, peer: PeerId | None = None, *, expires: int = 0) -> Invite:
        """Return an invite with a token: for `peer`, or for any holder of its secret.

        The secret follows from our key, the run and the expiry, so the invite without an expiry stays the same after each
        restart. It ends with our own token, if that expires earlier. Raises TokenError if this peer may not invite.
        """
        author, longest = self.identity.public_key == self.policy.author, self.policy.longest
        if not longest:  # An open run admits all; an invite for one key exempts its holder from the trial.
            return self._with(invite, (), peer, expires, 0, b"") if author and peer and self.policy.trial else invite
        chain = () if author else decode(self.token)  # The author may have come back by an invite of another peer.
        further = longest - 1 if author else chain[-1].further - 1 if chain else -1
        # An invite of a peer whose own token has expired would admit no peer.
        if further < (0 if peer else 1) or (chain and 0 < expiry(self.token) < self.wall):
            raise TokenError("this peer may not invite others", "ask the author of the run for an invite")
        if peer is not None:  # As many further grants as the holder of an invite for any peer may make.
            return self._with(invite, chain, peer, expires, max(0, further - 1), b"")
        # Ed25519 signatures are deterministic, and this one is never sent.
        secret = self.identity.sign("invite", self.policy.run_id, expires.to_bytes(4, "big"))[:32]
        return self._with(invite, chain, Identity.generate(secret).peer_id, expires, further, secret)

    def _with(self, invite: Invite, chain: Chain, subject: PeerId, expires: int, further: int, secret: bytes) -> Invite:
        token = encode(_issue(self.identity, self.policy.run_id, chain, subject, expires, further))
        return Invite(invite.run_id, invite.seeds, token, secret)


def serial(invite: Invite) -> str:
    """Return the hexadecimal serial by which an invite can be revoked; empty for one without a token."""
    chain = decode(invite.token)
    return chain[-1].subject[:PREFIX].hex() if chain else ""
