"""The tables of a manifest: each field with its unit and when to change it.

The defaults suit a small demonstration on CPUs. A `description` completes the sentence "… is not" of an error.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from .protocol import MAX_GROUP, MAX_HOPS, MAX_MICROS

MAX_WEIGHT = 2**53 - 1
"""Most tokens that a weight on the wire can say."""

AUTO_GRACE = 10.0
"""Seconds of grace until rounds have shown how late members are."""

_NAME = "a name of at most 64 letters, digits, dots, dashes and underscores"
_HASH = "a blake3 hash of 64 hexadecimal digits"
_CODEC = "a codec with all its parameters, such as 'int8(block=256)' or 'fp32'"
_NAMED = r"[a-z0-9]+(\([a-z]+=[0-9]{1,9}(,[a-z]+=[0-9]{1,9})*\))?"


class Table(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of the tables."""


class Run(Table, frozen=True):
    """[run]: name and length.

    name: what people call the run; also a directory name (letters, digits, dot, dash, underscore; at most 64).
    seed: everything random derives from it: first weights, shards, order of batches.
    rounds: outer steps after which everyone stops; 0 = go on until stopped by hand.
    """

    name: Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}\Z", description=_NAME)] = "demo"
    seed: Annotated[int, Meta(ge=0, le=2**53 - 1)] = 0
    rounds: Annotated[int, Meta(ge=0, le=2**32 - 1)] = 0


class Model(Table, frozen=True):
    """[model]: what is trained.

    kind: "transformer", the built-in decoder; "custom", a module of one's own given through the Python API, for which
        the other fields mean nothing.
    layers, width, heads: size of the transformer; width is a multiple of twice the heads (rotary positions need pairs).
    context: tokens a training sequence has; memory and time of attention grow with its square.
    mlp: hidden size of the feed-forward part as a multiple of width; 8/3 with its three matrices costs what the usual 4
        costs with two.
    tied: whether the head shares the embedding's weights; saves vocabulary × width parameters, good for small models.
    """

    kind: Literal["transformer", "custom"] = "transformer"
    layers: Annotated[int, Meta(ge=1, le=1024)] = 4
    width: Annotated[int, Meta(ge=2, le=65_536)] = 128
    heads: Annotated[int, Meta(ge=1, le=1024)] = 4
    context: Annotated[int, Meta(ge=1, le=2**20)] = 128
    mlp: Annotated[float, Meta(gt=0, le=64)] = 8 / 3
    tied: bool = True


class Data(Table, frozen=True):
    """[data]: how text becomes tokens and who trains on what.

    tokenizer: "bytes", or the name of a Hugging Face `tokenizers` JSON file, relative, without "..", because every peer
        looks for it on its own disk.
    tokenizer_hash: blake3 of that file, 64 hexadecimal digits; set it, else peers may disagree about tokens unnoticed.
    shards: parts that the text is cut into; at least a few for every peer that may come.
    holdout: fraction of the text kept for evaluation.
    once: whether the swarm keeps book of what is used up, so that no sample comes again before its shard is through and none
        is left out, whoever joins, dies or comes back; a newcomer then trains from its second round on. All have the same text.
    domains: whether every peer has a text of its own and trains on all of it; else all have the same, and share it.
    """

    tokenizer: Annotated[str, Meta(min_length=1, max_length=256)] = "bytes"
    tokenizer_hash: Annotated[str, Meta(pattern=r"^([0-9a-f]{64})?\Z", description=_HASH)] = ""
    shards: Annotated[int, Meta(ge=1, le=2**20)] = 256
    holdout: Annotated[float, Meta(ge=0, le=0.5)] = 0.02
    once: bool = False
    domains: bool = False


