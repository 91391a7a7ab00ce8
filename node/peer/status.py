"""Status of a daemon in status.json, and the check whether the daemon that wrote it still runs."""

from __future__ import annotations

import errno
import os
from contextlib import suppress
from pathlib import Path
from typing import Literal, TypeAlias

import msgspec
from thinwire.collectives.costs.plan_outcome import Comparison
from thinwire.node.runtime.process_lock import holder

_LIMIT = 4 << 20

STALE_SECONDS = 30.0
"""Age of a status, which is written each second, at which a running daemon counts as stuck."""


class PeerStatus(msgspec.Struct, frozen=True, kw_only=True):
    """Another peer, as this one knows it.

    `age`: seconds since its last message, 0: none has come. `loss`: None until it has announced one. `seat`: its stage of the
    model and its group; empty: the whole model. `diagnosis`: the cause of its trouble and the evidence; empty if nothing
    stands out. `relay`: id of the peer that relays between the two; empty: none. `shared`: bulk data goes through shared
    memory. `up`, `down`: bytes sent to it and received from it by this process. `rtt`: seconds to it and back over an idle
    link; 0: unknown. `obstacle`: why there is no link to it, if the last attempt to open one failed.
    """

    peer: str
    name: str = ""
    state: str = ""
    address: str = ""
    round: int = 0
    age: float = 0.0
    loss: float | None = None
    reason: str = ""
    seat: str = ""
    diagnosis: str = ""
    relay: str = ""
    shared: bool = False
    up: int = 0
    down: int = 0
    rtt: float = 0.0
    obstacle: str = ""


class LinkStatus(msgspec.Struct, frozen=True, array_like=True):
    """Link from `sender` to `receiver` (the first 16 digits of their ids), as the sender has measured it.

    rtt: seconds there and back; rate: bytes/s; 0: unknown. Other peers announce their links with each round, rounded to an
    eighth of a doubling.
    """

    sender: str
    receiver: str
    rtt: float
    rate: float


class FragmentStatus(msgspec.Struct, frozen=True, kw_only=True):
    """Fragment with separate rounds: its last committed round, and the members of the next one.

    lineage: its name; empty for the first one.
    """

    fragment: int
    round: int
    members: tuple[str, ...]
    lineage: str = ""


class StateTransfer(msgspec.Struct, frozen=True, kw_only=True):
    """Transfer of the state after `round` of a fragment to this peer, for `seconds` so far.

    `bytes`: size of the state; `here`: bytes of it that are present. `sources`: peers that may be asked for chunks. `silence`:
    seconds since the last chunk.
    """

    fragment: int
    round: int
    bytes: int
    here: int
    sources: tuple[str, ...]
    seconds: float
    silence: float


class Stall(msgspec.Struct, frozen=True, kw_only=True):
    """Wait for a quorum of the members after `round` of a fragment, for `seconds` so far.

    `absent`: members that cannot be reached or have no vote. `founders`: peers that would continue without them, this one
    included. `until`: seconds until they do so by themselves; None: never. `obstacle`: why they cannot; mostly empty.
    """

    fragment: int
    round: int
    members: tuple[str, ...]
    absent: tuple[str, ...]
    founders: tuple[str, ...]
    seconds: float
    until: float | None = None
    obstacle: str = ""


Phase: TypeAlias = Literal["starting", "joining", "training", "exchanging", "waiting", "leaving", "done"]
"""Phase of a peer's process."""


