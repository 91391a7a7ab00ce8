"""Manifest: content of the TOML file that defines a run; its hash is the run id.

So peers with different settings never meet in one run. The tables of the file are the classes of tables.py, and for [outer]
those of swarm/method_specs. Absent tables and keys have defaults.
"""

from __future__ import annotations

from typing import ClassVar, Literal, TypeVar

import blake3
import msgspec
from thinwire.swarm.identity.errors import HintedError
from thinwire.swarm.manifest.tables import Admission, Data, Exchange, Inner, Lora, Model, Pipeline, Run
from thinwire.swarm.method_specs.base import ManifestTable, MethodSpec
from thinwire.swarm.method_specs.diloco import DiLoCo

AUDITED = 0.1
"""Probability with which a member audits a chunk of a round."""

AUDIT_SHARE = 0.02
"""Most bytes of these audits, as a part of the bytes of a round."""

LATER = (("model", "buffers"), ("model", "name"), ("model", "config_hash"), ("inner", "precision"))
"""Keys that were added after the first runs, besides those of the method (`MethodSpec.later`)."""

LATER_TABLES = ("lora",)
"""Tables that were added after the first runs."""

S = TypeVar("S", bound=MethodSpec)


class ManifestError(HintedError):
    """Unusable manifest: the message names file, table and key."""

    exit_code: ClassVar[int] = 2


class ManifestMismatch(HintedError):
    """Manifest of another run, or without a valid signature of its author."""

    exit_code: ClassVar[int] = 5


class Manifest(ManifestTable, frozen=True):
    """Checked manifest. Only `parse` of parser.py makes one."""

    run: Run = Run()
    model: Model = Model()
    data: Data = Data()
    inner: Inner = Inner()
    outer: MethodSpec = DiLoCo()
    exchange: Exchange = Exchange()
    pipeline: Pipeline = Pipeline()
    admission: Admission = Admission()
    lora: Lora = Lora()

    def method(self, kind: type[S]) -> S:
        """Return [outer] as the keys of a method. Raises TypeError if the run has another one (our bug)."""
        if not isinstance(self.outer, kind):
            raise TypeError(f"outer.method is {self.outer.method!r}, not one of {kind.__name__}")
        return self.outer

    @property
    def first_weights(self) -> str:
        """Hash of the first parameters of the trained state; "" if they are drawn from run.seed.

        With an adapter, `model.weights` is the hash of the frozen base.
        """
        return "" if self.lora.rank else self.model.weights

    @property
    def max_weight(self) -> int:
        """Most tokens that one contribution may claim."""
        return self.exchange.max_weight or round(self.outer.sync_every * self.outer.step_ratio) * self.step_tokens

    @property
    def step_tokens(self) -> int:
        """Tokens of one inner step of a peer, or of a pipeline group."""
        batch = self.inner.global_batch or self.inner.batch * max(self.inner.accumulate, self.pipeline.microbatches)
        return batch * self.model.context

    @property
    def schedule_steps(self) -> int:
        """Inner steps of the learning rate's schedule; 0 = endless."""
        return self.inner.steps or self.steps_after(self.run.rounds)

    @property
    def pace(self) -> int:
        """Inner steps between two rounds."""
        return self.outer.round_steps

    @property
    def overlap(self) -> int:
        """Inner steps of `pace` that overlap the exchange; with a lag, in the last of its turns."""
        return self.outer.overlap_steps

    @property
    def lag(self) -> int:
        """Turns of other fragments that pass before the result of a fragment is awaited."""
        return self.outer.lag

    @property
    def sparse(self) -> bool:
        """True if a small part of each pseudo-gradient is sent, to all peers."""
        return self.exchange.codec.startswith("topk")

    @property
    def fragmented(self) -> bool:
        """True if each fragment of the model has separate rounds."""
        return self.outer.fragmented

    @property
    def microbatches(self) -> int:
        """Micro-batches of one inner step of a group."""
        return self.pipeline.microbatches or self.inner.accumulate

    @property
    def host_capacity(self) -> int:
        """Micro-batches that a host holds at a time."""
        pipeline = self.pipeline
        return pipeline.host_capacity or pipeline.max_in_flight or min(pipeline.stages, self.microbatches)

    @property
    def asynchronous(self) -> bool:
        """True if a round has the contributors that are ready, while the other peers train on and follow."""
        return self.outer.asynchronous

    @property
    def quorum(self) -> float:
        """Fraction of the members that a quorum exceeds."""
        return 2 / 3 if self._quorum == "two-thirds" else self._quorum

    @property
    def _quorum(self) -> float | Literal["two-thirds"]:
        wanted = self.exchange.quorum
        if wanted == "auto":
            return "two-thirds" if self.admission.mode == "open" else 0.5
        return wanted

    @property
    def audited(self) -> bool:
        """True if members audit owners of chunks, which is possible in a butterfly only.

        In pairs, and if every payload goes to all peers, each peer computes its results itself. In a ring and in a hierarchy
        no peer but the relays sees the contributions, and a result of a sparse butterfly depends on the owner's residual.
        """
        exchange = self.exchange
        plain = exchange.collective == exchange.topology == "butterfly" and not self.outer.gossip
        return plain and exchange.audit != 0

    def audit_chance(self, chunks: int, peers: int) -> float:
        """Return the probability with which a member audits one of the `chunks` of a round with these `peers`.

        An audit moves peers − 1 chunks, and a round 2 · (peers − 1) · chunks. So audits add chance · peers / (2 · chunks).
        """
        if not self.audited or not chunks:
            return 0.0
        wanted = self.exchange.audit
        return min(AUDITED, 2 * AUDIT_SHARE * chunks / max(1, peers)) if wanted == "auto" else wanted

    def steps_after(self, round: int) -> int:
        """Return the inner steps of a peer up to the end of a round."""
        return self.outer.steps_after(round)

    def canonical(self) -> bytes:
        """Return all values in the order of their definition as msgpack: equal for files of equal meaning.

        A later key is absent if it has its default, and a table of LATER_TABLES if all its keys have, so that older runs
        have the same id. The quorum is the one that applies.
        """
        values = msgspec.to_builtins(self)
        values["exchange"]["quorum"] = self._quorum
        for section in LATER_TABLES:
            if getattr(self, section) == type(getattr(self, section))():
                del values[section]
        for section, key in (*LATER, *(("outer", key) for key in self.outer.later)):
            usual = getattr(type(getattr(self, section))(), key)
            if values[section][key] == usual:
                del values[section][key]
        return msgspec.msgpack.encode(values)

    def changes_since(self, older: Manifest) -> tuple[str, ...]:
        """Return the keys that have another value in `older`, each as text with the old and the new value.

        A key of [outer] that only one of two methods has is left out: the text of `outer.method` explains it.
        """
        was, now = (
            {(table, key): value for table, keys in msgspec.to_builtins(one).items() for key, value in keys.items()}
            for one in (older, self)
        )
        shared = [key for key in now if key in was and was[key] != now[key]]
        return tuple(f"{table}.{key} was {was[table, key]!r}, is {now[table, key]!r}" for table, key in shared)

    def warnings(self) -> tuple[str, ...]:
        """Return warnings about values that are allowed but unwise."""
        return self.outer.warnings()

    def run_id(self, author: bytes) -> bytes:
        """Return the run id, 32 bytes: a hash of the manifest and of its author's Ed25519 public key."""
        return blake3.blake3(b"thinwire/run/2\0" + author + self.canonical()).digest()
