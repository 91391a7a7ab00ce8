"""The manifest: one TOML file that defines a run. Its hash is the run id, so peers with other settings cannot meet.

The tables of the file are the classes of `settings`; absent tables and fields take their defaults there.
"""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any, ClassVar, get_args

import blake3
import msgspec
from msgspec import Meta

from .errors import HintedError
from .identity import SIGNATURE_BYTES, Identity, verify
from .settings import (
    ASYNCHRONOUS,
    BOUNDARIES,
    CODECS,
    DATA,
    DENSE,
    EXCHANGE,
    FOREIGN,
    INNER,
    MAX_WEIGHT,
    MUON,
    ONLY_MUON,
    OUTER,
    PIPELINE,
    RUN,
    SPARSE_STREAMING,
    UNBOOKED,
    Data,
    Exchange,
    Inner,
    Model,
    Outer,
    Pipeline,
    Run,
    Table,
    steady,
)

MAX_TOML = 32_768
"""Largest manifest in bytes: what a Welcome can carry."""

NEAR = 0.9
"""From this part of what is steady on, a manifest is used with a warning."""

SUITS = "leave it out: every method has one that suits it"
"""What to do about a codec that cannot be."""

YOUNG = (
    *("gamma", "beta", "denominator", "on_exclusion", "decay", "fragments", "overlap", "alpha"),
    *("clip", "staleness", "fade", "arrivals"),
)
"""Keys of [outer] that are younger than the first runs, whose ids must stay: they count where a method has a use for them."""

UNSAID: dict[str, dict[str, dict[object, tuple[str, ...]]]] = {
    "data": {"once": {False: ("once",)}, "domains": {False: ("domains",)}},
    "inner": {"global_batch": {0: ("global_batch",)}},
    "outer": {"work": {"equal": ("work", "spread")}, "late": {0: ("late", "late_lr")}},
    "exchange": {
        "sick": {"report": ("sick",)},
        "shards": {"bandwidth": ("shards",)},
        "topology": {"butterfly": ("topology",)},
        "group": {2: ("group",)},
        "collective": {"butterfly": ("keep",), "gather": ("keep",)},
    },
}
"""Table -> key -> value that says nothing new -> the keys that then do not count: they are younger still."""

MAX_CHAINS = 64
"""Most parts of a model with rounds of their own: what is said when somebody comes is said of each."""

_DOMAIN = "manifest"


__all__ = [
    "Data",
    "Exchange",
    "Inner",
    "Manifest",
    "ManifestError",
    "ManifestMismatch",
    "Model",
    "Outer",
    "Pipeline",
    "Run",
    "SignedManifest",
    "parse",
    "sign",
]


class ManifestError(HintedError):
    """The file cannot be used: the message names file, table and key."""

    exit_code: ClassVar[int] = 2


class ManifestMismatch(HintedError):
    """A manifest that is not the one asked for, or not signed by its author."""

    exit_code: ClassVar[int] = 5


