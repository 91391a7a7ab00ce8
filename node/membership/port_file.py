"""Port of a run's gate, stored across restarts: other peers know it, and invites contain it."""

from __future__ import annotations

from pathlib import Path

from thinwire.node.membership.known_peers_file import replace_file
from thinwire.node.runtime.disk import Disk

_LONGEST = 16


class PortFile:
    """File with the port at which the gate of a run listened last."""

    def __init__(self, path: Path, disk: Disk) -> None:
        self._path, self._disk = path, disk

    def load(self) -> int:
        """Return the stored port, 0 if there is none."""
        try:
            text = self._disk.read(self._path, _LONGEST).strip()
        except OSError:
            return 0
        port = int(text) if text.isdigit() else 0
        return port if port < 65_536 else 0

    def save(self, port: int) -> None:
        """Store the port; ignore a failing disk, because the next process then chooses again."""
        if port != self.load():
            try:
                replace_file(self._path, self._disk, b"%d\n" % port)
            except OSError:
                return
