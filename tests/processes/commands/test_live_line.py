"""The last line of `thinwire start` on a terminal."""

import re
import signal

from kit.real.terminal import CAP, ESCAPE, Terminal
from rich.cells import cell_len


def test_start_on_a_terminal_shows_its_progress_in_one_line(machine):
    here = machine(rounds=6, steps=20)
    home = here.path / "founder"
    words = ("--host", "127.0.0.1", "--threads", 1, "--data", here.text, "--home", home, "--wait-for", 2)
    terminal = Terminal("start", here.manifest, *words, warm=True)
    try:
        terminal.wait_for("thinwire join tw1-")
        end = terminal.wait_for("for 2 peers")
        invite = re.search(r"[\r\n]thinwire join (tw1-\S+)\r\n", terminal.text)
        assert invite is not None, terminal.text
        other = here.join("other", invite[1])
        assert other.exit() == 0 and terminal.exit() == 0, terminal.text[end:]
    finally:
        terminal.end()
    lines = [line for line in re.split(r"[\r\n]+", ESCAPE.sub("", terminal.output)) if line.startswith("round ")]
    assert lines and max(map(cell_len, lines)) < 80
    assert re.search(r"round \d of 6 · loss [\d.]+ · ", "\n".join(lines)) and "saved" in lines[-1]
    # Messages of good rounds are replaced by the line, and the cursor is back.
    assert "tok/s" not in terminal.text
    assert terminal.output.rindex("\x1b[?25h") > terminal.output.rindex("\x1b[?25l")
    log = (home / "state" / "thinwire.log").read_text()
    assert "INFO round 6 · loss " in log


def test_peer_whose_terminal_closes_leaves_in_order(machine):
    here = machine(steps=4)
    founder = here.daemon("founder")
    words = ("--host", "127.0.0.1", "--threads", 1, "--data", here.text, "--home", founder.home)
    terminal = Terminal("start", here.manifest, *words, warm=True)
    try:
        terminal.wait_for(" · loss ", after=terminal.wait_for("thinwire join tw1-"))
        terminal.close()
        terminal.process.send_signal(signal.SIGHUP)  # not every system sends it
        assert terminal.process.wait(CAP) == 0
        founder.starts.append(0)
        assert founder.of("left")
    finally:
        terminal.end()