class Manifest(Table, frozen=True):
    """A checked manifest: made by `parse` only."""

    run: Run = Run()
    model: Model = Model()
    data: Data = Data()
    inner: Inner = Inner()
    outer: Outer = Outer()
    exchange: Exchange = Exchange()
    pipeline: Pipeline = Pipeline()

    @property
    def max_weight(self) -> int:
        """Most tokens that one contribution may claim."""
        most = self.outer.steps if self.outer.work == "equal" else round(self.outer.steps * self.outer.spread)
        batch = self.inner.global_batch or self.inner.batch * max(self.inner.accumulate, self.pipeline.micro)
        return self.exchange.max_weight or most * batch * self.model.context

    @property
    def schedule_steps(self) -> int:
        """Inner steps that the learning rate's schedule spans; 0 = endless."""
        return self.inner.steps or self.steps_after(self.run.rounds)

    @property
    def pace(self) -> int:
        """Inner steps between two rounds: H, where a round is for the whole model."""
        return self.outer.steps // (self.outer.fragments if self.outer.method == "streaming" else 1)

    @property
    def overlap(self) -> int:
        """Of these, how many a peer makes while the exchange is under way; with a lag, in the last of those turns."""
        if self.outer.method in ("eager", "co2"):
            return self.outer.steps
        return self.outer.overlap - self.lag * self.pace if self.outer.method == "streaming" else 0

    @property
    def lag(self) -> int:
        """Turns of other parts that a part is under way before it is waited for."""
        return max(0, self.outer.overlap - 1) // self.pace if self.outer.method == "streaming" else 0

    @property
    def sparse(self) -> bool:
        """Whether a small part of each pseudo-gradient is sent, to everybody."""
        return self.exchange.codec.startswith("topk")

    @property
    def chained(self) -> bool:
        """Whether each part of the model has rounds of its own: where several are under way, or send a small part, or where
        peers may hold one part only.
        """
        return self.outer.method == "streaming" and (self.lag > 0 or self.sparse or self.pipeline.stages > 0)

    @property
    def micro(self) -> int:
        """Micro-batches that peers which hold the model together make of one inner step."""
        return self.pipeline.micro or self.inner.accumulate

    @property
    def room(self) -> int:
        """Micro-batches that one of those holds at a time."""
        pipeline = self.pipeline
        return pipeline.room or pipeline.window or min(pipeline.stages, self.micro)

    @property
    def asynchronous(self) -> bool:
        """Whether a round is of whoever is ready, and the others train on and follow."""
        return self.outer.method in ASYNCHRONOUS

    def steps_after(self, round: int) -> int:
        """Inner steps that a peer has made when a round is over: with powersgd two rounds follow H of them."""
        if self.outer.method == "merge":
            return max(0, round - 1) * self.outer.steps  # the first one only gathers
        return round // (2 if self.outer.method == "powersgd" else 1) * self.pace

    def canonical(self) -> bytes:
        """All values in the order of their definition as msgpack: the same for every file that means the same."""
        plain = msgspec.to_builtins(self)
        for key in FOREIGN[self.outer.method]:
            if key in YOUNG:
                del plain["outer"][key]
        for section, keys in UNSAID.items():
            for key, silent in keys.items():
                for other in silent.get(plain[section][key], ()):
                    del plain[section][other]
        if self.inner.optimizer != "muon":
            for key in ONLY_MUON:
                del plain["inner"][key]
        if not self.pipeline.stages:
            del plain["pipeline"]
        return msgspec.msgpack.encode(plain)

    def warnings(self) -> tuple[str, ...]:
        """What is allowed and yet not wise."""
        outer, limit = self.outer, steady(self.outer.momentum)
        if outer.method == "noloco" and outer.gamma > NEAR * limit:
            return (f"outer.gamma {outer.gamma:g} is near the limit of {limit:g}: replicas stay far from each other",)
        return ()

    def run_id(self, author: bytes) -> bytes:
        """32 bytes that name the run of this manifest as published by the owner of the Ed25519 key `author`."""
        return blake3.blake3(b"thinwire/run/1\0" + author + self.canonical()).digest()


