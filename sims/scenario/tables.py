"""Tables of a scenario file: each key with its unit. A `description` completes an error's "… is not"."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta
from thinwire.sims.network.translator import Nat
from thinwire.sims.scenario.faults import Fault
from thinwire.sims.scenario.toml_table_reader import ScenarioTable

MOST_PEERS = 10_000

_NAME = "a name of at most 64 lower-case letters, digits and dashes"
_SECONDS = "a number of seconds"

Name = Annotated[str, Meta(pattern=r"^[a-z0-9][a-z0-9-]{0,63}\Z", description=_NAME)]
Seconds = Annotated[float, Meta(ge=0, le=1e7, description=_SECONDS)]
Positive = Annotated[float, Meta(ge=1e-3, le=1e7, description="a number of seconds from 0.001")]
Rate = Annotated[float, Meta(gt=0, le=1e6, description="a number of Mbit/s above 0")]
Part = Annotated[float, Meta(ge=0, lt=1, description="a fraction from 0 to below 1")]
Milliseconds = Annotated[float, Meta(ge=0, le=60_000, description="a round trip in milliseconds")]
Regions = Annotated[list[str], Meta(min_length=1, max_length=1000, description="a list of regions")]


class Top(ScenarioTable, frozen=True, kw_only=True):
    """Keys of a scenario file before its first table."""

    name: Name = ""
    about: str = ""
    seed: Annotated[int, Meta(ge=0, le=2**53 - 1, description="a whole number from 0")] = 0
    duration: Positive
    interval: Positive = 5.0
    compute: Literal["stub", "torch"] = "stub"
    parameters: Annotated[int, Meta(ge=1, le=10**9, description="a number of parameters from 1")] = 100_000
    manifest: dict[str, Any] | str = {}
    peers: list[Any]
    links: dict[str, Any] = {}
    sites: dict[str, Any] = {}
    faults: list[Any] = []
    random: dict[str, Any] = {}


class PeerGroup(ScenarioTable, frozen=True):
    """[[peers]]: `count` equal peers.

    - region: one name, or several that the peers take in turn.
    - access: a kind of link; or up_mbit and down_mbit instead.
    - step: seconds of one inner step; of a peer that holds a stage, the stage's part of one inner step.
    - join: arrival of the first peer. every: seconds between two arrivals, and between two departures.
    - leave: departure of the first peer.
    - liar: kind of lie.
    - site: announced site, for exchange.topology = "hierarchy".
    - memory_mib: memory for training, if the manifest has a [pipeline]; without this key it is enough for the model.
      A peer for which the model is too large holds a stage.
    - nat: kind of address translator of each peer: "none", "full-cone", "restricted", "symmetric" or "refusing", see
      sims/network/translator.py.
    """

    name: Name = "peer"
    count: Annotated[int, Meta(ge=1, le=MOST_PEERS, description=f"a number of peers from 1 to {MOST_PEERS}")] = 1
    region: str | Regions = "Oregon"
    access: str = ""
    up_mbit: Rate | None = None
    down_mbit: Rate | None = None
    step: Positive = 1.0
    join: Seconds = 0.0
    every: Seconds = 0.0
    leave: Seconds | None = None
    liar: str = ""
    site: Annotated[str, Meta(max_length=64)] = ""
    memory_mib: Annotated[float, Meta(gt=0, le=1e9, description="a number of MiB above 0")] | None = None
    nat: Nat = "none"


class SiteLine(ScenarioTable, frozen=True, kw_only=True):
    """[sites.NAME]: link to other sites, address translator, or both, that all peers of a site share.

    Inside the site, the peers have separate links and reach each other.
    """

    up_mbit: Rate | None = None
    down_mbit: Rate | None = None
    nat: Nat = "none"


class Links(ScenarioTable, frozen=True):
    """[links]: the network between the access links.

    rtt_ms: one round-trip time for all, or a matrix for `regions`; stream_mbit: largest rate of one connection,
    likewise.
    """

    regions: Regions | None = None
    rtt_ms: Milliseconds | list[list[Milliseconds]] | None = None
    stream_mbit: Rate | list[list[Rate]] | None = None
    jitter: Part = 0.0
    loss: Part = 0.0


class FaultEntry(ScenarioTable, frozen=True, kw_only=True):
    """[[faults]]: see faults.py for the kinds. peers: indices, names of peers, or names of groups."""

    at: Seconds
    kind: str
    peers: list[int | str] = []
    seconds: Seconds = 0.0
    amount: float = 0.0
    detail: str = ""

    def fault(self, peers: tuple[int, ...]) -> Fault:
        """Return the fault with peers as indices."""
        return Fault(self.at, self.kind, peers, self.seconds, self.amount, self.detail)
