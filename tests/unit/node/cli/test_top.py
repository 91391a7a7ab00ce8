"""Screen of `thinwire top`: all tabs at 80×24, symbols, sparkline, rates."""

import pytest
from rich.cells import cell_len
from thinwire.node.cli import main
from thinwire.node.cli.page.run_view import RunView
from thinwire.node.cli.top.screen import GLYPHS, PLAIN_GLYPHS, TABS, Rates, everything, screen, sparkline, symbol
from thinwire.node.peer.status import PeerStatus, Status, write_status
from thinwire.node.runtime.directories import directories
from thinwire.node.runtime.event_log import EventLog
from thinwire.node.runtime.process_lock import hold, this_process

ME, IN, LATE = "aa" * 32, "bb" * 32, "cc" * 32
LONG = "雪" * 30 + "\x1b[31m"


@pytest.fixture(autouse=True)
def no_settings_of_this_machine(monkeypatch):
    monkeypatch.delenv("THINWIRE_PORT", raising=False)


def peers(number=30):
    some = (
        PeerStatus(peer=IN, name=LONG, state="alive", round=7, age=2.0, loss=3.5, up=5000, down=100, rtt=0.012),
        PeerStatus(peer=LATE, name="late", state="alive", relay=IN),
        PeerStatus(peer="dd" * 32, state="suspect", diagnosis="slow upload: " + "x" * 300),
        PeerStatus(peer="ee" * 32, state="dead", reason="no answer"),
        PeerStatus(peer="ff" * 32, state="banned", reason="banned: two votes"),
    )
    return some + tuple(PeerStatus(peer=f"{n:02x}" * 32, state="alive") for n in range(number))


@pytest.fixture(autouse=True)
def lock(tmp_path):
    """Hold the lock of the home, as a daemon does."""
    with hold(directories(tmp_path).lock):
        yield


def files(tmp_path, *, rounds=200, **more):
    """Return a view of a home with a status and events."""
    where, (process, started) = directories(tmp_path), this_process()
    given = {
        **{"process": process, "process_started": started, "wall": 100.0, "peer": ME, "run": "12" * 32},
        **{"run_name": "demo", "phase": "exchanging", "round": rounds, "rounds": 400, "loss": 3.25, "peers": peers()},
        **{"bytes_up": 2_000_000, "bytes_down": 3_000_000, "fp32_bytes": 200_000_000, "ready": (ME, IN)},
        **{"memory": 900_000_000, "device": "cpu", "tokens_per_second": 41_000.0},
    }
    assert write_status(where.status, Status(**{**given, **more}))
    log = EventLog(where.run(bytes.fromhex("12" * 32)).events)
    for number in range(1, rounds + 1):
        fields = {
            "round": number,
            "loss": 5.0 - number / 100,
            "members": [ME[:8], IN[:8]],
            "contributors": 2,
            "peers": 3,
        }
        fields |= {"missing": {LATE[:8]: "silent " * 20}, "sync_seconds": 0.4, "tokens_per_second": 1000.0}
        log.append("round", fields, at=0.0, wall=float(number))
    log.append("alarm", {"detail": LONG * 5}, at=0.0, wall=9.0)
    log.append("phase", {"round": rounds + 1, "phase": "record"}, at=0.0, wall=9.0)
    log.close()
    return RunView(where)


@pytest.mark.parametrize("tab", TABS)
@pytest.mark.parametrize(("columns", "rows"), [(80, 24), (40, 10), (200, 60)])
@pytest.mark.parametrize("alarm", ["", "disk full " * 30])
def test_screen_fits_the_terminal(tmp_path, tab, columns, rows, alarm):
    state, rates = files(tmp_path, alarm=alarm).state(), Rates()
    rates.update(state["status"])
    lines = screen(state, rates, tab, columns, rows)
    assert len(lines) == rows and max(cell_len(line.plain) for line in lines) <= columns
    assert not any("\n" in line.plain or "\x1b" in line.plain for line in lines)
    assert lines[-1].plain.startswith("alarm: disk full" if alarm else "# in")


def shown(state, tab):
    return "\n".join(line.plain for line in screen(state, Rates(), tab, 80, 24))


