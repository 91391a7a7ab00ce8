"""Outputs of a peer's reports on this machine: events.jsonl, status.json, and lines on the terminal."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from logging import Logger

from thinwire.node.peer.peer import Peer
from thinwire.node.peer.recover_command_file import take_request
from thinwire.node.peer.reporter import Reporter
from thinwire.node.peer.reports.background_thread import Background
from thinwire.node.peer.reports.experiment_trackers import Monitors
from thinwire.node.peer.status import Status, write_status
from thinwire.node.peer.status_parts import without_quorum
from thinwire.node.runtime.console import EVENT, LOGGER
from thinwire.node.runtime.device import memory_of_process
from thinwire.node.runtime.event_log import EventLog
from thinwire.node.runtime.load_settings import Config
from thinwire.node.runtime.process_lock import this_process, unwritable
from thinwire.swarm.messages.registry import PeerId

STATUS_SECONDS = 1.0
"""Seconds between two writes of status.json."""


class ReportSinks:
    """Outputs of one process, with the run's event log; `report` is the reporter that the peer uses.

    show: gets each status, too. Raises InUseError, NotInstalled.
    """

    def __init__(
        self,
        config: Config,
        run_id: bytes,
        peer_id: PeerId,
        device: str = "",
        group: Callable[[], str] = lambda: "",
        logger: Logger = LOGGER,
        show: Callable[[Status], None] = lambda status: None,
    ) -> None:
        events = config.directories.run(run_id).events
        self._show, self._status, self._background = show, config.directories.status, Background("reports")
        self._request, self._process = config.directories.run(run_id).recover_request, this_process()
        self._monitors = Monitors(
            config, run_id, peer_id, later=self._background.run, warn=lambda text: logger.warning("%s", text)
        )
        try:
            self._log = EventLog(events, config.events_limit, self._background.run)
        except OSError as error:
            raise unwritable(events, error) from None
        self.report = Reporter(
            self._write,
            log=lambda level, text, event: logger.log(level, "%s", text, extra={EVENT: event}),
            wall=time.time,
            name=config.name,
            device=device,
            process=self._process,
            group=group,
            memory=lambda: memory_of_process(device),
        )

    def _write(self, kind: str, fields: Mapping[str, object]) -> None:
        self._log.append(kind, fields, at=time.monotonic(), wall=time.time())
        self._monitors.take(kind, fields)

    def publish(self, peer: Peer) -> None:
        """Write status.json."""
        status = self.report.snapshot(peer)
        write_status(self._status, status)
        self._show(status)

    async def publish_repeatedly(self, peer: Peer) -> None:
        """Update status.json, and look for requests of `recover` and `revoke`, until cancelled."""
        while True:
            if take_request(self._request, self._process, time.time()):
                count = recover(peer)
                self.report.emit(
                    "recover", {"detail": "asked by hand to continue without a quorum", "fragments": count}
                )
            peer.admission.take_revocations()
            self.publish(peer)
            await asyncio.sleep(STATUS_SECONDS)

    def close(self) -> None:
        """Close the event log, wait for the thread behind it, and close the tools of others."""
        self._log.close()
        self._background.close()
        self._monitors.close()


def recover(peer: Peer) -> int:
    """Found lineages without a quorum, and wait no longer; return in how many fragments."""
    waiting = without_quorum(peer)
    for session in waiting:
        session.quorum_wait.recover()
    return len(waiting)
