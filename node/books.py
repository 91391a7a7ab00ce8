"""A peer's books on this machine: events.jsonl, status.json, and lines on the terminal."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping

from .config import Config
from .console import LOGGER
from .events import EventLog
from .lock import unwritable
from .peer import Peer
from .report import Reporter
from .status import this_process, write_status

STATUS_SECONDS = 1.0
"""Time between two writes of status.json."""


class Books:
    """Opens the event log of a run. `report` is what the peer writes to. Raises InUseError."""

    def __init__(self, config: Config, run_id: bytes, device: str = "") -> None:
        events = config.directories.run(run_id).events
        try:
            self._log, self._status = EventLog(events), config.directories.status
        except OSError as error:
            raise unwritable(events, error) from None
        self.report = Reporter(
            self._write, say=LOGGER.log, wall=time.time, name=config.name, device=device, process=this_process()
        )

    def _write(self, kind: str, fields: Mapping[str, object]) -> None:
        self._log.append(kind, fields, at=time.monotonic(), wall=time.time())

    def tell(self, peer: Peer) -> None:
        """Write status.json."""
        write_status(self._status, self.report.snapshot(peer))

    async def keep_telling(self, peer: Peer) -> None:
        """Keep status.json up to date until cancelled."""
        while True:
            self.tell(peer)
            await asyncio.sleep(STATUS_SECONDS)

    def close(self) -> None:
        """Close the event log."""
        self._log.close()
