"""Where the others of a run are, as one peer knows it: for its next life, and for who is invited. And how a founder comes back:
to its run, or to found it once more.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from pathlib import Path

from thinwire.collectives.transport import REFUSED, Contact
from thinwire.swarm.errors import HintedError
from thinwire.swarm.protocol import PeerId
from thinwire.swarm.roster import Roster

from .chainsession import ChainedSession
from .doors import Doors
from .knock import SEARCH_SECONDS, NoSwarm, Refused
from .memory import MOST, AnchorFile
from .session import Session
from .waiting import Work

BACK_SECONDS = 5.0
"""How long a founder that comes back and was alone looks for peers that still run what it founded."""

Knock = Callable[[Sequence[Contact], float, Sequence[str]], Awaitable[HintedError | None]]
"""Knocks at contacts for so many seconds, see knock.knock; the codes are refusals that are lasting, too."""


def contacts(roster: Roster, peers: Iterable[PeerId]) -> Iterator[Contact]:
    """Where those of `peers` can be dialled that can, ourselves left out."""
    for peer in peers:
        record = roster.record_of(peer)
        if record is not None and peer != roster.record.peer_id and record.addresses:
            yield Contact(record.addresses[0], record.transport_key)


class Anchors:
    """See the module. They are kept in the file at `path`, on the disk of these doors."""

    def __init__(self, path: Path, doors: Doors) -> None:
        self._path, self._doors, self._file = path, doors, AnchorFile(path, doors.disk)
        self.returns = False
        """Whether we have founded this run before, and were its only member when we left it."""
        self.founds = False
        """Whether the run begins with us in this life, for the first time or once more: then others need a new invite."""

    def known(self) -> tuple[Contact, ...]:
        """Those of the last life."""
        return self._file.load()

    def drop(self, roster: Roster, *, alone: bool) -> None:
        """Keep on disk where the others are. `alone`: and that we are the run's only member."""
        peers = roster.view.peers
        if len(peers) > MOST:
            peers = tuple(self._doors.rng.sample(peers, MOST))
        self._file.save(contacts(roster, peers), alone=alone)

    @property
    def few(self) -> bool:
        """Whether those that are kept may all be gone at once."""
        return self._file.few

    # --- a founder that comes back

    @property
    def advice(self) -> str:
        """What a person can do when a swarm that was found goes away before it gives us its state."""
        if self.returns:
            return "start again: alone, or where all say that they have no state, this founder founds its run again"
        return "ask for a new invite"

    async def come_back(self, knock: Knock) -> bool:
        """Look for a run that we have founded: True when peers of an earlier life still run it.

        Who was in a swarm with others and can reach none of them is cut off, for all it knows, and they go on: it does not
        begin the run anew beside them. Not so when it was alone before, or when nobody listens at their addresses any more.
        Raises NoSwarm, Refused.
        """
        anchors = list(self.known())
        if self._file.damaged:
            raise NoSwarm(
                f"{self._path}, which says where the others of this run are, cannot be read",
                "join them with an invite of theirs; if nobody goes on with this run, remove the file first",
            )
        if not anchors:
            return False
        self._doors.rng.shuffle(anchors)  # the first may all be gone, and each of them takes its time
        # A machine that answers that nobody listens there any more need not be asked again.
        alone = self.returns = self._file.alone
        refusal = await knock(anchors, BACK_SECONDS if alone else SEARCH_SECONDS, (REFUSED,))
        if refusal is None or alone or (isinstance(refusal, (NoSwarm, Refused)) and refusal.nobody):
            return refusal is None
        if isinstance(refusal, Refused):
            raise refusal
        raise NoSwarm(
            f"none of the {len(anchors)} peers that this run had can be reached, and they may go on with it",
            f"start again when they can; if they are gone for good, remove {self._path} first",
        )

    async def found_again(self, session: Session | ChainedSession, work: Work, fragment: int) -> bool:
        """Go on alone, or found the run once more: those who came after the last round that we had alone have no state.

        See rounds.Lost.
        """
        session = session.links[fragment] if isinstance(session, ChainedSession) else session
        replica, me = session.replica, session.me
        if not set(session.roster.view.peers) - {me} <= set(session.states.without):
            return False  # who may have one has not said that it does not, and may be rounds ahead

        def change() -> None:
            replica.members = (me,)
            replica.seal(())  # or whoever is offered this state finds that its digest is another one

        await session.change(work, change)
        session.brought_back()
        session.report("founded again", "nobody who is here has a state")
        self.founds = True
        return True