class Inner(Table, frozen=True):
    """[inner]: the optimizer each peer runs by itself between two exchanges.

    optimizer: "adamw"; "sgd" (with betas[0] as its momentum) where memory for two moments is lacking; or "muon", whose
        updates of matrices are nearly orthogonal, and AdamW beside it for vectors, embeddings and the head.
    lr: peak learning rate; lower it for wider models. muon: 0.02, that of the matrices.
    adam_lr: of muon alone, peak learning rate of the AdamW beside it.
    momentum: of muon alone.
    betas: decay of the first and second moment.
    weight_decay: decoupled weight decay.
    warmup: inner steps over which lr rises from 0.
    schedule: "constant" after the warm-up, or "cosine" down to a tenth of lr at the end of `steps`.
    steps: inner steps the schedule spans; 0 = rounds × H.
    batch: sequences of one forward pass; what fits a peer's memory.
    accumulate: forward passes of one inner step; raise it instead of batch when memory is short.
    global_batch: sequences of one inner step over all peers, however many there are; 0 = batch × accumulate each. Needs
        data.once; batch is then the most of one forward pass.
    clip: largest norm of the gradient; 0 = not clipped.
    """

    optimizer: Literal["adamw", "sgd", "muon"] = "adamw"
    lr: Annotated[float, Meta(gt=0, le=100)] = 1e-3
    adam_lr: Annotated[float, Meta(gt=0, le=100)] = 1e-3
    momentum: Annotated[float, Meta(ge=0, lt=1)] = 0.95
    betas: tuple[Annotated[float, Meta(ge=0, lt=1)], Annotated[float, Meta(ge=0, lt=1)]] = (0.9, 0.95)
    weight_decay: Annotated[float, Meta(ge=0, le=10)] = 0.1
    warmup: Annotated[int, Meta(ge=0, le=2**32 - 1)] = 50
    schedule: Literal["constant", "cosine"] = "constant"
    steps: Annotated[int, Meta(ge=0, le=2**53 - 1)] = 0
    batch: Annotated[int, Meta(ge=1, le=2**20)] = 8
    accumulate: Annotated[int, Meta(ge=1, le=2**16)] = 1
    global_batch: Annotated[int, Meta(ge=0, le=2**24)] = 0
    clip: Annotated[float, Meta(ge=0, le=1e6)] = 1.0