def parse(toml: str | bytes, name: str = "run.toml") -> Manifest:
    """Read a manifest; `name` is the file's, for messages. Raises ManifestError."""
    try:
        text = toml.decode() if isinstance(toml, bytes) else toml
        if len(text.encode()) > MAX_TOML:
            raise ManifestError(f"{name}: larger than {MAX_TOML} bytes", "a manifest holds settings only")
        document = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise ManifestError(f"{name}: not TOML: {error}", "see https://toml.io for the format") from None
    tables = {field.name: field.type for field in msgspec.structs.fields(Manifest)}
    values: dict[str, Any] = {}
    for key, table in document.items():
        if key not in tables:
            raise ManifestError(f"{name}: unknown table [{key}]", _nearest(key, list(tables), "tables"))
        if not isinstance(table, dict):
            raise ManifestError(f"{name}: {key} is a table", f"write [{key}] on a line of its own")
        fields = _fields(tables[key], table, name, key)
        values[key] = Outer(**_with_method(fields, name)) if key == "outer" else tables[key](**fields)
    manifest = Manifest(**values)
    method = manifest.outer.method
    if method == "streaming" and manifest.sparse:
        manifest = _with_usual(manifest, "outer", SPARSE_STREAMING, document)
        manifest = _with_usual(manifest, "exchange", {"collective": "gather"}, document)
    if manifest.pipeline.stages:
        usual_outer = {"fragments": manifest.pipeline.stages, **PIPELINE}
        manifest = _with_usual(manifest, "outer", usual_outer, document)
    for section, usual in (("run", RUN), ("data", DATA), ("inner", INNER), ("exchange", EXCHANGE)):
        manifest = _with_usual(manifest, section, usual.get(method, {}), document)
    if manifest.inner.optimizer == "muon":
        manifest = _with_usual(manifest, "inner", MUON, document)
    elif strange := next((key for key in ONLY_MUON if key in document.get("inner", {})), None):
        raise ManifestError(
            f"{name}: inner.{strange} says nothing with the optimizer {manifest.inner.optimizer!r}", "remove the key"
        )
    for message, hint in _contradictions(manifest):
        raise ManifestError(f"{name}: {message}", hint)
    return manifest


def _with_usual(manifest: Manifest, section: str, usual: Mapping[str, object], document: dict[str, Any]) -> Manifest:
    """The manifest with these values in a table, but for those that the file has itself."""
    new = {key: value for key, value in usual.items() if key not in document.get(section, {})}
    changed = msgspec.structs.replace(getattr(manifest, section), **new)
    return msgspec.structs.replace(manifest, **{section: changed}) if new else manifest


def _fields(kind: type[Table], table: dict[str, Any], name: str, section: str) -> dict[str, Any]:
    fields = {field.name: field for field in msgspec.structs.fields(kind)}
    values = {}
    for key, value in table.items():
        place = f"{name}: {section}.{key}"
        if key not in fields:
            raise ManifestError(f"{place}: unknown key", _nearest(key, list(fields), f"keys of [{section}]"))
        field = fields[key]
        try:
            values[key] = msgspec.convert(value, field.type)
        except msgspec.ValidationError as error:
            choices = [choice for choice in get_args(field.type) if isinstance(choice, str)]
            usual = SUITS if key == "codec" else f"the default is {field.default!r}"
            hint = _nearest(str(value), choices, "choices") if choices else usual
            wanted = [meta.description for meta in get_args(field.type)[1:] if isinstance(meta, Meta)]
            reason = f"{value!r} is not {wanted[0]}" if wanted and wanted[0] else str(error)
            raise ManifestError(f"{place}: {reason}", hint) from None
    return values


def _with_method(fields: dict[str, Any], name: str) -> dict[str, Any]:
    """[outer] with the defaults of its method."""
    method = fields.get("method", "diloco")
    for key in FOREIGN[method]:
        if key in fields:
            raise ManifestError(f"{name}: outer.{key} says nothing with the method {method!r}", "remove the key")
    return {**OUTER[method], **fields}


def _nearest(word: str, known: list[str], what: str) -> str:
    close = difflib.get_close_matches(word, known, n=1)
    return f"did you mean {close[0]!r}?" if close else f"{what}: {', '.join(known)}"


