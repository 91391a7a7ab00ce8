"""The planner: methods against each other and against measurements, its advice, and the command."""

import itertools
import json
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from thinwire.collectives.costs.method_costs import methods, rounds
from thinwire.node.cli import main
from thinwire.sims.planner.pipeline_costs import MICRO, pipeline
from thinwire.sims.planner.plan import Plan, plan
from thinwire.sims.planner.plan_view import percent, rate_text, seconds_text, size_text
from thinwire.sims.planner.question import PlanError, question
from thinwire.swarm.messages.registry import MAX_GROUP

ROOT = Path(__file__).parents[3]
NAMES = [
    "data parallel, fp32",
    "diloco",
    "streaming, overlap 0",
    "streaming, overlap 1",
    "eager",
    "sparseloco",
    "noloco",
]


def asked(**changes):
    """Eight peers at home, a model of 100M parameters."""
    flags = {"parameters": "100M", "layers": 12, "step": 1.0, "links": ["8x50/10"], "every": 50, "tokens": 2048}
    return question(**{**flags, **changes})


def named(found, name):
    return next(method for method in found if method.name == name)


def test_planned_round_matches_measured_round():
    answer, now = plan(asked()), rounds(asked(), 50)
    row = next(row for row in answer.methods if row.here)
    assert (answer.round.data, answer.round.sent) == (now.data, now.sent)
    assert row.utilisation == answer.round.utilisation == pytest.approx(50 / now.period)
    assert now.sent == pytest.approx(2 * 7 / 8 * 1e8 * 8.0625 / 8, rel=0.01)


def test_planned_memory_counts_the_arrays_of_a_round():
    """Measured daemons have 2.9 to 3.3 fp32 copies, 0.3 of them pages that two share (docs/measured/daemon.md)."""
    answer = plan(asked(parameters="25.3M", links=["4x100/100"]))
    assert answer.memory.rounds / (4 * 25.3e6) == pytest.approx(2.8, rel=0.08)
    assert answer.memory.model == 16 * 25.3e6


def test_planned_round_matches_real_peers_on_wide_area_links():
    """docs/measured/exchange.md: 40 MB as int8, 4 peers, 100 Mbit/s, 80 ms: 1.06 times the time of the links."""
    now = rounds(asked(parameters="10M", links=["4x100/100"], rtt=80.0), 1)
    alone = 2 * 3 / 4 * 1e7 * 8.0625 / 8 / 12.5e6 + 2 * 0.08
    assert now.exchange == pytest.approx(1.06 * alone, rel=0.1)


def test_methods_with_fewer_bytes_compute_a_larger_part_of_the_time():
    found = {method.name: method.busy(50) for method in methods(asked())}
    assert list(found) == NAMES
    assert found["data parallel, fp32"] < found["diloco"] < found["streaming, overlap 1"]
    # Two vectors to one peer are more than 7/8 of two, but the slow weights travel during the steps.
    assert found["diloco"] < found["noloco"] < found["sparseloco"]
    exact = {method.name: method.busy(50) for method in methods(asked(codec="fp32"))}
    assert exact["diloco"] < exact["noloco"]


@settings(max_examples=20, deadline=None)
@given(
    st.integers(2, 40), st.integers(1, 60), st.floats(1, 1e4), st.floats(1, 1e4), st.floats(0, 300), st.integers(1, 400)
)
def test_more_resources_never_slow_the_plan(peers, layers, down, up, rtt, every):
    def busy(every=every, faster=1.0, rtt=rtt):
        link = f"{peers}x{down * faster:.3f}/{up * faster:.3f}"
        found = methods(question(parameters="30M", layers=layers, step=0.3, links=[link], rtt=rtt, every=every))
        return [method.busy(every) for method in found]

    usual = busy()
    assert all(0 < value <= 1 + 1e-9 for value in usual)
    for better in (busy(faster=2.0), busy(rtt=rtt / 2), busy(every=2 * every)):
        assert all(b >= a - 0.02 for a, b in zip(usual, better, strict=True)), (usual, better)


