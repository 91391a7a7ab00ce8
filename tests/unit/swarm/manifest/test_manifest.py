import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from thinwire.compression import registry
from thinwire.swarm.identity.errors import HintedError
from thinwire.swarm.identity.identity import Identity
from thinwire.swarm.manifest.manifest import Manifest, ManifestError, ManifestMismatch
from thinwire.swarm.manifest.parser import SignedManifest, parse, sign
from thinwire.swarm.manifest.renamed_keys import KEYS, VALUES
from thinwire.swarm.manifest.tables import Inner, Lora, Model, Pipeline
from thinwire.swarm.method_specs.base import ManifestTable
from thinwire.swarm.method_specs.diloco import DiLoCo
from thinwire.swarm.method_specs.noloco import gamma_limit
from thinwire.swarm.method_specs.registry import METHODS

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
weights = "abababababababababababababababababababababababababababababababab"
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
sync_every = 10
lr = 0.5
momentum = 0.8
nesterov = false
[exchange]
codec = "fp32"
collective = "butterfly"
aggregation = "mean"
quorum = 0.6
min_peers = 2
straggler_timeout = 3
orphan = 20
on_split = "discard"
max_weight = 1000
[admission]
mode = "closed"
"""


YOUNGER = {
    "model.name",
    "model.config_hash",
    "admission.trial_rounds",
    "admission.trial_per_network",
    "exchange.slow_peers",
    "exchange.gossip_group_size",
    "exchange.owner_residual_decay",
    "exchange.chunk_assignment",
    "exchange.topology",
    "exchange.audit",
    "exchange.max_liars",
    "exchange.aggregation_iterations",
    "model.buffers",
    "inner.adam_lr",
    "inner.momentum",
    "outer.step_balancing",
    "outer.max_step_ratio",
    "outer.lr_change_round",
    "outer.lr_after",
    "data.exactly_once",
    "data.private",
    "inner.global_batch",
    "inner.precision",
    *(f"pipeline.{key}" for key in Pipeline.__struct_fields__),
    *(f"lora.{key}" for key in Lora.__struct_fields__),
}
"""Keys that FULL leaves at their defaults."""


RUN_IDS = {
    "": "13cfa7c4f5599c1e",
    "[outer]\nmethod='noloco'": "6d6263df6a0d0021",
    "[outer]\nmethod='sparseloco'": "31cd84444ce30b59",
    "[outer]\nmethod='sparseloco'\ndenominator='contributor_mean'": "44fde70999c42144",
    "[outer]\nmethod='demo'": "509ee629429f914e",
    "[outer]\nmethod='demo'\ndenominator='contributor_mean'": "0fedce214a7bdcb1",
    "[outer]\nmethod='streaming'": "02705237573ebeb9",
}


def test_every_key_can_be_set_and_keeps_its_type():
    manifest = parse(FULL)
    default = Manifest()
    for table in Manifest.__struct_fields__:
        ours, theirs = getattr(manifest, table), getattr(default, table)
        for field in ours.__struct_fields__:
            if field != "quorum":  # a number, or a name as by default
                assert type(getattr(ours, field)) is type(getattr(theirs, field)), (table, field)
            if f"{table}.{field}" in YOUNGER:
                continue
            if field not in ("kind", "method", "collective", "aggregation", "on_exclusion"):
                assert getattr(ours, field) != getattr(theirs, field), (table, field)
    assert manifest.model == Model(layers=2, width=64, heads=2, context=32, mlp=4.0, tied=False, weights="ab" * 32)
    assert manifest.inner.betas == (0.8, 0.99)
    assert parse(FULL.encode()) == manifest


def test_younger_keys_with_their_defaults_change_no_run_id():
    named = "[model]\nkind = 'module'\nname = 'a:"
    assert b"config_hash" not in Manifest().canonical() and b"config_hash" not in parse(f"{named}b'").canonical()
    assert parse(f"{named}b'").run_id(b"") != parse(f"{named}c'").run_id(b"")
    adapter = f"{named}b'\n[lora]\nrank = 4\ntargets = ['a']"
    assert b"lora" not in Manifest().canonical() and b"precision" not in Manifest().canonical()
    changes = ("", "alpha = 4", "alpha = 16")
    ids = [parse(f"{adapter}\n{more}").run_id(b"") for more in changes]
    assert ids[0] == ids[2] != ids[1] and parse(f"{named}b'").run_id(b"") not in ids


def test_empty_manifest_gives_the_defaults():
    assert parse("") == Manifest() == parse("[model]\n[inner]")


def test_every_manifest_key_is_documented():
    for field in msgspec.structs.fields(Manifest):
        kinds = METHODS.values() if field.name == "outer" else [field.type]
        for kind in kinds:
            assert f"[{field.name}]" in kind.__doc__
            # The keys of a base class are documented there.
            text = " ".join(base.__doc__ or "" for base in kind.__mro__ if issubclass(base, ManifestTable))
            words = text.replace(",", " ").replace(":", " ").split()
            assert set(kind.__struct_fields__) <= set(words), kind


def test_derived_properties_follow_from_values():
    manifest = parse(
        "[run]\nrounds = 3\n[outer]\nsync_every = 5\n[inner]\nbatch = 2\naccumulate = 3\n[model]\ncontext = 7"
    )
    assert manifest.max_weight == 5 * 2 * 3 * 7 and manifest.schedule_steps == 15
    assert parse(FULL).max_weight == 1000 and parse(FULL).schedule_steps == 200
    assert Manifest().schedule_steps == 0


@pytest.mark.parametrize(
    ("toml", "place", "hint"),
    [
        ("[model]\nlayer = 3", "model.layer: unknown key", "did you mean 'layers'?"),
        ("[model]\nzzz = 3", "model.zzz: unknown key", "keys of [model]: kind, layers"),
        ("[model]\nkind = 'hf'", "model.kind = 'hf' needs model.name", "a folder with config.json"),
        ("[model]\nkind = 'module'\nname = 'a'", "'a' is not MODULE:FUNCTION", "mymodel:make"),
        ("[model]\nkind = 'module'\nname = 'a:b c'", "model.name: 'a:b c' is not a path", '""'),
        ("[model]\nname = 'a:b'", "model.name only applies to", "set model.kind"),
        ("[model]\nkind = 'custom'\n[inner]\nprecision = 'bf16'", "a training loop of the user", "the loop decides"),
        ("[lora]\nalpha = 3", "[lora] has no effect without rank", "set lora.rank"),
        ("[lora]\nrank = 3", "lora.rank does not apply to the built-in model", "set model.kind"),
        ("[model]\nkind = 'custom'\n[lora]\nrank = 3", "a training loop of the user", "a model of peft to `wrap`"),
        ("[model]\nkind = 'module'\nname = 'a:b'\n[lora]\nrank = 3", "lora.targets must name layers", "q_proj"),
        (
            "[model]\nkind = 'hf'\nname = 'a'\n[lora]\nrank = 3\ntargets = ['all-linear', 'b']",
            "lora.targets has 'all-linear' and others",
            "remove the others",
        ),
        (
            "[lora]\nrank = 3\ntargets = ['a(b|c)+']",
            "a list of values, each a name of at most 128 letters",
            "the default is",
        ),
        ("[inner]\nprecision = 'fp16'", "inner.precision: ", "did you mean 'bf16'?"),
        ("[model]\nkind = 'custom'\nconfig_hash = '" + "ab" * 32 + "'", "model.config_hash only applies", "remove"),
        ("[modle]", "unknown table [modle]", "did you mean 'model'?"),
        ("rate = 3", "unknown table [rate]", "tables: run"),
        ("model = 3", "model is not a table", "[model]"),
        ("[[model]]\nlayers = 3", "model is not a table", "[model]"),
        ("[model]\nlayers = '3'", "model.layers: '3' is not a whole number from 1 to 1024", "the default is 4"),
        ("[model]\nlayers = true", "model.layers: true is not a whole number from 1 to 1024", "4"),
        ("[model]\nlayers = 3.0", "model.layers", "4"),
        ("[model]\ntied = 1", "model.tied: 1 is not true or false", "true"),
        (
            "[model]\nkind = 'transfromer'",
            "model.kind: 'transfromer' is not 'transformer' or ",
            "did you mean 'transformer'?",
        ),
        (
            "[inner]\nbetas = [0.9]",
            "inner.betas: [0.9] is not a list of 2 values, each a number from 0 to below 1",
            "[0.9,0.95]",
        ),
        ("[inner]\nbetas = [0.9, nan]", "inner.betas", "[0.9,0.95]"),
        ("[inner]\nlr = nan", "inner.lr: nan is not a number above 0 up to 100", "0.001"),
        ("[exchange]\nquorum = 'half'", "quorum: 'half' is not a number from 0.5 to below 1 or 'two-thirds'", "auto"),
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
            "every method has a suitable default",
        ),
        ("[exchange]\ncodec = 'int8(block=15)'", "exchange.codec: a block has 16 to 65536 values", "256"),
        ("[exchange]\ncodec = 'e3m0(block=8)'", "exchange.codec: a block has 16 to 65536 values", "256"),
        ("[exchange]\ncodec = 'e3m0'", "not a codec with all its parameters", "e3m0(block=256)"),
        ("[exchange]\ncodec = 'int8(block=65537)'", "exchange.codec: a block has 16 to 65536 values", "256"),
        ("[model]\nwidth = 100\nheads = 8", "model.width = 100 is not a multiple of 2 × model.heads = 16", "change"),
        ("[inner]\nschedule = 'cosine'", "inner.schedule is 'cosine', but the run has no end", "run.rounds"),
        ("[data]\ntokenizer = '/etc/passwd'", "data.tokenizer", "relative"),
        ("[data]\ntokenizer = 'a/../../b'", "data.tokenizer", "relative"),
        ("[data]\ntokenizer = 'c:b'", "data.tokenizer", "relative"),
        (f"[data]\ntokenizer_hash = '{'0' * 64}'", "data.tokenizer_hash", "remove"),
        (
            "[data]\ntokenizer = 'x'\ntokenizer_hash = 'abc'",
            "data.tokenizer_hash: 'abc' is not a blake3 hash",
            "default",
        ),
        (
            "[outer]\nsync_every = 1048576\n[inner]\nbatch = 1048576\n[model]\ncontext = 1048576",
            "exceed the largest weight",
            "lower",
        ),
        ("[outer]\nmethod = 'nolocco'", "outer.method: there is no method 'nolocco'", "did you mean 'noloco'?"),
        ("[outer]\ngamma = 0.5", "outer.gamma does not apply to this method", "remove"),
        ("[outer]\nmethod = 'noloco'\nnesterov = false", "outer.nesterov does not apply", "it applies to diloco"),
        ("[outer]\nmethod = 'noloco'\ngamma = 1.5", "outer.gamma = 1.5 makes replicas diverge", "0.7"),
        (
            "[outer]\nmethod = 'noloco'\ngamma = 2\n[exchange]\ngossip_group_size = 4",
            "the limit is 1.5",
            "lower outer.gamma",
        ),
        (
            "[outer]\nmethod = 'noloco'\n[exchange]\nslow_peers = 'no-ownership'",
            "with noloco: no peer owns chunks, because a round has a few peers",
            "remove",
        ),
        (
            "[outer]\nmethod = 'sparseloco'\n[exchange]\nslow_peers = 'no-ownership'",
            "with sparseloco: no peer owns chunks, because every payload goes to all",
            "remove",
        ),
        ("[outer]\nmethod = 'demo'\n[exchange]\nslow_peers = 'no-ownership'", "no peer owns chunks", "remove"),
        ("[exchange]\nstraggler_timeout = 'soon'", "exchange.straggler_timeout: ", "the default is 10.0"),
        (
            "[outer]\nmethod = 'noloco'\n[exchange]\nstraggler_timeout = 'auto'",
            "exchange.straggler_timeout = 'auto' does not apply to noloco",
            "give seconds",
        ),
        (
            "[outer]\nmethod = 'merge'\n[exchange]\nstraggler_timeout = 'auto'",
            "there is only one round",
            "give seconds",
        ),
        (
            "[outer]\nmethod = 'buffered-async'\n[exchange]\nstraggler_timeout = 'auto'",
            "a round has the contributors that are ready",
            "give seconds",
        ),
        (
            "[exchange]\ngossip_group_size = 3",
            "exchange.gossip_group_size does not apply to the method 'diloco'",
            "remove",
        ),
        (
            "[outer]\nmethod = 'noloco'\n[exchange]\ngossip_group_size = 65",
            "exchange.gossip_group_size",
            "the default is 2",
        ),
        ("[outer]\nmethod = 'noloco'\nmomentum = 0.9\ngamma = 1", "the limit is 0.38", "lower outer.gamma"),
        ("[outer]\nmethod = 'sparseloco'\nmomentum = 0.9", "outer.momentum does not apply", "remove"),
        ("[outer]\nresidual_decay = 0.9", "outer.residual_decay does not apply", "remove"),
        (
            "[outer]\nstep_balancing = 'by-sped'",
            "outer.step_balancing: 'by-sped' is not 'equal' or 'by-speed'",
            "did you mean 'by-speed'?",
        ),
        (
            "[data]\nexactly_once = true\n[outer]\nmethod = 'noloco'",
            "data.exactly_once does not work with the method 'noloco'",
            "remove",
        ),
        (
            "[data]\nexactly_once = true\n[outer]\nmethod = 'sparseloco'\non_exclusion = 'restore'",
            "data.exactly_once draws the data",
            "remove",
        ),
        ("[data]\nexactly_once = true\n[model]\nkind = 'custom'", "data.exactly_once does not apply", "remove"),
        ("[data]\nexactly_once = true\n[exchange]\nmax_weight = 100", "exchange.max_weight is below", "remove"),
        ("[inner]\nglobal_batch = 8", "inner.global_batch needs data.exactly_once", "data.exactly_once = true"),
        (
            "[data]\nexactly_once = true\n[inner]\nglobal_batch = 8\n[outer]\nstep_balancing = 'by-speed'",
            "inner.global_batch gives all peers equal parts",
            "remove",
        ),
        (
            "[data]\nexactly_once = true\n[inner]\nglobal_batch = 8\naccumulate = 2",
            "inner.accumulate follows",
            "remove",
        ),
        ("[data]\nexactly_once = true\nprivate = true", "data.exactly_once needs one text for all peers", "remove"),
        (
            "[outer]\nmethod = 'merge'\n[run]\nrounds = 5",
            "run.rounds must be 2 with the method 'merge'",
            "outer.sync_every",
        ),
        ("[outer]\nmethod = 'merge'\nmomentum = 0.9", "outer.momentum does not apply", "remove"),
        (
            "[outer]\nmethod = 'merge'\n[data]\nexactly_once = true",
            "data.exactly_once does not work with the method 'merge'",
            "remove",
        ),
        ("[outer]\nmax_step_ratio = 2", "outer.max_step_ratio only applies", "by-speed"),
        ("[outer]\nlr_change_round = 9", "outer.lr_change_round does not apply", "remove"),
        (
            "[outer]\nmethod = 'sparseloco'\nlr_after = 0.5",
            "outer.lr_after only applies",
            "set outer.lr_change_round",
        ),
        ("[outer]\nmethod = 'noloco'\nstep_balancing = 'by-speed'", "outer.step_balancing does not apply", "remove"),
        ("[inner]\nmomentum = 0.9", "inner.momentum only applies to the optimizer 'muon'", "remove"),
        ("[outer]\nmethod = 'muloco'\n[inner]\noptimizer = 'sgd'", "'muloco' is DiLoCo with Muon", "diloco"),
        ("[outer]\nmethod = 'muloco'\ngamma = 0.5", "outer.gamma does not apply", "noloco"),
        ("[outer]\nmethod = 'sparseloco'\nresidual_decay = 1.1", "outer.residual_decay: ", "0.95"),
        ("[outer]\nmethod = 'sparseloco'\non_exclusion = 'keep'", "outer.on_exclusion: ", "drop"),
        (
            "[outer]\nmethod = 'sparseloco'\n[exchange]\ncodec = 'fp32'",
            "'fp32' is not for the method 'sparseloco'",
            "topk",
        ),
        ("[exchange]\ncodec = 'topk(k=64,chunk=4096)|2bit|rice'", "is not for the method 'diloco'", "int8"),
        ("[exchange]\ncodec = 'int9(block=64)'", "there is no codec 'int9'", "did you mean 'int"),
        ("[exchange]\ncollective = 'all-gather'", "diloco needs 'butterfly'", "remove"),
        (
            "[outer]\nmethod = 'sparseloco'\n[exchange]\ncollective = 'butterfly'",
            "sparseloco needs 'all-gather'",
            "remove",
        ),
        ("[exchange]\ntopology = 'rign'", "exchange.topology: ", "did you mean 'ring'?"),
        (
            "[outer]\nmethod = 'noloco'\n[exchange]\ntopology = 'ring'",
            "exchange.topology does not apply to noloco",
            "remove",
        ),
        (
            "[outer]\nmethod = 'demo'\n[exchange]\ntopology = 'ring'",
            "exchange.topology does not apply to demo",
            "remove",
        ),
        ("[outer]\nmethod = 'noloco'\nlr = 3", "outer.lr = 3 makes the mean", "0.7"),
        ("[outer]\nmethod = 'noloco'\n[exchange]\nmin_peers = 2", "exchange.min_peers does not apply", "remove"),
        ("[model]\nlayers = 1\nlayers = 2", "not TOML", "toml.io"),
        ("[model", "not TOML", "toml.io"),
        ("x = " + "[" * 20_000, "not TOML", "toml.io"),
        ("[model]\nlayers = " + "9" * 5000, "not TOML", "toml.io"),
        ("[model]\nlayers = " + "9" * 50, "is not a whole number from 1 to 1024", "4"),
        ("#" * 32_769, "larger than 32768 bytes", "settings"),
        (b"[run]\nname = '\xff'", "not TOML", "toml.io"),
    ],
)
def test_manifest_mistakes_name_place_and_remedy(toml, place, hint):
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
    "outer.sync_every": (1, 2**20),
    "exchange.min_peers": (1, 256),
    "exchange.straggler_timeout": (0.0, 3600.0),
    "exchange.max_weight": (0, 2**53 - 1),
}


@pytest.mark.parametrize("key", BOUNDS)
def test_manifest_values_are_bounded(key):
    table, field = key.split(".")
    for value in BOUNDS[key]:
        assert getattr(getattr(parse(f"[{table}]\n{field} = {value}"), table), field) == value
    low, high = BOUNDS[key]
    for value in (low - 1, high + 1):
        with pytest.raises(ManifestError, match=key):
            parse(f"[{table}]\n{field} = {value}")


def test_non_finite_numbers_are_refused():
    tried = 0
    for table in msgspec.structs.fields(Manifest):
        kind = DiLoCo if table.name == "outer" else table.type
        for field in msgspec.structs.fields(kind):
            if isinstance(field.default, float):
                for value in ("nan", "-nan", "inf", "-inf"):
                    with pytest.raises(ManifestError, match=f"{table.name}.{field.name}"):
                        parse(f"[{table.name}]\n{field.name} = {value}")
                    tried += 1
    assert tried >= 36


@pytest.mark.parametrize("value", ["0.49", "1", "0", "-1", "1.5"])
def test_quorum_is_at_least_one_half_and_below_one(value):
    with pytest.raises(ManifestError, match="exchange.quorum"):
        parse(f"[exchange]\nquorum = {value}")
    assert parse("[exchange]\nquorum = 0.5").canonical() == parse("").canonical(), "an older run keeps its id"


def test_quorum_may_be_above_two_thirds():
    assert (
        parse('[exchange]\nquorum = "two-thirds"').quorum == 2 / 3 and parse("[exchange]\nquorum = 0.75").quorum == 0.75
    )
    with pytest.raises(ManifestError, match="exchange.quorum"):
        parse('[exchange]\nquorum = "all"')


def test_quorum_of_an_open_run_is_above_two_thirds_unless_the_author_sets_another():
    """A stranger can be one of its members, and one that lies could give a round two results with a majority."""
    opened = "[admission]\nmode = 'open'\n"
    assert parse("").quorum == parse("[admission]\nmode = 'closed'").quorum == 0.5 and parse(opened).quorum == 2 / 3
    chosen = parse(f"{opened}[exchange]\nquorum = 0.5")
    assert chosen.quorum == 0.5 and chosen.canonical() != parse(opened).canonical()


@given(st.binary(max_size=60))
@settings(max_examples=60)
def test_any_bytes_parse_or_raise_manifest_error(data):
    for toml in (data, b"[inner]\nlr = " + data):
        try:
            assert isinstance(parse(toml), Manifest)
        except ManifestError:
            pass


@pytest.mark.parametrize(
    "toml",
    [
        "[outer]\nmethod = []",
        "[outer]\nmethod = 0x" + "f" * 4000,
        "[run]\nname = 0x" + "f" * 4000,
        "[run]\nname = [0x" + "f" * 4000 + "]",
        "[exchange]\ncodec = 0x" + "f" * 4000,
        "[exchange]\ncollective = 0x" + "f" * 4000,
        "[inner]\nlr = 0x" + "f" * 4000,
    ],
)
def test_value_that_python_cannot_hash_or_write_is_refused(toml):
    with pytest.raises(ManifestError) as caught:
        parse(toml)
    assert len(str(caught.value)) < 400


def test_key_of_thousands_of_parts_is_refused_before_it_is_read():
    """tomllib takes 8 s for it."""
    with pytest.raises(ManifestError, match="dots"):
        parse("a." * 15_000 + "a = 1")
    assert parse("# " + "." * 200)


def test_run_id_depends_on_meaning_and_author():
    ids = parse(FULL).run_id(AUTHOR.public_key)
    assert len(ids) == 32
    same = FULL.replace("# everything", "# other words").replace("seed = 7", "seed=0x7").replace("mlp = 4", "mlp = 4.0")
    assert parse(same).run_id(AUTHOR.public_key) == ids
    assert parse("").run_id(AUTHOR.public_key) == parse("[inner]\nlr = 1e-3").run_id(AUTHOR.public_key)
    assert parse(FULL).run_id(Identity.generate(b"2" * 32).public_key) != ids


def test_error_messages_have_no_control_characters():
    for toml in ('"\\u001b[2J\\n" = 1', '[model]\n"\\u001b[2J\\n" = 1', '[model]\nkind = "\\u001b[2J"'):
        with pytest.raises(ManifestError) as caught:
            parse(toml)
        assert (str(caught.value) + caught.value.hint).isprintable() and "[2J" in str(caught.value)


def test_every_value_changes_the_run_id():
    changes = ["run.seed = 1", "run.name = 'x'", "model.tied = false", "inner.betas = [0.9, 0.96]", "outer.lr = 0.71"]
    seen = {parse(toml).run_id(b"a" * 32) for toml in ["", *changes]}
    assert len(seen) == 6


def test_noloco_has_its_own_defaults_and_warning():
    outer = parse("[outer]\nmethod = 'noloco'").outer
    assert (outer.sync_every, outer.sgd, outer.gamma) == (50, (0.7, 0.5, False), 0.7)
    assert parse("[outer]\nmethod = 'noloco'\nsync_every = 3").outer.sync_every == 3
    assert parse("").outer == DiLoCo() and DiLoCo().sync_every == 20
    assert parse("[outer]\nmethod = 'noloco'\ngamma = 1.35").warnings() == ()
    assert "near the limit of 1.5" in parse("[outer]\nmethod = 'noloco'\ngamma = 1.36").warnings()[0]
    ids = {parse(f"[outer]\nmethod = 'noloco'\n{more}").run_id(b"a" * 32) for more in ("", "gamma = 0.6", "lr = 0.6")}
    assert len(ids | {parse("").run_id(b"a" * 32)}) == 4


def test_noloco_takes_a_sparse_codec_with_the_defaults_of_sparseloco():
    toml = "[outer]\nmethod = 'noloco'\n{}\n[exchange]\ncodec = 'topk(k=64,chunk=4096)|2bit|rice'\n"
    outer, usual = parse(toml.format("")).outer, parse("[outer]\nmethod = 'sparseloco'").outer
    assert (outer.sgd, outer.residual_decay) == (usual.sgd, usual.residual_decay) and outer.slow_weight_parts == 1
    assert parse("[outer]\nmethod = 'noloco'").outer.residual_decay == 1.0  # without sparsity nothing decays
    assert parse(toml.format("momentum = 0.5\ngamma = 0.5")).outer.momentum == 0.5
    with pytest.raises(ManifestError, match="collective"):
        parse(toml.format("") + "collective = 'all-gather'\n")
    for other in ("demo(k=32)", "powersgd(rank=8)"):
        with pytest.raises(ManifestError, match="not for the method 'noloco'"):
            parse(f"[outer]\nmethod = 'noloco'\n[exchange]\ncodec = '{other}'\n")


def test_noloco_gamma_bound_falls_with_the_parts_of_the_slow_weights():
    """Momentum continues between two turns of a part: without any the limit stays."""
    toml = "[outer]\nmethod = 'noloco'\ngamma = {}\nslow_weight_parts = {}\n"
    assert gamma_limit(0.0, parts=16) == gamma_limit(0.0) == 2.0
    assert gamma_limit(0.5, parts=64) == pytest.approx(1.0) and gamma_limit(0.5, parts=2) == pytest.approx(1.25)
    assert parse(toml.format(1.2, 1)).outer.gamma == 1.2
    with pytest.raises(ManifestError, match=r"with momentum 0.5 and 4 parts the limit is 1.0"):
        parse(toml.format(1.2, 4))
    assert "near the limit" in parse(toml.format(1.0, 4)).warnings()[0]
    with pytest.raises(ManifestError, match="slow_weight_parts does not apply to this method"):
        parse("[outer]\nmethod = 'diloco'\nslow_weight_parts = 2\n")


def test_later_keys_of_noloco_change_no_run_id_by_their_defaults():
    toml = "[outer]\nmethod = 'noloco'\n{}"
    same, other = (parse(toml.format(f"slow_weight_parts = {parts}")).run_id(b"a" * 32) for parts in (1, 2))
    assert parse(toml.format("")).run_id(b"a" * 32) == same != other
    key = b"\xaeresidual_decay"  # with its length, because another key ends so, too
    assert key not in parse(toml.format("")).canonical()
    assert key in parse("[outer]\nmethod = 'sparseloco'").canonical()


def test_noloco_gamma_bound_for_pairs():
    assert gamma_limit(0.5) == pytest.approx(1.5) and gamma_limit(0.9) < 1
    assert gamma_limit(0.5, 2) == pytest.approx(2 * 1.5)  # with two peers each pair has all of them: 2 (1 + α)
    assert gamma_limit(0.5, 64) == pytest.approx(1.5 / (1 - 0.5 / 63))


def test_noloco_gamma_bound_grows_with_group_size():
    assert gamma_limit(0.5, group=4) == pytest.approx(2.0) and gamma_limit(0.5, 8, 8) == pytest.approx(3.0)
    assert gamma_limit(0.5, 9, 4) == pytest.approx(1.5 / (0.5 + 2 / 8))  # three groups
    for group in range(2, 9):
        assert all(gamma_limit(0.5, peers, group) >= gamma_limit(0.5, group=group) - 1e-12 for peers in range(2, 60))


def test_group_size_changes_run_id_unless_two():
    toml = "[outer]\nmethod = 'noloco'\n{}\n[exchange]\n{}"
    ids = [
        parse(toml.format("", more)).run_id(b"a" * 32)
        for more in ("", "gossip_group_size = 2", "gossip_group_size = 3", "gossip_group_size = 8")
    ]
    assert ids[0] == ids[1] and len(set(ids)) == 3
    # A group is a pair when the others are late.
    assert "near the limit of 1.5" in parse(toml.format("gamma = 1.4", "gossip_group_size = 4")).warnings()[0]
    with pytest.raises(ManifestError, match="limit is 1.5"):
        parse(toml.format("gamma = 1.6", "gossip_group_size = 4"))


def test_run_id_of_a_file_is_frozen():
    assert parse(FULL).run_id(b"a" * 32).hex()[:16] == "21bffbfd7759a5f4"


def test_rules_and_their_parameters_change_the_run_id():
    lines = ("", "aggregation = 'clip'", "aggregation = 'mean'", "aggregation = 'median'\nmin_peers = 3")
    more = ("aggregation = 'median'\nmin_peers = 5\nmax_liars = 2", "aggregation = 'flag'\nmin_peers = 3")
    last = "aggregation = 'flag'\nmin_peers = 3\naggregation_iterations = 9"
    ids = [parse(f"[exchange]\n{line}").run_id(b"a" * 32) for line in (*lines, *more, last)]
    assert ids[0] == ids[1] and len(set(ids)) == 6
    assert parse(f"[exchange]\n{last}").exchange.rule == ("flag", 1, 9)


def test_every_averaging_method_clips_by_default():
    found = {method: parse(f"[outer]\nmethod = '{method}'").exchange.aggregation for method in METHODS}
    assert {method for method, rule in found.items() if rule != "clip"} == {"noloco", "merge"}
    assert found["noloco"] == found["merge"] == "mean"


@pytest.mark.parametrize(
    ("lines", "method", "said"),
    [
        ("aggregation = 'krum'", "diloco", r"max_liars = 1 needs 5 contributors, and exchange.min_peers = 1"),
        ("aggregation = 'bulyan'\nmax_liars = 3\nmin_peers = 14", "diloco", "needs 15 contributors"),
        ("aggregation = 'bulyan'\nmax_liars = 32\nmin_peers = 64", "diloco", "needs 131 contributors"),
        ("aggregation = 'krum'\nmin_peers = 5\ntopology = 'ring'", "diloco", "all contributions in one place"),
        ("aggregation = 'median'\nmin_peers = 3\ntopology = 'hierarchy'", "diloco", "all contributions in one place"),
        ("max_liars = 2", "diloco", "exchange.max_liars does not apply to the rule 'clip'"),
        (
            "aggregation = 'krum'\nmin_peers = 5\naggregation_iterations = 3",
            "diloco",
            "aggregation_iterations does not",
        ),
        ("aggregation = 'clip'", "noloco", "does not apply to the method 'noloco'"),
        ("aggregation = 'rda'", "sparseloco", "does not apply to the method 'sparseloco'"),
        ("aggregation = 'flag'\nmin_peers = 3", "powersgd", "does not apply to the method 'powersgd'"),
        ("aggregation = 'krumm'", "diloco", "aggregation"),
    ],
)
def test_rules_that_a_run_cannot_use_are_refused(lines, method, said):
    with pytest.raises(ManifestError, match=said) as caught:
        parse(f"[outer]\nmethod = '{method}'\n[exchange]\n{lines}")
    assert caught.value.hint


def test_shards_key_changes_run_id_unless_default():
    ids = [
        parse(f"[exchange]\n{line}").run_id(b"a" * 32)
        for line in ("", 'chunk_assignment = "bandwidth"', 'chunk_assignment = "equal"')
    ]
    assert ids[0] == ids[1] != ids[2]
    for method in ("noloco", "sparseloco"):
        with pytest.raises(ManifestError, match="exchange.chunk_assignment only applies"):
            parse(f'[outer]\nmethod = "{method}"\n[exchange]\nchunk_assignment = "equal"')
    with pytest.raises(ManifestError, match="exchange.chunk_assignment only applies"):
        parse('[exchange]\ntopology = "hierarchy"\nchunk_assignment = "equal"')


def test_topology_changes_run_id_unless_default():
    ids = [
        parse(f"[exchange]\n{line}").run_id(b"a" * 32)
        for line in ("", 'topology = "butterfly"', 'topology = "ring"', 'topology = "hierarchy"')
    ]
    assert ids[0] == ids[1] and len(set(ids)) == 3
    assert parse('[exchange]\ntopology = "ring"').exchange.topology == "ring"


def test_sick_key_changes_run_id_unless_default():
    ids = [
        parse(f"[exchange]\n{line}").run_id(b"a" * 32)
        for line in ("", 'slow_peers = "report"', 'slow_peers = "no-ownership"')
    ]
    assert ids[0] == ids[1] != ids[2]
    assert parse('[exchange]\nslow_peers = "no-ownership"').exchange.slow_peers == "no-ownership"


def test_manifest_signature_verifies_only_unchanged():
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
        (_forged(b"[run]\nseed = 9"), "belongs to run .*, not 72727272"),
    ],
)
def test_unsigned_invalid_or_other_manifest_is_refused(signed, reason):
    with pytest.raises(ManifestMismatch, match=reason) as caught:
        signed.verify(b"r" * 32)
    assert caught.value.exit_code == 5 and caught.value.hint


def test_manifest_is_immutable():
    with pytest.raises(AttributeError):
        Manifest().inner.lr = 1.0
    assert Inner() == Manifest().inner


def test_sparse_butterfly_changes_run_id_and_needs_sparseloco():
    toml = "[outer]\nmethod = '{}'\n[exchange]\ncollective = '{}'"
    butterfly = parse(toml.format("sparseloco", "sparse-butterfly"))
    assert butterfly.run_id(b"a" * 32) != parse(toml.format("sparseloco", "all-gather")).run_id(b"a" * 32)
    for method in ("diloco", "demo", "noloco"):
        with pytest.raises(ManifestError, match="exchange.collective is 'sparse-butterfly'"):
            parse(toml.format(method, "sparse-butterfly"))
    with pytest.raises(ManifestError, match="exchange.chunk_assignment only applies"):
        parse(toml.format("sparseloco", "sparse-butterfly") + "\nchunk_assignment = 'equal'")
    less = parse(toml.format("sparseloco", "sparse-butterfly") + "\nowner_residual_decay = 0.4")
    assert less.run_id(b"a" * 32) != butterfly.run_id(b"a" * 32)
    with pytest.raises(ManifestError, match="exchange.owner_residual_decay only applies"):
        parse(toml.format("sparseloco", "all-gather") + "\nowner_residual_decay = 0.4")


def test_sparseloco_has_its_own_defaults():
    manifest = parse("[outer]\nmethod = 'sparseloco'")
    outer, exchange = manifest.outer, manifest.exchange
    assert (outer.sync_every, outer.sgd, outer.residual_decay) == (30, (1.0, 0.0, False), 0.95)
    assert (outer.denominator, outer.on_exclusion) == ("bounded_contributor_mean", "drop")
    assert (exchange.codec, exchange.collective) == ("topk(k=64,chunk=4096)|2bit|rice", "all-gather")
    written = "[outer]\nmethod = 'sparseloco'\nresidual_decay = 0.95\n[exchange]\ncollective = 'all-gather'"
    assert parse(written).run_id(b"a" * 32) == manifest.run_id(b"a" * 32)
    for more in ("residual_decay = 0.9", "denominator = 'mean'", "on_exclusion = 'restore'", "lr = 0.65"):
        assert parse(f"[outer]\nmethod = 'sparseloco'\n{more}").run_id(b"a" * 32) != manifest.run_id(b"a" * 32)
    smaller = "[outer]\nmethod = 'sparseloco'\n[exchange]\ncodec = 'topk(k=32,chunk=4096)|1bit|fixed'"
    assert parse(smaller).exchange.codec == registry.parse(parse(smaller).exchange.codec).spec


@pytest.mark.parametrize(
    ("keys", "steps", "turns"),
    [
        ("", 5, 0),
        ("sync_every = 4\nfragments = 2", 2, 0),
        ("sync_every = 2\nfragments = 2", 1, 0),
        ("overlap = 12", 2, 1),
        ("overlap = 0", 0, 0),
    ],
)
def test_streaming_overlaps_five_steps_by_default_but_no_more_than_a_turn(keys, steps, turns):
    manifest = parse(f"[outer]\nmethod = 'streaming'\n{keys}")
    assert (manifest.overlap, manifest.lag) == (steps, turns)


def test_every_codec_allowed_in_manifest_can_be_built():
    for method, spec in METHODS.items():
        assert all(name in registry.CODECS for name in spec.codecs), method
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


def test_the_run_ids_of_default_manifests_stay():
    """A change of these ids is a change of the manifest's format: announce it in the changelog."""
    ids = {toml: parse(toml).run_id(b"a" * 32).hex()[:16] for toml in RUN_IDS}
    assert ids == RUN_IDS


