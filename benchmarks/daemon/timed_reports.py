"""`thinwire` with a clock in its reports: status, event log, TensorBoard. For benchmarks.daemon.monitoring.

    python -m benchmarks.daemon.timed_reports FILE start run.toml …

FILE gets the CPU seconds of these reports so far, about once a second.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from thinwire.node.cli.main import main
from thinwire.node.peer.peer import Peer
from thinwire.node.peer.report_sinks import ReportSinks
from thinwire.node.peer.reports.background_thread import Background


class TimedReports:
    """Sum of the CPU seconds of all reports of this process; `install` puts it around them."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._spent = {"reports": 0.0, "thread": 0.0}

    def install(self) -> None:
        """Time what the event loop does for reports, and the thread behind it."""
        publish, write, run = ReportSinks.publish, ReportSinks._write, Background.run

        def timed_publish(sinks: ReportSinks, peer: Peer) -> None:
            self._timed("reports", lambda: publish(sinks, peer))
            self._file.write_text(str(sum(self._spent.values())))

        def timed_write(sinks: ReportSinks, kind: str, fields: Mapping[str, object]) -> None:
            self._timed("reports", lambda: write(sinks, kind, fields))

        def timed_run(thread: Background, work: Callable[[], None]) -> bool:
            return run(thread, lambda: self._timed("thread", work))

        for owner, name, timed in (
            (ReportSinks, "publish", timed_publish),
            (ReportSinks, "_write", timed_write),
            (Background, "run", timed_run),
        ):
            setattr(owner, name, timed)

    def _timed(self, part: str, work: Callable[[], None]) -> None:
        before = time.thread_time()
        try:
            work()
        finally:
            self._spent[part] += time.thread_time() - before  # each part is of one thread


if __name__ == "__main__":
    TimedReports(Path(sys.argv[1])).install()
    sys.exit(main(sys.argv[2:]))
