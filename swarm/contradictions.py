"""What of a manifest contradicts itself, or is about something that it does not have."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator
from pathlib import PurePath
from typing import TYPE_CHECKING

import msgspec

from .methods import (
    BOUNDARIES,
    CODECS,
    DENSE,
    EXCHANGE,
    UNBOOKED,
    gamma_limit,
)
from .settings import MAX_WEIGHT, Exchange, Outer, Pipeline

if TYPE_CHECKING:
    from .manifest import Manifest

MAX_CHAINS = 64
"""Most parts of a model with rounds of their own: what is said when somebody comes is said of each."""


def nearest(word: str, known: list[str], what: str) -> str:
    """A hint for a word that is none of those known."""
    close = difflib.get_close_matches(word, known, n=1)
    return f"did you mean {close[0]!r}?" if close else f"{what}: {', '.join(known)}"


def contradictions(manifest: Manifest) -> Iterator[tuple[str, str]]:
    """What cannot be meant, and what to do about it: pairs of a message and a hint."""
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
    limit = gamma_limit(outer.momentum)
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
    yield from _idle_words(manifest)
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


def _idle_words(manifest: Manifest) -> Iterator[tuple[str, str]]:
    """Keys of [exchange] that can do nothing here."""
    method, exchange = manifest.outer.method, manifest.exchange
    if exchange.sick == "isolate" and (method == "noloco" or exchange.collective == "gather"):
        why = "a round is of a few peers" if method == "noloco" else "every payload goes to everybody"
        yield (
            f"exchange.sick is 'isolate', which takes chunks to own from the sick, and with {method} nobody owns any: {why}",
            "remove the key: the sick are named in the status all the same",
        )
    if exchange.grace == "auto" and (method in ("noloco", "merge") or manifest.asynchronous):
        known = {"noloco": "pairs wait by a pace of their own", "merge": "there is but one round"}
        why = known.get(method, "rounds are of whoever is ready")
        yield (f"exchange.grace is 'auto', which says nothing with {method}: {why}", "give seconds, or remove the key")


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
            else (f"exchange.codec: there is no codec {name!r}", nearest(name, list(usable), f"codecs of {method}"))
        )
        return
    if name.startswith("int") or name == "e3m0":
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
