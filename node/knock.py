"""Knocking at the gates of a swarm until somebody lets us in; and what a gate tells whom it lets in."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Collection, Sequence
from typing import ClassVar

from thinwire.collectives.transport import Contact, Transport
from thinwire.swarm.errors import HintedError
from thinwire.swarm.manifest import ManifestMismatch, SignedManifest
from thinwire.swarm.protocol import Hello, PeerId, Welcome
from thinwire.swarm.roster import Roster

from .doors import Doors

SEARCH_SECONDS = 60.0
"""How long a swarm is looked for before `join` gives up, when it is not told otherwise."""

MAX_RECORDS = 10


class NoSwarm(HintedError):
    """None of the addresses of the invite answered, or none let us in."""

    exit_code: ClassVar[int] = 4
    nobody = False
    """Whether there is no peer of the run at any of the addresses, as far as those say that answer there."""


class Refused(HintedError):
    """The swarm is there and does not want us: another version or run."""

    exit_code: ClassVar[int] = 5
    nobody = False
    """See NoSwarm."""


async def knock(
    contacts: Sequence[Contact],
    hello: Callable[[], Hello],
    enter: Callable[[Welcome], None],
    transport: Transport,
    doors: Doors,
    *,
    seconds: float,
    lasting: Collection[str] = (),
) -> HintedError | None:
    """Knock for so many seconds, until a contact lets us in and `enter` takes its welcome; None then, else what went wrong.

    Who refuses for good (see ADVICE, and the codes in `lasting`), or welcomes us to another run (`enter` raises
    ManifestMismatch), is not asked again, but for those whose clock differs from ours: one of both may be put right. When
    nobody is left who may think better of it the last such refusal is given, or NoSwarm.
    """
    until, said = doors.now() + seconds, "nobody answered"
    refusals: dict[Contact, Refused | ManifestMismatch] = {}
    there = False
    while contacts:
        words, hopeful = hello(), False
        for contact in contacts:
            answer, again = await transport.meet(contact, words), True
            if isinstance(answer, Welcome):
                try:
                    enter(answer)
                    return None
                except ManifestMismatch as error:
                    refusals[contact], again = error, False
            else:
                said = f"{contact.address}: {answer.detail or answer.code}"
                again = answer.code not in ADVICE and answer.code not in lasting
                if answer.code in ADVICE:
                    text = f"{contact.address} refused us ({answer.code}): {answer.detail}"
                    refusals[contact], there = Refused(text, ADVICE[answer.code]), there or answer.code != "run"
            if again:
                hopeful = True
                refusals.pop(contact, None)  # it was asked again, and says something else
            elif isinstance(answer, Welcome) or answer.code != "signature":
                contacts = [other for other in contacts if other is not contact]
        if not hopeful or doors.now() >= until:
            break
        await asyncio.sleep(0.2 + 0.8 * doors.rng.random())
    last = next(reversed(refusals.values()), None)
    found = last or NoSwarm(
        f"no peer of the swarm could be reached; {said}",
        "check that a peer of the swarm runs and that its address can be dialled from here, or ask for a new invite",
    )
    if not isinstance(found, ManifestMismatch):
        found.nobody = not contacts and not there
    return found


ADVICE = {
    "version": "install the version of thinwire that the swarm runs",
    "run": "the peer at that address runs something else now; ask for a new invite",
    "signature": "check that the clocks of both machines are right to within two minutes",
    "banned": "this key has misbehaved; see `thinwire id`",
}
"""Refusals that waiting does not change, and what a person can do."""


def welcome(signed: SignedManifest, roster: Roster, newcomer: PeerId, rng: random.Random) -> Welcome:
    """What a newcomer is told: the run, and the records of some who are here."""
    others = roster.others
    if roster.alive(newcomer):
        others.remove(newcomer)
    chosen = rng.sample(others, min(MAX_RECORDS, len(others)))
    records = tuple(known.wire for peer in chosen if (known := roster.record_of(peer)) is not None)
    return Welcome(
        roster.record.wire,
        signed.toml,
        signed.author,
        signed.signature,
        records,
        endpoint="",
        bulk="",
        secret=bytes(32),
    )
