"""Parts of a local swarm without running one; tests/processes/test_local_demo.py runs it."""

import io
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from thinwire.node.daemon.options import Options
from thinwire.node.local_swarm import baseline, evaluation, loss_plot
from thinwire.node.local_swarm import chaos as plans
from thinwire.node.local_swarm.baseline import train
from thinwire.node.local_swarm.child_process import Child
from thinwire.node.local_swarm.evaluation import write_on
from thinwire.node.local_swarm.event_analysis import DigestComparison, EventAnalysis, Recovery
from thinwire.node.local_swarm.launcher import LocalSwarm, PlaceError, UsageError
from thinwire.node.local_swarm.live_view import Display, News, Row, Snapshot, line, row, table
from thinwire.node.local_swarm.summary import JoinerReport, KillReport, Summary, TrafficReport, as_json, screen
from thinwire.node.runtime import plotting
from thinwire.node.runtime.load_settings import load
from thinwire.node.runtime.settings import size_of
from thinwire.node.training.batches import shards_of
from thinwire.node.training.local_learner import Computing, build_learner
from thinwire.swarm.identity.errors import NotInstalled
from thinwire.swarm.manifest.parser import parse

TOML = """
[run]
name = "toy"
rounds = 6
[model]
layers = 1
width = 16
heads = 1
context = 16
[inner]
batch = 2
[outer]
sync_every = 3
"""

# --- chaos


@given(st.integers(0, 2**53), st.integers(2, 64), st.integers(4, 500))
def test_chaos_plan_depends_on_seed_and_fits_the_run(seed, peers, rounds):
    chaos = plans.plan(seed, peers, rounds)
    assert chaos == plans.plan(seed, peers, rounds)
    assert 0 <= chaos.victim < peers and 0 <= chaos.moment < 1
    assert 1 <= chaos.kill_round < rounds - 1 and chaos.kill_round < chaos.join_round < rounds


def test_chaos_plan_may_kill_any_peer():
    assert {plans.plan(seed, 4, 40).victim for seed in range(50)} == {0, 1, 2, 3}


@pytest.mark.parametrize("peers, rounds", [(1, 40), (4, 3)])
def test_chaos_plan_needs_enough_peers_and_rounds(peers, rounds):
    with pytest.raises(ValueError):
        plans.plan(0, peers, rounds)


def test_chaos_plan_of_endless_run_is_early():
    assert plans.plan(1, 4, 0).join_round < plans.HORIZON


# --- output


def rounds(name, count):
    said = [
        {"at": 1.0, "wall": n * 2.0, "kind": "round", "round": n, "loss": 5.0 / n, "digest": f"{n:064x}", "bytes_up": n * 1000,
         "bytes_down": n * 900, "factor": 80.0, "sync_seconds": 0.25, "tokens_per_second": 4000.0}
        for n in range(1, count + 1)
    ]  # fmt: skip
    return EventAnalysis(name, [{"at": 0.0, "wall": 0.0, "kind": "start", "peer": "ab" * 32, "run": "cd" * 32}, *said])


def test_live_view_row_shows_peer_events():
    told = row("peer 1", "training", rounds("peer 1", 4))
    assert told == Row("peer 1", "abababab", "training", 4, 1.25, 4000.0, 4000, 3600, 80.0, 0.25)
    assert row("peer 1", "killed", rounds("peer 1", 4)).speed == 0.0
    assert row("peer 2", "starting", EventAnalysis("peer 2")) == Row(
        "peer 2", "", "starting", 0, None, 0.0, 0, 0, 0.0, 0.0
    )


def scene():
    rows = [row("peer 1", "training", rounds("", 4)), row("peer [2]", "killed", rounds("", 3))]
    return Snapshot("toy", 4, 6, 83.0, rows, "a note")


def test_live_view_table_has_every_figure():
    from rich.console import Console

    out = io.StringIO()
    Console(file=out, width=160).print(table(scene()))
    text = out.getvalue()
    for figure in ("round 4 of 6", "1 peers running", "1:23", "1.250", "4.0 kB", "3.6 kB", "×80", "0.2 s", "a note"):
        assert figure in text, text
    assert "peer [2]" in text and "killed" in text


