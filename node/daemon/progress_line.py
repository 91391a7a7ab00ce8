"""Line with the progress of a run, for the terminal of a daemon."""

from __future__ import annotations

from collections.abc import Iterator

from thinwire.node.peer.status import Status
from thinwire.node.runtime.console import bytes_text, clock_text, factor_text


class ProgressLine:
    """Maker of a line from each status. The time left follows from the rounds since the first one."""

    def __init__(self) -> None:
        self._first: tuple[int, float] | None = None
        self._newest = (0, 0.0)

    def text(self, status: Status, rounds: int, width: int) -> str:
        """Return the line with the most details that has at most `width` characters, or else the shortest one.

        Each has round, loss, time left and saved bytes, as far as they are known. rounds: the last round of this peer; 0:
        there is none.
        """
        if status.run_name and self._first is None:
            self._first = self._newest = status.round, status.wall
        if status.round > self._newest[0]:
            self._newest = status.round, status.wall
        line = ""
        for line in _lines(status, rounds, self._left(rounds)):
            if len(line) <= width:
                break
        return line

    def _left(self, rounds: int) -> float | None:
        """Return the seconds until the end at the pace since the first status; None if unknown."""
        if self._first is None or not rounds or self._newest[0] <= self._first[0]:
            return None
        pace = (self._newest[1] - self._first[1]) / (self._newest[0] - self._first[0])
        return max(0, rounds - self._newest[0]) * pace


def _lines(status: Status, rounds: int, left: float | None) -> Iterator[str]:
    """Yield the line in several lengths, from the longest to the shortest. left: seconds until the end."""
    end, loss = f" of {rounds}" if rounds else "", status.loss
    spared = status.fp32_bytes - status.bytes_up
    saved = f"saved {bytes_text(spared)}" if spared > 0 and status.bytes_up else ""
    parts = [
        f"round {status.round}{end}",
        "" if loss is None else f"loss {loss:.3f}",
        "" if left is None else f"ETA {clock_text(left)}",
        saved and f"{saved} ({factor_text(status.saved_factor)})",
    ]
    here = 1 + sum(peer.state == "alive" for peer in status.peers)
    details = [status.phase, f"{here} peer{'s' if here > 1 else ''}"]
    fetching = [status.phase, status.fetching] if status.fetching else details
    for known in (fetching, details, details[:1], []):
        yield " · ".join(filter(None, [*parts, *known]))
    parts[3], short = saved, "" if loss is None else f"{loss:.2f}"
    yield " · ".join(filter(None, parts))
    parts[0], parts[1] = parts[0].replace(" of ", "/"), short and f"loss {short}"
    yield " · ".join(filter(None, parts))
    time = "" if left is None else f"ETA {_hours(left)}"
    for round in (f"{status.round}/{rounds}" if rounds else f"{status.round}", f"{status.round}"):
        yield " ".join(filter(None, (round, short, time, saved)))


def _hours(seconds: float) -> str:
    """Format seconds shortly: 3723 -> "1h02", 59 -> "0:59"."""
    minutes = int(seconds) // 60
    return f"{minutes // 60}h{minutes % 60:02d}" if minutes >= 60 else clock_text(seconds)
