"""The round in which a group of callers reduces its arrays."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import blake3
import msgspec
from thinwire.collectives.allreduce.element_arithmetic import Elements
from thinwire.collectives.allreduce.group_acceptance import Group
from thinwire.collectives.allreduce.rendezvous import PeerContext
from thinwire.collectives.consensus.members.terms import RoundTerms
from thinwire.collectives.consensus.paxos import Agreement
from thinwire.collectives.rounds.data_planes.butterfly import Butterfly
from thinwire.collectives.rounds.round import LinkReport, Round
from thinwire.collectives.topology.shards import Grid
from thinwire.compression.core.types import Buffer
from thinwire.swarm.messages.registry import OPERATIONS, AveragePlan
from thinwire.swarm.rendezvous_hash import leader_order

MAX_CALL_WEIGHT = 2**31
"""Largest weight of one peer in a mean that a user calls.

A larger claim of another peer counts as this much.
"""


PAIR = 4
"""Patiences in which one of two waits for the other: without it there is nothing to average.

The first one in the leader order is a quorum of the two. A larger group waits one patience for its members.
"""


@dataclass(frozen=True, slots=True)
class LocalPart:
    """This peer's input: encoded chunks in grid order with their hashes, their grid and arithmetic."""

    payloads: Sequence[Buffer]
    hashes: bytes
    weight: int
    grid: Grid
    elements: Elements


def group_round(
    context: PeerContext,
    group: Group,
    key: tuple[int, int],
    plan: AveragePlan,
    share: LocalPart,
    *,
    patience: float,
    voter: bool,
    attempt: int,
    on_phase: Callable[[int, str], None],
) -> Round:
    """Return the round of a group, with nothing announced yet.

    `key`: see `key_of`. `voter`, `attempt`, `on_phase`: see Agreement and Round.
    """
    round, fragment = key
    seed = blake3.blake3(
        b"".join((context.keyring.run_id, round.to_bytes(8, "big"), fragment.to_bytes(8, "big"), *group))
    ).digest()
    terms = RoundTerms(
        round,
        fragment,
        leader_order(seed, group, round, fragment),
        seed,
        blake3.blake3(msgspec.msgpack.encode(plan)).digest(),
        min_peers=plan.least,
        max_weight=MAX_CALL_WEIGHT,
        grace=patience * (PAIR if len(group) == 2 else 1),
        limit=0.0,
        patience=patience,
        chunks=len(share.grid),
    )

    agreement = Agreement(context.keyring, terms, live=context.live, voter=voter)
    data_plane = Butterfly(
        agreement,
        share.elements,
        share.grid,
        seed=seed,
        usual={},
        send_queue=context.send_queue,
        now=context.now,
        aside=context.aside,
    )
    links = LinkReport(rates=context.link)
    return Round(data_plane, context.keyring, attempt=attempt, links=links, on_phase=on_phase)


def key_of(name: str, number: int) -> tuple[int, int]:
    """Return round and fragment of an operation's messages.

    They are 47 bits of the hash of its name, plus its number.
    """
    first, fragment = _first_key(name)
    return (first + number) % 2**32, fragment


@lru_cache(maxsize=4096)  # called for every stored operation and every frame
def _first_key(name: str) -> tuple[int, int]:
    digest = blake3.blake3(name.encode()).digest()
    return int.from_bytes(digest[2:6], "big"), OPERATIONS | int.from_bytes(digest[:2], "big") % OPERATIONS