def test_sparse_plan_uses_allgather_while_cheaper():
    few, many = (named(methods(asked(links=[f"{n}x50/50"])), "sparseloco") for n in (5, 6))
    assert "everyone's to everyone" in few.about and "owners" in many.about
    assert few.moved == pytest.approx(4 * 1e8 * 0.1485 / 8)
    assert many.moved == pytest.approx(5 / 6 * 1e8 * (0.1485 + 0.641) / 8)


def test_gossip_plan_waits_for_mean_over_all_pairs():
    """Mean over all pairs, computed pair by pair."""
    own = asked(links=["3x50/10@1.0", "2x300/300@2.0"], every=20)
    peers = [machine for machine in own.machines for _ in range(machine.count)]
    expected = []
    for a, b in itertools.permutations(peers, 2):
        vector = 1e8 * 8.0625 / 8 / min(a.down, a.up, b.down, b.up)
        seconds = vector + max(0.0, vector - 20 * max(a.step, b.step)) + 3 * 0.025
        expected.append(20 * a.step / (20 * max(a.step, b.step) + seconds))
    gossip = named(methods(own), "noloco")
    assert gossip.busy(20) == pytest.approx(sum(expected) / len(expected), rel=1e-3)


def test_pair_plan_counts_codec_bytes_and_memory():
    """One vector if γ = β and the codec is lossless, otherwise two; the residual needs memory."""
    lossy, exact = (named(methods(asked(codec=codec)), "noloco") for codec in ("int8(block=256)", "fp32"))
    assert lossy.moved == pytest.approx(2 * 1e8 * 8.0625 / 8, rel=1e-3)
    assert exact.moved == pytest.approx(1e8 * 4, rel=1e-3)
    assert (lossy.memory, exact.memory) == (12e8 + 4e8 * 8.0625 / 8, 16e8)


def test_noloco_manifest_is_planned_as_pairs():
    toml = b'[run]\nname = "x"\n[outer]\nmethod = "noloco"\nsync_every = 50\ngamma = 0.4\n[exchange]\ncodec = "fp32"\n'
    own = question(toml, "x.toml", parameters="100M", layers=12, step=1.0, links=["8x50/10"])
    answer = plan(own)
    gossip = next(row for row in answer.methods if row.method == "noloco")
    assert gossip.here and answer.bits == 64.0
    assert (answer.round.sent, answer.round.utilisation) == (gossip.moved, gossip.utilisation)
    assert answer.round.sent == pytest.approx(8e8, rel=1e-3) and answer.round.agreement == 0.05
    assert answer.memory.rounds + answer.memory.model == gossip.memory
    many = question(toml, "x.toml", parameters="1M", layers=12, step=1.0, links=[f"{MAX_GROUP + 1}x50/10"])
    assert not any(str(MAX_GROUP) in note for note in plan(many).notes)


@pytest.mark.parametrize("group", [2, 4, 16])
def test_sparse_noloco_manifest_is_planned_with_its_parts(group):
    """Δ goes to all members of the group, slow weights by owners in large ones."""
    toml = '[run]\nname = "x"\n[outer]\nmethod = "noloco"\nslow_weight_parts = {}\n[exchange]\n'
    toml += f'codec = "topk(k=64,chunk=4096)|2bit|rice"\ngossip_group_size = {group}\n'
    sizes = {}
    for parts in (1, 8):
        own = question(
            toml.format(parts).encode(), "x.toml", parameters="100M", layers=12, step=1.0, links=["32x50/10"]
        )
        answer = plan(own)
        assert answer.bits == pytest.approx(0.1485 + 80 / 2**16 + 8.0625 / parts, rel=1e-3)  # a header of 80 bits a run
        sizes[parts] = answer.round.sent
        slow = 8.0625 / parts * (group - 1 if group < 16 else 2 * 15 / 16)
        assert answer.round.sent == pytest.approx(1e8 / 8 * ((group - 1) * 0.1485 + slow), rel=0.02)
        assert named(methods(own), "noloco").memory > 12e8
    assert sizes[8] < sizes[1] / 2


