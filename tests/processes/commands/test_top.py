"""`thinwire top` on a pseudo-terminal beside a real daemon, and all views after a division of its event log."""

import json

from kit.real.terminal import ESCAPE, Terminal
from kit.real.waiting import until
from rich.cells import cell_len
from thinwire.node.cli.page.run_view import RunView
from thinwire.node.peer.status import read_status
from thinwire.node.runtime.directories import directories


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
        (link,) = read_status(directories(daemon.home).status).peers
        assert min(link.up, link.down, link.rtt) > 0
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


def test_views_work_after_the_event_log_was_divided(machine):
    here = machine(steps=2, rounds=0)
    daemon = here.found("a")
    daemon.wait("round", round=2)
    daemon.signal(15)
    assert daemon.exit() == 0
    run = directories(daemon.home).run(bytes.fromhex(daemon.of("start")[0]["run"]))
    with open(run.events, "a") as file:
        while file.tell() < 260_000:
            file.write(json.dumps({"at": 0.0, "wall": 0.0, "kind": "filler", "text": "x" * 200}) + "\n")
    (daemon.home / "node.toml").write_text('events_limit = "1MB"\n')
    here.found("a")
    newest = daemon.wait("round", least=4)["round"]  # read across the division
    assert [segment.suffix for segment in (run.path / "events").iterdir()] == [".gz"]
    assert run.events.stat().st_size < 100_000
    rounds = [event["round"] for event in daemon.events if event["kind"] == "round"]
    assert rounds == list(range(1, rounds[-1] + 1)) and rounds[-1] >= newest
    state = RunView(directories(daemon.home)).state()
    assert [one["round"] for one in state["rounds"]][: len(rounds)] == rounds
    done = until(
        "the status of a running daemon",
        lambda: (done := daemon.command("status", "--json")).stdout.startswith('{"running":true') and done,
    )
    assert json.loads(done.stdout)["status"]["memory"] > 10_000_000
    logs = daemon.command("logs", "-n", "1")
    assert logs.returncode == 0 and logs.stdout
