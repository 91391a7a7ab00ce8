"""Scenario parser: its results, and its errors for files that cannot be played."""

import json
import re
import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kit.real.documents import ROOT
from thinwire.collectives.costs.access_links import MBIT
from thinwire.sims.network import regions
from thinwire.sims.processes.player import RealError, player
from thinwire.sims.scenario.faults import Fault
from thinwire.sims.scenario.parser import load, load_faults, parse, shipped
from thinwire.sims.scenario.toml_lines import as_toml, line_at, lines_of
from thinwire.sims.scenario.toml_table_reader import ScenarioError
from thinwire.swarm.manifest.parser import parse as parse_manifest

SMALL = """
duration = 60
[manifest.outer]
sync_every = 4
[[peers]]
name = "home"
count = 3
region = ["Germany", "Japan"]
access = "dsl"
step = 0.5
[[peers]]
name = "late"
up_mbit = 8
down_mbit = 16
join = 5
leave = 50
[[faults]]
at = 10
kind = "partition"
peers = ["home"]
seconds = 4
[random]
pause = 0.5
"""

SHIPPED = {
    "home-fibre-8", "ten-regions-30", "flash-crowd-200", "churn-storm", "partition-heal", "byzantine-19pct",
    "weak-peers-pipeline", "thousand-peers-gossip", "thousand-peers-groups", "transatlantic-100mbit",
}  # fmt: skip


def test_own_scenario_of_the_document_is_one():
    (text,) = re.findall(r"```toml\n(seed = .*?)```", (ROOT / "docs" / "simulation.md").read_text(), re.DOTALL)
    read = parse(text)
    assert len(read.peers) == 200 and len(read.faults[0].peers) == 60 and read.mix == {"kill": 0.5, "restart": 1.0}


def test_hint_for_an_unknown_peer_of_a_large_swarm_is_short():
    with pytest.raises(ScenarioError) as caught:
        parse(SMALL.replace("count = 3", "count = 500").replace('["home"]', '["usa"]'))
    assert caught.value.hint.startswith("peers and groups: home, late, home-1, ")
    assert caught.value.hint.endswith(" and 462 more") and len(caught.value.hint) < 500


def test_parser_reads_every_table():
    read = parse(SMALL)
    assert [peer.name for peer in read.peers] == ["home-1", "home-2", "home-3", "late"]
    assert [peer.region for peer in read.peers] == ["Germany", "Japan", "Germany", "Oregon"]
    home, late = read.peers[0], read.peers[3]
    assert (home.up, home.down, home.step_seconds) == (1.25e6, 6.25e6, 0.5)
    assert (late.up, late.down, late.join, late.leave, late.index) == (1e6, 2e6, 5.0, 50.0, 3)
    assert read.faults == (Fault(10.0, "partition", (0, 1, 2), 4.0),) and read.mix == {"pause": 0.5}
    assert parse_manifest(read.manifest).outer.sync_every == 4
    # Germany to Japan and back: 224 ms, 95 Mbit/s a connection, in both directions.
    assert read.latency(0, 1) == read.latency(1, 0) == 0.112 and read.stream(1, 0) == 95e6 / 8
    assert read.latency(0, 2) == 0.0005


def test_parser_reads_site_lines():
    read = parse(
        SMALL.replace('access = "dsl"', 'access = "dsl"\nsite = "loft"') + "[sites.loft]\nup_mbit = 8\ndown_mbit = 40\n"
    )
    assert [peer.site for peer in read.peers] == ["loft"] * 3 + [""]
    assert read.lines == {"loft": (5e6, 1e6)}
    with pytest.raises(RealError, match="cannot share the line"):
        player("L1", read)


def test_parser_reads_translators_of_peers_and_sites():
    at_site = 'access = "dsl"\nsite = "loft"'
    read = parse(SMALL.replace('name = "late"', 'name = "late"\nnat = "symmetric"'))
    assert [peer.nat for peer in read.peers] == ["none"] * 3 + ["symmetric"] and read.translated and not read.nats
    read = parse(SMALL.replace('name = "late"', 'name = "late"\nsite = "loft"') + '[sites.loft]\nnat = "restricted"\n')
    assert read.nats == {"loft": "restricted"} and read.translated and not read.lines and not parse(SMALL).translated
    for level in ("L1", "L2"):
        with pytest.raises(RealError, match="no address translators"):
            player(level, read)
    with pytest.raises(ScenarioError, match="the others must reach it"):
        parse(SMALL.replace('access = "dsl"', at_site) + '[sites.loft]\nnat = "restricted"\n')