def _contradictions(manifest: Manifest) -> Iterator[tuple[str, str]]:
    model, data, inner = manifest.model, manifest.data, manifest.inner
    if model.kind == "transformer" and model.width % (2 * model.heads):
        yield (
            f"model.width {model.width} is not a multiple of 2 × model.heads ({2 * model.heads})",
            "change one of the two",
        )
    path = PurePath(data.tokenizer)
    if path.is_absolute() or ".." in path.parts or set("\\:") & set(data.tokenizer):
        yield f"data.tokenizer {data.tokenizer!r} leaves the directory it is looked for in", "give a relative path"
    if data.tokenizer == "bytes" and data.tokenizer_hash:
        yield "data.tokenizer_hash is set, but the tokenizer is not a file", "remove the hash or name the file"
    yield from _wrong_codec(manifest)
    if inner.schedule == "cosine" and not manifest.schedule_steps:
        yield "inner.schedule is cosine, but the run has no end", "set run.rounds or inner.steps"
    outer, group = manifest.outer, manifest.exchange.group
    # That of pairs: who is late or gone makes of a larger group a smaller one.
    limit = steady(outer.momentum)
    if outer.method == "noloco":
        if outer.gamma >= limit:
            yield (
                f"outer.gamma {outer.gamma:g} drives replicas apart: with momentum {outer.momentum:g} it is below {limit:g}",
                "lower outer.gamma or outer.momentum; 0.7 and 0.5 are the defaults",
            )
        if outer.lr >= 2 * (1 + outer.momentum):
            yield (
                f"outer.lr {outer.lr:g} makes the mean of all replicas diverge: it is below {2 * (1 + outer.momentum):g}",
                "0.7 is the default",
            )
        if manifest.exchange.min_peers > 1:
            yield "exchange.min_peers says nothing with noloco: a round has a few peers, or one", "remove it"
    elif group != Exchange().group:
        yield f"exchange.group says nothing with the method {outer.method!r}", "remove the key"
    if outer.method == "streaming":
        if outer.steps % outer.fragments:
            yield (
                f"outer.steps {outer.steps} is not a multiple of outer.fragments {outer.fragments}",
                "parts take turns after equal numbers of steps: change one of the two",
            )
        elif outer.overlap > outer.steps:
            yield (
                f"outer.overlap {outer.overlap} is more than the {outer.steps} steps between two rounds of one part",
                "lower outer.overlap, or raise outer.steps",
            )
        if manifest.chained and outer.fragments > MAX_CHAINS:
            yield (
                f"outer.fragments is {outer.fragments}, and {MAX_CHAINS} can have rounds of their own",
                "lower it, or outer.overlap to steps / fragments",
            )
        if manifest.sparse and (outer.alpha or outer.momentum or outer.nesterov):
            yield (
                "with a codec that sends a small part, what is not sent takes the place of momentum and of what would stay",
                "remove outer.alpha, outer.momentum and outer.nesterov",
            )
    yield from _unstageable(manifest)
    if outer.method == "demo" and (inner.optimizer != "sgd" or inner.betas[0] or inner.weight_decay):
        yield (
            "demo exchanges the gradients of plain SGD: inner.optimizer is 'sgd', betas[0] and weight_decay are 0",
            "remove the keys; beta and decay of [outer] take their place",
        )
    if manifest.exchange.collective != "sparse-butterfly" and manifest.exchange.keep != Exchange().keep:
        yield "exchange.keep says nothing but of a sparse butterfly", "remove the key"
    plain = manifest.exchange.collective == "butterfly" and manifest.exchange.topology == "butterfly"
    if manifest.exchange.shards == "equal" and (not plain or outer.method == "noloco"):
        yield "exchange.shards says nothing but of a butterfly, where peers own parts", "remove the key"
    if outer.work == "equal" and outer.spread != Outer().spread:
        yield "outer.spread says nothing where all peers make H steps", "remove the key, or write work = 'by-power'"
    if not outer.late and outer.late_lr != Outer().late_lr:
        yield "outer.late_lr says nothing without outer.late", "remove the key, or set the round from which it counts"
    yield from _unbookable(manifest)
    if manifest.exchange.aggregation != "mean" and (
        outer.method == "noloco" or manifest.exchange.codec.split("(")[0] not in DENSE
    ):
        yield (
            f"exchange.aggregation {manifest.exchange.aggregation!r} is not for the method {outer.method!r}",
            "remove it",
        )
    if manifest.exchange.aggregation != "mean" and manifest.exchange.topology != "butterfly":
        yield (
            f"exchange.aggregation {manifest.exchange.aggregation!r} needs all contributions in one place",
            "remove it, or exchange.topology",
        )
    if outer.method == "muloco" and inner.optimizer != "muon":
        yield "muloco is diloco with Muon: inner.optimizer is 'muon'", "remove the key, or take the method 'diloco'"
    if manifest.max_weight > MAX_WEIGHT:
        yield "a round has more tokens than can be counted", "lower outer.steps, inner.batch or model.context"


