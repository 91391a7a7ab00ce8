import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from thinwire.compression import registry
from thinwire.swarm.errors import HintedError
from thinwire.swarm.identity import Identity
from thinwire.swarm.manifest import (
    Manifest,
    ManifestError,
    ManifestMismatch,
    SignedManifest,
    parse,
    sign,
)
from thinwire.swarm.methods import CODECS, FOREIGN, gamma_limit
from thinwire.swarm.settings import Exchange, Inner, Model, Outer, Pipeline

AUTHOR = Identity.generate(b"1" * 32)
FULL = """
# everything, none of it the default
[run]
name = "tiny-1"
seed = 7
rounds = 12
[model]
kind = "transformer"
layers = 2
width = 64
heads = 2
context = 32
mlp = 4
tied = false
[data]
tokenizer = "tokens/bpe.json"
tokenizer_hash = "0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef"
shards = 16
holdout = 0.1
[inner]
optimizer = "sgd"
lr = 0.1
betas = [0.8, 0.99]
weight_decay = 0
warmup = 5
schedule = "cosine"
steps = 200
batch = 4
accumulate = 2
clip = 0.5
[outer]
method = "diloco"
steps = 10
lr = 0.5
momentum = 0.8
nesterov = false
[exchange]
codec = "fp32"
collective = "butterfly"
aggregation = "mean"
quorum = 0.6
min_peers = 2
grace = 3
max_weight = 1000
"""


YOUNGER = {
    "exchange.sick",
    "exchange.group",
    "exchange.keep",
    "exchange.shards",
    "exchange.topology",
    "inner.adam_lr",
    "inner.momentum",
    "outer.work",
    "outer.spread",
    "outer.late",
    "outer.late_lr",
    "data.once",
    "data.domains",
    "inner.global_batch",
    *(f"pipeline.{key}" for key in Pipeline.__struct_fields__),
}
"""Keys that came after this file, whose run id must stay."""


def test_everything_can_be_set_and_keeps_its_type():
    manifest = parse(FULL)
    default = Manifest()
    for table in Manifest.__struct_fields__:
        ours, theirs = getattr(manifest, table), getattr(default, table)
        for field in ours.__struct_fields__:
            assert type(getattr(ours, field)) is type(getattr(theirs, field)), (table, field)
            if f"{table}.{field}" in YOUNGER:
                continue
            if field not in ("kind", "method", "collective", "aggregation", *FOREIGN["diloco"]):
                assert getattr(ours, field) != getattr(theirs, field), (table, field)
    assert manifest.model == Model(layers=2, width=64, heads=2, context=32, mlp=4.0, tied=False)
    assert manifest.inner.betas == (0.8, 0.99)
    assert parse(FULL.encode()) == manifest


def test_an_empty_file_is_the_demonstration():
    assert parse("") == Manifest() == parse("[model]\n[inner]")


def test_every_field_is_documented():
    for field in msgspec.structs.fields(Manifest):
        assert f"[{field.name}]" in field.type.__doc__
        words = field.type.__doc__.replace(",", " ").replace(":", " ").split()
        assert set(field.type.__struct_fields__) <= set(words), field.name


def test_what_follows_from_the_values():
    manifest = parse("[run]\nrounds = 3\n[outer]\nsteps = 5\n[inner]\nbatch = 2\naccumulate = 3\n[model]\ncontext = 7")
    assert manifest.max_weight == 5 * 2 * 3 * 7 and manifest.schedule_steps == 15
    assert parse(FULL).max_weight == 1000 and parse(FULL).schedule_steps == 200
    assert Manifest().schedule_steps == 0


