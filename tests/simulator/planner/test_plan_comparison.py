"""Plan and outcome of a run side by side."""

import json

import pytest
from thinwire.collectives.costs.plan_outcome import comparison, outcome_of
from thinwire.node.cli.main import main
from thinwire.node.runtime.directories import directories
from thinwire.node.runtime.event_log import EventLog
from thinwire.sims.planner.plan import plan
from thinwire.sims.planner.question import question

RUN = "ab" * 32
MANIFEST = '[run]\nname = "mine"\n[model]\nlayers = 2\nwidth = 64\n[outer]\nsync_every = 10\n'


def round_event(number, at, **more):
    given = {"round": number, "contributors": 2, "sync_seconds": 1.0, "steps": 10, "bytes_up": 100 * number}
    return {"kind": "round", "at": at, **given, "bytes_down": 50 * number, **more}


EVENTS = [
    {"kind": "start", "at": 0.0},
    *(round_event(number, 20.0 + 5.0 * number) for number in range(1, 6)),
    {"kind": "start", "at": 100.0},  # the clock of another process: the next round has a start in it
    round_event(6, 400.0),
    round_event(7, 404.0, contributors=1),
]


def test_outcome_is_the_median_of_rounds_with_others_and_without_a_start():
    found = outcome_of(EVENTS)
    assert (found.rounds, found.seconds, found.exchange, found.peers) == (4, 5.0, 1.0, 2)
    assert (found.sent, found.received, found.steps) == (100.0, 50.0, 10.0)
    assert found.step == pytest.approx(0.4) and found.utilisation == pytest.approx(0.8)


def test_too_few_rounds_have_no_outcome():
    assert outcome_of(EVENTS[:4]) is None and outcome_of(EVENTS[:5]) is not None


def test_comparison_has_the_ratio_of_each_figure():
    asked = question(MANIFEST.encode(), step=0.4, peers=2, links=(), rtt=0.0)
    answer = plan(asked)
    rows = {row.name: row for row in comparison(asked, answer.round, outcome_of(EVENTS))}
    exchange = answer.round.agreement + answer.round.data
    assert rows["its exchange"].ratio == pytest.approx(1.0 / exchange)
    assert rows["a round"].planned == pytest.approx(answer.round.computing + exchange)
    assert rows["sent a round"].ratio == pytest.approx(100.0 / (answer.round.sent + 2 * 500)), (
        "500 bytes a peer of control"
    )
    assert rows["utilisation"].measured == pytest.approx(0.8)


def test_a_round_of_each_fragment_is_one_round():
    """Fragments may have unequal sizes: the second one has 19 of 20 bytes."""
    events = []
    for turn in range(10):
        sent = 2000 * (turn // 2) + (100 if turn % 2 == 0 else 2000)
        events.append(round_event(turn, 3.0 * turn, fragment=turn % 2, steps=5, bytes_up=sent))
    found = outcome_of(events)
    assert (found.rounds, found.seconds, found.exchange, found.sent, found.steps) == (4, 6.0, 2.0, 2000.0, 10.0)
    streaming = MANIFEST.replace("[outer]", '[outer]\nmethod = "streaming"\nfragments = 2')
    asked = question(streaming.encode(), step=0.4, peers=2, links=(), rtt=0.0)
    answer = plan(asked)
    rows = {row.name: row for row in comparison(asked, answer.round, found)}
    assert rows["sent a round"].planned == pytest.approx(answer.round.sent + 2 * 2 * 500), "and control messages"
    assert rows["its exchange"].planned == pytest.approx(2 * answer.round.agreement + answer.round.data)


def test_plan_command_compares_with_a_run_of_this_machine(tmp_path, capsys):
    (tmp_path / "mine.toml").write_text(MANIFEST)
    run = directories(tmp_path).run(bytes.fromhex(RUN))
    log = EventLog(run.events)
    for event in EVENTS:
        fields = {name: value for name, value in event.items() if name not in ("kind", "at")}
        log.append(event["kind"], fields, at=event["at"], wall=0.0)
    log.close()
    run.manifest.write_text(MANIFEST)
    asked = ["plan", str(tmp_path / "mine.toml"), "--outcome", "mine", "--home", str(tmp_path)]
    assert main([*asked, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["outcome"]["rounds"] == 4 and found["plan"]["question"]["machines"][0]["step"] == pytest.approx(0.4)
    assert main(asked) == 0
    out = capsys.readouterr().out
    assert "Medians of 4 rounds of 10 steps with 2 contributors" in out and "utilisation" in out
    for flags, peers in (
        ("--link 8/8", 2),
        ("--link 3x8/8", 3),
        ("--link 8/8 --link dsl", 2),
        ("--link dsl --peers 4", 4),
    ):
        assert main([*asked, "--json", *flags.split()]) == 0
        machines = json.loads(capsys.readouterr().out)["plan"]["question"]["machines"]
        assert sum(machine["count"] for machine in machines) == peers, (
            "a link without a number is that of all in the run"
        )
    assert main(["plan", str(tmp_path / "mine.toml"), "--outcome", "other", "--home", str(tmp_path)]) == 2
    run.events.write_text("")
    assert main(asked) == 2 and "fewer than 3 rounds can be compared" in capsys.readouterr().err