def _unstageable(manifest: Manifest) -> Iterator[tuple[str, str]]:
    """What stands in the way of a model that some hold together."""
    pipeline, outer, model = manifest.pipeline, manifest.outer, manifest.model
    if not pipeline.stages:
        if pipeline != Pipeline():
            yield "[pipeline] says nothing without stages", "set pipeline.stages, or remove the table"
        return
    if pipeline.stages < 2:
        yield "pipeline.stages is 1: that is a peer that holds all of the model", "it is 2 and more, or 0"
    if outer.method != "streaming":
        yield (
            f"pipeline.stages is for the method 'streaming', whose parts have rounds of their own, not {outer.method!r}",
            "write outer.method = 'streaming'; with the overlap of 0 that it then has it is DiLoCo, part by part",
        )
    elif outer.fragments != pipeline.stages:
        yield (
            f"outer.fragments is {outer.fragments}, and a model of {pipeline.stages} stages has as many fragments",
            "remove outer.fragments",
        )
    if model.kind != "transformer":
        yield "a model of someone's own cannot be cut into stages", "remove [pipeline]"
    elif model.layers < pipeline.stages:
        yield f"a model of {model.layers} layers has no {pipeline.stages} stages", "lower pipeline.stages"
    name = pipeline.codec.split("(")[0]
    if name not in BOUNDARIES:
        yield (
            f"pipeline.codec: {pipeline.codec!r} is no codec of what crosses between stages",
            f"codecs: {', '.join(BOUNDARIES)}",
        )
    if pipeline.window > manifest.micro:
        yield f"pipeline.window is {pipeline.window}, and a step has {manifest.micro} micro-batches", "lower it"
    yield from _unplannable(manifest.pipeline)


def _unplannable(pipeline: Pipeline) -> Iterator[tuple[str, str]]:
    """What is wrong with the ways of micro-batches."""
    usual = Pipeline()
    if pipeline.paths != "planned":
        for key in ("skip", "swaps", "room"):
            if getattr(pipeline, key) != getattr(usual, key):
                yield (
                    f"pipeline.{key} says nothing without plans",
                    "write pipeline.paths = 'planned', or remove the key",
                )
    elif pipeline.rebalance != usual.rebalance:
        yield "pipeline.rebalance says nothing of planned paths, which go past who is slow", "remove the key"
    if pipeline.skip and not 2 <= pipeline.visited < pipeline.stages:
        fewest, most = 0.5 / pipeline.stages, 1 - 1.5 / pipeline.stages
        yield (
            f"pipeline.skip {pipeline.skip:g} of {pipeline.stages} stages is none, or leaves fewer than two",
            f"write one between {fewest:.2f} and {most:.2f}" if pipeline.stages > 2 else "remove it",
        )


def _unbookable(manifest: Manifest) -> Iterator[tuple[str, str]]:
    """What stands in the way of a ledger of the data."""
    data, inner, outer = manifest.data, manifest.inner, manifest.outer
    per_round = msgspec.structs.replace(manifest, exchange=Exchange()).max_weight
    if data.once and outer.method in UNBOOKED:
        yield f"data.once is not for the method {outer.method!r}, which has no state to book in", "remove it"
    if data.once and outer.on_exclusion == "restore":
        yield (
            "data.once draws what was left out again, on_exclusion = 'restore' sends it again",
            "remove one of the two",
        )
    if data.once and data.domains:
        yield "data.once needs one text for all, data.domains one for each", "remove one of the two"
    if outer.method == "merge" and manifest.run.rounds != 2:
        yield "run.rounds is 2 with the method 'merge': one to gather, and one to merge", "set outer.steps instead"
    if data.once and manifest.model.kind == "custom":
        yield "data.once says nothing with a model of someone's own: its samples are not ours to deal out", "remove it"
    if data.once and manifest.max_weight < per_round:
        yield (
            f"exchange.max_weight is below the {per_round} tokens of a round: with data.once all that count are booked",
            "remove max_weight",
        )
    if inner.global_batch and not data.once:
        yield "inner.global_batch needs data.once: else nobody knows who shares the batch", "set data.once = true"
    if inner.global_batch and outer.work != "equal":
        yield "inner.global_batch is shared out equally, so nobody can work by power", "remove one of the two"
    if inner.global_batch and inner.accumulate > 1:
        yield "inner.accumulate follows from inner.global_batch", "remove it"