def test_live_view_line_sums_up_a_round():
    assert line(scene()) == (
        "run toy · round 4 of 6 · 1 peers running · 4k tokens/s · 1:23 · loss 1.250 · up 7.0 kB, down 6.3 kB "
        "(80 times less than synchronous fp32) · exchange 0.2 s"
    )


# --- the last screen

PROOF = DigestComparison(6, 17, (), "ab" * 32, 6, 3)


def verdict(**changes):
    fields = dict(
        run="toy", peers=4, rounds=6, wanted=6, steps=18, seconds=83.0, before=5.5, after=2.25, alone="peer 1",
        alone_after=2.5, sent=(TrafficReport("peer 1", 12_000_000, 74.2),), proof=PROOF,
        kill=KillReport("peer 3", 2, Recovery(3, 1.24, 1.6), 2.0), newcomer=JoinerReport("peer 4", 3, 4, 5), picture="loss.png",
        checkpoint="step-00000006", prompt="def ", sample="main():\n\tpass\x1b[31m", directory="runs",
    )  # fmt: skip
    return Summary(**{**fields, **changes})


def test_summary_screen_has_every_fact():
    said = screen(verdict())
    for part in (
        "6 rounds of 3 steps on 4 peers in 1:23 min", "5.500 before, 2.250 after 18 steps", "2.500 after the same 18 steps",
        "shard of peer 1", "peer 1 12.0 MB (×74)", "peer 3 after round 2; round 3 was committed 1.2 s later",
        "by all peers after 1.6 s", "peer 4 joined in round 4, got the state of round 4", "took part from round 5",
        "abababababababab… on all 3 live replicas after round 6", "equal in all 6 rounds (17 digests compared)", "loss.png",
        "step-00000006", "    | def main():\n    |     pass·[31m",
    ):  # fmt: skip
        assert part in said, said
    assert verdict().faults() == [] and as_json(verdict())["faults"] == []


def test_summary_names_each_lineage():
    said = screen(verdict(lineages=("2 of 5 members continue as lineage 3f9ab210 since round 128",)))
    assert "lineage         2 of 5 members continued as lineage 3f9ab210 since round 128" in said
    assert "\nlineage" not in screen(verdict())


def test_summary_names_newcomer_that_took_the_empty_stage():
    late = JoinerReport("peer 4", 3, 4, 5, (2,), (2,), 99)
    assert "took the empty stage 2, took part from round 5" in screen(verdict(newcomer=late))
    assert verdict(newcomer=late).faults() == []


def test_summary_shows_dash_for_missing_measurements():
    said = screen(verdict(before=None, after=float("nan"), alone_after=None, picture="", checkpoint="", sample=""))
    assert "held-out loss   - before, - after" in said and "picture         -" in said


@pytest.mark.parametrize(
    "changes, fault",
    [
        ({"rounds": 5}, "ended in round 5 of 6"),
        ({"proof": DigestComparison(6, 17, ("round 2 (aa: x; bb: y)",), "ab", 6, 3)}, "replicas differ in round 2"),
        ({"proof": DigestComparison(6, 17, (), "", 0, 3)}, "did not end in one round"),
        ({"proof": DigestComparison(0, 0, (), "ab", 6, 1)}, "did not end in one round"),
        ({"kill": KillReport("peer 3", 2, None, 2.0)}, "no round was committed after the kill"),
        ({"newcomer": JoinerReport("peer 4", 3, None, None)}, "peer 4 joined late"),
        ({"newcomer": JoinerReport("peer 4", 3, 4, 5, (1,), (2,), 99)}, "did not take the stage of peer 3"),
        ({"newcomer": JoinerReport("peer 4", 3, 4, 5, (2,), (2,), 0)}, "made no inner steps with peer 4"),
    ],
)
def test_summary_lists_each_fault(changes, fault):
    assert [found for found in verdict(**changes).faults() if fault in found] and as_json(verdict(**changes))["faults"]


# --- the picture


