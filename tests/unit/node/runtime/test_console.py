import contextlib
import fcntl
import json
import logging
import math
import os
import pty
import re
import struct
import termios

import pytest
from rich.cells import cell_len
from thinwire.node.runtime.console import (
    EVENT,
    LOGGER,
    LiveLine,
    bytes_text,
    clock_text,
    count_text,
    factor_text,
    log_style,
    saved_text,
    set_up_logging,
)


@pytest.fixture(autouse=True)
def quiet_afterwards():
    yield
    for handler in LOGGER.handlers[:]:
        LOGGER.removeHandler(handler)
        handler.close()
    LOGGER.propagate = True
    LOGGER.setLevel(logging.NOTSET)


def say():
    LOGGER.info("round %d", 3)
    LOGGER.debug("a detail")
    try:
        raise RuntimeError("wheel")
    except RuntimeError:
        LOGGER.exception("it broke")


@pytest.mark.parametrize("style", ["plain", "json", "rich"])
@pytest.mark.parametrize("debug", [False, True])
def test_log_file_always_has_tracebacks_and_details(tmp_path, capsys, monkeypatch, style, debug):
    monkeypatch.setenv("NO_COLOR", "1")
    log = tmp_path / "state" / "thinwire.log"
    set_up_logging(style, log, debug=debug)
    say()
    said = capsys.readouterr()
    assert said.out == "" and "round 3" in said.err and "it broke" in said.err and "\x1b" not in said.err
    assert ("a detail" in said.err) is debug
    if style == "json":
        lines = [json.loads(line) for line in said.err.splitlines()]
        assert (
            lines[0]["message"] == "round 3"
            and lines[0]["kind"] == "message"
            and lines[-1]["level"] == "error"
            and "wheel" in lines[-1]["traceback"]
        )
    else:
        assert ("Traceback" in said.err) is debug
    text = log.read_text()
    assert "a detail" in text and "Traceback" in text and "RuntimeError: wheel" in text


def test_repeated_console_setup_does_not_duplicate_lines(tmp_path, capsys):
    for _ in range(2):
        set_up_logging("plain", tmp_path / "log")
    LOGGER.info("once")
    assert capsys.readouterr().err.count("once") == 1 and (tmp_path / "log").read_text().count("once") == 1


def test_unwritable_log_file_is_a_warning(tmp_path, capsys):
    (tmp_path / "state").write_text("")
    set_up_logging("plain", tmp_path / "state" / "log")
    LOGGER.info("still here")
    err = capsys.readouterr().err
    assert "warning: cannot write the log file" in err and "still here" in err
    assert LOGGER.level == logging.DEBUG


def test_log_file_that_is_removed_begins_again(tmp_path, capsys):
    set_up_logging("plain", tmp_path / "log")
    LOGGER.info("before")
    (tmp_path / "log").unlink()
    LOGGER.info("after")
    LOGGER.info("later")
    lines = (tmp_path / "log").read_text().splitlines()
    assert [line.split()[-1] for line in lines] == ["after", "later"] and "before" in capsys.readouterr().err


def test_log_style_follows_terminal_and_setting(monkeypatch):
    for terminal, expected in ((True, "rich"), (False, "plain")):
        monkeypatch.setattr("sys.stderr.isatty", lambda terminal=terminal: terminal)
        assert log_style("auto") == expected and log_style("json") == "json"


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (999.7, "1.0 kB"),
        (1_900_000, "1.9 MB"),
        (212e6, "212 MB"),
        (5e9, "5.0 GB"),
        (2e15, "2000 TB"),
    ],
)
def test_byte_counts_are_formatted(count, text):
    assert bytes_text(count) == text


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0"), (950, "950"), (41_300, "41k"), (999_600, "1.0M"), (1_250_000, "1.2M")]
)
def test_counts_are_formatted(count, text):
    assert count_text(count) == text


@pytest.mark.parametrize(("seconds", "text"), [(5.9, "0:05"), (605.9, "10:05"), (3599, "59:59"), (3723, "1:02:03")])
def test_durations_are_formatted_as_on_a_clock(seconds, text):
    assert clock_text(seconds) == text


def test_json_lines_have_the_fields_of_the_event(capsys):
    set_up_logging("json", None)
    LOGGER.info("%s", "round 3 · loss -", extra={EVENT: {"kind": "round", "round": 3, "loss": math.nan, "level": 1}})
    line = json.loads(capsys.readouterr().err)
    assert {key: line[key] for key in ("kind", "round", "loss", "level", "message")} == {
        **{"kind": "round", "round": 3, "loss": None, "level": "info", "message": "round 3 · loss -"}
    }


def test_live_line_is_silent_without_a_terminal(capsys):
    line = LiveLine()
    line.show("round 1")
    set_up_logging("rich", None, live=line)
    LOGGER.info("round 1", extra={EVENT: {"kind": "round"}})
    line.hide()
    assert capsys.readouterr().err.count("round 1") == 1  # the message stays


def _read_to(controller: int, end: str) -> str:
    """Return the terminal's output up to `end`: one read may return a part, as the kernel passes it on in pieces."""
    said = b""
    while not said.endswith(end.encode()):
        said += os.read(controller, 1 << 16)
    return said.decode()


def test_live_line_on_a_terminal_stays_below_messages_and_survives_its_end(monkeypatch):
    controller, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    with open(terminal, "w") as stderr:
        monkeypatch.setenv("TERM", "xterm")
        monkeypatch.setattr("sys.stderr", stderr)
        live = LiveLine()
        set_up_logging("rich", None, live=live)
        live.show("round 1 \x1b[31m" + "雪" * 80)
        LOGGER.info("good", extra={EVENT: {"kind": "round"}})
        LOGGER.warning("missing", extra={EVENT: {"kind": "round"}})
        LOGGER.info("joined")
        live.hide()
        print("<end>", end="", file=stderr, flush=True)
        said = _read_to(controller, "<end>")
        lines = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", said).splitlines()
        assert max(map(cell_len, lines)) <= 80 and any(line.startswith("round 1 ?[31m雪") for line in lines)
        assert "good" not in said and said.index("missing") < said.index("joined")
        assert said.rindex("\x1b[?25h") > said.rindex("\x1b[?25l")
        os.close(controller)
        live.show("round 2")
        live.show("round 3")
        live.hide()
        # Prevent an error about buffered output when the file is closed.
        with contextlib.suppress(OSError):
            stderr.flush()
        os.dup2(os.open(os.devnull, os.O_WRONLY), stderr.fileno())


def test_json_line_of_a_path_that_is_no_text_is_not_lost(capsys):
    set_up_logging("json", None)
    LOGGER.info("cannot read %s", "a\udcff")
    assert json.loads(capsys.readouterr().err)["message"] == "cannot read a\udcff"


@pytest.mark.parametrize(
    ("factor", "text"), [(0.0, "-"), (0.38, "×0.4"), (1.0, "×1.0"), (9.94, "×9.9"), (9.96, "×10"), (212.4, "×212")]
)
def test_factor_below_ten_has_one_decimal_place(factor, text):
    assert factor_text(factor) == text
    assert saved_text(factor) == (f" ({text[1:]} times less than synchronous fp32)" if factor else "")