class Outer(Table, frozen=True):
    """[outer]: how replicas come together after H inner steps.

    method: "diloco" (Douillard et al., arXiv:2311.08105), one step that all peers make together; "noloco" (Kolehmainen
        et al., arXiv:2506.10911), where each averages with a random partner or some: no barrier, replicas stay a little apart;
        "muloco" (arXiv:2505.23725), diloco whose peers train with Muon;
        "sparseloco" (arXiv:2508.15706), diloco with a small part of every pseudo-gradient, 200 times fewer bytes; "demo"
        (arXiv:2411.19870), an exchange after every step of plain SGD: each peer's momentum sends its strongest coefficients;
        "powersgd" (arXiv:1905.13727), diloco whose matrices travel as two thin factors: a step takes two rounds;
        "streaming" (arXiv:2501.18512), diloco in parts: a round is for one part of the model, and training goes on while it
        is under way; "eager" (arXiv:2502.12996), where a round is under way during all of the next one's inner steps, and
        each puts its own newest contribution in the place of its last one; "co2" (arXiv:2401.16265), as far behind, where
        all start from the same and a step that comes late counts less; "buffered-async" (FedBuff, arXiv:2106.06639), a round of
        whoever is ready `grace` seconds after the first, while the others train on and follow; "delayed-nesterov"
        (arXiv:2401.09135), the same with momentum that moves when as many contributions have come as there are peers; or
        "merge": all train apart, on domains of their own, and the run ends with the one average of what they have. Its first
        round only gathers those who are there, after which all make their H steps.
    steps: H, inner steps between two exchanges; more saves traffic, fewer keeps peers closer together. noloco: 50,
        sparseloco, muloco, eager, co2, buffered-async and delayed-nesterov: 30, demo: 1, merge: 1000. Of streaming, 30,
        between two of the same part: it has a round after every H / fragments.
    lr, momentum, nesterov: of the outer SGD on the mean pseudo-gradient; of muloco 0.7 and 0.6. With noloco they are β and α,
        0.7 and 0.5, and there is no nesterov. With sparseloco lr is α, 1, and there is no momentum: what was not sent takes
        its place. With demo lr is the length of the sign step, 0.0004. Of streaming lr is 0.4, of eager 0.2. Of buffered-async
        they are 1 and 0, the plain average: momentum on every arrival adds up; of co2 1 and 0.2. co2's and delayed-nesterov's
        momentum is of their own kind.
    gamma: of noloco alone, how strongly partners are drawn together; with lr, and codec "fp32", one vector travels
        instead of two. noloco: 0.7.
    beta: of sparseloco and demo, which part of what was not sent lives on to the next round. demo: 0.999.
    denominator: of sparseloco and demo: "contributor_mean" divides every coordinate by those who sent it, "mean" by all.
    on_exclusion: of sparseloco, demo and powersgd, what becomes of a contribution that the round's record does not name:
        "drop" takes it for sent, "restore" keeps it for the next round. Directions grow stale: "drop" was the better one where
        it was tried.
    decay: of demo alone, weight decay of the sign step.
    work: "equal", H inner steps for everybody; or "by-power", for unequal machines: as many as fit into the time that the one
        in the middle needs for H, so that all arrive together. Contributions count by their tokens either way.
    spread: of "by-power" alone, how many times H a fast peer may make.
    fragments: of streaming alone, parts that the model is exchanged in, by layers; steps is a multiple of it. More lowers the
        peak of the traffic.
    overlap: of streaming alone, inner steps that a peer makes while a part is under way, before it waits for the result; at
        most `steps`. With more than steps / fragments several parts are under way. Raise it until nobody waits; 5 and less
        cost next to nothing.
    alpha: of streaming alone, which part of the local parameters stays when the result comes. 0 suits an overlap of 0.
    clip: of co2 alone, the largest element of its momentum, in units of a parameter; 0 = not clipped.
    staleness: of buffered-async and delayed-nesterov, whole steps that may have passed since a contribution was begun, of
        which so many contributions make one as there are peers; older work is given up, and its peer starts from what all have.
    fade: of these too, a in 1 / (1 + s)^a, what a contribution begun s steps ago counts.
    arrivals: of these too, contributions that make a whole step, with delayed-nesterov one of the momentum; 0 = as many as
        there are peers.
    late, late_lr: of sparseloco alone, the round from which on lr is late_lr, 0 = none; its paper ends with 0.65.
    """

    method: Literal[
        "diloco",
        "muloco",
        "noloco",
        "sparseloco",
        "demo",
        "powersgd",
        "streaming",
        "eager",
        "co2",
        "buffered-async",
        "delayed-nesterov",
        "merge",
    ] = "diloco"
    steps: Annotated[int, Meta(ge=1, le=2**20)] = 20
    lr: Annotated[float, Meta(gt=0, le=10)] = 0.7
    momentum: Annotated[float, Meta(ge=0, lt=1)] = 0.9
    nesterov: bool = True
    gamma: Annotated[float, Meta(gt=0, le=10)] = 0.7
    beta: Annotated[float, Meta(ge=0, le=1)] = 0.95
    denominator: Literal["contributor_mean", "mean"] = "contributor_mean"
    on_exclusion: Literal["drop", "restore"] = "drop"
    decay: Annotated[float, Meta(ge=0, le=10)] = 0.1
    work: Literal["equal", "by-power"] = "equal"
    spread: Annotated[float, Meta(ge=1, le=1000)] = 4.0
    fragments: Annotated[int, Meta(ge=1, le=1024)] = 3
    overlap: Annotated[int, Meta(ge=0, le=2**20)] = 1
    alpha: Annotated[float, Meta(ge=0, lt=1)] = 0.5
    clip: Annotated[float, Meta(ge=0, le=1e6)] = 0.0
    staleness: Annotated[int, Meta(ge=0, le=2**20)] = 16
    fade: Annotated[float, Meta(ge=0, le=10)] = 0.5
    arrivals: Annotated[int, Meta(ge=0, le=MAX_GROUP)] = 0
    late: Annotated[int, Meta(ge=0, le=2**32 - 1)] = 0
    late_lr: Annotated[float, Meta(gt=0, le=10)] = 0.65