@pytest.mark.parametrize(
    ("toml", "place", "hint"),
    [
        ("[model]\nlayer = 3", "model.layer: unknown key", "did you mean 'layers'?"),
        ("[model]\nzzz = 3", "model.zzz: unknown key", "keys of [model]: kind, layers"),
        ("[modle]", "unknown table [modle]", "did you mean 'model'?"),
        ("lr = 3", "unknown table [lr]", "tables: run"),
        ("model = 3", "model is a table", "[model]"),
        ("[[model]]\nlayers = 3", "model is a table", "[model]"),
        ("[model]\nlayers = '3'", "model.layers: Expected `int`, got `str`", "the default is 4"),
        ("[model]\nlayers = true", "model.layers: Expected `int`, got `bool`", "4"),
        ("[model]\nlayers = 3.0", "model.layers", "4"),
        ("[model]\ntied = 1", "model.tied: Expected `bool`", "True"),
        (
            "[model]\nkind = 'transfromer'",
            "model.kind: Invalid enum value 'transfromer'",
            "did you mean 'transformer'?",
        ),
        ("[inner]\nbetas = [0.9]", "inner.betas: Expected `array` of length 2", "(0.9, 0.95)"),
        ("[inner]\nbetas = [0.9, nan]", "inner.betas", "(0.9, 0.95)"),
        ("[inner]\nlr = nan", "inner.lr", "0.001"),
        ("[inner]\nlr = inf", "inner.lr", "0.001"),
        ("[inner.lr]\nx = 1", "inner.lr", "0.001"),
        ("[run]\nname = 1979-05-27", "run.name", "demo"),
        ("[run]\nname = '../x'", "run.name: '../x' is not a name", "demo"),
        ('[run]\nname = "a\\n"', "run.name", "demo"),
        (
            "[exchange]\ncodec = 'int8'",
            "exchange.codec: 'int8' is not a codec with all its parameters",
            "int8(block=256)",
        ),
        (
            "[outer]\nmethod = 'sparseloco'\n[exchange]\ncodec = 'topk(K=64)'",
            "exchange.codec: 'topk(K=64)' is not a codec",
            "every method has one that suits it",
        ),
        ("[exchange]\ncodec = 'int8(block=15)'", "exchange.codec: a block has 16 to 65536 values", "256"),
        ("[exchange]\ncodec = 'e3m0(block=8)'", "exchange.codec: a block has 16 to 65536 values", "256"),
        ("[exchange]\ncodec = 'e3m0'", "not a codec with all its parameters", "e3m0(block=256)"),
        ("[exchange]\ncodec = 'int8(block=65537)'", "exchange.codec: a block has 16 to 65536 values", "256"),
        ("[model]\nwidth = 100\nheads = 8", "model.width 100 is not a multiple of 2 × model.heads (16)", "change"),
        ("[inner]\nschedule = 'cosine'", "inner.schedule is cosine, but the run has no end", "run.rounds"),
        ("[data]\ntokenizer = '/etc/passwd'", "data.tokenizer", "relative"),
        ("[data]\ntokenizer = 'a/../../b'", "data.tokenizer", "relative"),
        ("[data]\ntokenizer = 'c:b'", "data.tokenizer", "relative"),
        (f"[data]\ntokenizer_hash = '{'0' * 64}'", "data.tokenizer_hash", "remove"),
        (
            "[data]\ntokenizer = 'x'\ntokenizer_hash = 'abc'",
            "data.tokenizer_hash: 'abc' is not a blake3 hash",
            "default",
        ),
        ("[outer]\nsteps = 1048576\n[inner]\nbatch = 1048576\n[model]\ncontext = 1048576", "more tokens", "lower"),
        ("[outer]\nmethod = 'nolocco'", "outer.method: Invalid enum value 'nolocco'", "did you mean 'noloco'?"),
        ("[outer]\ngamma = 0.5", "outer.gamma says nothing with the method 'diloco'", "remove"),
        ("[outer]\nmethod = 'noloco'\nnesterov = false", "outer.nesterov says nothing", "remove"),
        ("[outer]\nmethod = 'noloco'\ngamma = 1.5", "outer.gamma 1.5 drives replicas apart", "0.7"),
        ("[outer]\nmethod = 'noloco'\ngamma = 2\n[exchange]\ngroup = 4", "it is below 1.5", "lower outer.gamma"),
        (
            "[outer]\nmethod = 'noloco'\n[exchange]\nsick = 'isolate'",
            "with noloco nobody owns any: a round is of a few peers",
            "remove",
        ),
        (
            "[outer]\nmethod = 'sparseloco'\n[exchange]\nsick = 'isolate'",
            "with sparseloco nobody owns any: every payload goes to everybody",
            "remove",
        ),
        ("[outer]\nmethod = 'demo'\n[exchange]\nsick = 'isolate'", "nobody owns any", "remove"),
        ("[exchange]\ngrace = 'soon'", "exchange.grace: ", "the default is 10.0"),
        ("[outer]\nmethod = 'noloco'\n[exchange]\ngrace = 'auto'", "exchange.grace is 'auto'", "give seconds"),
        ("[outer]\nmethod = 'merge'\n[exchange]\ngrace = 'auto'", "there is but one round", "give seconds"),
        (
            "[outer]\nmethod = 'buffered-async'\n[exchange]\ngrace = 'auto'",
            "rounds are of whoever is ready",
            "give seconds",
        ),
        ("[exchange]\ngroup = 3", "exchange.group says nothing with the method 'diloco'", "remove"),
        ("[outer]\nmethod = 'noloco'\n[exchange]\ngroup = 9", "exchange.group", "the default is 2"),
        ("[outer]\nmethod = 'noloco'\nmomentum = 0.9\ngamma = 1", "it is below 0.38", "lower outer.gamma"),
        ("[outer]\nmethod = 'sparseloco'\nmomentum = 0.9", "outer.momentum says nothing", "remove"),
        ("[outer]\nbeta = 0.9", "outer.beta says nothing with the method 'diloco'", "remove"),
        ("[outer]\nwork = 'by power'", "outer.work: Invalid enum value 'by power'", "did you mean 'by-power'?"),
        ("[data]\nonce = true\n[outer]\nmethod = 'noloco'", "data.once is not for the method 'noloco'", "remove"),
        (
            "[data]\nonce = true\n[outer]\nmethod = 'sparseloco'\non_exclusion = 'restore'",
            "data.once draws what",
            "remove",
        ),
        ("[data]\nonce = true\n[model]\nkind = 'custom'", "data.once says nothing", "remove"),
        ("[data]\nonce = true\n[exchange]\nmax_weight = 100", "exchange.max_weight is below", "remove"),
        ("[inner]\nglobal_batch = 8", "inner.global_batch needs data.once", "data.once = true"),
        (
            "[data]\nonce = true\n[inner]\nglobal_batch = 8\n[outer]\nwork = 'by-power'",
            "inner.global_batch is shared out equally",
            "remove",
        ),
        ("[data]\nonce = true\n[inner]\nglobal_batch = 8\naccumulate = 2", "inner.accumulate follows", "remove"),
        ("[data]\nonce = true\ndomains = true", "data.once needs one text for all", "remove"),
        ("[outer]\nmethod = 'merge'\n[run]\nrounds = 5", "run.rounds is 2 with the method 'merge'", "outer.steps"),
        ("[outer]\nmethod = 'merge'\nmomentum = 0.9", "outer.momentum says nothing", "remove"),
        ("[outer]\nmethod = 'merge'\n[data]\nonce = true", "data.once is not for the method 'merge'", "remove"),
        ("[outer]\nspread = 2", "outer.spread says nothing", "by-power"),
        ("[outer]\nlate = 9", "outer.late says nothing with the method 'diloco'", "remove"),
        ("[outer]\nmethod = 'sparseloco'\nlate_lr = 0.5", "outer.late_lr says nothing without", "the round from which"),
        ("[outer]\nmethod = 'noloco'\nwork = 'by-power'", "outer.work says nothing", "remove"),
        ("[inner]\nmomentum = 0.9", "inner.momentum says nothing with the optimizer 'adamw'", "remove"),
        ("[outer]\nmethod = 'muloco'\n[inner]\noptimizer = 'sgd'", "muloco is diloco with Muon", "diloco"),
        ("[outer]\nmethod = 'muloco'\ngamma = 0.5", "outer.gamma says nothing", "remove"),
        ("[outer]\nmethod = 'sparseloco'\nbeta = 1.1", "outer.beta: ", "0.95"),
        ("[outer]\nmethod = 'sparseloco'\non_exclusion = 'keep'", "outer.on_exclusion: ", "drop"),
        (
            "[outer]\nmethod = 'sparseloco'\n[exchange]\ncodec = 'fp32'",
            "'fp32' is not for the method 'sparseloco'",
            "topk",
        ),
        ("[exchange]\ncodec = 'topk(k=64,chunk=4096)|2bit|rice'", "is not for the method 'diloco'", "int8"),
        ("[exchange]\ncodec = 'int9(block=64)'", "there is no codec 'int9'", "did you mean 'int"),
        ("[exchange]\ncollective = 'gather'", "diloco needs 'butterfly'", "remove"),
        ("[outer]\nmethod = 'sparseloco'\n[exchange]\ncollective = 'butterfly'", "sparseloco needs 'gather'", "remove"),
        ("[exchange]\ntopology = 'rign'", "exchange.topology: ", "did you mean 'ring'?"),
        (
            "[outer]\nmethod = 'noloco'\n[exchange]\ntopology = 'ring'",
            "exchange.topology says nothing with noloco",
            "remove",
        ),
        (
            "[outer]\nmethod = 'demo'\n[exchange]\ntopology = 'ring'",
            "exchange.topology says nothing with demo",
            "remove",
        ),
        ("[outer]\nmethod = 'noloco'\nlr = 3", "outer.lr 3 makes the mean", "0.7"),
        ("[outer]\nmethod = 'noloco'\n[exchange]\nmin_peers = 2", "exchange.min_peers says nothing", "remove"),
        ("[model]\nlayers = 1\nlayers = 2", "not TOML", "toml.io"),
        ("[model", "not TOML", "toml.io"),
        ("x = " + "[" * 20_000, "not TOML", "toml.io"),
        ("[model]\nlayers = " + "9" * 5000, "not TOML", "toml.io"),
        ("[model]\nlayers = " + "9" * 50, "model.layers: Expected `int` <= 1024", "4"),
        ("#" * 32_769, "larger than 32768 bytes", "settings"),
        (b"[run]\nname = '\xff'", "not TOML", "toml.io"),
    ],
)
def test_mistakes_name_the_place_and_the_way_out(toml, place, hint):
    with pytest.raises(ManifestError) as caught:
        parse(toml, "my.toml")
    assert str(caught.value).startswith("my.toml: ") and place in str(caught.value)
    assert hint in caught.value.hint
    assert "\n" not in str(caught.value) and caught.value.exit_code == 2 and isinstance(caught.value, HintedError)


