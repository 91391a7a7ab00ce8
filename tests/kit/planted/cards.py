"""Run cards of planted peers."""

from __future__ import annotations

from typing import Any

from thinwire.swarm.identity.identity import Identity
from thinwire.swarm.identity.peer_record import PeerRecord
from thinwire.swarm.identity.run_card import RunCard, RunDescription

RUN = b"r" * 32
NOW = 1_700_000_000


def identity(number: int) -> Identity:
    return Identity.generate(number.to_bytes(32, "big"))


def record(
    number: int, *, run: bytes = RUN, issued: int = NOW, addresses: tuple[str, ...] | None = None, ttl: int = 3600
) -> PeerRecord:
    own = (f"192.0.2.1:{7000 + number}",) if addresses is None else addresses
    return PeerRecord.create(identity(number), run_id=run, addresses=own, sequence=1, issued=issued, ttl=ttl)


def card(
    number: int = 1,
    *,
    run: bytes = RUN,
    issued: int = NOW,
    signer: int | None = None,
    addresses: tuple[str, ...] | None = None,
    ttl: int = 180,
    **more: Any,
) -> RunCard:
    """Return the card of peer `number`. `signer`: another peer that signs it. `more`: of the description."""
    values: dict[str, Any] = {
        "name": "demo",
        "model": "transformer-4x128",
        "method": "diloco",
        "admission": "open",
        "round": 7,
        "peers": 3,
        "loss": 2.5,
        **more,
    }
    whose = record(number, run=run, issued=issued, addresses=addresses)
    signed_by = identity(number if signer is None else signer)
    return RunCard.create(signed_by, whose, RunDescription(**values), issued=issued, ttl=ttl)