class Pipeline(Table, frozen=True):
    """[pipeline]: how peers that are too small for the model hold it together, in stages, beside others that hold all of it.

    stages: parts of consecutive layers that the model is cut into, each a fragment with rounds of its own; 0 = nobody holds
        a part only. As many as the smallest peers need to hold one; each costs two crossings of a slow link per micro-batch.
    codec: of what crosses from stage to stage: "fp32", "bf16", "rows(bits=8)" (a quarter of fp32, the gradients too) or "tah"
        (an eighth forward); or "subspace(k=…)", k of model.width numbers per token: a group then trains a projection of the
        model, whose writes into the residual stream stay in a subspace drawn from run.seed; who holds all of it trains all of
        it. Coarser ones suit slower links.
    micro: micro-batches that a group makes of one inner step, each of inner.batch sequences; 0 = inner.accumulate. More keep
        the stages busy.
    window: of these, how many are under way at a time; 0 = as many as stages (1F1B); as many as `micro` is GPipe, which
        needs more memory.
    gradient: "all", a stage's gradient is divided by all micro-batches; or "visits", by those that went through it: the two
        differ where micro-batches went past a stage.
    paths: "even", every micro-batch visits all stages, and whoever of a stage was given least time so far is next; or
        "planned", a group's origin plans their ways from what it measures, anew when that changes.
        For groups with several holders of a stage (see `holders`) and slow or uneven links.
    skip: part of the stages that each micro-batch goes past, of planned paths; 0 = it visits all. With 0.33 a step takes
        about half as long, and training as a whole loses a little (docs/pipelines.md).
    swaps: visits out of order that a planned path may have, each behind its next neighbour: 0, 1 or 2.
    room: micro-batches that a host holds at a time by a plan; 0 = as many as are under way without.
    holders: peers of each stage but the first that a group is to have before weak peers found another group; 1 = as soon as
        there are enough for one. More make a group survive its hosts, and give plans something to choose from.
    rebalance: seconds between two moves of hosts to the stage that is waited for most; 0 = nobody moves. Of "even" paths: plans
        go past who is slow.
    buddy: rounds after which a peer fetches a copy of the stage after its own, for the day when all are gone who hold that; 0 =
        nobody does. Only while two peers at most hold it.
    recent: rounds: an older copy or checkpoint of a stage that nobody holds any more is worth less than the mean of the stages
        beside it.
    """

    stages: Annotated[int, Meta(ge=0, le=MAX_HOPS)] = 0
    codec: Annotated[str, Meta(pattern=rf"^{_NAMED}\Z", description=_CODEC)] = "rows(bits=8)"
    micro: Annotated[int, Meta(ge=0, le=MAX_MICROS)] = 0
    window: Annotated[int, Meta(ge=0, le=MAX_MICROS)] = 0
    gradient: Literal["all", "visits"] = "all"
    paths: Literal["even", "planned"] = "even"
    skip: Annotated[float, Meta(ge=0, lt=1)] = 0.0
    swaps: Annotated[int, Meta(ge=0, le=2)] = 0
    room: Annotated[int, Meta(ge=0, le=MAX_MICROS)] = 0
    holders: Annotated[int, Meta(ge=1, le=64)] = 1
    rebalance: Annotated[float, Meta(ge=0, le=86_400)] = 300.0

    @property
    def visited(self) -> int:
        """Stages that a micro-batch visits by a plan, the first among them."""
        return round((1 - self.skip) * self.stages)

    buddy: Annotated[int, Meta(ge=0, le=1000)] = 8
    recent: Annotated[int, Meta(ge=0, le=100_000)] = 50


