"""`thinwire top` on a pseudo-terminal beside a real daemon."""

from kit.real.terminal import ESCAPE, Terminal
from rich.cells import cell_len


def test_top_shows_each_tab_of_a_daemon_and_quits(machine):
    here = machine(steps=4)
    daemon = here.found("a")
    other = here.join("b", daemon.invite())
    daemon.wait("round", contributors=2)
    terminal = Terminal("top", "--home", daemon.home)
    try:
        end = terminal.wait_for("peers   ##")
        assert "thinwire e2e" in terminal.text and "\x1b[" in terminal.output
        for key, wanted in (
            ("2", " ms"),
            ("r", "ready   "),
            ("4", "joined"),
            ("\t", "speed"),
            ("\x1b[A", "peers   ##"),
        ):
            terminal.type(key)
            end = terminal.wait_for(wanted, after=end)
        frames = [ESCAPE.sub("", frame).splitlines() for frame in terminal.output.split("\x1b[H")[1:-1]]
        frames = [frame for frame in frames if frame]
        assert len(frames) > 4 and {len(frame) for frame in frames} == {24}
        assert {cell_len(line) for frame in frames for line in frame} == {80}
        other.kill()
        terminal.wait_for("peers   #_", after=end)
        terminal.type("q")
        assert terminal.exit() == 0
        # The normal screen and the cursor are back.
        assert terminal.output.rindex("\x1b[?1049l") > terminal.output.rindex("\x1b[?1049h")
        assert terminal.output.rindex("\x1b[?25h") > terminal.output.rindex("\x1b[?25l")
    finally:
        terminal.end()
    for environment in ({"TERM": "dumb"}, {"NO_COLOR": "1"}):
        terminal = Terminal("top", "--home", daemon.home, environment=environment)
        try:
            terminal.wait_for("speed")
            terminal.type("q")
            assert terminal.exit() == 0
            colours = [
                code for code in ESCAPE.findall(terminal.output) if code.endswith("m") and code[1:3] in ("31", "32")
            ]
            assert not colours and (environment.get("TERM") != "dumb" or "\x1b" not in terminal.output)
        finally:
            terminal.end()
