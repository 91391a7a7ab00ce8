"""Console output: data to stdout, everything else to stderr and always to the log file."""

from __future__ import annotations

import json
import logging
import logging.handlers
import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Literal, TypeAlias

LOGGER = logging.getLogger("thinwire")
LogStyle: TypeAlias = Literal["rich", "plain", "json"]

EVENT = "event"
"""Attribute of a log record with the event behind it: "kind" and fields."""

_FILE_BYTES = 4 << 20
_FILES = 3


def tell(message: str, hint: str) -> None:
    """Print one `error:` line and one `hint:` line on stderr."""
    print(f"error: {_one_line(message)}", file=sys.stderr)
    if hint:
        print(f"hint: {_one_line(hint)}", file=sys.stderr)


def warn(message: str) -> None:
    """Print one `warning:` line on stderr."""
    print(f"warning: {_one_line(message)}", file=sys.stderr)


def replace_closed() -> None:
    """Replace the standard streams that the parent process has closed, as in `2>&-`, by /dev/null."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # The new one gets the lowest free number, so that no later file or socket does.
            setattr(sys, name, open(os.open(os.devnull, os.O_RDWR), mode, errors="backslashreplace"))


def discard_unwritable() -> None:
    """Discard output that a closed pipe or terminal does not take.

    Else the interpreter tries again when it ends, and its exit code is 120.
    """
    for stream in (sys.stdout, sys.stderr):
        if stream is None or stream.closed:  # the parent process may have closed it
            continue
        try:
            stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _one_line(text: str) -> str:
    # The text may come from a peer or a file: prevent extra lines and control of the terminal.
    return "".join(letter if letter.isprintable() else " " for letter in " ".join(text.split()))


def plain(text: str) -> str:
    """Return text without control characters: names come from other machines."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def record_traceback(error: BaseException, log: Path | None, *, show: bool) -> bool:
    """Write a traceback to the log file, and with `show` to stderr; return whether the file took it."""
    text = "".join(traceback.format_exception(error))
    if show:
        print(text, end="", file=sys.stderr)
    if log is None:
        return False
    try:
        log.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        with open(descriptor, "a", encoding="utf-8", errors="backslashreplace") as file:
            file.write(text)
    except OSError:
        return False
    return True


def log_style(wanted: str) -> LogStyle:
    """Resolve "auto": rich on a terminal, plain elsewhere."""
    match wanted:
        case "rich" | "plain" | "json":
            return wanted
        case _:
            return "rich" if sys.stderr.isatty() else "plain"


class _Json(logging.Formatter):
    """Formatter of one JSON object a line: wall, level, message, and the event's kind and fields.

    A number that is not finite is null.
    """

    def format(self, record: logging.LogRecord) -> str:
        import msgspec

        own = {"wall": record.created, "level": record.levelname.lower(), "message": record.getMessage()}
        if record.exc_info:
            own["traceback"] = self.formatException(record.exc_info)
        fields = {"kind": "message", **getattr(record, EVENT, {}), **own}
        try:
            return msgspec.json.encode(fields).decode()
        except UnicodeEncodeError:  # a path that is no text: escaped, the line is pure ASCII
            return json.dumps(msgspec.to_builtins(fields))


class _Short(logging.Formatter):
    """Formatter that omits tracebacks; --debug selects another one."""

    def format(self, record: logging.LogRecord) -> str:
        mark = "" if record.levelno < logging.WARNING else f"{record.levelname.lower()}: "
        return f"{self.formatTime(record, '%H:%M:%S')} {mark}{record.getMessage()}"


def set_up_logging(style: LogStyle, log: Path | None, *, debug: bool = False, live: LiveLine | None = None) -> None:
    """Send the logger "thinwire" to stderr in `style`, and to the file `log`.

    The file gets debug messages too, and is rotated. live: line below the messages, which replaces those of good rounds.

    A second call starts over. A log file that cannot be written gives one warning. NO_COLOR is respected.
    """
    for handler in LOGGER.handlers[:]:
        LOGGER.removeHandler(handler)
        handler.close()
    LOGGER.setLevel(logging.DEBUG)
    LOGGER.propagate = False
    LOGGER.addHandler(_terminal(style, debug, live))
    if log is not None:
        _add_file(LOGGER, log)