BOUNDS = {
    "run.seed": (0, 2**53 - 1),
    "run.rounds": (0, 2**32 - 1),
    "model.layers": (1, 1024),
    "data.shards": (1, 2**20),
    "data.holdout": (0.0, 0.5),
    "inner.warmup": (0, 2**32 - 1),
    "inner.batch": (1, 2**20),
    "inner.accumulate": (1, 2**16),
    "inner.clip": (0.0, 1e6),
    "outer.steps": (1, 2**20),
    "exchange.min_peers": (1, 256),
    "exchange.grace": (0.0, 3600.0),
    "exchange.max_weight": (0, 2**53 - 1),
}


@pytest.mark.parametrize("key", BOUNDS)
def test_bounds(key):
    table, field = key.split(".")
    for value in BOUNDS[key]:
        assert getattr(getattr(parse(f"[{table}]\n{field} = {value}"), table), field) == value
    low, high = BOUNDS[key]
    for value in (low - 1, high + 1):
        with pytest.raises(ManifestError, match=key):
            parse(f"[{table}]\n{field} = {value}")


def test_no_number_may_be_infinite_or_none_at_all():
    tried = 0
    for table in msgspec.structs.fields(Manifest):
        for field in msgspec.structs.fields(table.type):
            if isinstance(field.default, float):
                for value in ("nan", "-nan", "inf", "-inf"):
                    with pytest.raises(ManifestError, match=f"{table.name}.{field.name}"):
                        parse(f"[{table.name}]\n{field.name} = {value}")
                    tried += 1
    assert tried >= 36