def test_every_pair_of_regions_has_a_path():
    assert len(regions.PATHS) == 100
    assert regions.PATHS["LA", "Australia"] == regions.Path(0.138, 126 * MBIT)
    assert regions.PATHS["Australia", "Canada"] == regions.PATHS["Canada", "Australia"]
    assert regions.PATHS["Canada", "Australia"].rtt == 0.196


@pytest.mark.parametrize("name", sorted(SHIPPED))
def test_shipped_scenarios_parse(name):
    read = load(name)
    assert read.name == name and len(read.about) > 50
    assert len(read.peers) == int("".join(filter(str.isdigit, name.split("-")[-1])) or 0) or not name[-1].isdigit()
    assert all(fault.until < read.duration for fault in read.faults)


def test_scenarios_of_this_list_are_shipped():
    assert set(shipped()) == SHIPPED
    assert len(load("thousand-peers-gossip").peers) == 1000


def test_parser_reads_own_links():
    uniform = parse(SMALL + "[links]\nrtt_ms = 50\njitter = 0.1\nloss = 0.01")
    assert uniform.latency(0, 1) == 0.025 and uniform.stream(0, 1) is None
    assert (uniform.jitter, uniform.loss) == (0.1, 0.01)
    text = """
duration = 60
[links]
regions = ["home", "office"]
rtt_ms = [[2, 30],
          [30, 1]]
stream_mbit = [[80, 8], [8, 800]]
[[peers]]
count = 2
region = ["home", "office"]
"""
    own = parse(text)
    assert own.latency(0, 1) == 0.015 and own.latency(0, 0) == 0.001 and own.stream(0, 1) == 1e6


def test_changed_number_of_peers_keeps_proportions():
    text = SMALL.replace('["home"]', '["home"]')
    for wanted, late in ((2, 1), (4, 1), (8, 2), (11, 3), (102, 25)):
        groups = [peer.group for peer in parse(text, peers=wanted).peers]
        assert len(groups) == wanted and groups.count("late") == late
    with pytest.raises(ScenarioError, match="fewer than the 2 groups"):
        parse(SMALL, peers=1)


def test_own_number_of_peers_gives_the_groups_of_the_file():
    text = "duration = 60\n" + "".join(
        f'[[peers]]\nname = "{name}"\ncount = {n}\n' for name, n in zip("abcd", (7, 3, 1, 3), strict=True)
    )
    assert parse(text, peers=14).peers == parse(text).peers


def test_fault_of_a_peer_that_fewer_peers_leave_out_names_the_option():
    with pytest.raises(ScenarioError, match="there is no peer or group 'home-2'") as caught:
        parse(SMALL.replace('["home"]', '["home-2"]'), peers=2)
    assert caught.value.hint == "--peers has changed the groups; did you mean 'home'?"