def test_loss_plot_is_a_png(tmp_path):
    alone = EventAnalysis("alone")
    alone.events += [{"at": 0.0, "wall": 0.0, "kind": "held_out", "round": 0, "loss": 5.5}]
    alone.events += [{"at": 0.0, "wall": 0.0, "kind": "alone", "round": n, "loss": 5.0 / n} for n in (1, 2, 3)]
    marks = [loss_plot.Marker(2.5, "kill -9 of peer 1", "red"), loss_plot.Marker(3, "peer 2 takes part", "green")]
    analyses = [rounds("peer 1", 3), EventAnalysis("peer 2")]
    path = tmp_path / "loss.png"
    loss_plot.draw(path, title="toy", analyses=analyses, alone=alone, held_out=[(0, 5.5), (3, 2.0)], marks=marks)
    assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    from matplotlib.image import imread

    pixels = imread(path)[..., :3]
    assert pixels.shape[0] > 300 and pixels.shape[1] > 600
    # Both marks are there, in their colours.
    assert (
        np.all(pixels == (1.0, 0.0, 0.0), axis=-1).any() and np.all(np.abs(pixels - (0, 128 / 255, 0)) < 0.01, -1).any()
    )


def test_missing_plot_library_gives_clear_message(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(NotInstalled, match="need the package matplotlib") as caught:
        plotting.check()
    assert "thinwire[plots]" in caught.value.hint


# --- baseline and sample


@pytest.fixture
def training(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog. " * 400)
    return build_learner(
        parse(TOML), Computing("cpu", 0), data=text, cache=tmp_path / "cache", here=tmp_path, clock=time.perf_counter
    )


def test_baseline_trains_on_its_shard_for_the_same_steps(training):
    said, seen = [], []
    batches = training.trainer.batches
    draw = batches.next_samples

    def noted(size):
        seen.append(draw(size))
        return seen[-1]

    batches.next_samples = noted
    group = [bytes([n]) * 32 for n in range(4)]
    train(training, group, group[2], 6, lambda kind, fields: said.append((kind, fields)))
    assert [fields["round"] for kind, fields in said if kind == "alone"] == [1, 2, 3, 4, 5, 6]
    looks = [fields for kind, fields in said if kind == "held_out"]
    assert looks[0]["round"] == 0 and looks[-1]["round"] == 6 and looks[-1]["loss"] < looks[0]["loss"]
    assert training.trainer.step == 18 and len(seen) == 18
    # Only the shard of that peer.
    mine = set(shards_of(0, 256, group, group[2]))
    order = {int(sample): place for place, sample in enumerate(training.split.training)}
    shards = {order[int(sample)] * 256 // len(order) for samples in seen for sample in samples}
    assert shards <= mine and len(mine) == 64


def test_sample_continues_held_out_text(training):
    prompt, sample = write_on(training, 5)
    first = training.split.batch(training.split.held_out[:1])[0][0].tolist()
    assert prompt == training.tokenizer.decode(first) and len(sample) > 100
    torch.manual_seed(99)  # the sample has a separate generator
    assert write_on(training, 5) == (prompt, sample)


# --- options and processes


def swarm(tmp_path, flags=None, **options):
    file = tmp_path / "run.toml"
    file.write_text(TOML)
    config = load({"home": tmp_path / "home", **(flags or {})}, {})
    return LocalSwarm(file, parse(TOML), config, Options(local=3, **options))


@pytest.mark.parametrize(
    "flags, options, said",
    [
        ({"port": 7400}, {}, "--port"),
        ({"host": "0.0.0.0"}, {}, "--host"),
        ({"relay": False}, {}, "--no-relay"),
        ({"map_port": True}, {}, "--map-port"),
        ({}, {"place": 3}, "--place"),
        ({}, {"public": True}, "--public"),
        ({}, {"lan": True}, "--lan"),
        ({}, {"wait_for": 2}, "--wait-for"),
        ({}, {"new": True}, "--new"),
        ({}, {"chaos": True, "rounds": 2}, "--chaos"),
    ],
)
def test_options_without_meaning_for_local_swarm_are_refused(tmp_path, flags, options, said):
    with pytest.raises(UsageError, match=said):
        swarm(tmp_path, flags, **options)


def test_baseline_has_the_shard_of_a_surviving_peer(tmp_path):
    made = swarm(tmp_path, chaos=True)
    for victim in range(3):
        made.chaos = plans.Chaos(victim, 2, 0.5, 3)
        assert made.model_peer != victim


def test_threads_are_divided_among_peers(tmp_path):
    assert swarm(tmp_path, {"threads": 5}).threads == 5
    assert swarm(tmp_path).threads >= 1


def test_local_swarm_without_writable_folder_fails(tmp_path):
    (tmp_path / "home").write_text("a file, not a directory")
    with pytest.raises(PlaceError, match="cannot create") as caught:
        swarm(tmp_path).run(Display("plain"))
    assert caught.value.exit_code == 3 and "--home" in caught.value.hint


def test_first_signal_is_forwarded_and_second_ends_all(tmp_path):
    told = []
    made = swarm(tmp_path)
    made.peers = [SimpleNamespace(end=lambda *, now: told.append(("peer", now)))]
    made.alone = SimpleNamespace(end=lambda *, now: told.append(("alone", now)))
    made.signalled(signal.SIGTERM, None)
    assert told == [("peer", False), ("alone", True)] and made.stopped == signal.SIGTERM
    with pytest.raises(SystemExit) as caught:
        made.signalled(signal.SIGINT, None)
    assert caught.value.code == 130 and told[2:] == [("peer", True), ("alone", True)]


def test_launcher_starts_peers_without_loading_torch():
    """The server of forked processes loads it: doing so twice would delay the first round by seconds."""
    program = (
        "import sys, thinwire.node.local_swarm.launcher; sys.exit('torch' in sys.modules or 'numba' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0


def test_news_are_the_newest_message_now_and_then():
    news = News(10.0)
    told = [
        news.of(said, now)
        for said, now in (("a", 11.0), ("a", 12.0), ("a", 15.0), ("b", 15.5), ("c", 15.9), ("c", 17.6))
    ]
    assert told == ["", "a", "", "b", "", "c"]


def test_child_ends_when_parent_closes_the_pipe():
    code = "from thinwire.node.runtime.parent_watch import watch\n"
    code += "import time; watch(0); print('up', flush=True); time.sleep(600)"
    process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout.readline() == b"up\n" and process.poll() is None
    process.stdin.close()
    assert process.wait(60) == -signal.SIGKILL
    process.stdout.close()


def test_failing_child_is_quoted(tmp_path, monkeypatch):
    monkeypatch.setenv("THINWIRE_PORT", "not a port")  # our environment does not affect it
    child = Child(
        "peer 1",
        tmp_path / "peer-1",
        ["join", "tw1-nonsense", "--home", str(tmp_path / "peer-1")],
        tmp_path,
    )
    assert child.process.wait(60) == 2 and child.state == "failed" and not child.live
    assert "invite" in child.error() and "THINWIRE" not in child.error() and child.log.exists()
    assert child.hint() and child.hint() in (child.home / "stderr").read_text()
    child.poll()
    assert child.analysis.events == [] and child.printed() == ""


def test_child_killed_on_purpose_is_no_failure(tmp_path):
    command = ["alone", "--help"]
    child = Child("peer 1", tmp_path / "peer-1", command, tmp_path)
    child.kill()
    child.process.wait(60)
    assert child.state == "killed" and not child.live and child.killed_at is not None


@pytest.mark.parametrize(
    ("text", "size"), [("2GiB", 2 << 30), ("512 MiB", 512 << 20), ("1.5g", 3 << 29), ("900", 900), ("7M", 7 << 20)]
)
def test_memory_sizes_parse(text, size):
    assert size_of(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "-1", "0", "2 pounds", "1e9", "nan"])
def test_invalid_memory_sizes_are_refused(text):
    with pytest.raises(ValueError, match="no size"):
        size_of(text)


def test_measurements_of_large_model_have_fewer_samples(training, monkeypatch):
    """The work is bounded: a model of a million times the work would otherwise take hours after the last round."""
    drawn = []
    draw = training.split.evaluation
    monkeypatch.setattr(
        type(training.split), "evaluation", lambda self, size, count: drawn.append(size * count) or draw(2, 1)
    )
    sample = 2 * training.layout.total * training.manifest.model.context
    for work, samples in ((4e12, 256), (100 * sample, 96), (5.5 * sample, 5), (0, 1)):
        monkeypatch.setattr(baseline, "WORK", work)
        baseline.evaluate(training)
        assert drawn[-1] == samples
    monkeypatch.setattr(evaluation, "WORK", 32 * training.layout.total)
    assert len(write_on(training, 5)[1].encode()) <= 4 * 4