OLD = [
    *((table, f"{old} = 1", new) for table, keys in KEYS.items() for old, new in keys.items()),
    *((table, f"{key} = {old!r}", new) for (table, key, old), new in VALUES.items()),
]


@pytest.mark.parametrize(("table", "line", "new"), OLD)
def test_parse_of_an_old_key_or_value_names_the_new_one(table, line, new):
    method = "method = 'sparseloco'\n" if line.startswith("collective") else ""
    with pytest.raises(ManifestError, match=f"is now called .*{new}") as caught:
        parse(f"[{table}]\n{line}" if not method else f"[outer]\n{method}[{table}]\n{line}")
    assert new in caught.value.hint


@pytest.mark.parametrize("method", METHODS)
def test_every_method_has_a_valid_default_manifest(method):
    manifest = parse(f"[outer]\nmethod = '{method}'")
    assert type(manifest.outer) is METHODS[method] and manifest.outer.method == method
    assert parse(f"[outer]\nmethod = '{method}'\nsync_every = {manifest.outer.sync_every}") == manifest


@pytest.mark.parametrize("method", METHODS)
def test_every_method_refuses_the_keys_of_other_methods(method):
    own = set(METHODS[method].__struct_fields__)
    for key in {field for kind in METHODS.values() for field in kind.__struct_fields__} - own:
        with pytest.raises(ManifestError, match=f"outer.{key} does not apply to this method"):
            parse(f"[outer]\nmethod = '{method}'\n{key} = 1")


