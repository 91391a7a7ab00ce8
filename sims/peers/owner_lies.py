"""Owners that compute false results of their chunks, which only audits find."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
from thinwire.collectives.aggregation.means import Rule
from thinwire.compression.core.codec import Codec
from thinwire.compression.core.types import Buffer, Floats
from thinwire.node.methods.noloco.session import GossipSession
from thinwire.node.outer.round_session import RoundSession
from thinwire.sims.peers.false_messages import each
from thinwire.sims.peers.machine import Process


def falsify(
    change: Callable[[Rule, Codec, Sequence[Buffer], Sequence[float], Floats], None],
) -> Callable[[Process], None]:
    """Return the lie of an owner that computes results by `change`, from the next round on."""

    def begin(session: RoundSession | GossipSession) -> None:
        if isinstance(session, RoundSession):
            session.factory.planes.rule = partial(change, session.factory.planes.rule)

    return each(begin)


def _double(rule: Rule, codec: Codec, payloads: Sequence[Buffer], weights: Sequence[float], out: Floats) -> None:
    rule(codec, payloads, weights, out)
    out *= np.float32(2)


def _leave_out(rule: Rule, codec: Codec, payloads: Sequence[Buffer], weights: Sequence[float], out: Floats) -> None:
    rule(codec, payloads[1:], weights[1:], out)


def _shift(rule: Rule, codec: Codec, payloads: Sequence[Buffer], weights: Sequence[float], out: Floats) -> None:
    rule(codec, payloads, weights, out)
    out += np.abs(out).max() / np.float32(10)


OWNER_LIES: dict[str, Callable[[Process], None]] = {
    "double-result": falsify(_double),
    "left-out": falsify(_leave_out),
    "shifted": falsify(_shift),
}
"""Kind of lie -> function that makes the peer of a process tell it."""
