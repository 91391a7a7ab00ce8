"""The commands `thinwire invite` and `thinwire revoke`, which sign with the key of this machine."""

from __future__ import annotations

from typing import ClassVar

from thinwire.node.daemon.options import join_line
from thinwire.node.membership.ban_file import BanFile
from thinwire.node.peer.status import Status
from thinwire.node.runtime.directories import Directories
from thinwire.node.runtime.disk import RealDisk
from thinwire.swarm.identity.admission_token import PREFIX, Inviter, decode, encode, revoke, serial
from thinwire.swarm.identity.errors import HintedError
from thinwire.swarm.identity.identity import Identity
from thinwire.swarm.identity.invite import Invite
from thinwire.swarm.manifest.manifest import Manifest, ManifestError
from thinwire.swarm.manifest.parser import MAX_TOML, parse
from thinwire.swarm.membership.gossip_items import revocation_item

LEAST_DIGITS = 8
"""Least number of digits of the id of a known peer; a revocation cannot be taken back."""


class WrongIdError(HintedError):
    """An id on the command line that names no peer or invite, or more than one."""

    exit_code: ClassVar[int] = 2


class NotAuthorError(HintedError):
    """A command that only the author of the run may use."""

    exit_code: ClassVar[int] = 5


def invitation(status: Status, directories: Directories, peer: str, expires: int) -> tuple[str, str]:
    """Return an invite and its serial: for the peer with this hexadecimal id (empty: any).

    expires: seconds since 1970; 0: never. Raises TokenError, WrongIdError.
    """
    for known in status.peers:
        if known.peer == peer.lower() and known.state == "banned":
            reason = f"peer {known.peer[:8]} is banned ({known.reason}), so no invite admits it"
            raise WrongIdError(reason, "it can join with another key, or when the ban has ended")
    standing = Invite.parse(status.invite)
    if not (peer or (standing.token and expires)):
        return status.invite, serial(standing)
    identity, manifest, run_id = _run(status, directories)
    # The author is the first issuer of every token. Other peers are subjects in the invite that they show.
    policy = manifest.admission.policy(run_id, identity.public_key if _is_author(status, directories) else b"")
    inviter = Inviter(identity, encode(decode(standing.token)[:-1]), policy, status.wall)
    made = inviter.invite(standing, bytes.fromhex(_full_peer_id(peer)) if peer else None, expires=expires)
    return made.code(), serial(made)


def command(code: str, status: Status, directories: Directories) -> str:
    """Return the command with which others join by an invite; without options if the run's files are lost."""
    try:
        return join_line(code, _manifest(status, directories).model)
    except (OSError, ManifestError):
        return f"thinwire join {code}"


def revoked(status: Status, directories: Directories, target: str) -> str:
    """Exclude a peer or an invite; return the hexadecimal id that was revoked.

    Peers that have joined by an invite of an excluded peer are excluded, too. Raises WrongIdError, NotAuthorError.
    """
    target = target.lower()
    peers = [one.peer for one in status.peers if len(target) >= LEAST_DIGITS and one.peer.startswith(target)]
    if len(peers) == 1:
        target = peers[0]
    try:
        start = bytes.fromhex(target)
    except ValueError:
        start = b""
    if not PREFIX <= len(start) <= 32:
        raise WrongIdError(
            f"{target!r} is the id of {len(peers) or 'no'} known peers and no serial of an invite",
            f"`thinwire status` shows the peers; a peer that is not there needs {2 * PREFIX} or more digits of its id",
        )
    identity, _, run_id = _run(status, directories)
    if not _is_author(status, directories):
        raise NotAuthorError("only the author of the run can revoke an admission", "ask the peer that founded the run")
    if identity.peer_id.startswith(start):
        raise WrongIdError(
            "this is the author of the run, whose admission needs no invite and cannot be revoked",
            "`thinwire status` shows the ids of the other peers",
        )
    file = BanFile(directories.run(run_id).revocations, RealDisk())
    file.save((*file.load(), revocation_item(revoke(identity, run_id, start))))
    return target


def _run(status: Status, directories: Directories) -> tuple[Identity, Manifest, bytes]:
    return Identity.load(directories.key), _manifest(status, directories), bytes.fromhex(status.run)


def _manifest(status: Status, directories: Directories) -> Manifest:
    file = directories.run(bytes.fromhex(status.run)).manifest
    return parse(RealDisk().read(file, MAX_TOML), "the run's manifest")


def _is_author(status: Status, directories: Directories) -> bool:
    identity, manifest, run_id = _run(status, directories)
    return manifest.run_id(identity.public_key) == run_id


def _full_peer_id(peer: str) -> str:
    if len(peer) != 64 or set(peer.lower()) - set("0123456789abcdef"):
        raise WrongIdError(
            f"{peer!r} is no peer id", "a peer id has 64 hexadecimal digits; `thinwire id` prints it there"
        )
    return peer