def test_contributions_that_other_peers_can_compute_are_those_of_five_methods():
    """The invariants of simulations check these bit for bit: a method that drops out would be checked no more."""
    found = {name for name, kind in METHODS.items() if kind.computable}
    assert found == {"diloco", "muloco", "merge", "noloco", "streaming"}


def test_work_by_power_raises_max_weight_and_changes_run_id():
    manifest = parse("[outer]\nstep_balancing = 'by-speed'\nmax_step_ratio = 3\nsync_every = 10")
    assert manifest.max_weight == 3 * parse("[outer]\nsync_every = 10").max_weight
    assert manifest.run_id(b"a" * 32) != parse("[outer]\nstep_balancing = 'by-speed'\nsync_every = 10").run_id(
        b"a" * 32
    )
    assert parse("[outer]\nstep_balancing = 'equal'").run_id(b"a" * 32) == parse("").run_id(b"a" * 32)


def test_late_learning_rate_changes_run_id_only_if_set():
    plain = parse("[outer]\nmethod = 'sparseloco'").run_id(b"a" * 32)
    assert parse("[outer]\nmethod = 'sparseloco'\nlr_change_round = 0").run_id(b"a" * 32) == plain
    late = [
        parse(f"[outer]\nmethod = 'sparseloco'\nlr_change_round = 9{more}") for more in ("", "0", "\nlr_after = 0.5")
    ]
    assert len({plain, *(one.run_id(b"a" * 32) for one in late)}) == 4 and late[0].outer.lr_after == 0.65


