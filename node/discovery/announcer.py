"""Publication of this peer's run card in directories, again and again, while it takes part in a run."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from thinwire.node.discovery.public_runs import Directory
from thinwire.swarm.identity.peer_record import RecordError
from thinwire.swarm.identity.run_card import RunCard

REFRESH_SECONDS = 60.0
"""Seconds between two publications."""

LOOK_SECONDS = 1.0
"""Seconds between two checks whether there is a card, and then whether its addresses have changed."""

CARD_SECONDS = 180
"""Validity of a card: it outlasts two publications that fail."""


async def announce(
    directory: Directory,
    card: Callable[[], RunCard | None],
    published: Callable[[bool], Awaitable[None]],
    addresses: Callable[[], Sequence[str]],
) -> None:
    """Publish the card that `card` returns, again and again, until cancelled.

    `card`: returns None while there is no card yet. `published`: awaited after each publication; True: a source has accepted
    the card. `addresses`: returns the addresses of the next card, empty if unknown; when they have changed, a card is published
    at once.
    """
    while True:
        try:
            made = card()
        except RecordError:
            made = None  # Our clock was set; the record is renewed soon.
        if made is None:
            await asyncio.sleep(LOOK_SECONDS)
            continue
        await published(await directory.publish(made))
        left = REFRESH_SECONDS
        while left > 0 and tuple(addresses() or made.record.addresses) == made.record.addresses:
            await asyncio.sleep(LOOK_SECONDS)
            left -= LOOK_SECONDS