@pytest.mark.parametrize("value", ["0.49", "1", "0", "-1", "1.5"])
def test_a_quorum_is_at_least_a_half_and_can_be_exceeded(value):
    with pytest.raises(ManifestError, match="exchange.quorum"):
        parse(f"[exchange]\nquorum = {value}")
    assert parse("[exchange]\nquorum = 0.5").exchange == Exchange()


@given(st.binary(max_size=60))
@settings(max_examples=60)
def test_any_bytes_give_a_manifest_or_a_manifest_error(data):
    for toml in (data, b"[inner]\nlr = " + data):
        try:
            assert isinstance(parse(toml), Manifest)
        except ManifestError:
            pass


def test_the_run_id_is_of_the_meaning_and_of_the_author():
    ids = parse(FULL).run_id(AUTHOR.public_key)
    assert len(ids) == 32
    same = FULL.replace("# everything", "# other words").replace("seed = 7", "seed=0x7").replace("mlp = 4", "mlp = 4.0")
    assert parse(same).run_id(AUTHOR.public_key) == ids
    assert parse("").run_id(AUTHOR.public_key) == parse("[inner]\nlr = 1e-3").run_id(AUTHOR.public_key)
    assert parse(FULL).run_id(Identity.generate(b"2" * 32).public_key) != ids