def test_muloco_trains_with_muon():
    manifest = parse("[outer]\nmethod = 'muloco'")
    outer, inner = manifest.outer, manifest.inner
    assert (outer.sync_every, outer.sgd) == (30, (0.7, 0.6, True))
    assert (inner.optimizer, inner.lr, inner.momentum, inner.adam_lr) == ("muon", 0.02, 0.95, 0.001)
    written = "[inner]\noptimizer = 'muon'\nmomentum = 0.95\n[outer]\nmethod = 'muloco'\nsync_every = 30"
    assert parse(written).run_id(b"a" * 32) == manifest.run_id(b"a" * 32)
    assert parse(written.replace("0.95", "0.9")).run_id(b"a" * 32) != manifest.run_id(b"a" * 32)
    assert parse("[inner]\noptimizer = 'muon'").inner.lr == 0.02
    assert parse("[inner]\noptimizer = 'muon'\nlr = 0.01").inner.lr == 0.01


def test_merge_has_one_exchange():
    manifest = parse("[outer]\nmethod = 'merge'")
    outer, exchange = manifest.outer, manifest.exchange
    assert (outer.sync_every, outer.sgd) == (1000, (1.0, 0.0, False))
    assert (manifest.run.rounds, manifest.data.private, exchange.codec, exchange.straggler_timeout) == (
        2,
        True,
        "fp32",
        3600.0,
    )
    assert (manifest.steps_after(1), manifest.steps_after(2), manifest.schedule_steps) == (0, 1000, 1000)
    assert parse("[outer]\nmethod = 'merge'\n[data]\nprivate = false").run_id(b"a" * 32) != manifest.run_id(b"a" * 32)


