"""The command `thinwire recover`: who would continue without a quorum, and the request to the daemon."""

from __future__ import annotations

import time
from typing import ClassVar

from thinwire.node.peer.recover_command_file import RecoverRequest, withdraw, write_request
from thinwire.node.peer.status import Stall, Status, alive, read_status
from thinwire.node.runtime.console import plain
from thinwire.node.runtime.directories import Directories
from thinwire.swarm.identity.errors import HintedError

WAIT = 60.0
"""Seconds that the command waits for a lineage."""

ANSWER = 10.0
"""Seconds in which a daemon takes the request; it looks for one every second."""

LOOK = 0.1
"""Seconds between two looks at the status."""


ADVICE = """\
`thinwire recover --now` does it at once. If the absent peers continue elsewhere, too, one of the two lineages
prevails when they meet, and the rounds of the other one are lost."""


class NothingToRecoverError(HintedError):
    """A quorum is here, or the run needs none."""

    exit_code: ClassVar[int] = 6


class NotRecoveredError(HintedError):
    """The daemon has founded no lineage in time."""

    exit_code: ClassVar[int] = 1


def check(status: Status) -> None:
    """Raise NothingToRecoverError if the daemon does not lack a quorum."""
    if status.stalls:
        return
    if status.phase in ("starting", "joining"):
        raise NothingToRecoverError(
            "this peer has no state of the run yet; nothing to recover",
            "try again when `thinwire status` shows a round",
        )
    reason = "a quorum of the members is here" if status.alike else "this run needs no quorum"
    raise NothingToRecoverError(f"{reason}; nothing to recover", "`thinwire status` shows what a round waits for")


def plan(status: Status, wall: float) -> str:
    """Return what `--now` would do, at `wall` seconds since 1970."""
    return "\n\n".join([*(_plan(status, stall, wall) for stall in status.stalls), ADVICE])


def _plan(status: Status, stall: Stall, wall: float) -> str:
    states = {one.peer: one.state for one in status.peers}
    since = time.strftime("%H:%M:%S", time.localtime(status.wall - stall.seconds))
    absent = [f"{peer[:8]} ({states.get(peer) or 'unknown'})" for peer in stall.absent]
    stay = [f"{peer[:8]} (this peer)" if peer == status.peer else peer[:8] for peer in stall.founders]
    if stall.until is None:
        itself = "never (exchange.orphan = 0)"
    else:
        itself = f"in {max(0.0, stall.until - (wall - status.wall)):.0f} s"
    facts = [
        ("round", f"{stall.round}: no quorum of its {len(stall.members)} members since {since}"),
        ("absent", ", ".join(absent) or "no member, but the results of the round, or votes of members, are missing"),
        ("continue", f"{', '.join(stay)}: {_counted(stall)}"),
        ("by itself", itself),
        *((("but", stall.obstacle),) if stall.obstacle else ()),
    ]
    if len(status.stalls) > 1:
        facts.insert(0, ("fragment", str(stall.fragment)))
    return "\n".join(f"{name:<11}{plain(text)}" for name, text in facts)


def _counted(stall: Stall) -> str:
    known = len(set(stall.founders).intersection(stall.members))
    return f"{known} of {len(stall.members)} members"


def recover(status: Status, directories: Directories) -> str:
    """Ask the daemon for a lineage, and wait for it; return what has happened.

    Raises NotRecoveredError, NothingToRecoverError.
    """
    path = directories.run(bytes.fromhex(status.run)).recover_request
    write_request(path, RecoverRequest(status.process, status.process_started, time.time()))
    began, before, last = time.monotonic(), len(status.continued), status
    while (waited := time.monotonic() - began) < WAIT:
        time.sleep(LOOK)
        last = read_status(directories.status) or last
        if last.process != status.process or not alive(last, directories.lock):
            withdraw(path)
            raise NotRecoveredError("the daemon has ended", "start it again")
        if (new := last.continued[before:]) and not last.stalls:
            return "\n".join(new)
        if waited > ANSWER and withdraw(path):
            raise NotRecoveredError(
                "the daemon does not answer", "is it stopped? `thinwire status` shows its last report"
            )
        if not last.stalls and last.wall > status.wall:
            withdraw(path)
            if last.lineage and last.lineage != status.lineage:
                return f"this peer continues in lineage {last.lineage}"
            check(last)
    why = "; ".join({stall.obstacle for stall in last.stalls if stall.obstacle})
    others = ", ".join(sorted({peer[:8] for stall in last.stalls for peer in stall.founders if peer != status.peer}))
    why = why or (f"waiting for the statements of {others}" if others else "the founding has not ended")
    raise NotRecoveredError(
        f"no lineage after {WAIT:.0f} s: {why}",
        "the daemon continues to try until a quorum is here; `thinwire status` shows when it has succeeded",
    )