def test_messages_carry_no_control_characters_to_the_terminal():
    for toml in ('"\\u001b[2J\\n" = 1', '[model]\n"\\u001b[2J\\n" = 1', '[model]\nkind = "\\u001b[2J"'):
        with pytest.raises(ManifestError) as caught:
            parse(toml)
        assert (str(caught.value) + caught.value.hint).isprintable() and "[2J" in str(caught.value)


def test_every_value_changes_the_run_id():
    changes = ["run.seed = 1", "run.name = 'x'", "model.tied = false", "inner.betas = [0.9, 0.96]", "outer.lr = 0.71"]
    seen = {parse(toml).run_id(b"a" * 32) for toml in ["", *changes]}
    assert len(seen) == 6


def test_noloco_has_defaults_and_a_warning_of_its_own():
    outer = parse("[outer]\nmethod = 'noloco'").outer
    assert (outer.steps, outer.lr, outer.momentum, outer.nesterov, outer.gamma) == (50, 0.7, 0.5, False, 0.7)
    assert parse("[outer]\nmethod = 'noloco'\nsteps = 3").outer.steps == 3
    assert parse("").outer == Outer() and Outer().steps == 20
    assert parse("[outer]\nmethod = 'noloco'\ngamma = 1.35").warnings() == ()
    assert "near the limit of 1.5" in parse("[outer]\nmethod = 'noloco'\ngamma = 1.36").warnings()[0]
    ids = {parse(f"[outer]\nmethod = 'noloco'\n{more}").run_id(b"a" * 32) for more in ("", "gamma = 0.6", "lr = 0.6")}
    assert len(ids | {parse("").run_id(b"a" * 32)}) == 4


def test_what_keeps_replicas_together_in_groups_of_two():
    assert gamma_limit(0.5) == pytest.approx(1.5) and gamma_limit(0.9) < 1
    assert gamma_limit(0.5, 2) == pytest.approx(2 * 1.5)  # with two each pair is everybody: 2 (1 + α)
    assert gamma_limit(0.5, 64) == pytest.approx(1.5 / (1 - 0.5 / 63))


def test_larger_groups_stay_together_more_easily():
    assert gamma_limit(0.5, group=4) == pytest.approx(2.0) and gamma_limit(0.5, 8, 8) == pytest.approx(3.0)
    assert gamma_limit(0.5, 9, 4) == pytest.approx(1.5 / (0.5 + 2 / 8))  # three groups
    for group in range(2, 9):
        assert all(gamma_limit(0.5, peers, group) >= gamma_limit(0.5, group=group) - 1e-12 for peers in range(2, 60))


def test_a_group_is_part_of_the_run_where_it_is_not_a_pair():
    toml = "[outer]\nmethod = 'noloco'\n{}\n[exchange]\n{}"
    ids = [parse(toml.format("", more)).run_id(b"a" * 32) for more in ("", "group = 2", "group = 3", "group = 8")]
    assert ids[0] == ids[1] and len(set(ids)) == 3
    # A group is a pair when the others are late.
    assert "near the limit of 1.5" in parse(toml.format("gamma = 1.4", "group = 4")).warnings()[0]
    with pytest.raises(ManifestError, match="below 1.5"):
        parse(toml.format("gamma = 1.6", "group = 4"))


def test_the_run_id_of_a_file_never_changes():
    assert parse(FULL).run_id(b"a" * 32).hex()[:16] == "c66b6f8d4d19518c"


def test_how_chunks_are_dealt_out_is_part_of_the_run_where_it_is_not_the_default():
    ids = [parse(f"[exchange]\n{line}").run_id(b"a" * 32) for line in ("", 'shards = "bandwidth"', 'shards = "equal"')]
    assert ids[0] == ids[1] != ids[2]
    for method in ("noloco", "sparseloco"):
        with pytest.raises(ManifestError, match="exchange.shards says nothing"):
            parse(f'[outer]\nmethod = "{method}"\n[exchange]\nshards = "equal"')
    with pytest.raises(ManifestError, match="exchange.shards says nothing"):
        parse('[exchange]\ntopology = "hierarchy"\nshards = "equal"')