def test_grace_is_seconds_or_auto():
    fixed, computed = parse("[exchange]\nstraggler_timeout = 10.0"), parse("[exchange]\nstraggler_timeout = 'auto'")
    assert fixed == Manifest() and fixed.exchange.timeout_seconds == fixed.exchange.straggler_timeout == 10.0
    assert computed.exchange.straggler_timeout == "auto" and computed.exchange.timeout_seconds == 10.0
    assert computed.run_id(b"a" * 32) != fixed.run_id(b"a" * 32)


def test_sick_isolate_is_allowed_with_every_topology():
    for toml in ("", "collective = 'sparse-butterfly'\n[outer]\nmethod = 'sparseloco'", "topology = 'ring'"):
        assert parse(f"[exchange]\nslow_peers = 'no-ownership'\n{toml}").exchange.slow_peers == "no-ownership"


STAGED = '[outer]\nmethod = "streaming"\n[pipeline]\nstages = 3\n'


def test_pipeline_table_describes_stages():
    run = parse(STAGED)
    assert run.fragmented and (run.outer.fragments, run.outer.overlap, run.outer.local_mix) == (3, 0, 0.0)
    assert run.microbatches == 1 and parse(f"{STAGED}microbatches = 6").max_weight == 6 * parse(STAGED).max_weight
    assert parse(f"{STAGED}[inner]\naccumulate = 4").microbatches == 4
    kept = STAGED.replace("[pipeline]", "overlap = 12\nlocal_mix = 0.25\n[pipeline]")
    assert (parse(kept).outer.overlap, parse(kept).outer.local_mix) == (12, 0.25)
    assert parse("").canonical() == parse("[pipeline]\nstages = 0").canonical()
    assert parse(STAGED).canonical() != parse(f"{STAGED}max_in_flight = 1").canonical()
    planned = parse(f"{STAGED}paths = 'planned'\nskip_fraction = 0.34\nmax_reorders = 1\nhost_capacity = 4")
    assert (planned.pipeline.visited, parse(STAGED).pipeline.visited) == (2, 3)
    assert planned.host_capacity == 4
    assert [parse(f"{STAGED}microbatches = {count}").host_capacity for count in (2, 8)] == [2, 3]
    assert planned.canonical() != parse(STAGED).canonical()


