"""Tables of a manifest except [outer] (see swarm/method_specs): each key, its unit, when to change it.

The defaults suit a small demonstration on CPUs. A `description` completes the sentence "… is not" of an error.
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta
from thinwire.swarm.aggregation_spec import AggregationSpec
from thinwire.swarm.choices import (
    AdmissionMode,
    Aggregation,
    BufferRule,
    ChunkAssignment,
    Collective,
    InnerOptimizer,
    ModelKind,
    OnSplit,
    Precision,
    RateSchedule,
    SlowPeers,
    StageGradient,
    StagePaths,
    Topology,
)
from thinwire.swarm.identity.admission_token import MAX_GRANTS, AdmissionPolicy
from thinwire.swarm.messages.registry import MAX_GROUP, MAX_HOPS, MAX_MICROS
from thinwire.swarm.method_specs.base import ManifestTable

MAX_WEIGHT = 2**53 - 1
"""Largest weight in tokens that a message can carry."""

AUTO_TIMEOUT = 10.0
"""Straggler time-out in seconds until rounds have shown how late members are."""

_NAME = "a name of at most 64 letters, digits, dots, dashes and underscores"
_HASH = "a blake3 hash of 64 hexadecimal digits"
_MODEL = "a path, or MODULE:FUNCTION, of at most 256 letters, digits, dots, dashes, underscores, slashes and colons"
_LAYER = "a name of at most 128 letters, digits, dots, dashes and underscores"
_CODEC = "a codec with all its parameters, such as 'int8(block=256)' or 'fp32'"
_NAMED = r"[a-z0-9]+(\([a-z]+=[0-9]{1,9}(,[a-z]+=[0-9]{1,9})*\))?"


class Run(ManifestTable, frozen=True):
    """[run]: name and length.

    name: display name and directory name of the run (letters, digits, dot, dash, underscore; at most 64).
    seed: source of all randomness: first weights, shards, order of batches.
    rounds: outer steps after which all peers stop; 0 = continue until stopped by hand.
    """

    name: Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}\Z", description=_NAME)] = "demo"
    seed: Annotated[int, Meta(ge=0, le=2**53 - 1)] = 0
    rounds: Annotated[int, Meta(ge=0, le=2**32 - 1)] = 0


class Model(ManifestTable, frozen=True):
    """[model]: the trained model.

    kind: "transformer", the built-in decoder; "module", the result of a Python function; "hf", a causal language model of the
        transformers library; "custom", a module of the user's own, given through the Python API. Sizes and context only apply
        to the built-in decoder, context to "module" and "hf", too; `buffers` to all but the built-in decoder.
    layers, width, heads: size of the transformer; width is a multiple of 2 × heads (rotary positions need pairs).
    context: tokens of a training sequence; memory and time of attention grow with its square.
    mlp: hidden size of the feed-forward part as a multiple of width; 8/3 with its three matrices costs as much as the usual 4
        with two.
    tied: whether the head shares the embedding's weights; saves vocabulary × width parameters, good for small models.
    weights: blake3 of the first parameters, 64 hexadecimal digits; the founder gives their file with `thinwire start --from`,
        which names the hash. Without it they are random, from run.seed.
    buffers: persistent buffers of the module, such as the statistics of BatchNorm; not with "transformer". They are state of
        the swarm, and each round sets them: "average", floats to the mean by weight, integers to those of the contribution with
        the largest weight; "heaviest", all to those of that contribution; "local", not state, every peer retains its own.
        Daemons share none, so "module" and "hf" need "local" if there are any.
    name: of a "module", MODULE:FUNCTION; of an "hf", the folder or file of its configuration, or its name on the Hugging Face
        Hub. The author's peer takes the model from there; another peer takes the model that its `--model` names.
    config_hash: only with "hf", which needs it: blake3 of config.json, 64 hexadecimal digits.
    """

    kind: ModelKind = "transformer"
    layers: Annotated[int, Meta(ge=1, le=1024)] = 4
    width: Annotated[int, Meta(ge=2, le=65_536)] = 128
    heads: Annotated[int, Meta(ge=1, le=1024)] = 4
    context: Annotated[int, Meta(ge=1, le=2**20)] = 128
    mlp: Annotated[float, Meta(gt=0, le=64)] = 8 / 3
    tied: bool = True
    weights: Annotated[str, Meta(pattern=r"^([0-9a-f]{64})?\Z", description=_HASH)] = ""
    buffers: BufferRule = "average"
    name: Annotated[str, Meta(pattern=r"^[A-Za-z0-9._/:-]{0,256}\Z", description=_MODEL)] = ""
    config_hash: Annotated[str, Meta(pattern=r"^([0-9a-f]{64})?\Z", description=_HASH)] = ""


class Lora(ManifestTable, frozen=True):
    """[lora]: an adapter (LoRA), trained instead of the model; for the kinds "hf" and "module".

    The base weights are frozen and stay on the disks of the peers, each of which has them: `model.weights` is their hash.

    rank: of the two matrices beside each adapted layer; 0 = no adapter, the whole model is trained. 8 to 64 are usual.
    alpha: the product of the matrices is scaled by alpha / rank.
    targets: names of adapted layers, or the last parts of their names, such as ["q_proj", "v_proj"]; ["all-linear"], all
        linear layers but the head, for "hf"; empty = those that peft suggests for the architecture, for "hf".
    """

    rank: Annotated[int, Meta(ge=0, le=1024)] = 0
    alpha: Annotated[int, Meta(ge=1, le=10_000)] = 16
    targets: Annotated[
        tuple[Annotated[str, Meta(pattern=r"^[A-Za-z0-9_.-]{1,128}\Z", description=_LAYER)], ...], Meta(max_length=64)
    ] = ()


class Data(ManifestTable, frozen=True):
    """[data]: how text becomes tokens, and which peer trains on which part.

    tokenizer: "bytes", or the name of a Hugging Face `tokenizers` JSON file, or of a folder with tokenizer.json, relative and
        without "..": every peer looks for the file on its own disk.
    tokenizer_hash: blake3 of that file, 64 hexadecimal digits. Without it peers may use different tokens unnoticed.
    shards: parts of the text; at least a few for every peer that may join.
    holdout: fraction of the text that is reserved for evaluation.
    exactly_once: whether the swarm records the used samples, so that no sample repeats before its shard is used up, and none
        is left out, whichever peers join, die or return. A joiner then trains from its second round on. All peers need the
        same text.
    private: whether every peer trains on all of a separate text; otherwise all peers share one text.
    """

    tokenizer: Annotated[str, Meta(min_length=1, max_length=256)] = "bytes"
    tokenizer_hash: Annotated[str, Meta(pattern=r"^([0-9a-f]{64})?\Z", description=_HASH)] = ""
    shards: Annotated[int, Meta(ge=1, le=2**20)] = 256
    holdout: Annotated[float, Meta(ge=0, le=0.5)] = 0.02
    exactly_once: bool = False
    private: bool = False


class Inner(ManifestTable, frozen=True):
    """[inner]: the local optimizer of each peer.

    optimizer: "adamw"; "sgd" (betas[0] is its momentum) if memory for two moments is lacking; or "muon", with nearly
        orthogonal updates of matrices, and AdamW for vectors, embeddings and the head.
    lr: peak learning rate; lower it for wider models. With muon 0.02, the rate of the matrices.
    adam_lr: only with muon: peak learning rate of its AdamW.
    momentum: only with muon.
    betas: decay of the first and second moment.
    weight_decay: decoupled weight decay.
    warmup: inner steps over which lr rises from 0.
    schedule: "constant" after the warm-up, or "cosine" down to a tenth of lr at the end of `steps`.
    steps: inner steps of the schedule; 0 = run.rounds × outer.sync_every.
    batch: sequences of one forward pass; limited by the peer's memory.
    accumulate: forward passes of one inner step; raise it instead of batch if memory is short.
    global_batch: sequences of one inner step of all peers together, for any number of peers; 0 = batch × accumulate each.
        Needs data.exactly_once; batch is then the limit of one forward pass.
    clip: largest norm of the gradient; 0 = not clipped.
    precision: of matrix products in model and loss: "fp32"; "bf16", faster on hardware that has it; "auto", bf16 on a GPU and
        fp32 on a CPU. Parameters, gradients and the optimizer's state are float32 in any case.
    """

    optimizer: InnerOptimizer = "adamw"
    lr: Annotated[float, Meta(gt=0, le=100)] = 1e-3
    adam_lr: Annotated[float, Meta(gt=0, le=100)] = 1e-3
    momentum: Annotated[float, Meta(ge=0, lt=1)] = 0.95
    betas: tuple[Annotated[float, Meta(ge=0, lt=1)], Annotated[float, Meta(ge=0, lt=1)]] = (0.9, 0.95)
    weight_decay: Annotated[float, Meta(ge=0, le=10)] = 0.1
    warmup: Annotated[int, Meta(ge=0, le=2**32 - 1)] = 50
    schedule: RateSchedule = "constant"
    steps: Annotated[int, Meta(ge=0, le=2**53 - 1)] = 0
    batch: Annotated[int, Meta(ge=1, le=2**20)] = 8
    accumulate: Annotated[int, Meta(ge=1, le=2**16)] = 1
    global_batch: Annotated[int, Meta(ge=0, le=2**24)] = 0
    clip: Annotated[float, Meta(ge=0, le=1e6)] = 1.0
    precision: Precision = "auto"

    @property
    def sgd_momentum(self) -> float:
        """Momentum with the optimizer "sgd"."""
        return self.betas[0]


class Pipeline(ManifestTable, frozen=True):
    """[pipeline]: peers that are too small for the model hold it together, in stages.

    stages: parts of consecutive layers, each a fragment with separate rounds; 0 = no pipeline. Use as many as the smallest
        peers need to hold one; each stage costs two crossings of a slow link per micro-batch.
    codec: of activations and gradients between stages: "fp32", "bf16", "rows(bits=8)" (a quarter of fp32, gradients too),
        "tah" (an eighth in the forward direction), or "subspace(k=…)", k of model.width numbers per token: a group then trains
        a projection of the built-in model, whose writes into the residual stream stay in a subspace drawn from run.seed; peers
        with the whole model train all of it. Coarser codecs suit slower links.
    microbatches: micro-batches of one inner step of a group, each of inner.batch sequences; 0 = inner.accumulate. More keep
        the stages busy.
    max_in_flight: micro-batches in progress at a time; 0 = as many as stages (1F1B); as many as `microbatches` is GPipe, which
        needs more memory.
    gradient: "all", a stage's gradient is divided by the number of all micro-batches; or "visits", by the number of those that
        passed through the stage: they differ if micro-batches skip stages.
    paths: "round-robin", every micro-batch visits all stages, and the least used holder of a stage is next; or "planned", a
        group's origin plans routes from its measurements, and again when those change. "planned" is for groups with several
        holders of a stage (see `peers_per_stage`) and slow or uneven links.
    skip_fraction: fraction of the stages that each micro-batch skips, with planned paths (SkipPipe); 0 = it visits all. With
        0.33 a step takes about half as long, and training as a whole loses a little (docs/measured/pipelines.md).
    max_reorders: visits out of order that a planned path may have, each behind its next neighbour: 0, 1 or 2.
    host_capacity: micro-batches that a host holds at a time in a plan; 0 = max_in_flight.
    peers_per_stage: peers of each stage but the first that a group has before weak peers found another group; 1 = a new group
        as soon as there are enough peers. More make a group survive the loss of hosts, and give plans a choice.
    rebalance: seconds between two moves of hosts to the stage with the longest queue; 0 = no moves. Only with "round-robin":
        planned paths avoid slow hosts.
    backup_every: rounds after which a peer fetches a copy of the next stage, in case all its holders die; 0 = never. Only
        while at most two peers hold that stage.
    backup_max_age: rounds; an older copy or checkpoint of a lost stage is worth less than the mean of the neighbouring stages.
    """

    stages: Annotated[int, Meta(ge=0, le=MAX_HOPS)] = 0
    codec: Annotated[str, Meta(pattern=rf"^{_NAMED}\Z", description=_CODEC)] = "rows(bits=8)"
    microbatches: Annotated[int, Meta(ge=0, le=MAX_MICROS)] = 0
    max_in_flight: Annotated[int, Meta(ge=0, le=MAX_MICROS)] = 0
    gradient: StageGradient = "all"
    paths: StagePaths = "round-robin"
    skip_fraction: Annotated[float, Meta(ge=0, lt=1)] = 0.0
    max_reorders: Annotated[int, Meta(ge=0, le=2)] = 0
    host_capacity: Annotated[int, Meta(ge=0, le=MAX_MICROS)] = 0
    peers_per_stage: Annotated[int, Meta(ge=1, le=64)] = 1
    rebalance: Annotated[float, Meta(ge=0, le=86_400)] = 300.0
    backup_every: Annotated[int, Meta(ge=0, le=1000)] = 8
    backup_max_age: Annotated[int, Meta(ge=0, le=100_000)] = 50

    @property
    def visited(self) -> int:
        """Stages that a micro-batch visits with a planned path, including the first one."""
        return round((1 - self.skip_fraction) * self.stages)


class Exchange(ManifestTable, frozen=True):
    """[exchange]: how pseudo-gradients travel, and when a round counts.

    codec: "int8(block=256)", a quarter of the bytes of fp32; "int4(block=256)", "e3m0(block=256)", an eighth; or "fp32",
        exact, for fast networks and tests. sparseloco, and optionally streaming: "topk(k=64,chunk=4096)|2bit|rice", one value
        of 64. demo: "demo(k=32,chunk=4096)|2bit|rice". With noloco, which can also send sparse ones, this is the codec of the
        pseudo-gradient; slow weights, which have no error feedback, travel as "int8(block=256)" during the inner steps, so
        that int4 halves the time of waiting. With a sparse one outer.slow_weight_parts lowers their bytes, too.
    collective: "butterfly", every peer owns a part of every round; or "all-gather", every payload goes to all peers, which is
        worth it only for payloads as small as those of sparseloco. The method decides. With sparseloco also
        "sparse-butterfly": the owner of a part adds up the payloads, sends the largest values of the sum to all peers and
        retains the rest, so that a peer's download does not grow with the number of peers; for more than about five peers.
    owner_residual_decay: only with "sparse-butterfly": part of an owner's unsent sum that is carried over to the next round.
        Directions become stale: in our experiments 0.5 was better than 0.8 and 0.95.
    topology: route of the data of a butterfly. "butterfly": every contribution goes directly to the owners of its parts;
        "ring": from peer to peer, each adding its own, so that a peer sends to one neighbour only; "hierarchy": the peers of a
        site (node.toml: site; otherwise those within 5 ms of each other) average among themselves first, and one value of each
        site crosses the wide area. For sites of several peers behind one uplink; a lossy codec loses once more.
    aggregation: rule by which contributions become one, after screening. "clip", the mean weighted by tokens, with norms
        clipped to their median from three contributors on, so that no peer moves the result by more than its weight; "mean",
        without clipping; "rda", also weighted, with direction and length averaged separately for each chunk: if peers pull in
        different directions, the step remains as long as theirs. Against up to max_liars liars: "centered-clip", "flag",
        "geometric-median", "trimmed-mean", "median", "krum", "multi-krum", "bulyan" (docs/design/aggregation.md compares
        them). They need all contributions in one place and a minimum of contributors, exchange.min_peers.
    max_liars: only with these rules: largest number of contributors of a round that may lie.
    aggregation_iterations: only with "centered-clip", "geometric-median" and "flag": largest number of iterations; 0 = 20, 32
        and 5.
    quorum: fraction of the last round's members that must be exceeded; at least 0.5, because below it both halves of a
        partition could continue. A larger quorum loses more rounds and fewer contributions. "two-thirds", or a fraction above
        it: fewer than a third of the members may lie about votes and proposals without two results of one round. Such a
        round may have to wait for more members than a quorum, and with fewer than four members none may lie. "auto":
        "two-thirds" in open runs, 0.5 in others.
    min_peers: least number of contributors of a round that counts.
    straggler_timeout: seconds to wait for stragglers when the quorum is ready; or "auto", computed from the lateness of each
        member in the last rounds, at most half of the quorum's training time. A later peer is left out: its pseudo-gradient of
        the round is lost, and it continues from the swarm's state. A peer that was too late in two rounds in a row is
        not waited for until it is in time by itself. For machines that are always much slower set
        outer.step_balancing = "by-speed", with which all peers arrive together. The data of a contribution gets as much time,
        once that of more than half has come.
    orphan: seconds without a quorum after which the peers that are left continue as another lineage, at least three patiences;
        0 = never by themselves, see `thinwire recover`. Lineages become one again when their peers meet.
    on_split: treatment of the training of a peer whose lineage gives way to another one. "merge": its next contribution is the
        way from its model to the state of the other lineage, with the tokens that it trained since the split as weight;
        "discard": it is lost. Methods that train during a round, asynchronous ones, noloco, and data.exactly_once always
        discard it.
    max_weight: most tokens that one contribution may claim; 0 = tokens that a peer trains on in a round (sync_every × batch ×
        accumulate × context), times max_step_ratio with step balancing.
    slow_peers: treatment of a peer that is much slower than the others, or has a lossy link: "report", the status names it; or
        "no-ownership", it also owns no chunks in rounds of leaders that noticed.
    gossip_group_size: only with noloco: peers that average with each other in a round, from 2 (random pairs) to 64. More keep
        replicas closer together, and wait for the slowest of more peers. Up to 8 send everything to each other; in larger
        groups each chunk has an owner that sends the mean back, so that a peer sends twice its contribution at most; sparse
        pseudo-gradients go to all members in any group.
    chunk_assignment: "bandwidth", peers own as much of every round as their links can carry, by their own measurements, at most
        three times an equal part; or "equal". No effect if every payload goes to all peers.
    audit: only in a butterfly: probability with which a member computes the result of one chunk of a round again, to find
        owners that lie. "auto": 0.1, or less if audits would add more than 2 % to the bytes of a round. 0: no audits.
    """

    codec: Annotated[str, Meta(pattern=rf"^{_NAMED}(\|{_NAMED}){{0,4}}\Z", description=_CODEC)] = "int8(block=256)"
    collective: Collective = "butterfly"
    owner_residual_decay: Annotated[float, Meta(ge=0, le=1)] = 0.5
    topology: Topology = "butterfly"
    aggregation: Aggregation = "clip"
    max_liars: Annotated[int, Meta(ge=1, le=MAX_GROUP // 2)] = 1
    aggregation_iterations: Annotated[int, Meta(ge=0, le=1000)] = 0
    quorum: Annotated[float, Meta(ge=0.5, lt=1)] | Literal["two-thirds", "auto"] = "auto"
    min_peers: Annotated[int, Meta(ge=1, le=MAX_GROUP)] = 1
    straggler_timeout: Annotated[float, Meta(ge=0, le=3600)] | Literal["auto"] = 10.0
    orphan: Annotated[float, Meta(ge=0, le=86400)] = 10.0
    on_split: OnSplit = "merge"
    max_weight: Annotated[int, Meta(ge=0, le=MAX_WEIGHT)] = 0
    slow_peers: SlowPeers = "report"
    gossip_group_size: Annotated[int, Meta(ge=2, le=64)] = 2
    chunk_assignment: ChunkAssignment = "bandwidth"
    audit: Annotated[float, Meta(ge=0, le=1)] | Literal["auto"] = "auto"

    @property
    def rule(self) -> AggregationSpec:
        """The aggregation rule with its parameters."""
        return AggregationSpec(self.aggregation, self.max_liars, self.aggregation_iterations)

    @property
    def timeout_seconds(self) -> float:
        """Straggler time-out in seconds; with "auto" the one before anything was measured."""
        return AUTO_TIMEOUT if self.straggler_timeout == "auto" else self.straggler_timeout


class Admission(ManifestTable, frozen=True):
    """[admission]: peers that may join.

    mode: "invited", peers with an invite of the author or of a member that was invited; a run id alone is not enough; "closed",
        peers with an invite of the author only; "open", any key that finds the run. The author of the manifest is always
        admitted, and can exclude peers and invites in every mode (`thinwire revoke`).
    trial_rounds: only with "open": least number of scored contributions of a newcomer before members endorse it. Until a quorum
        of the members endorses it, it gets results but has no vote, and its contributions do not count. Peers with an invite
        of the author for their key (`thinwire invite --for`) need no trial. 0 = no trial: any key counts from its first round.
    trial_per_network: only with "open": most peers on trial from one IPv4 network of 24 bits, or IPv6 network of 48 bits, at
        each member; 0 = no limit, for tests on one machine.
    """

    mode: AdmissionMode = "invited"
    trial_rounds: Annotated[int, Meta(ge=0, le=1000)] = 8
    trial_per_network: Annotated[int, Meta(ge=0, le=MAX_GROUP)] = 4

    @property
    def trial(self) -> int:
        """Scored contributions that a newcomer needs; 0: none."""
        return self.trial_rounds if self.mode == "open" else 0

    def policy(self, run_id: bytes, author: bytes) -> AdmissionPolicy:
        """Return the rule by which members of a run judge records. `author`: its Ed25519 key."""
        return AdmissionPolicy(run_id, author, self.longest, self.trial, self.trial_per_network)

    @property
    def longest(self) -> int:
        """Longest chain of grants from the author to a peer; 0: peers need none."""
        return {"closed": 2, "invited": MAX_GRANTS, "open": 0}[self.mode]