@pytest.mark.parametrize(
    ("old", "new", "line", "message", "hint"),
    [
        ("region =", "regoin =", 8, "peers.regoin: unknown key", "did you mean 'region'?"),
        ('"Japan"', '"Jpan"', 8, "there is no region 'Jpan'", "did you mean 'Japan'?"),
        ('"dsl"', '"dls"', 9, "'dls' is no kind of link", "did you mean 'dsl'?"),
        ("step = 0.5", "step = 0", 10, "peers.step: 0 is not a number of seconds from 0.001", "explains every key"),
        ("step = 0.5", "step = nan", 10, "nan is not a finite number", ""),
        ("step = 0.5", 'step = "fast"', 10, "'fast' is not a number of seconds from 0.001", ""),
        ("count = 3", "count = 0", 7, "peers.count: 0 is not a number of peers from 1 to 10000", ""),
        ("down_mbit = 16", 'access = "dsl"', 14, "a kind or rates, not both", ""),
        ("down_mbit = 16", "", 13, "both up_mbit and down_mbit", "add the other"),
        ("leave = 50", "leave = 5", 16, "leaves after it has joined", "join is 5"),
        ("leave = 50", 'liar = "hugh"', 16, "'hugh' is no way to lie", "did you mean 'huge'?"),
        ('kind = "partition"', 'kind = "liar"\ndetail = "fip"', 20, "'fip' is no way to lie", "did you mean 'flip'?"),
        ("partition", "partiton", 19, "'partiton' is no kind of fault", "did you mean 'partition'?"),
        ('["home"]', '["hom"]', 20, "there is no peer or group 'hom'", "did you mean 'home'?"),
        ('["home"]', '["home", 4]', 20, "there is no peer 4", "peers are 0 to 3"),
        ('["home"]', "[]", 20, "partition concerns 1 peers at least", ""),
        ("pause", "puase", 23, "'puase' is no kind of fault", "did you mean 'pause'?"),
        ("pause = 0.5", "pause = -1", 23, "-1 is not a number of faults per minute", ""),
        (
            "sync_every = 4",
            "sync_evrey = 4",
            4,
            "manifest: outer.sync_evrey: unknown key",
            "did you mean 'sync_every'?",
        ),
        ("sync_every = 4", "sync_every = 0", 4, "manifest: outer.sync_every", ""),
        ("manifest.outer", "manifest.outre", 3, "unknown table [outre]", "did you mean 'outer'?"),
        ("duration = 60", "", 1, "duration is missing", "add duration"),
        ("duration = 60", "duration = 60\nfoo = 1", 3, "foo: unknown key", "keys: "),
        ("duration = 60", 'duration = 60\ncompute = "gpu"', 3, "'gpu' is not 'stub' or 'torch'", ""),
        ("duration = 60", 'duration = 60\nmanifest = "no.toml"', None, "", ""),
        ("[[peers]]", "[[peers]]\njoin = 3", 6, "the first peer founds the run", "remove its join"),
        ("[random]", "[links]\nloss = 1.0\n[random]", 23, "1.0 is not a fraction", ""),
        ("[random]", "[links]\nrtt_ms = [[1]]\n[random]", 22, "needs the names of its regions", ""),
        (
            "[random]",
            '[links]\nregions = ["a", "b"]\nrtt_ms = [[1, 2], [3, 1]]\n[random]',
            24,
            "differs with the direction",
            "symmetric",
        ),
        ("[random]", '[links]\nregions = ["a", "b"]\nrtt_ms = [[1, 2]]\n[random]', 24, "not 2 × 2", ""),
        ("[[faults]]", "[faults]", None, "", ""),
        ("at = 10", "", 17, "faults.at is missing", ""),
        ("at = 10", "at = 61", 18, "the fault would start after the end", "duration is 60"),
        ('["home"]', '["home", "late"]', 20, "partition needs a peer on the other side", "leave out"),
        ('"partition"', '"reset"', 20, "reset concerns 2 peers, 3 are named", "the link between two"),
        ("seconds = 4", "seconds = 4\namount = 2", 22, "partition has none", "remove it"),
        ("seconds = 4", "", 20, "partition needs a duration", "for `seconds`"),
        ('"partition"', '"loss"\namount = 7.5', 20, "7.5 is not from 0 to 1", "is lost"),
        ('"partition"', '"clock-drift"\namount = -5', 20, "-5 is not from -0.5 to 0.5", "run fast"),
        ('"partition"', '"slow-disk"', 17, "0 is not from 0 to 1000, without 0", ""),
        (
            "[random]",
            "[sites.loft]\nup_mbit = 1\ndown_mbit = 1\n[random]",
            22,
            "no peer is at the site 'loft'",
            "write site = 'loft' in its [[peers]]",
        ),
        ('name = "late"', 'name = "late"\nnat = "cone"', 13, "is not 'none' or 'full-cone'", ""),
        ('access = "dsl"', 'access = "dsl"\nnat = "symmetric"', 10, "the others must reach it", "remove its nat"),
        (
            'name = "late"',
            'name = "late"\nnat = "symmetric"\nsite = "loft"\n[sites.loft]\nnat = "symmetric"\n[[peers]]\nname = "x"',
            16,
            "a peer has at most one address translator",
            "from its peers",
        ),
        (
            'name = "late"',
            'name = "late"\nsite = "loft"\n[sites.loft]\nup_mbit = 1\n[[peers]]\nname = "x"',
            15,
            "a link needs both",
            "add the other",
        ),
        ('name = "late"', 'name = "home"', 12, "two groups are called 'home'", "another name"),
        ('name = "late"', 'name = "home-2"', 12, "'home-2' is a peer of 'home'", "another name"),
        (
            "duration = 60",
            'duration = 60\ncompute = "torch"\n[manifest.model]\nkind = "custom"',
            5,
            "a custom model",
            "stub",
        ),
        ("duration = 60", "duration = 60\nparameters = 1_000_000_000\n[links]\n", 3, "this machine has", "lower"),
        ("step = 0.5", "step = 1e-9", 10, "1e-09 is not a number of seconds from 0.001", ""),
        ("duration = 60", "duration = 60\ninterval = 1e-9", 3, "1e-09 is not a number of seconds from 0.001", ""),
    ],
)
def test_scenario_mistake_is_reported_with_its_line(old, new, line, message, hint):
    assert old in SMALL
    with pytest.raises(ScenarioError) as caught:
        parse(SMALL.replace(old, new, 1))
    assert message in str(caught.value) and hint in caught.value.hint and caught.value.hint
    if line:
        assert f", line {line}:" in str(caught.value)
    else:
        assert "line " in str(caught.value)  # of the TOML reader, or of the nearest table
    assert caught.value.exit_code == 2


