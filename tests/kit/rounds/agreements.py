"""Agreements of one round, without a network: short names, signatures and announcements."""

from __future__ import annotations

import blake3
import msgspec
from kit.rounds.fake_keys import FakeKeys
from thinwire.collectives.consensus.members.terms import RoundTerms
from thinwire.collectives.consensus.paxos import Agreement
from thinwire.swarm.messages.registry import Ready

BASE, PLAN = bytes(32), bytes([1]) * 32


def name(index):
    return bytes([index]) * 32


def sign(peer, message):
    return blake3.blake3(peer + msgspec.msgpack.encode(message)).digest(64)


def verify(peer, message, signature):
    return signature == sign(peer, message)


def digest(contributors):
    """Results are a pure function of the contributors."""
    return blake3.blake3(msgspec.msgpack.encode(contributors)).digest()


def terms(members, **more):
    return RoundTerms(5, 0, tuple(members), BASE, PLAN, max_weight=100, **more)


def ready(attempt=1, *, weight=10, base=BASE, plan=PLAN, voter=True, life=b""):
    return Ready(5, 0, attempt, base, plan, weight, b"", voter, 0.0, 0.0, life=life)


def agreement(me, members, live, *, voter=True, store=None, hasty=(), **more):
    return Agreement(
        FakeKeys(me, sign, verify),
        terms(members, **more),
        live=live,
        voter=voter,
        store=store,
        hasty=hasty,
    )