class Status(msgspec.Struct, frozen=True, kw_only=True):
    """State of a daemon at `wall` (seconds since 1970).

    Ids and digests are hexadecimal, byte counts are totals of the run. `process` and `process_started` (seconds since
    1970, from the system) identify the process uniquely; a process number alone does not. `phase`: see Phase; other
    versions may have more. `alike`: True if the digests of all peers in one round are equal. `fp32_bytes`: bytes that
    synchronous data parallelism in fp32 would have sent for the same steps. `reach`: how other peers see and
    reach this one, see Reach. `alarm`: a problem for a person, such as a
    checkpoint that cannot be written. `seat`: as in PeerStatus; `group`: state of the group with which this peer holds
    the model. `stalled`: why the round does not end, for whom this peer waits, and until when; empty if it makes progress.
    `stalls`: the same for programs. `fetching`: size of the state that is being fetched, the part that is here, number of
    sources, and duration, or the wait for offers of one; empty if none is. `transfers`: the same for programs, without
    that wait. `lineage`: name of the lineage, if it is not the first one. `continued`: the lineages that this process has
    seen begin, as text for people. `held_out`: loss on held-out text after round `held_out_round`;
    None: not evaluated yet. `ready`: peers that have announced a contribution to the round in progress. `memory`: bytes of
    main memory that the process occupies; `gpu_memory`: bytes of the GPU's memory that it has reserved. What this peer
    relays between others: `relay_circuits` that are open, `relayed_bytes` since the start of the process, `relay_left`
    bytes that it may still pass on (None: no limit), `relay_refused`, the number of refusals by reason.
    `no_sharing`: why this peer shares no memory with other peers of its machine; empty if it can. `plan`: figures of
    a round as a plan for these peers, speeds and links has them, and as measured; empty before the fourth round. `links`:
    those that are known, of this peer and of others. `fragments`: those that this peer holds; empty if there is only one.
    """

    process: int
    process_started: float
    wall: float
    peer: str
    name: str = ""
    run: str = ""
    run_name: str = ""
    invite: str = ""
    phase: str = "starting"
    device: str = ""
    addresses: tuple[str, ...] = ()
    reach: str = ""
    round: int = 0
    rounds: int = 0
    digest: str = ""
    alike: bool = True
    loss: float | None = None
    held_out: float | None = None
    held_out_round: int = 0
    tokens_per_second: float = 0.0
    bytes_up: int = 0
    bytes_down: int = 0
    fp32_bytes: int = 0
    sync_seconds: float = 0.0
    peers: tuple[PeerStatus, ...] = ()
    checkpoint: str = ""
    alarm: str = ""
    seat: str = ""
    group: str = ""
    stalled: str = ""
    stalls: tuple[Stall, ...] = ()
    fetching: str = ""
    transfers: tuple[StateTransfer, ...] = ()
    lineage: str = ""
    continued: tuple[str, ...] = ()
    ready: tuple[str, ...] = ()
    memory: int = 0
    gpu_memory: int = 0
    relay_circuits: int = 0
    relayed_bytes: int = 0
    relay_left: int | None = None
    relay_refused: dict[str, int] = {}
    no_sharing: str = ""
    plan: tuple[Comparison, ...] = ()
    links: tuple[LinkStatus, ...] = ()
    fragments: tuple[FragmentStatus, ...] = ()

    @property
    def saved_factor(self) -> float:
        """Ratio of the bytes of synchronous data parallelism to the bytes sent; 0 before anything was sent."""
        return self.fp32_bytes / self.bytes_up if self.bytes_up else 0.0


def write_status(path: Path, status: Status) -> bool:
    """Replace the file in one step: readers see the old or the new content. False if the disk refuses.

    On a full disk the file is overwritten in the blocks that it has, so that it shows the alarm of the full disk.
    """
    draft, content = path.with_name(f".{path.name}.{os.getpid()}"), msgspec.json.encode(status)
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        with open(descriptor, "wb") as file:
            file.write(content)
        os.replace(draft, path)
    except OSError as error:
        with suppress(OSError):
            draft.unlink(missing_ok=True)
        return error.errno in (errno.ENOSPC, errno.EDQUOT) and _overwrite(path, content)
    return True


def _overwrite(path: Path, content: bytes) -> bool:
    try:
        with open(path, "r+b", buffering=0) as file:
            if len(content) > os.fstat(file.fileno()).st_blocks * 512:
                return False
            if os.pwrite(file.fileno(), content, 0) != len(content):
                return False
            file.truncate(len(content))
    except OSError:
        return False
    return True


def read_status(path: Path) -> Status | None:
    """Return the last status; None if there is no valid one.

    Raises PermissionError for that of another user.
    """
    try:
        with open(path, "rb") as file:
            return msgspec.json.decode(file.read(_LIMIT), type=Status)
    except PermissionError:
        raise
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None


def unresponsive(status: Status, wall: float) -> str:
    """Return a text about a daemon that has written no status for long; empty if it has.

    `wall`: seconds since 1970.
    """
    age = wall - status.wall
    if age < STALE_SECONDS:
        return ""
    return (
        f"process {status.process} has written no status for {age:.0f} s: "
        "it is suspended, hangs, or cannot write to its disk"
    )


def alive(status: Status, lock: Path) -> bool:
    """Return True if the process that wrote the status still holds the lock file of its directories."""
    return holder(lock) == (status.process, status.process_started)
