"""Directory of public runs: cards that peers publish, read from sources that are not trusted.

A source returns bytes of strangers. This module keeps those that are valid cards (swarm/identity/run_card.py), bounds
their number, and ignores the rest. A card leads to peers to knock at, exactly as an invite does: the manifest that they
send is checked against the run id.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import median_low
from typing import ClassVar, Protocol, TypeVar

from thinwire.swarm.identity.errors import HintedError
from thinwire.swarm.identity.invite import Invite, Seed
from thinwire.swarm.identity.peer_record import RecordError
from thinwire.swarm.identity.run_card import RunCard, RunDescription

T = TypeVar("T")

MOST_CARDS = 1024
"""Most answers of one source that are verified; a longer list is sampled."""

MOST_PEERS = 64
"""Most peers of one run that are contacted."""


class DirectoryError(HintedError):
    """No source of the directory works, or the run is not in it."""

    exit_code: ClassVar[int] = 4


class AmbiguousRun(HintedError):
    """Several runs have the name."""

    exit_code: ClassVar[int] = 2


class InviteNeeded(HintedError):
    """The run admits only peers with an invite."""

    exit_code: ClassVar[int] = 5


class DirectorySource(Protocol):
    """One directory. All methods raise DirectoryError if it does not work now."""

    name: str

    async def publish(self, card: RunCard) -> None:
        """Store a card until it expires."""

    async def find(self, run_id: bytes) -> Sequence[bytes]:
        """Return what is stored for a run, unverified."""

    async def cards(self) -> Sequence[bytes]:
        """Return what is stored for all runs, unverified."""

    async def close(self) -> None:
        """Release everything."""


@dataclass(frozen=True, slots=True)
class ListedRun:
    """Run of a listing, as its publishers describe it.

    Each number is the median of those on the cards, so that no single one of many publishers decides it; the texts are the most
    frequent ones. `issued`: time of the newest card, in seconds since 1970. `publishers`: number of peers with a valid card.
    """

    run_id: bytes
    description: RunDescription
    issued: int
    publishers: int


class Directory:
    """All sources together; one that fails is reported through `warn` and left out."""

    def __init__(
        self,
        sources: Sequence[DirectorySource],
        *,
        wall: Callable[[], float],
        rng: random.Random,
        warn: Callable[[str], None],
    ) -> None:
        self._sources, self.wall, self._rng, self._warn = sources, wall, rng, warn

    async def publish(self, card: RunCard) -> bool:
        """Publish a card everywhere; return True if a source accepted it."""
        answers = await asyncio.gather(*(source.publish(card) for source in self._sources), return_exceptions=True)
        return len(self._successes(answers)) > 0

    async def find(self, run_id: bytes) -> tuple[RunCard, ...]:
        """Return valid cards of a run, at most MOST_PEERS, in random order.

        No two have the same publisher, and each publisher can be dialled. Raises DirectoryError if no source works.
        """
        found = self._verified(await self._ask([source.find(run_id) for source in self._sources]))
        cards = [card for card in found if card.run_id == run_id and card.record.addresses]
        return tuple(self._rng.sample(cards, min(MOST_PEERS, len(cards))))

    async def runs(self) -> tuple[ListedRun, ...]:
        """Return all runs with a valid card, those with most peers first.

        Raises DirectoryError if no source works.
        """
        return listing(self._verified(await self._ask([source.cards() for source in self._sources])))

    async def invite_to(self, target: str) -> Invite:
        """Return an invite to the run with this name or this start of its id, 8 or more hex digits.

        A name cannot stand in for an id: a whole id is never taken for a name, and a start that is the name of another run
        is ambiguous. Raises DirectoryError, AmbiguousRun, InviteNeeded.
        """
        runs, digits = await self.runs(), target.lower()
        whole = len(target) == 64 and not set(digits) - set("0123456789abcdef")
        named = [
            run
            for run in runs
            if (run.description.name == target and not whole)
            or (len(target) >= 8 and run.run_id.hex().startswith(digits))
        ]
        if len(named) > 1:
            listed = ", ".join(
                f"{run.run_id.hex()[:16]} ({run.description.name}, {run.description.peers} peers)" for run in named[:16]
            )
            raise AmbiguousRun(f"{len(named)} runs are called {target!r}: {listed}", "give the id of one of them")
        if named:
            run_id = named[0].run_id
        elif whole:
            run_id = bytes.fromhex(target)  # No card is listed, but its peers may be found by the id.
        else:
            raise DirectoryError(f"no run {target!r} in the directory", "`thinwire runs` lists those that are there")
        cards = await self.find(run_id)
        if not cards:
            raise DirectoryError(
                f"no peer of run {run_id.hex()[:16]} in the directory", "try again in a minute, or ask for an invite"
            )
        modes = sorted({card.description.admission for card in cards} - {"open"})
        if all(card.description.admission != "open" for card in cards):
            raise InviteNeeded(
                f"run {run_id.hex()[:16]} admits only peers with an invite (admission.mode = {modes[0]!r})",
                "ask one of its peers for one: `thinwire invite` prints it there",
            )
        return Invite(run_id, tuple(Seed(card.record.addresses[0], card.record.transport_key) for card in cards))

    async def close(self) -> None:
        """Close all sources."""
        await asyncio.gather(*(source.close() for source in self._sources), return_exceptions=True)

    async def _ask(self, questions: Sequence[Awaitable[Sequence[bytes]]]) -> list[bytes]:
        answers = self._successes(await asyncio.gather(*questions, return_exceptions=True))
        if not answers:
            raise DirectoryError("no directory can be read", "see the warnings above, or join with an invite")
        return [wire for wires in answers for wire in self._rng.sample(list(wires), min(MOST_CARDS, len(wires)))]

    def _successes(self, answers: Sequence[T | BaseException]) -> list[T]:
        good: list[T] = []
        for source, answer in zip(self._sources, answers, strict=True):
            if isinstance(answer, DirectoryError):
                self._warn(f"{source.name}: {answer}; {answer.hint}")
            elif isinstance(answer, BaseException):
                raise answer
            else:
                good.append(answer)
        return good

    def _verified(self, wires: Iterable[bytes]) -> list[RunCard]:
        """Return the newest valid card of each peer and run."""
        newest: dict[tuple[bytes, bytes], RunCard] = {}
        for wire in wires:
            try:
                card = RunCard.parse(wire, now=int(self.wall()))
            except RecordError:
                continue
            key = card.run_id, card.record.peer_id
            if key not in newest or newest[key].issued < card.issued:
                newest[key] = card
        return list(newest.values())


def listing(cards: Iterable[RunCard]) -> tuple[ListedRun, ...]:
    """Merge the cards of each run."""
    by_run: defaultdict[bytes, list[RunCard]] = defaultdict(list)
    for card in cards:
        by_run[card.run_id].append(card)
    return tuple(
        sorted(
            (_merged(run, cards) for run, cards in by_run.items()), key=lambda run: (-run.description.peers, run.run_id)
        )
    )


def _merged(run_id: bytes, cards: Sequence[RunCard]) -> ListedRun:
    def usual(values: Iterable[str]) -> str:
        return min(Counter(values).items(), key=lambda item: (-item[1], item[0]))[0]

    stated = [card.description for card in cards]
    losses = [one.loss for one in stated if one.loss is not None]
    description = RunDescription(
        name=usual(one.name for one in stated),
        model=usual(one.model for one in stated),
        method=usual(one.method for one in stated),
        admission=usual(one.admission for one in stated),
        round=median_low(one.round for one in stated),
        peers=median_low(one.peers for one in stated),
        loss=median_low(losses) if losses else None,
    )
    return ListedRun(run_id, description, issued=max(card.issued for card in cards), publishers=len(cards))