@pytest.mark.parametrize(
    ("toml", "said"),
    [
        ("[pipeline]\nmicrobatches = 4", "without stages"),
        ("[pipeline]\nstages = 3", "'streaming'"),
        (STAGED.replace("3", "1"), "holds the whole model"),
        (STAGED.replace("3", "5") + "[model]\nlayers = 4", "into 5 stages"),
        (STAGED + "[model]\nkind = 'custom'", "cannot be cut"),
        (STAGED + "[inner]\nprecision = 'bf16'", "does not apply to stages"),
        (STAGED.replace("[pipeline]", "fragments = 5\n[pipeline]"), "as many fragments"),
        (STAGED + "codec = 'int8(block=256)'", "between stages"),
        (STAGED + "max_in_flight = 2", "1 micro-batches"),
        (STAGED + "skip_fraction = 0.34", "pipeline.skip_fraction only applies with pipeline.paths"),
        (STAGED + "max_reorders = 1", "pipeline.max_reorders only applies"),
        (STAGED + "host_capacity = 1", "pipeline.host_capacity only applies"),
        (STAGED + "paths = 'planned'\nrebalance = 5", "rebalance does not apply"),
        (STAGED + "paths = 'planned'\nskip_fraction = 0.1", "0.1 with 3 stages skips no stage"),
        (STAGED + "paths = 'planned'\nskip_fraction = 0.6", "fewer than 2"),
        (STAGED + "paths = 'planned'\nskip_fraction = 1.0", "skip_fraction"),
        (STAGED + "paths = 'planned'\nmax_reorders = 3", "max_reorders"),
        (STAGED + "paths = 'plan'", "did you mean 'planned'|paths"),
        (STAGED + "rebalance = -1", "rebalance"),
        (STAGED + "peers_per_stage = 0", "peers_per_stage"),
    ],
)
def test_invalid_pipeline_tables_are_refused(toml, said):
    with pytest.raises(ManifestError, match=said):
        parse(toml)


