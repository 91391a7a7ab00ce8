"""Addresses of the other peers of a run, for restarts and invites; return of a founder to its run."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence
from pathlib import Path

from thinwire.collectives.transport.interface import REFUSED, Contact
from thinwire.node.membership.join import SEARCH_SECONDS, NoSwarm, Refused
from thinwire.node.membership.known_peers_file import MOST, KnownPeersFile
from thinwire.node.membership.lost_peers import contacts_of
from thinwire.node.outer.round_session import RoundSession
from thinwire.node.outer.session import Session
from thinwire.node.runtime.asyncio_extra import Work
from thinwire.node.runtime.environment import Environment
from thinwire.swarm.identity.errors import HintedError
from thinwire.swarm.manifest.manifest import Manifest
from thinwire.swarm.membership.swim import Roster

BACK_SECONDS = 5.0
"""Seconds for which a returning peer that was the only member searches for others.

Also the seconds for which a founder that was not alone waits for them at its gate, if no process listens at their addresses.
"""

Knock = Callable[[Sequence[Contact], float, Sequence[str], float], Awaitable[HintedError | None]]
"""Function like join.knock: contacts, seconds, codes of refusals that are final, and `least`."""


class KnownPeers:
    """Known peers of one run, stored in the file at `path`, on the disk of this environment."""

    def __init__(self, path: Path, environment: Environment) -> None:
        self._path, self._environment, self._file = path, environment, KnownPeersFile(path, environment.disk)
        self.returns = False
        """True if this peer returns and may continue the run without others."""
        self.cut_off = False
        """True if this founder returns from its checkpoint, although other peers may continue the run."""
        self.founds = False
        """True if the run starts with this process, again or for the first time: others need a new invite."""

    def known(self) -> tuple[Contact, ...]:
        """Return the peers known from the last process."""
        return self._file.load()

    def absent(self) -> tuple[Contact, ...]:
        """Return the peers that the last process knew and could not reach at its end."""
        self._file.load()
        return self._file.absent

    @property
    def alone(self) -> bool:
        """True if this peer was the only member when its last process ended."""
        self._file.load()
        return self._file.alone

    @property
    def others(self) -> bool:
        """True if other peers were members when the last process ended."""
        return bool(self.known() or self.absent()) and not self.alone

    def store(self, roster: Roster, *, alone: bool, absent: Iterable[Contact]) -> None:
        """Store the addresses of the other peers, and of the `absent` ones, see KnownPeersFile.

        `alone`: this peer is the run's only member.
        """
        peers = roster.peers.view.peers
        if len(peers) > MOST:
            peers = tuple(self._environment.rng.sample(peers, MOST))
        self._file.save(contacts_of(roster, peers), alone=alone, absent=absent)

    @property
    def few(self) -> bool:
        """True if so few peers are stored that all may be gone at once."""
        return self._file.few

    # Return

    def return_alone(self, manifest: Manifest) -> bool:
        """Return True if this returning peer needs no others: the only member, or rounds of pairs."""
        self.returns = self.alone or manifest.outer.gossip
        return self.returns

    @property
    def advice(self) -> str:
        """Return the hint for a swarm that disappears before it has sent its state."""
        if self.returns:
            return "start again: alone, or where all say that they have no state, this peer continues the run"
        return "ask for a new invite"

    async def come_back(self, knock: Knock, *, continues: bool) -> bool:
        """Search for a run that this peer has founded; return True if peers still run it.

        A founder that was in a swarm with others and can reach none of them may be cut off. Then it `continues` from its
        checkpoint, as a lineage, or raises NoSwarm. If it was alone before, or no process listens at their addresses any more
        and none of them comes to its gate (they may have other addresses), it starts the run again. Raises Refused, too.
        """
        known_peers = list(dict.fromkeys((*self.known(), *self._file.absent)))
        if self._file.damaged:
            raise NoSwarm(
                f"{self._path}, which has the addresses of this run's peers, cannot be read",
                "join them with an invite of theirs; if no peer continues this run, remove the file first",
            )
        if not known_peers:
            return False
        self._environment.rng.shuffle(known_peers)  # The first ones may all be gone, and those take time.
        # A machine that answers that no process listens there need not be asked again.
        alone = self.returns = self._file.alone
        seconds, least = (BACK_SECONDS, 0.0) if alone else (SEARCH_SECONDS, BACK_SECONDS)
        refusal = await knock(known_peers, seconds, (REFUSED,), least)
        if refusal is None or alone or (isinstance(refusal, (NoSwarm, Refused)) and refusal.absent):
            return refusal is None
        if not isinstance(refusal, NoSwarm):
            raise refusal
        if continues:
            self.cut_off = True
            return False
        raise NoSwarm(
            f"none of the {len(known_peers)} peers that this run had can be reached, and they may continue it",
            f"start again when they can; if they are gone for good, remove {self._path} first",
        )

    async def found_again(self, peer_session: Session, work: Work, fragment: int) -> bool:
        """Continue alone, or found the run again if the peers that joined since have no state.

        Implements round_loop.Lost.
        """
        session = peer_session.sessions[fragment]
        assert isinstance(session, RoundSession)  # GossipLoop does not call this.
        me = session.me
        if not set(session.roster.peers.view.peers) - {me} <= set(session.catch_up.fetcher.without):
            return False  # A possible holder has not answered that it has no state, and may be rounds ahead.

        await session.continue_alone(work)
        session.report("refounded", "no present peer has a state")
        self.founds = True
        return True
