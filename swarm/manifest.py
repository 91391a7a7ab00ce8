"""The manifest: one TOML file that defines a run. Its hash is the run id, so peers with other settings cannot meet.

The tables of the file are the classes of `settings`; absent tables and fields take their defaults there.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, get_args

import blake3
import msgspec
from msgspec import Meta

from .contradictions import contradictions, nearest
from .errors import HintedError
from .identity import SIGNATURE_BYTES, Identity, verify
from .methods import (
    ASYNCHRONOUS,
    DATA,
    EXCHANGE,
    FOREIGN,
    INNER,
    MUON,
    ONLY_MUON,
    OUTER,
    PIPELINE,
    RUN,
    SPARSE_STREAMING,
    gamma_limit,
)
from .settings import Data, Exchange, Inner, Model, Outer, Pipeline, Run, Table

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
        outer, limit = self.outer, gamma_limit(self.outer.momentum)
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
            raise ManifestError(f"{name}: unknown table [{key}]", nearest(key, list(tables), "tables"))
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
    for message, hint in contradictions(manifest):
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
            raise ManifestError(f"{place}: unknown key", nearest(key, list(fields), f"keys of [{section}]"))
        field = fields[key]
        try:
            values[key] = msgspec.convert(value, field.type)
        except msgspec.ValidationError as error:
            choices = [choice for choice in get_args(field.type) if isinstance(choice, str)]
            usual = SUITS if key == "codec" else f"the default is {field.default!r}"
            hint = nearest(str(value), choices, "choices") if choices else usual
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