@pytest.mark.parametrize(
    "toml", ["[outer]\nmethod = 'noloco'", "[outer]\nmethod = 'streaming'", "[model]\nkind = 'custom'"]
)
def test_open_run_whose_newcomers_cannot_be_scored_needs_trial_rounds_of_zero(toml):
    with pytest.raises(ManifestError, match="trial of newcomers") as caught:
        parse(f"{toml}\n[admission]\nmode = 'open'")
    assert "trial_rounds = 0" in caught.value.hint
    assert not parse(f"{toml}\n[admission]\nmode = 'open'\ntrial_rounds = 0").admission.trial
    assert parse("[admission]\nmode = 'open'").admission.trial == 8 and not parse("").admission.trial


def test_audits_are_on_in_runs_with_a_butterfly_only():
    for run in (Manifest(), parse('[admission]\nmode = "open"')):
        assert run.audited and run.audit_chance(64, 16) == 0.1
        assert run.audit_chance(4, 16) == pytest.approx(0.01)  # 0.01 · 16 / (2 · 4) is 2 % of the bytes of a round
    assert parse("[exchange]\naudit = 0.3").audit_chance(4, 16) == 0.3
    assert not parse('[admission]\nmode = "open"\n[exchange]\naudit = 0').audited
    for line in ('topology = "hierarchy"', 'topology = "ring"'):
        assert not parse(f'[admission]\nmode = "open"\n[exchange]\n{line}').audited
    gossip = parse('[outer]\nmethod = "noloco"\n[admission]\nmode = "open"\ntrial_rounds = 0')
    assert not gossip.audited


@pytest.mark.parametrize(
    "toml",
    [
        '[exchange]\naudit = 0.1\ntopology = "hierarchy"',
        '[exchange]\naudit = 0.1\ntopology = "ring"',
        '[outer]\nmethod = "noloco"\n[exchange]\naudit = 0.1',
        '[outer]\nmethod = "sparseloco"\n[exchange]\naudit = 0.1',
        '[outer]\nmethod = "sparseloco"\n[exchange]\naudit = 0.1\ncollective = "sparse-butterfly"',
    ],
)
def test_audit_without_a_butterfly_is_a_contradiction(toml):
    with pytest.raises(ManifestError, match="exchange.audit only applies to a butterfly"):
        parse(toml)


def test_run_ids_do_not_change_with_the_default_of_a_later_key():
    text = '[model]\nkind = "custom"\n'
    same = {parse(text + more).run_id(bytes(32)).hex() for more in ("", 'buffers = "average"\n')}
    assert len(same) == 1 and parse(text + 'buffers = "local"\n').run_id(bytes(32)).hex() not in same
    with pytest.raises(ManifestError, match="does not apply to the built-in model"):
        parse('[model]\nbuffers = "local"\n')