def test_the_topology_is_part_of_the_run_where_it_is_not_the_default():
    ids = [
        parse(f"[exchange]\n{line}").run_id(b"a" * 32)
        for line in ("", 'topology = "butterfly"', 'topology = "ring"', 'topology = "hierarchy"')
    ]
    assert ids[0] == ids[1] and len(set(ids)) == 3
    assert parse('[exchange]\ntopology = "ring"').exchange.topology == "ring"


def test_what_becomes_of_the_sick_is_part_of_the_run_where_it_is_not_the_default():
    ids = [parse(f"[exchange]\n{line}").run_id(b"a" * 32) for line in ("", 'sick = "report"', 'sick = "isolate"')]
    assert ids[0] == ids[1] != ids[2]
    assert parse('[exchange]\nsick = "isolate"').exchange.sick == "isolate"


def test_signing():
    signed = sign(FULL.encode(), AUTHOR)
    run_id = parse(FULL).run_id(AUTHOR.public_key)
    assert signed.verify() == signed.verify(run_id) == parse(FULL)
    with pytest.raises(ManifestError):
        sign(b"[modl]", AUTHOR)
    with pytest.raises(ManifestError, match="large"):
        sign(b"#" * 40_000, AUTHOR)


def _forged(toml):
    return SignedManifest(toml, AUTHOR.public_key, AUTHOR.sign("manifest", toml))


@pytest.mark.parametrize(
    ("signed", "reason"),
    [
        (SignedManifest(b"", AUTHOR.public_key, b"s" * 64), "not signed"),
        (SignedManifest(b"", AUTHOR.public_key, b""), "not signed"),
        (SignedManifest(b" ", AUTHOR.public_key, AUTHOR.sign("manifest", b"")), "not signed"),
        (SignedManifest(b"", b"k" * 32, AUTHOR.sign("manifest", b"")), "not signed"),
        (SignedManifest(b"", b"", AUTHOR.sign("manifest", b"")), "not signed"),
        (SignedManifest(b"", AUTHOR.public_key, AUTHOR.sign("record", b"")), "not signed"),
        (_forged(b"#" * 40_000), "not signed"),
        (_forged(b"[run]\nfuture = 1"), "run.future: unknown key"),
        (_forged(b"\xff"), "not TOML"),
        (_forged(b"[run]\nseed = 9"), "is of run .*, not 72727272"),
    ],
)
def test_a_manifest_that_is_not_the_one_asked_for(signed, reason):
    with pytest.raises(ManifestMismatch, match=reason) as caught:
        signed.verify(b"r" * 32)
    assert caught.value.exit_code == 5 and caught.value.hint


def test_a_manifest_is_frozen():
    with pytest.raises(AttributeError):
        Manifest().inner.lr = 1.0
    assert Inner() == Manifest().inner


def test_a_sparse_butterfly_is_another_run_and_of_sparseloco_alone():
    toml = "[outer]\nmethod = '{}'\n[exchange]\ncollective = '{}'"
    sieve = parse(toml.format("sparseloco", "sparse-butterfly"))
    assert sieve.run_id(b"a" * 32) != parse(toml.format("sparseloco", "gather")).run_id(b"a" * 32)
    for method in ("diloco", "demo", "noloco"):
        with pytest.raises(ManifestError, match="exchange.collective is 'sparse-butterfly'"):
            parse(toml.format(method, "sparse-butterfly"))
    with pytest.raises(ManifestError, match="exchange.shards says nothing"):
        parse(toml.format("sparseloco", "sparse-butterfly") + "\nshards = 'equal'")
    less = parse(toml.format("sparseloco", "sparse-butterfly") + "\nkeep = 0.4")
    assert less.run_id(b"a" * 32) != sieve.run_id(b"a" * 32)
    with pytest.raises(ManifestError, match="exchange.keep says nothing"):
        parse(toml.format("sparseloco", "gather") + "\nkeep = 0.4")


def test_sparseloco_has_defaults_of_its_own():
    manifest = parse("[outer]\nmethod = 'sparseloco'")
    outer, exchange = manifest.outer, manifest.exchange
    assert (outer.steps, outer.lr, outer.momentum, outer.nesterov, outer.beta) == (30, 1.0, 0.0, False, 0.95)
    assert (outer.denominator, outer.on_exclusion) == ("contributor_mean", "drop")
    assert (exchange.codec, exchange.collective) == ("topk(k=64,chunk=4096)|2bit|rice", "gather")
    written = "[outer]\nmethod = 'sparseloco'\nbeta = 0.95\n[exchange]\ncollective = 'gather'"
    assert parse(written).run_id(b"a" * 32) == manifest.run_id(b"a" * 32)
    for more in ("beta = 0.9", "denominator = 'mean'", "on_exclusion = 'restore'", "lr = 0.65"):
        assert parse(f"[outer]\nmethod = 'sparseloco'\n{more}").run_id(b"a" * 32) != manifest.run_id(b"a" * 32)
    smaller = "[outer]\nmethod = 'sparseloco'\n[exchange]\ncodec = 'topk(k=32,chunk=4096)|1bit|fixed'"
    assert parse(smaller).exchange.codec == registry.parse(parse(smaller).exchange.codec).spec