def _wrong_codec(manifest: Manifest) -> Iterator[tuple[str, str]]:
    """What can be said of a codec by its name; its parameters are checked by those who make it."""
    codec, method = manifest.exchange.codec, manifest.outer.method
    name, usable = re.split(r"[(|]", codec)[0], CODECS[method]
    if name not in usable:
        known = {one for those in CODECS.values() for one in those}
        hint = f"codecs of {method}: {', '.join(usable)}"
        yield (
            (f"exchange.codec: {codec!r} is not for the method {method!r}", hint)
            if name in known
            else (f"exchange.codec: there is no codec {name!r}", _nearest(name, list(usable), f"codecs of {method}"))
        )
        return
    if name.startswith("int"):
        found = re.search(r"block=([0-9]+)", codec)
        if found is None:
            yield (
                f"exchange.codec: {codec!r} is not a codec with all its parameters, such as '{name}(block=256)'",
                f"write {name}(block=256)",
            )
        elif not 16 <= int(found[1]) <= 65_536:
            yield f"exchange.codec: a block has 16 to 65536 values, not {found[1]}", "256 suits most models"
    topology = manifest.exchange.topology
    if topology != "butterfly" and (method == "noloco" or manifest.exchange.collective != "butterfly"):
        yield (
            f"exchange.topology says nothing with {method}: "
            + ("a round has a few peers" if method == "noloco" else "it is about dense payloads"),
            "remove the key",
        )
    wanted = "gather" if manifest.sparse else EXCHANGE.get(method, {}).get("collective", "butterfly")
    given = manifest.exchange.collective
    if given != wanted and (method, given) != ("sparseloco", "sparse-butterfly"):
        yield (
            f"exchange.collective is {manifest.exchange.collective!r}, but {method} needs {wanted!r}",
            "remove the key",
        )


@dataclass(frozen=True, slots=True)
class SignedManifest:
    """A manifest as it travels: the file's bytes, its author's Ed25519 public key and signature."""

    toml: bytes
    author: bytes
    signature: bytes

    def verify(self, run_id: bytes | None = None) -> Manifest:
        """The manifest, when the signature holds, it can be read, and (where given) `run_id` is its own.

        Raises ManifestMismatch.
        """
        fits = len(self.toml) <= MAX_TOML and len(self.signature) == SIGNATURE_BYTES
        if not fits or not verify(self.author, _DOMAIN, self.signature, self.toml):
            raise ManifestMismatch("the manifest is not signed by its author", "ask for a new invite")
        try:
            manifest = parse(self.toml, "the swarm's manifest")
        except ManifestError as error:
            raise ManifestMismatch(str(error), "the swarm may run another version of thinwire") from None
        if run_id is not None and manifest.run_id(self.author) != run_id:
            raise ManifestMismatch(
                f"the manifest is of run {manifest.run_id(self.author)[:4].hex()}, not {run_id[:4].hex()}",
                "ask for a new invite",
            )
        return manifest


def sign(toml: bytes, identity: Identity) -> SignedManifest:
    """Publish a manifest as its author. Raises ManifestError when it is not valid."""
    parse(toml)
    return SignedManifest(toml, identity.public_key, identity.sign(_DOMAIN, toml))