def test_sparse_plan_matches_published_production_run():
    """72.75B parameters, H = 30, 20 min of computing, 70 s of exchange: 94.5 % (as published)."""
    own = question(parameters="72.75B", layers=80, step=40.0, links=["17x1000/1000"], every=30)
    sparse = named(methods(own), "sparseloco")
    speed = sparse.seconds / 70  # links with which an exchange takes the published 70 s
    faster = question(parameters="72.75B", layers=80, step=40.0, links=[f"17x{1000 * speed:.3f}/{1000 * speed:.3f}"])
    assert named(methods(faster), "sparseloco").busy(30) == pytest.approx(0.945, abs=0.001)


def test_plan_assigns_chunks_by_bandwidth_where_faster():
    unequal = asked(links=["3x100/100", "1x10/10"])
    sized, equal = (rounds(msgspec.structs.replace(unequal, sized=how), 50) for how in (True, False))
    # (1 + s (N - 2)) times the encoded size through the slowest link, with s = 0 and s = 1/4.
    assert equal.data / sized.data == pytest.approx(1.5, rel=0.03) and sized.sent == equal.sent
    assert plan(unequal).round.data == sized.data
    assert any("dealt out by bandwidth" in note for note in plan(unequal).notes)
    assert not any("dealt out by bandwidth" in note for note in plan(asked()).notes)
    as_before = question(b'[exchange]\nchunk_assignment = "equal"', "run.toml", step=1.0, parameters="100M", layers=12)
    assert not as_before.sized


def test_plan_names_late_peers():
    answer = plan(asked(links=["5x50/10@1.0", "3x50/10@2.0"], every=50))
    assert answer.round.late == 3 and any("straggler_timeout" in note for note in answer.notes)
    assert plan(asked(links=["5x50/10@1.0", "3x50/10@1.1"], every=50)).round.late == 0


class TestAdvice:
    def test_plan_for_good_links_is_diloco(self):
        answer = plan(asked(links=["8x1000/1000"]))
        assert answer.best == answer.best_here and answer.best.method == "diloco"
        assert answer.best.utilisation >= 0.9 and answer.best.every <= 500

    def test_plan_for_home_links_is_sparse(self):
        answer = plan(asked(links=["8x50/10"], step=0.3))
        assert answer.best.method == "sparseloco" and answer.best.every <= 250
        assert answer.best_here == answer.best
        rivals = [row for row in answer.methods if row.here and row.method != "sparseloco"]
        assert rivals and all(row.utilisation < answer.best.utilisation for row in rivals)

    def test_planned_sync_interval_is_the_smallest_that_suffices(self):
        answer = plan(asked(links=["8x1000/1000"]))
        at = answer.targets.index(0.9)
        assert answer.best.every == next(row for row in answer.methods if row.here).reaching[at]

    def test_plan_for_small_memories_is_a_pipeline(self):
        answer = plan(asked(parameters="1B", memory=8 << 30))
        assert answer.pipeline is not None
        assert answer.best.method.startswith(f"pipeline of {answer.pipeline.stages} stages")
        assert answer.pipeline.memory <= 8.0 * 2**30
        assert any("cannot hold" in note for note in answer.notes)

    def test_plan_names_limits_of_this_version(self):
        notes = " ".join(plan(asked(parameters="1B", links=[f"{MAX_GROUP + 1}x50/10"])).notes)
        assert "536,870,912" in notes and str(MAX_GROUP) in notes

    @pytest.mark.parametrize("memory", [20, 22, 24, 26, 28, 30, 33, 36, 40])
    def test_plan_advises_a_method_that_fits_or_says_that_none_does(self, memory):
        answer = plan(asked(parameters="1.3B", layers=24, step=0.3, memory=memory << 30, tokens=0))
        for best, rows in (
            (answer.best, answer.methods),
            (answer.best_here, [row for row in answer.methods if row.here]),
        ):
            fitting = [row.method for row in rows if row.memory <= memory * 2**30]
            if fitting:
                assert best.method in fitting and "fits" not in best.why
            else:
                assert best.method == min(rows, key=lambda row: row.memory).method
                assert f"no method fits into {memory} GiB" in best.why

    def test_plan_for_one_peer_is_refused(self):
        with pytest.raises(PlanError, match="no partner"):
            plan(asked(links=["1x50/10"]))


