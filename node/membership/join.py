"""Joining a swarm: knocking at gates until a peer admits us, and the Welcome of a gate."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator, Callable, Collection, Sequence
from contextlib import aclosing
from typing import ClassVar

from thinwire.collectives.transport.interface import SAME_KEY, Contact, Transport
from thinwire.node.runtime.environment import Environment
from thinwire.swarm.identity.errors import HintedError
from thinwire.swarm.identity.peer_record import PeerRecord
from thinwire.swarm.manifest.manifest import ManifestMismatch
from thinwire.swarm.manifest.parser import SignedManifest
from thinwire.swarm.membership.swim import Roster
from thinwire.swarm.messages.registry import Hello, Refuse, Welcome

SEARCH_SECONDS = 60.0
"""Default time for which `join` looks for a swarm before it gives up."""

DIALS = 8
"""Contacts that are dialled at the same time: one that does not answer takes seconds."""

REPORT_SECONDS, REPEAT_SECONDS = 3.0, 30.0
"""Seconds of a search before it is reported why no peer has admitted us, and between two such reports."""

MAX_RECORDS = 10
"""Most records of present peers, and most absent peers, in a Welcome."""


class NoSwarm(HintedError):
    """No address of the invite answered, or none admitted us."""

    exit_code: ClassVar[int] = 4
    absent = False
    """True if the answers show that no peer of the run is at any of the addresses."""


class Refused(HintedError):
    """The swarm exists but refuses us: another version or run."""

    exit_code: ClassVar[int] = 5
    absent = False
    """True if no peer of the run is at any of the addresses, see NoSwarm."""


class DuplicateKey(Refused):
    """Another process with the same key is in the swarm.

    A service manager does not restart a daemon that ends with this exit code. Otherwise two machines with one key would stop
    each other for ever.
    """


class NoPlace(Refused):
    """The swarm exists, but has no place for us now."""

    exit_code: ClassVar[int] = 4


class WrongClock(Refused):
    """The clocks of a peer and of this machine differ too much.

    Its code is one after which a service is started again: many machines have a wrong clock until they reach an NTP server.
    """

    exit_code: ClassVar[int] = 4


async def knock(
    contacts: Sequence[Contact],
    hello: Callable[[], Hello],
    enter: Callable[[Welcome], None],
    transport: Transport,
    environment: Environment,
    *,
    seconds: float,
    lasting: Collection[str] = (),
    met: Callable[[], bool] = lambda: False,
    least: float = 0.0,
    report: Callable[[str], None] = lambda reason: None,
) -> HintedError | None:
    """Knock for `seconds` until a contact admits us and `enter` accepts its Welcome.

    Return None once admitted, or once `met` returns True while no contact has admitted us; else return the error. Each contact
    is asked at least once, DIALS at the same time.

    A contact that refuses for good (see ADVICE, and the codes in `lasting`), has our key, or admits us to another run (`enter`
    raises ManifestMismatch), is not asked again, except if its clock differs from ours: one of both may be corrected.
    If no contact is left that may change its answer, the last such refusal is returned, or NoSwarm, but not before
    `least` seconds: until then a peer may come to our gate. A refusal by the swarm itself ends the wait. That an address has
    another run is no refusal by the swarm: while others may still admit us, the error is NoSwarm, or NoPlace if one of them
    had no place. While the search lasts, `report` is called with the reason why it does.
    """
    began, reason, full = environment.now(), "no peer answered", ""
    refusals: dict[Contact, Refused | ManifestMismatch] = {}
    there, open_until, report_at = False, began + least, began + REPORT_SECONDS
    while contacts or (environment.now() < open_until and not there):
        hopeful = environment.now() < open_until
        async with aclosing(_answers(contacts, hello(), transport)) as answers:
            async for contact, answer in answers:
                again = True
                if isinstance(answer, Welcome):
                    try:
                        enter(answer)
                        return None
                    except ManifestMismatch as error:
                        refusals[contact], again = error, False
                elif met():
                    return None
                elif answer.detail == SAME_KEY:
                    text = f"another process with the key of this peer runs at {contact.address}"
                    refusals[contact], there, again = DuplicateKey(text, SAME_KEY_HINT), True, False
                else:
                    reason = answer.detail or answer.code
                    if contact.address not in reason:
                        reason = f"{contact.address}: {reason}"
                    full = reason if answer.code == "full" else full
                    again = answer.code not in ADVICE and answer.code not in lasting
                    if answer.code in ADVICE:
                        verdict = "cannot be joined" if answer.code == "signature" else "refused us"
                        text = f"{contact.address} {verdict} ({answer.code}): {answer.detail}"
                        kind = WrongClock if answer.code == "signature" else Refused
                        refusals[contact], there = kind(text, ADVICE[answer.code]), there or answer.code != "run"
                if again:
                    hopeful = True
                    refusals.pop(contact, None)  # it was asked again, and gives another answer
                elif isinstance(answer, Welcome) or answer.code != "signature":
                    contacts = [other for other in contacts if other is not contact]
                if environment.now() >= report_at:
                    report_at = environment.now() + REPEAT_SECONDS
                    refusal = next(reversed(refusals.values()), None)
                    report(reason if refusal is None else f"{refusal}; {refusal.hint}")
        if not hopeful or environment.now() >= began + seconds:
            break
        await asyncio.sleep(0.2 + 0.8 * environment.rng.random())
        if met():
            return None
    last = next(reversed(refusals.values()), None)
    if contacts and not there and isinstance(last, Refused):
        last = None
    found = last or (NoPlace(f"the swarm has no place for us now; {full}", FULL_HINT) if full else _unreached(reason))
    if not isinstance(found, ManifestMismatch):
        found.absent = not contacts and not there
    return found


def _unreached(reason: str) -> NoSwarm:
    return NoSwarm(
        f"no peer of the swarm could be reached; {reason}",
        "check that a peer of the swarm runs and that its address can be dialled from here, or ask for a new invite",
    )


async def _answers(
    contacts: Sequence[Contact], hello: Hello, transport: Transport
) -> AsyncGenerator[tuple[Contact, Welcome | Refuse]]:
    """Yield the answer of each contact when it comes. Dials without an answer end with the generator."""
    places = asyncio.Semaphore(DIALS)

    async def dial(contact: Contact) -> tuple[Contact, Welcome | Refuse]:
        async with places:
            return contact, await transport.meet(contact, hello)

    dials = [asyncio.create_task(dial(contact)) for contact in contacts]
    try:
        for answer in asyncio.as_completed(dials):
            yield await answer
    finally:
        for task in dials:
            task.cancel()
        await asyncio.gather(*dials, return_exceptions=True)


SAME_KEY_HINT = "a key belongs to one process: end the other one first, or give this one a new key with --home DIR"

FULL_HINT = (
    "wait some minutes and try again, or send the output of `thinwire id` to the author of the run and ask for an invite "
    "by `thinwire invite --for PEER-ID`: it needs no such place"
)

BANNED_HINT = (
    "the members of this run exclude this key for good. If it was used on two machines, or its run folder was restored from a "
    "copy, join with another one: --home DIR. If the author of the run has revoked it, ask the author"
)

ADVICE = {
    "version": "install the version of thinwire that the swarm runs",
    "run": "the peer at that address now runs another run; ask for a new invite",
    "signature": (
        "the clock of this machine or of that one is wrong; correct it, on Linux with `timedatectl set-ntp true`, so that "
        "the clocks of all machines differ by less than two minutes"
    ),
    "token": (
        "ask a member that may invite, or the author of the run, for a new invite; a key that was revoked needs a new "
        "key as well: --home DIR"
    ),
    "banned": BANNED_HINT,
}
"""Refusals that waiting does not change, with advice for the user."""


def welcome(
    signed: SignedManifest, roster: Roster, newcomer: PeerRecord, rng: random.Random, absent: Sequence[Contact] = ()
) -> Welcome:
    """Return the Welcome for a joiner: the run, records of some present peers, some `absent` ones."""
    chosen = roster.peers.sample(rng, MAX_RECORDS, but=newcomer.peer_id)
    records = tuple([known.wire for known in roster.peers.records(chosen)])
    others = [contact for contact in absent if contact.transport_key != newcomer.transport_key]
    named = rng.sample(others, min(MAX_RECORDS, len(others))) if others else ()
    return Welcome(
        roster.record.wire,
        signed.toml,
        signed.author,
        signed.signature,
        records,
        endpoint="",
        bulk="",
        secret=bytes(32),
        absent=tuple((contact.address, contact.transport_key) for contact in named),
    )