def test_tabs_show_peers_links_round_and_events(tmp_path):
    state = files(tmp_path).state()
    swarm = shown(state, "swarm")
    assert "thinwire demo 12121212  round 200 of 400  exchanging" in swarm and "peers   ##J?_!" in swarm
    assert (
        "2.0 MB in all (100 times less than synchronous fp32)" in swarm
        and "… and 24 more" in swarm
        and "memory 900 MB" in swarm
    )
    links = shown(state, "links")
    assert "12.0 ms" in links and "5.0 kB" in links and "  雪" in links  # the relay of the late peer
    found = shown(state, "round")
    assert "round 201:   announce   open  [record]  vote   commit" in found and "ready   2: this one, 雪" in found
    assert "200    3.000     2/3    0.4 s        1k  cccccccc (silent" in found
    assert "alarm 雪" in shown(state, "log")


def test_snapshot_has_all_tabs_at_80_columns(tmp_path, capsys, monkeypatch):
    files(tmp_path)
    monkeypatch.setenv("COLUMNS", "300")
    assert main.main(["top", "--home", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(cell_len, lines)) <= 80 and not any("\x1b" in line for line in lines)
    assert [line for line in lines if line in [f"{tab}:" for tab in TABS]] == [f"{tab}:" for tab in TABS]
    assert any(line.startswith("#") and LATE[:8] not in line for line in lines)


def test_top_without_any_daemon_ends_with_4(tmp_path, capsys):
    assert main.main(["top", "--home", str(tmp_path)]) == 4
    assert "no daemon is running here" in capsys.readouterr().err


def test_run_that_has_ended_is_shown_as_such(tmp_path):
    state = files(tmp_path, process_started=1.0).state()
    assert "not running" in shown(state, "swarm") and "peers   _#J" in shown(state, "swarm")


def test_rates_are_those_between_two_statuses():
    rates = Rates()
    assert rates.of() == ("-", "-")
    for wall, up in ((10.0, 1000), (10.0, 9999), (12.0, 5000)):
        rates.update({"wall": wall, "bytes_up": up, "bytes_down": 0, "peers": [{"peer": IN, "up": up // 2, "down": 7}]})
    assert rates.of() == ("2.0 kB/s", "0 B/s") and rates.of(IN) == ("1.0 kB/s", "0 B/s")
    rates.update({"wall": 13.0, "bytes_up": 10, "bytes_down": 0, "peers": []})  # the daemon has restarted
    assert rates.of() == ("0 B/s", "0 B/s") and rates.of(IN) == ("-", "-")


@pytest.mark.parametrize("columns", range(1, 12))
def test_screen_fits_a_terminal_of_a_few_columns(tmp_path, columns):
    state = files(tmp_path).state()
    for tab in TABS:
        assert all(cell_len(line.plain) <= columns for line in screen(state, Rates(), tab, columns, 10))


def test_title_has_room_for_the_round_beside_the_longest_name(tmp_path):
    title = screen(files(tmp_path, run_name="n" * 64).state(), Rates(), "swarm", 80, 24)[0].plain
    assert "n..." in title and title.endswith("round 200 of 400  exchanging")


def test_sparkline_averages_what_does_not_fit():
    assert sparkline([], 10) == "" and sparkline([None, 2.0], 10) == GLYPHS[0]
    assert sparkline([0.0, 7.0], 10) == GLYPHS[0] + GLYPHS[-1]
    assert sparkline([0, 2, 6, 8, 3, 5], 3) == GLYPHS[0] + GLYPHS[-1] + GLYPHS[round(3 * 7 / 6)]
    assert sparkline(range(8), 8, PLAIN_GLYPHS) == PLAIN_GLYPHS


@pytest.mark.parametrize(
    ("state", "members", "mark"),
    [("alive", [IN[:8]], "#"), ("alive", [ME[:8]], "J"), ("alive", [], "#"), ("left", [], "_"), ("other", [], "?")],
)
def test_symbol_of_an_alive_peer_depends_on_its_membership(state, members, mark):
    assert symbol({"peer": IN, "state": state}, members) == mark


def test_snapshot_without_utf8_has_plain_glyphs(tmp_path):
    lines = everything(files(tmp_path).state(), Rates(), 80, utf8=False)
    assert not any(glyph in line.plain for line in lines for glyph in GLYPHS)