class Exchange(Table, frozen=True):
    """[exchange]: how pseudo-gradients travel and when a round counts.

    codec: "int8(block=256)", a quarter of the bytes; "int4(block=256)", "e3m0(block=256)", an eighth; or "fp32", exact, for
        fast networks and tests. sparseloco, and streaming where told: "topk(k=64,chunk=4096)|2bit|rice", one value of 64. demo:
        "demo(k=32,chunk=4096)|2bit|rice". With noloco it is that of the pseudo-gradient; slow weights, of which nothing is fed
        back, travel as "int8(block=256)" beside it, and while the inner steps are made, so that int4 halves what is waited for.
    collective: "butterfly", every peer owns a part of every round; or "gather", every payload goes to everybody, which only
        payloads as small as those of sparseloco are worth. The method decides. Of sparseloco also "sparse-butterfly": the owner
        of a part adds up what has come, sends the largest values of the sum to all and keeps the rest for later, so that what
        a peer receives does not grow with their number; for more than some five of them.
    keep: of "sparse-butterfly" alone, which part of what an owner has not sent of a sum lives on to the next round. Directions
        grow stale: 0.5 was better than 0.8 and 0.95 where it was tried.
    topology: how the data of a butterfly goes. "butterfly": every contribution straight to the owners of its parts; or "ring":
        from peer to peer, each adding its own, so that a peer sends to one neighbour only, whatever the number of peers;
        or "hierarchy": peers of one site (node.toml: site; else those that are within 5 ms of each other) average among
        themselves first, and one value of each site crosses the wide area. For sites of several peers behind one uplink; a
        codec that loses something loses it once more.
    aggregation: "mean", weighted by tokens, after screening; or "rda", also weighted, direction and length averaged apart,
        chunk by chunk: where peers pull different ways the step stays as long as theirs are. Of dense methods but noloco.
    quorum: fraction of the last round's members that must be exceeded; at least 0.5, because below it both halves of a
        split could go on. Raise it to lose more rounds and fewer contributions.
    min_peers: contributors without whom a round does not count.
    grace: seconds to wait for stragglers once the quorum is ready; or "auto", computed from how late each member was in the
        last rounds, and at most half of what the quorum takes to train. Who is later than that is left out: its delta of the
        round is lost, and it goes on from the swarm's state. So for machines that are always much slower write
        outer.work = "by-power", with which all arrive together.
    max_weight: most tokens that one contribution may claim; 0 = H × batch × accumulate × context, what a peer trains on
        in a round, and `spread` times that by power.
    sick: what becomes of a peer that is much slower than the others, or whose link loses much: "report", it is named in the
        status; or "isolate", it also gets no part of the others' work: in rounds led by who has noticed it owns no chunks.
    group: of noloco alone, peers that average with each other in a round: 2, random pairs, to 8. More keep replicas closer
        together, send as many more copies and wait for the slowest of more.
    shards: "bandwidth", peers own as much of every round as their links can carry, by their own measure, at most three times
        an equal part; or "equal", equal parts for all. Says nothing where every payload goes to everybody.
    """

    codec: Annotated[str, Meta(pattern=rf"^{_NAMED}(\|{_NAMED}){{0,4}}\Z", description=_CODEC)] = "int8(block=256)"
    collective: Literal["butterfly", "gather", "sparse-butterfly"] = "butterfly"
    keep: Annotated[float, Meta(ge=0, le=1)] = 0.5
    topology: Literal["butterfly", "ring", "hierarchy"] = "butterfly"
    aggregation: Literal["mean", "rda"] = "mean"
    quorum: Annotated[float, Meta(ge=0.5, lt=1)] = 0.5
    min_peers: Annotated[int, Meta(ge=1, le=MAX_GROUP)] = 1
    grace: Annotated[float, Meta(ge=0, le=3600)] | Literal["auto"] = 10.0
    max_weight: Annotated[int, Meta(ge=0, le=MAX_WEIGHT)] = 0
    sick: Literal["report", "isolate"] = "report"
    group: Annotated[int, Meta(ge=2, le=8)] = 2
    shards: Literal["bandwidth", "equal"] = "bandwidth"

    @property
    def seconds(self) -> float:
        """The grace: where it is computed, what it is before anything has been measured."""
        return AUTO_GRACE if self.grace == "auto" else self.grace