def _add_file(logger: logging.Logger, log: Path) -> None:
    try:
        log.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        file = _LogFile(log, maxBytes=_FILE_BYTES, backupCount=_FILES - 1, encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        logger.warning("cannot write the log file %s: %s", log, error.strerror)
        return
    file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    file.setLevel(logging.DEBUG)
    logger.addHandler(file)


@contextmanager
def file_logger(log: Path) -> Iterator[logging.Logger]:
    """Logger of one peer in a program of the user's own.

    All its messages go to the file `log`, which is rotated. The logger "thinwire" gets those that its level allows, so they
    reach the program's handlers, or stderr without any.
    """
    logger = logging.Logger(LOGGER.name)
    logger.addHandler(_PassOn())
    _add_file(logger, log)
    try:
        yield logger
    finally:
        for handler in logger.handlers:
            handler.close()


class _PassOn(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        if LOGGER.isEnabledFor(record.levelno):
            LOGGER.handle(record)


class _LogFile(logging.handlers.RotatingFileHandler):
    """Log file that reports a full disk once, without stopping output to the terminal.

    It begins again if it is removed.
    """

    warned = False

    def emit(self, record: logging.LogRecord) -> None:
        with suppress(OSError, ValueError):
            if self.stream is not None and not os.fstat(self.stream.fileno()).st_nlink:
                removed, self.stream = self.stream, None  # opened again by the base class, which handles errors
                removed.close()
        super().emit(record)

    def handleError(self, record: logging.LogRecord) -> None:
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            super().handleError(record)
        elif not self.warned:
            self.warned = True
            LOGGER.warning("cannot write the log file %s: %s", self.baseFilename, error.strerror)


class LiveLine:
    """Last line of a terminal, which each `show` replaces; log messages appear above it.

    It shows nothing on a terminal that cannot move its cursor.
    """

    def __init__(self) -> None:
        from rich.console import Console
        from rich.live import Live

        self.console = Console(stderr=True)
        self._live = Live(
            console=self.console, auto_refresh=False, transient=True, redirect_stdout=False, redirect_stderr=False
        )
        self.able = self.console.is_terminal and not self.console.is_dumb_terminal

    @property
    def width(self) -> int:
        """Most characters of a line: one in the last column would make some terminals wrap."""
        return max(1, self.console.width - 1)

    def show(self, text: str) -> None:
        """Replace the line; text that does not fit is cut, so that nothing wraps."""
        from rich.text import Text

        if not self.able:
            return
        line = Text(plain(text))
        line.truncate(self.width, overflow="ellipsis")
        try:
            if not self._live.is_started:
                self._live.start()
            self._live.update(line, refresh=True)
        except OSError:
            self.able = False  # the terminal was closed; the daemon leaves the swarm in order

    def hide(self) -> None:
        """Remove the line, and show the cursor again."""
        with suppress(OSError):
            self._live.stop()


class _NotGoodRounds(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        return record.levelno > logging.INFO or getattr(record, EVENT, {}).get("kind") != "round"


def _terminal(style: LogStyle, debug: bool, live: LiveLine | None) -> logging.Handler:
    handler: logging.Handler
    if style == "rich":
        from rich.console import Console
        from rich.logging import RichHandler

        handler = RichHandler(
            console=live.console if live else Console(stderr=True),
            show_path=False,
            show_level=False,
            log_time_format="%H:%M:%S",
            markup=False,
        )
        if not debug:
            handler.setFormatter(_NoTraceback())
        if live is not None and live.able:
            handler.addFilter(_NotGoodRounds())
    else:
        handler = logging.StreamHandler(sys.stderr)
        plain = logging.Formatter("%(asctime)s %(levelname)s %(message)s") if debug else _Short()
        handler.setFormatter(_Json() if style == "json" else plain)
    handler.setLevel(logging.DEBUG if debug else logging.INFO)
    return handler


class _NoTraceback(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return record.getMessage()


def saved_text(factor: float) -> str:
    """Return how many times more synchronous training in fp32 would have sent, in brackets; 0: ""."""
    return f" ({_times(factor)} times less than synchronous fp32)" if factor else ""


def factor_text(factor: float) -> str:
    """Format a factor: "×12", "×0.4"; 0, if it is unknown: "-"."""
    return f"×{_times(factor)}" if factor else "-"


def _times(factor: float) -> str:
    return f"{factor:.{0 if factor >= 9.95 else 1}f}"


def bytes_text(count: float) -> str:
    """Format a number of bytes, in powers of 1000: 1900000 -> "1.9 MB"."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if count < 999.5 or unit == "TB":
            break
        count /= 1000
    return f"{count:.0f} {unit}" if unit == "B" or count >= 99.5 else f"{count:.1f} {unit}"


def clock_text(seconds: float) -> str:
    """Format a duration as on a clock: 83 -> "1:23", 3723 -> "1:02:03"."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def count_text(count: float) -> str:
    """Format a number shortly: 41300 -> "41k", 950 -> "950", 1.25e6 -> "1.2M"."""
    if count < 999.5:
        return f"{count:.0f}"
    return f"{count / 1e3:.0f}k" if count < 999_500 else f"{count / 1e6:.1f}M"
