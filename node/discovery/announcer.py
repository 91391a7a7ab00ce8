"""Publication of this peer's card, again and again, while it takes part in a run."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from thinwire.node.discovery.public_runs import Directory
from thinwire.swarm.identity.peer_record import RecordError
from thinwire.swarm.identity.run_card import RunCard

REFRESH_SECONDS = 60.0
"""Seconds between two publications."""

FIRST_SECONDS = 1.0
"""Seconds between two looks for a card, until there is one."""

CARD_SECONDS = 180
"""Validity of a card: it outlasts two publications that fail."""


async def announce(directory: Directory, card: Callable[[], RunCard | None], published: Callable[[], None]) -> None:
    """Publish what `card` returns until cancelled; None: not yet.

    `published`: called after the first success.
    """
    first = True
    while True:
        try:
            made = card()
        except RecordError:
            made = None  # Our clock was set; the record is renewed soon.
        if made is None:
            await asyncio.sleep(FIRST_SECONDS)
            continue
        if await directory.publish(made) and first:
            published()
            first = False
        await asyncio.sleep(REFRESH_SECONDS)