def test_every_codec_a_manifest_may_name_can_be_made():
    for method, names in CODECS.items():
        assert all(name in registry.CODECS for name in names), method
    for codec in (
        "fp32",
        "bf16",
        "int8(block=16)",
        "int8(block=256)",
        "int8(block=65536)",
        "int4(block=256)",
        "int3(block=64,asymmetric=1,stochastic=1)",
        "e3m0(block=256)",
    ):
        assert parse(f"[exchange]\ncodec = '{codec}'").exchange.codec == codec == registry.parse(codec).spec


def test_the_ids_of_the_first_runs_stay():
    """As they were before there was anything else to choose; a peer of an older version meets them by these."""
    ids = {
        "": "6e673045d140b62eb6e252913e8c86290f8eb4a6a92c1e654b57e241578736b9",
        "[outer]\nmethod='noloco'": "2e54e472191f0343ffbe5e4ddc0c1ebb83d8fcd99e74363e22cc517150ce7290",
        "[outer]\nmethod='sparseloco'": "4ef5e5ed39997492a92f6fe335203fe2de0d33597580013c24c69b2916db9b4f",
        "[outer]\nmethod='demo'": "ab824c2720fb2e15790a7bb31fa914834b786865eb9a1cee86cf733128cef7ae",
        "[outer]\nmethod='powersgd'": "9d0ae8d73eef9b692e033e13f2e27021d62a32c5948764bd376a952e25538df6",
    }
    assert {toml: parse(toml).run_id(b"a" * 32).hex() for toml in ids} == ids


def test_work_by_power_lets_a_fast_peer_do_more():
    manifest = parse("[outer]\nwork = 'by-power'\nspread = 3\nsteps = 10")
    assert manifest.max_weight == 3 * parse("[outer]\nsteps = 10").max_weight
    assert manifest.run_id(b"a" * 32) != parse("[outer]\nwork = 'by-power'\nsteps = 10").run_id(b"a" * 32)
    assert parse("[outer]\nwork = 'equal'").run_id(b"a" * 32) == parse("").run_id(b"a" * 32)


def test_a_late_rate_is_part_of_the_run_and_none_changes_no_run():
    plain = parse("[outer]\nmethod = 'sparseloco'").run_id(b"a" * 32)
    assert parse("[outer]\nmethod = 'sparseloco'\nlate = 0").run_id(b"a" * 32) == plain
    late = [parse(f"[outer]\nmethod = 'sparseloco'\nlate = 9{more}") for more in ("", "0", "\nlate_lr = 0.5")]
    assert len({plain, *(one.run_id(b"a" * 32) for one in late)}) == 4 and late[0].outer.late_lr == 0.65


def test_muloco_trains_with_muon():
    manifest = parse("[outer]\nmethod = 'muloco'")
    outer, inner = manifest.outer, manifest.inner
    assert (outer.steps, outer.lr, outer.momentum, outer.nesterov) == (30, 0.7, 0.6, True)
    assert (inner.optimizer, inner.lr, inner.momentum, inner.adam_lr) == ("muon", 0.02, 0.95, 0.001)
    written = "[inner]\noptimizer = 'muon'\nmomentum = 0.95\n[outer]\nmethod = 'muloco'\nsteps = 30"
    assert parse(written).run_id(b"a" * 32) == manifest.run_id(b"a" * 32)
    assert parse(written.replace("0.95", "0.9")).run_id(b"a" * 32) != manifest.run_id(b"a" * 32)
    assert parse("[inner]\noptimizer = 'muon'").inner.lr == 0.02
    assert parse("[inner]\noptimizer = 'muon'\nlr = 0.01").inner.lr == 0.01


