"""Contradictions between the tables of a manifest."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator
from pathlib import PurePath
from typing import get_args

import msgspec
from thinwire.swarm.aggregation_spec import ITERATED, NEEDS
from thinwire.swarm.choices import Aggregation, ModelKind
from thinwire.swarm.manifest.manifest import Manifest
from thinwire.swarm.manifest.tables import MAX_WEIGHT, Exchange, Lora, Model, Pipeline
from thinwire.swarm.messages.registry import MAX_GROUP
from thinwire.swarm.method_specs.base import DENSE
from thinwire.swarm.method_specs.registry import METHODS

BOUNDARIES = ("fp32", "bf16", "fp16", "rows", "tah", "subspace")
"""Codecs of activations and gradients between stages, by the first word of their names."""

MODULE_FUNCTION = re.compile(r"[A-Za-z_][A-Za-z0-9_.]*:[A-Za-z_][A-Za-z0-9_]*")
"""Form of the name of a function that makes a model."""

Contradictions = Iterator[tuple[str, str]]
"""Pairs of an error message and a hint."""


def nearest(word: str, known: list[str], what: str) -> str:
    """Return a hint for a word that is not in `known`."""
    close = difflib.get_close_matches(word, known, n=1)
    return f"did you mean {close[0]!r}?" if close else f"{what}: {', '.join(known)}"


def contradictions(manifest: Manifest) -> Contradictions:
    """Yield the contradictions of a manifest."""
    yield from _model_and_data(manifest)
    yield from _codec(manifest)
    if manifest.inner.schedule == "cosine" and not manifest.schedule_steps:
        yield "inner.schedule is 'cosine', but the run has no end", "set run.rounds or inner.steps"
    yield from manifest.outer.contradictions(manifest.sparse)
    yield from _required(manifest)
    yield from _gossip(manifest)
    yield from _pipeline(manifest)
    yield from _unused_exchange_keys(manifest)
    yield from _exactly_once(manifest)
    yield from _aggregation(manifest)
    yield from _trial(manifest)
    if manifest.max_weight > MAX_WEIGHT:
        yield "the tokens of a round exceed the largest weight", "lower outer.sync_every, inner.batch or model.context"


def _model_and_data(manifest: Manifest) -> Contradictions:
    model, data = manifest.model, manifest.data
    if model.kind == "transformer" and model.width % (2 * model.heads):
        yield (
            f"model.width = {model.width} is not a multiple of 2 × model.heads = {2 * model.heads}",
            "change one of the two",
        )
    if model.kind == "transformer" and model.buffers != Model().buffers:
        yield (
            "model.buffers does not apply to the built-in model",
            "remove the key: that model has no buffers",
        )
    if model.kind == "custom" and manifest.inner.precision != "auto":
        yield "inner.precision does not apply to a training loop of the user", "remove the key: the loop decides"
    yield from _user_model(manifest.model)
    yield from _adapter(manifest.lora, manifest.model.kind)
    path = PurePath(data.tokenizer)
    if path.is_absolute() or ".." in path.parts or set("\\:") & set(data.tokenizer):
        yield f"data.tokenizer = {data.tokenizer!r} is outside the directory of tokenizers", "give a relative path"
    if data.tokenizer == "bytes" and data.tokenizer_hash:
        yield "data.tokenizer_hash is set, but the tokenizer is not a file", "remove the hash or name the file"


def _user_model(model: Model) -> Contradictions:
    """Contradictions in the keys that name a model of the user."""
    named = model.kind in ("module", "hf")
    if named and not model.name:
        example = "mymodel:make" if model.kind == "module" else "gpt2-small, a folder with config.json"
        yield f"model.kind = {model.kind!r} needs model.name", f"give it, such as {example}"
    if not named and model.name:
        yield "model.name only applies to the kinds 'module' and 'hf'", "set model.kind, or remove the key"
    if model.kind == "module" and model.name and not MODULE_FUNCTION.fullmatch(model.name):
        yield f"model.name = {model.name!r} is not MODULE:FUNCTION", "write mymodel:make, for example"
    if model.kind != "hf" and model.config_hash:
        yield "model.config_hash only applies to the kind 'hf'", "remove the key"


def _adapter(lora: Lora, kind: ModelKind) -> Contradictions:
    """Contradictions in the keys of an adapter."""
    if not lora.rank:
        if lora != Lora():
            yield "[lora] has no effect without rank", "set lora.rank, or remove the table"
        return
    if kind == "custom":
        yield (
            "lora.rank does not apply to a training loop of the user",
            "remove [lora]; give a model of peft to `wrap`: frozen parameters stay local",
        )
    elif kind == "transformer":
        yield "lora.rank does not apply to the built-in model", "set model.kind = 'hf' or 'module', or remove [lora]"
    elif kind == "module" and (not lora.targets or "all-linear" in lora.targets):
        yield "lora.targets must name layers of a model of kind 'module'", "give names such as 'q_proj'"
    if "all-linear" in lora.targets and len(lora.targets) > 1:
        yield "lora.targets has 'all-linear' and others", "remove the others"


def _required(manifest: Manifest) -> Contradictions:
    """Values of other tables that the method cannot do without."""
    for section, (values, message, hint) in manifest.outer.required.items():
        if any(getattr(getattr(manifest, section), key) != value for key, value in values.items()):
            yield message, hint
            return


def _gossip(manifest: Manifest) -> Contradictions:
    if manifest.outer.gossip and manifest.exchange.min_peers > 1:
        yield "exchange.min_peers does not apply to gossip: a round has a few peers, or one", "remove the key"
    if not manifest.outer.gossip and manifest.exchange.gossip_group_size != Exchange().gossip_group_size:
        yield (
            f"exchange.gossip_group_size does not apply to the method {manifest.outer.method!r}",
            "remove the key; it applies to noloco",
        )


def _unused_exchange_keys(manifest: Manifest) -> Contradictions:
    """Keys of [exchange] that have no effect with the other settings."""
    outer, exchange = manifest.outer, manifest.exchange
    usual = Exchange()
    if exchange.collective != "sparse-butterfly" and exchange.owner_residual_decay != usual.owner_residual_decay:
        yield (
            "exchange.owner_residual_decay only applies with exchange.collective = 'sparse-butterfly'",
            "remove the key",
        )
    plain = exchange.collective == "butterfly" and exchange.topology == "butterfly"
    if exchange.chunk_assignment == "equal" and (not plain or outer.gossip):
        yield "exchange.chunk_assignment only applies to a butterfly, in which peers own chunks", "remove the key"
    if exchange.audit not in ("auto", 0) and (not plain or outer.gossip):
        yield (
            "exchange.audit only applies to a butterfly, in which owners compute results from contributions",
            "remove the key",
        )
    if exchange.slow_peers == "no-ownership" and (outer.gossip or exchange.collective == "all-gather"):
        why = "a round has a few peers" if outer.gossip else "every payload goes to all peers"
        yield (
            f"exchange.slow_peers = 'no-ownership' has no effect with {outer.method}: no peer owns chunks, because {why}",
            "remove the key; the status names slow peers in any case",
        )
    if exchange.straggler_timeout == "auto" and outer.fixed_timeout:
        yield (
            f"exchange.straggler_timeout = 'auto' does not apply to {outer.method}: {outer.fixed_timeout}",
            "give seconds, or remove the key",
        )
    if exchange.topology != "butterfly" and (outer.gossip or exchange.collective != "butterfly"):
        why = "a round has a few peers" if outer.gossip else "it is for dense payloads"
        yield f"exchange.topology does not apply to {outer.method}: {why}", "remove the key"


def _aggregation(manifest: Manifest) -> Contradictions:
    """Rules that the method, the topology or the number of contributors exclude."""
    outer, exchange, spec = manifest.outer, manifest.exchange, manifest.exchange.rule
    codec = re.split(r"[(|]", exchange.codec)[0]
    known: tuple[str, ...] = get_args(Aggregation)
    if outer.gossip:
        known = ("mean",)
    elif codec == "powersgd":
        known = ("mean", "clip")  # the factors of the second round depend on the mean of the first
    elif codec not in DENSE:
        known = tuple(rule for rule in known if rule != "rda")
    if spec.rule not in known:
        yield (
            f"exchange.aggregation = {spec.rule!r} does not apply to the method {outer.method!r}",
            f"remove the key; rules of {outer.method}: {', '.join(known)}",
        )
    elif spec.rule not in ("mean", "clip") and exchange.topology != "butterfly":
        yield (
            f"exchange.aggregation = {spec.rule!r} needs all contributions in one place",
            "remove the key, or exchange.topology",
        )
    if spec.rule not in NEEDS and spec.max_liars != Exchange().max_liars:
        yield (
            f"exchange.max_liars does not apply to the rule {spec.rule!r}",
            f"remove the key; rules: {', '.join(NEEDS)}",
        )
    if spec.rule not in ITERATED and spec.iterations:
        yield (
            f"exchange.aggregation_iterations does not apply to the rule {spec.rule!r}",
            f"remove the key; rules: {', '.join(ITERATED)}",
        )
    if exchange.min_peers < spec.needs:
        yield (
            f"exchange.aggregation = {spec.rule!r} with max_liars = {spec.max_liars} needs {spec.needs} contributors, "
            f"and exchange.min_peers = {exchange.min_peers} allows rounds with fewer",
            f"set exchange.min_peers = {spec.needs} or more"
            if spec.needs <= MAX_GROUP
            else f"lower exchange.max_liars: a round has at most {MAX_GROUP} contributors",
        )


def _trial(manifest: Manifest) -> Contradictions:
    """A trial of newcomers in runs whose members cannot score contributions."""
    if manifest.admission.trial and (not manifest.outer.scored or manifest.model.kind == "custom"):
        what = "a custom model" if manifest.model.kind == "custom" else f"the method {manifest.outer.method!r}"
        yield (
            f"admission.mode = 'open' has a trial of newcomers, which does not work with {what}",
            "set admission.trial_rounds = 0 if any key may count at once, or admission.mode = 'invited'",
        )


def _pipeline(manifest: Manifest) -> Contradictions:
    """Contradictions in the settings of a model in stages."""
    pipeline, outer, model = manifest.pipeline, manifest.outer, manifest.model
    if not pipeline.stages:
        if pipeline != Pipeline():
            yield "[pipeline] has no effect without stages", "set pipeline.stages, or remove the table"
        return
    if pipeline.stages < 2:
        yield "pipeline.stages = 1 is a peer that holds the whole model", "set pipeline.stages to 2 or more, or to 0"
    if not outer.fragmented:
        yield (
            f"pipeline.stages needs the method 'streaming', whose fragments have separate rounds, not {outer.method!r}",
            "set outer.method = 'streaming'; its default overlap of 0 is DiLoCo, fragment by fragment",
        )
    elif outer.fragment_count != pipeline.stages:
        yield (
            f"outer.fragments = {outer.fragment_count}, but a model of {pipeline.stages} stages has as many fragments",
            "remove outer.fragments",
        )
    if manifest.lora.rank:
        yield "an adapter cannot be cut into stages", "remove [lora] or [pipeline]"
    if manifest.inner.precision == "bf16":
        yield "inner.precision = 'bf16' does not apply to stages, which compute in float32", "remove the key"
    if model.kind == "custom":
        yield "a model of kind 'custom' cannot be cut into stages", "remove [pipeline], or set model.kind = 'module'"
    elif model.kind != "transformer" and pipeline.codec.startswith("subspace"):
        yield f"pipeline.codec = {pipeline.codec!r} only applies to the built-in model", "choose another codec"
    elif model.kind == "transformer" and model.layers < pipeline.stages:
        yield (
            f"a model of {model.layers} layers cannot be cut into {pipeline.stages} stages",
            "lower pipeline.stages",
        )
    if pipeline.codec.split("(")[0] not in BOUNDARIES:
        yield (
            f"pipeline.codec: {pipeline.codec!r} is not a codec of data between stages",
            f"codecs: {', '.join(BOUNDARIES)}",
        )
    if pipeline.max_in_flight > manifest.microbatches:
        yield (
            f"pipeline.max_in_flight = {pipeline.max_in_flight}, but a step has {manifest.microbatches} micro-batches",
            "lower pipeline.max_in_flight",
        )
    yield from _paths(pipeline)


def _paths(pipeline: Pipeline) -> Contradictions:
    """Contradictions in the paths of micro-batches."""
    usual = Pipeline()
    if pipeline.paths != "planned":
        for key in ("skip_fraction", "max_reorders", "host_capacity"):
            if getattr(pipeline, key) != getattr(usual, key):
                yield (
                    f"pipeline.{key} only applies with pipeline.paths = 'planned'",
                    "set pipeline.paths = 'planned', or remove the key",
                )
    elif pipeline.rebalance != usual.rebalance:
        yield "pipeline.rebalance does not apply to planned paths, which avoid slow hosts", "remove the key"
    if pipeline.skip_fraction and not 2 <= pipeline.visited < pipeline.stages:
        fewest, most = 0.5 / pipeline.stages, 1 - 1.5 / pipeline.stages
        yield (
            f"pipeline.skip_fraction = {pipeline.skip_fraction:g} with {pipeline.stages} stages skips no stage "
            "or leaves fewer than 2",
            f"choose a value between {fewest:.2f} and {most:.2f}" if pipeline.stages > 2 else "remove the key",
        )


def _exactly_once(manifest: Manifest) -> Contradictions:
    """Contradictions in the settings that record or divide the data."""
    data, inner, outer = manifest.data, manifest.inner, manifest.outer
    per_round = msgspec.structs.replace(manifest, exchange=Exchange()).max_weight
    if data.exactly_once and not outer.tracks_data:
        yield f"data.exactly_once does not work with the method {outer.method!r}", "remove the key"
    if data.exactly_once and outer.residual.on_exclusion == "restore":
        yield (
            "data.exactly_once draws the data of dropped contributions again; on_exclusion = 'restore' sends them again",
            "remove one of the two",
        )
    if data.exactly_once and data.private:
        yield "data.exactly_once needs one text for all peers, data.private one for each", "remove one of the two"
    if manifest.model.weights and (manifest.model.kind == "custom" or manifest.pipeline.stages):
        yield (
            "model.weights needs a model that daemons train, held as a whole by every peer",
            "remove the key; a custom module's weights are those of the peer that founds the run",
        )
    if data.exactly_once and manifest.model.kind == "custom":
        yield "data.exactly_once does not apply to a model of kind 'custom', whose data is the user's", "remove the key"
    if data.exactly_once and manifest.max_weight < per_round:
        yield (
            f"exchange.max_weight is below the {per_round} tokens of a round, which data.exactly_once records",
            "remove exchange.max_weight",
        )
    if inner.global_batch and not data.exactly_once:
        yield "inner.global_batch needs data.exactly_once", "set data.exactly_once = true"
    if inner.global_batch and outer.step_ratio != 1.0:
        yield "inner.global_batch gives all peers equal parts, so step balancing is impossible", "remove one of the two"
    if inner.global_batch and inner.accumulate > 1:
        yield "inner.accumulate follows from inner.global_batch", "remove inner.accumulate"


def _codec(manifest: Manifest) -> Contradictions:
    """Contradictions that the name of a codec shows. The codec itself checks its parameters."""
    codec, outer = manifest.exchange.codec, manifest.outer
    name = re.split(r"[(|]", codec)[0]
    if name not in outer.codecs:
        known = {one for kind in METHODS.values() for one in kind.codecs}
        hint = f"codecs of {outer.method}: {', '.join(outer.codecs)}"
        yield (
            (f"exchange.codec: {codec!r} is not for the method {outer.method!r}", hint)
            if name in known
            else (
                f"exchange.codec: there is no codec {name!r}",
                nearest(name, list(outer.codecs), f"codecs of {outer.method}"),
            )
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
    wanted = "all-gather" if manifest.sparse and not outer.gossip else outer.collective
    given = manifest.exchange.collective
    if given != wanted and given not in outer.collectives:
        yield f"exchange.collective is {given!r}, but {outer.method} needs {wanted!r}", "remove exchange.collective"