class TestPipeline:
    def test_pipeline_of_a_plan_has_the_stages_of_the_manifest(self):
        toml = b"[model]\nlayers = 6\n[outer]\nmethod = 'streaming'\nfragments = 3\n[pipeline]\nstages = 3\n"
        staged = question(toml, step=1.0, peers=6, links=("6x50/10",))
        assert pipeline(staged, 1e9).stages == 3

    def test_pipeline_on_fast_links_loses_only_the_bubble(self):
        own = asked(links=["8x100000/100000"], rtt=0.0, tokens=1, memory=2**30 // 10 + 1)
        found = pipeline(own, 0.4 * 2**30)
        assert found.stages == 4 and found.bubble == 3 / (4 * MICRO + 3)
        assert found.boundaries[0].utilisation == pytest.approx(1 - found.bubble, abs=1e-3)

    def test_subspace_boundary_moves_a_hundredth_of_the_bytes(self):
        """d = 4096, k = 40: 82 bytes instead of 8192 in each direction (as published)."""
        exact, *_, subspace = pipeline(asked(width=4096), 1.0).boundaries
        assert exact.per_token / subspace.per_token == pytest.approx(99.9, rel=0.001)

    def test_fast_enough_link_hides_boundary_traffic(self):
        own = asked(width=1024)
        for way in pipeline(own, 1.0).boundaries:
            wide = pipeline(asked(width=1024, links=[f"8x{way.mbits * 1.01:.4f}/{way.mbits * 1.01:.4f}"]), 1.0)
            same = next(other for other in wide.boundaries if other.name == way.name)
            assert same.utilisation > 0.75

    def test_pipeline_plan_without_tokens_is_none(self):
        assert pipeline(question(parameters="1M", layers=4, step=1.0), 1.0) is None
        assert pipeline(asked(layers=3, memory=2**30 // 100), 2**30) is None


def test_bandwidth_table_has_every_method():
    needs = plan(asked()).needs
    assert [need.method for need in needs] == [name for name in NAMES if name != "eager"]
    for need in needs:
        reached = [value for value in need.mbits if value is not None]
        assert reached == sorted(reached)
    dense, sparse = (next(n for n in needs if n.method == name).mbits[0] for name in ("diloco", "sparseloco"))
    assert dense / sparse == pytest.approx(2 * 8.0625 / (0.1485 + 0.641), rel=0.15)


def run(capsys, *arguments):
    code = main.main(["plan", *map(str, arguments)])
    said = capsys.readouterr()
    return code, said.out, said.err.splitlines()


def test_plan_command_prints_advice(capsys):
    code, out, err = run(capsys, ROOT / "examples" / "demo.toml", "--step", 0.05, "--link", "3xdsl", "--link", "fibre")
    assert code == 0 and err == []
    for words in (
        "429k parameters",
        "round      diloco",
        "(data parallel, fp32)",
        "3 × 50/10 Mbit/s",
        "best",
        "int8(block=256)",
        *NAMES,
    ):
        assert words in out
    assert max(map(len, out.splitlines())) <= 160


def test_plan_with_sites_moves_a_quarter_of_the_bytes():
    """Four peers each: a quarter of the bytes, a quarter of the time, as long as the line binds."""
    found = plan(asked(links=["8x1000/1000"], line="4x50/50")).sites
    assert (found.sites, found.members) == (2, 4)
    assert found.flat == pytest.approx(4 * 1e8 * 8.0625 / 8) and found.flat == 4 * found.tall
    assert found.factor == pytest.approx(4, rel=0.01)
    assert plan(asked(links=["8x10/10"], line="4x1000/1000")).sites.factor < 1.2, "their own links bind"
    uneven = plan(asked(links=["7x1000/1000"], line="3x50/50")).sites
    assert (uneven.sites, uneven.members) == (3, 3) and uneven.tall == pytest.approx(4 / 3 * 1e8 * 8.0625 / 8)
    assert plan(asked()).sites is None


def test_plan_command_accepts_sites(capsys):
    known = ["--parameters", "100M", "--layers", 12, "--step", 1, "--link", "8x1000/1000"]
    code, out, err = run(capsys, *known, "--shared-line", "4x50/50")
    assert code == 0 and err == [] and "4.0 times as fast" in out and 'exchange.topology = "hierarchy"' in out
    code, out, err = run(capsys, *known, "--shared-line", "2x1000/1000")
    assert code == 0 and "hierarchy" in out


def test_plan_command_accepts_noloco_manifest(capsys, tmp_path):
    path = tmp_path / "nl.toml"
    path.write_text('[run]\nname = "x"\n[outer]\nmethod = "noloco"\n')
    code, out, err = run(capsys, path, "--step", 1)
    assert code == 0 and err == []
    assert "round      noloco, pairs, H = 50, int8(block=256)+int8(block=256): 16.12 bits per parameter" in out
    assert "asking" in out and "agreeing" not in out


@pytest.mark.parametrize(
    ("method", "way", "row", "bits"),
    [
        ("sparseloco", "sparseloco, H = 30, topk(k=64,chunk=4096)|2bit|rice: 0.1485 bits", "sparseloco", 0.1485),
        ("demo", "demo, H = 1, demo(k=32,chunk=4096)|2bit|rice: 0.0819 bits", "sparseloco", 0.0819),
        ("powersgd", "powersgd, H = 20, powersgd(rank=4): 1 bits", "powersgd", 1.0),
        ("streaming", "streaming, H = 30, int8(block=256): 8.062 bits", "streaming, overlap 1", 8.0625),
        ("eager", "eager, H = 30, int8(block=256)", "eager", 8.0625),
        ("co2", "co2, H = 30, int8(block=256)", "eager", 8.0625),
        ("muloco", "muloco, H = 30, int8(block=256)", "diloco", 8.0625),
    ],
)
def test_plan_command_plans_the_method_of_the_manifest(capsys, tmp_path, method, way, row, bits):
    file = tmp_path / "run.toml"
    file.write_text(f'[model]\nlayers = 8\nwidth = 256\nheads = 4\n[outer]\nmethod = "{method}"\n')
    assert main.main(["plan", str(file), "--step", "1"]) == 0
    said = capsys.readouterr().out
    assert way in said and ("at the same time" in said) == (method in ("streaming", "eager", "co2"))
    assert ("ring" in said) == (row not in ("sparseloco", "powersgd"))
    assert main.main(["plan", str(file), "--step", "1", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    own = next(one for one in answer["methods"] if one["method"] == row)
    assert answer["bits"] == pytest.approx(bits, rel=1e-3)
    assert answer["round"]["sent"] == pytest.approx(own["moved"])
    assert answer["round"]["utilisation"] == pytest.approx(own["utilisation"])
    assert answer["memory"]["rounds"] == pytest.approx(own["memory"] - answer["memory"]["model"])


def test_plan_says_that_asynchronous_rounds_are_not_modelled():
    notes = plan(question(b'[outer]\nmethod = "buffered-async"\n', "run.toml", step=1.0)).notes
    assert any("asynchronous rounds" in note for note in notes)


def test_plan_advises_no_ring_that_takes_as_long_as_owners():
    """In fp32 on equal links the two differ by a percent; the note was "16.5 s … 16.5 s: ring suits"."""
    notes = plan(asked(codec="fp32", links=["8x300/300"])).notes
    (note,) = [note for note in notes if "ring" in note]
    assert "as long as with owners" in note and "suits" not in note


def test_plan_command_prints_json(capsys):
    code, out, err = run(capsys, "--parameters", "350M", "--layers", 24, "--step", 2, "--json")
    answer = msgspec.json.decode(out, type=Plan)
    assert code == 0 and err == [] and answer.question.parameters == 350_000_000
    assert answer == plan(question(parameters="350M", layers=24, step=2.0))
    assert json.loads(out)["methods"][1]["method"] == "diloco"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "--parameters"),
        (["nowhere.toml"], "cannot read"),
        (["/dev/zero"], "cannot read /dev/zero: not a regular file"),
        (["--pipeline", "/dev/zero"], "cannot read /dev/zero: not a regular file"),
        (["--parameters", "1B", "--layers", "x"], "--layers"),
        (["--parameters", "1B", "--layers", "8", "--step", "1", "--link", "fast"], "50/10"),
        (["--parameters", "1B", "--layers", "8", "--step", "1", "--link", "0x50/10"], "'0x50/10' is no link"),
        (["--parameters", "1B", "--layers", "8", "--step", "1", "--link", "dsl", "--link", "00xdsl"], "'00xdsl'"),
        (["--parameters", "1B", "--layers", "8", "--link", "0x50/10"], "'0x50/10' is no link"),
        (["--parameters", "1B", "--layers", "8", "--link", "2x50/10@3", "--link", "dsl"], "--step SECONDS"),
        (["--parameters", "1B", "--layers", "8", "--step", "1", "--link", "50/10@0"], "must be above 0"),
        (["--outcome"], "`thinwire plan --help`"),
        (["--parameters", "1B", "--layers", "8", "--step", "1", "--rtt", "inf"], "1000000000"),
        (["--parameters", "1B", "--layers", "8", "--step", "1", "--rtt", "1e308"], "1000000000"),
        (["--parameters", "1B", "--layers", "8", "--step", "1e300"], "1000000000"),
        (["--parameters", "1B", "--layers", "8", "--step", "1", "--memory", "24"], "24' is less than 1 MiB"),
        (["--parameters", "1B", "--layers", "8", "--step", "1", "--memory", "much"], "'much' is no size"),
        (["--parameters", "1B", "--layers", "8", "--step", "1", "--shared-line", "50/10"], "'50/10' is no line"),
        (["--parameters", "1B", "--layers", "8", "--step", "1", "--shared-line", "4x50/10@2"], "4x50/10"),
    ],
)
def test_plan_command_mistakes_print_two_lines_and_exit_code(capsys, arguments, words):
    code, out, err = run(capsys, *arguments)
    assert code == 2 and out == "" and len(err) == 2
    assert err[0].startswith("error: ") and err[1].startswith("hint: ") and words in " ".join(err)


def test_plan_figures_are_formatted_with_units():
    assert [percent(x) for x in (0.0981, 0.95, 0.0003)] == ["9.8 %", "95 %", "0.03 %"]
    assert [seconds_text(x) for x in (0.398, 200, 7300)] == ["0.40 s", "200 s", "2.0 h"]
    assert [rate_text(x) for x in (43.65, 5754, None, 120_000)] == ["44 Mbit/s", "5.8 Gbit/s", "-", "120 Gbit/s"]
    assert [size_text(x) for x in (1_300_000_000, 428_928, 12)] == ["1.3B", "429k", "12"]
