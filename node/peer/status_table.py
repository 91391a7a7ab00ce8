"""Status of a daemon for people: a few lines and a table of peers."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text
from thinwire.node.peer.reports.plan_outcome_text import comparison_text
from thinwire.node.peer.status import PeerStatus, Status, unresponsive
from thinwire.node.runtime.console import bytes_text, count_text, plain, saved_text


def show(status: Status, wall: float) -> None:
    """Print to stdout, at `wall` seconds since 1970; with a wide layout for pipes, so that nothing wraps."""
    console = _console()
    console.print(summary(status, wall), highlight=False)
    alarms = status.alarm, unresponsive(status, wall)
    for alarm in filter(None, alarms):
        console.print(Text(f"alarm: {alarm}", style="bold red"))
    if status.peers:
        console.print(table(status.peers))


def show_peers(status: Status) -> None:
    """Print the peers to stdout, each with its state and all reasons: ban, score, suspicion."""
    if not status.peers:
        print("no other peers")
        return
    _console().print(reasons(status.peers))


def _console() -> Console:
    console = Console()
    return console if console.is_terminal else Console(width=200)


def summary(status: Status, wall: float) -> Text:
    """Return the facts about the run, one a line. Text from peers is never interpreted as markup."""
    rounds = f"{status.round} of {status.rounds}" if status.rounds else str(status.round)
    up = bytes_text(status.bytes_up) + saved_text(status.saved_factor)
    facts = [
        ("run", f"{status.run_name} {status.run[:8]}".strip()),
        ("peer", f"{status.name} {status.peer[:8]}".strip()),
        ("phase", status.phase),
        ("round", rounds),
        ("loss", "-" if status.loss is None else f"{status.loss:.3f}"),
        *(
            (("held out", f"{status.held_out:.3f} after round {status.held_out_round}"),)
            if status.held_out is not None
            else ()
        ),
        ("speed", f"{count_text(status.tokens_per_second)} tokens/s on {status.device or '?'}"),
        ("up", up),
        ("down", bytes_text(status.bytes_down)),
        ("exchange", f"{status.sync_seconds:.1f} s a round"),
        (
            "digest",
            (status.digest[:16] or "-") + ("" if status.alike else " (of this replica alone: each differs a little)"),
        ),
        ("reachable", ", ".join(status.addresses) or "-"),
        *((("seen", status.reach),) if status.reach else ()),
        *((("relays", relays),) if (relays := _relays(status)) else ()),
        *((("memory", f"not shared: {status.no_sharing}"),) if status.no_sharing else ()),
        ("checkpoint", status.checkpoint or "-"),
        *((("holds", status.seat),) if status.seat else ()),
        *((("group", status.group),) if status.group else ()),
        *((("waits", status.stalled),) if status.stalled else ()),
        *((("fetches", status.fetching),) if status.fetching else ()),
        *((("lineage", status.lineage),) if status.lineage else ()),
        *((("plan", comparison_text(status.plan)),) if status.plan else ()),
        ("process", f"{status.process}, wrote this {max(0.0, wall - status.wall):.0f} s ago"),
    ]
    return Text("\n".join(f"{name:<11}{plain(value)}" for name, value in facts))


def table(peers: tuple[PeerStatus, ...]) -> Table:
    """Return a table with one row per peer."""
    result = Table(box=None, header_style="bold", pad_edge=False)
    for column in ("peer", "name", "state", "address"):
        result.add_column(column)
    for column in ("round", "loss", "seen"):
        result.add_column(column, justify="right")
    result.add_column("why")
    for peer in peers:
        loss = "-" if peer.loss is None else f"{peer.loss:.3f}"
        cells = (
            peer.peer[:8],
            peer.name,
            peer.state,
            peer.address,
            str(peer.round),
            loss,
            f"{peer.age:.0f} s",
            " · ".join(filter(None, (peer.seat, _relayed(peer, peers), *_why(peer)))),
        )
        result.add_row(*(Text(plain(cell)) for cell in cells))
    return result


def reasons(peers: tuple[PeerStatus, ...]) -> Table:
    """Return a table with state and reasons of each peer; a long reason takes several lines."""
    result = Table(box=None, header_style="bold", pad_edge=False)
    for column in ("peer", "name", "state"):
        result.add_column(column, no_wrap=True)
    result.add_column("why", overflow="fold")
    for peer in peers:
        silence = f"no message for {peer.age:.0f} s" if peer.state in ("suspect", "dead") and peer.age else ""
        cells = peer.peer[:16], peer.name, peer.state, " · ".join(filter(None, (*_why(peer), silence))) or "-"
        result.add_row(*(Text(plain(cell)) for cell in cells))
    return result


def _why(peer: PeerStatus) -> tuple[str, str, str]:
    """Return ban, score or absence from the last round; diagnosis; obstacle; "" for none."""
    return peer.reason, peer.diagnosis, peer.obstacle


def _relays(status: Status) -> str:
    """Return circuits and bytes that this peer relays, and its refusals; empty if it was never asked to."""
    if not (status.relay_circuits or status.relayed_bytes or status.relay_refused):
        return ""
    left = "" if status.relay_left is None else f", {bytes_text(status.relay_left)} left for now"
    refused = [f"{count} refused: {reason}" for reason, count in status.relay_refused.items()]
    return "; ".join([f"{status.relay_circuits} circuits, {bytes_text(status.relayed_bytes)}{left}", *refused])


def _relayed(peer: PeerStatus, peers: tuple[PeerStatus, ...]) -> str:
    names = {one.peer: one.name for one in peers}
    if peer.shared:
        return "shared memory"
    return f"relayed by {names.get(peer.relay) or peer.relay[:8]}" if peer.relay else ""