def test_fault_of_a_group_becomes_one_fault_per_peer():
    read = parse(SMALL.replace('"partition"', '"pause"'))
    assert read.faults == tuple(Fault(10.0, "pause", (index,), 4.0) for index in range(3))


def test_inline_list_of_peers_is_refused_with_the_right_syntax():
    with pytest.raises(ScenarioError) as caught:
        parse("duration = 5\npeers = [3, {count = 1}]\n")
    assert "write [[peers]] on a separate line" in caught.value.hint


def test_missing_scenario_file_is_an_error(tmp_path):
    with pytest.raises(ScenarioError, match="no scenario 'churn-strom'") as caught:
        load("churn-strom")
    assert "did you mean 'churn-storm'?" in caught.value.hint
    with pytest.raises(ScenarioError, match="cannot read"):
        load(str(tmp_path / "none.toml"))
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(ScenarioError, match="not text"):
        load(str(tmp_path / "binary.toml"))


def test_scenario_loads_manifest_file_beside_it(tmp_path):
    (tmp_path / "run.toml").write_text("[outer]\nsync_every = 9\n")
    (tmp_path / "mine.toml").write_text('duration = 9\nmanifest = "run.toml"\n[[peers]]\n')
    read = load(str(tmp_path / "mine.toml"))
    assert read.name == "mine" and parse_manifest(read.manifest).outer.sync_every == 9
    (tmp_path / "run.toml").write_text("[outer]\nsync_every = -9\n")
    with pytest.raises(ScenarioError, match="line 2: .*outer.sync_every"):
        load(str(tmp_path / "mine.toml"))


def test_parser_reads_list_of_faults(tmp_path):
    file = tmp_path / "faults.json"
    file.write_text(json.dumps([{"at": 3, "kind": "pause", "peers": [1], "seconds": 2}]))
    assert load_faults(file, 2) == (Fault(3.0, "pause", (1,), 2.0),)
    with pytest.raises(ScenarioError, match="fault 1: there is no peer 1"):
        load_faults(file, 1)
    for wrong in (
        "",
        "{}",
        '[{"at": 3}]',
        '[{"at": 3, "kind": "pause", "speed": 1}]',
        '[{"at":3,"kind":"kill","peers":[0,1]}]',
    ):
        file.write_text(wrong)
        with pytest.raises(ScenarioError):
            load_faults(file, 9)


def test_scenario_faults_can_be_replaced():
    other = parse(SMALL).with_(seed=5, duration=7.0, faults=())
    assert (other.seed, other.duration, other.faults, other.mix) == (5, 7.0, (), {})
    assert parse(SMALL).with_(seed=5).faults and parse(SMALL).with_(seed=5).mix


def test_toml_text_finds_lines_of_arrays_and_nested_tables():
    text = 'a = """\nb = 1\n[c]\n"""\nlist = [\n  1,\n  # [no]\n  2,\n]\n[t]\nx.y = 1\n[[p]]\nk = 1\n[[p.q]]\nk = 2\n'
    text += "[[p]]\n[[p.q]]\n[[p.q]]\nk = 3\n[p.r]\nz = { u = 1 }\n"
    lines = lines_of(text)
    assert lines[("a",)] == 1 and ("b",) not in lines and lines[("list",)] == 5 and lines[("t", "x", "y")] == 11
    assert lines[("p", 0, "k")] == 13 and lines[("p", 0, "q", 0, "k")] == 15
    assert lines[("p", 1, "q", 1, "k")] == 19 and lines[("p", 1, "r", "z", "u")] == 21
    assert line_at(lines, ("p", 1, "q", 0, "nothing")) == 17 and line_at(lines, ("nowhere",)) == 1


_VALUES = st.one_of(
    st.integers(-(2**53), 2**53),
    st.floats(allow_nan=False, allow_infinity=False),
    st.booleans(),
    st.text(st.characters(exclude_categories=["C"]), max_size=20),
)
_TABLES = st.dictionaries(
    st.text(max_size=8).filter(str.isprintable), _VALUES | st.lists(_VALUES, max_size=3), max_size=4
)


@given(_TABLES, st.dictionaries(st.sampled_from(["run", "a b", "é"]), _TABLES, max_size=3))
def test_written_tables_read_back_equal(values, tables):
    document = {**values, **tables}
    assert tomllib.loads(as_toml(document)) == document


def test_package_data_has_scenarios_and_template():
    root = Path(__file__).parents[3]
    patterns = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"][
        "thinwire.sims"
    ]
    installed = {file for pattern in patterns for file in (root / "sims").glob(pattern)}
    assert installed == set((root / "sims").rglob("*.toml")) and len(installed) == len(SHIPPED) + 1