def test_merge_has_one_exchange():
    manifest = parse("[outer]\nmethod = 'merge'")
    outer, exchange = manifest.outer, manifest.exchange
    assert (outer.steps, outer.lr, outer.momentum, outer.nesterov) == (1000, 1.0, 0.0, False)
    assert (manifest.run.rounds, manifest.data.domains, exchange.codec, exchange.grace) == (2, True, "fp32", 3600.0)
    assert (manifest.steps_after(1), manifest.steps_after(2), manifest.schedule_steps) == (0, 1000, 1000)
    assert parse("[outer]\nmethod = 'merge'\n[data]\ndomains = false").run_id(b"a" * 32) != manifest.run_id(b"a" * 32)


def test_a_grace_is_seconds_or_computed():
    fixed, computed = parse("[exchange]\ngrace = 10.0"), parse("[exchange]\ngrace = 'auto'")
    assert fixed == Manifest() and fixed.exchange.seconds == fixed.exchange.grace == 10.0
    assert computed.exchange.grace == "auto" and computed.exchange.seconds == 10.0
    assert computed.run_id(b"a" * 32) != fixed.run_id(b"a" * 32)


def test_the_slow_can_be_kept_from_owning_where_chunks_are_owned():
    for toml in ("", "collective = 'sparse-butterfly'\n[outer]\nmethod = 'sparseloco'", "topology = 'ring'"):
        assert parse(f"[exchange]\nsick = 'isolate'\n{toml}").exchange.sick == "isolate"


STAGED = '[outer]\nmethod = "streaming"\n[pipeline]\nstages = 3\n'


def test_a_model_in_stages():
    run = parse(STAGED)
    assert run.chained and (run.outer.fragments, run.outer.overlap, run.outer.alpha) == (3, 0, 0.0)
    assert run.micro == 1 and parse(f"{STAGED}micro = 6").max_weight == 6 * parse(STAGED).max_weight
    assert parse(f"{STAGED}[inner]\naccumulate = 4").micro == 4
    kept = STAGED.replace("[pipeline]", "overlap = 12\nalpha = 0.25\n[pipeline]")
    assert (parse(kept).outer.overlap, parse(kept).outer.alpha) == (12, 0.25)
    assert parse("").canonical() == parse("[pipeline]\nstages = 0").canonical()
    assert parse(STAGED).canonical() != parse(f"{STAGED}window = 1").canonical()
    planned = parse(f"{STAGED}paths = 'planned'\nskip = 0.34\nswaps = 1\nroom = 4")
    assert (planned.pipeline.visited, parse(STAGED).pipeline.visited) == (2, 3)
    assert (planned.room, parse(f"{STAGED}micro = 2").room, parse(f"{STAGED}micro = 8").room) == (4, 2, 3)
    assert planned.canonical() != parse(STAGED).canonical()


@pytest.mark.parametrize(
    ("toml", "said"),
    [
        ("[pipeline]\nmicro = 4", "without stages"),
        ("[pipeline]\nstages = 3", "'streaming'"),
        (STAGED.replace("3", "1"), "holds all"),
        (STAGED.replace("3", "5") + "[model]\nlayers = 4", "no 5 stages"),
        (STAGED + "[model]\nkind = 'custom'", "cannot be cut"),
        (STAGED.replace("[pipeline]", "fragments = 5\n[pipeline]"), "as many fragments"),
        (STAGED + "codec = 'int8(block=256)'", "crosses"),
        (STAGED + "window = 2", "1 micro-batches"),
        (STAGED + "skip = 0.34", "pipeline.skip says nothing without plans"),
        (STAGED + "swaps = 1", "pipeline.swaps says nothing without plans"),
        (STAGED + "room = 1", "pipeline.room says nothing without plans"),
        (STAGED + "paths = 'planned'\nrebalance = 5", "rebalance says nothing"),
        (STAGED + "paths = 'planned'\nskip = 0.1", "0.1 of 3 stages is none"),
        (STAGED + "paths = 'planned'\nskip = 0.6", "fewer than two"),
        (STAGED + "paths = 'planned'\nskip = 1.0", "skip"),
        (STAGED + "paths = 'planned'\nswaps = 3", "swaps"),
        (STAGED + "paths = 'plan'", "did you mean 'planned'|paths"),
        (STAGED + "rebalance = -1", "rebalance"),
        (STAGED + "holders = 0", "holders"),
    ],
)
def test_stages_that_cannot_be(toml, said):
    with pytest.raises(ManifestError, match=said):
        parse(toml)
