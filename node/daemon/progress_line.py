"""Line with the progress of a run, for the terminal of a daemon."""

from __future__ import annotations

from thinwire.node.peer.status import Status
from thinwire.node.runtime.console import bytes_text


class ProgressLine:
    """Maker of a line from each status. The time left follows from the rounds since the first one."""

    def __init__(self) -> None:
        self._first: tuple[int, float] | None = None
        self._newest = (0, 0.0)

    def text(self, status: Status, rounds: int) -> str:
        """Return the line. rounds: the last round of this peer; 0: there is none."""
        if status.run_name and self._first is None:
            self._first = self._newest = status.round, status.wall
        if status.round > self._newest[0]:
            self._newest = status.round, status.wall
        parts = [f"round {status.round}" + (f" of {rounds}" if rounds else "")]
        if status.loss is not None:
            parts.append(f"loss {status.loss:.3f}")
        if (left := self._left(rounds)) is not None:
            parts.append(f"ETA {_clock(left)}")
        if (saved := status.fp32_bytes - status.bytes_up) > 0 and status.bytes_up:
            parts.append(f"saved {bytes_text(saved)} (×{status.saved_factor:.0f})")
        parts.append(status.phase)
        here = 1 + sum(peer.state == "alive" for peer in status.peers)
        parts.append(f"{here} peer{'s' if here > 1 else ''}")
        return " · ".join(parts)  # the last ones may be cut

    def _left(self, rounds: int) -> float | None:
        """Return the seconds until the end at the pace since the first status; None if unknown."""
        if self._first is None or not rounds or self._newest[0] <= self._first[0]:
            return None
        pace = (self._newest[1] - self._first[1]) / (self._newest[0] - self._first[0])
        return max(0, rounds - self._newest[0]) * pace


def _clock(seconds: float) -> str:
    """Format seconds: 3723 -> "1:02:03"."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
