"""Mutants that no test can notice, for the mutation run (`mutants.py`)."""

from __future__ import annotations

CAPPED = "the power is capped far below"
KINDS = "the other kinds of events that get there are on one side in the order of letters"
SHARED = "no chain is shorter than the part that it shares with another one"
EQUIVALENT: dict[tuple[str, str], str] = {
    (
        "collectives/consensus/acceptor.py",
        "if self.abstains or proposal.ballot < self.promised or (voted is not None and voted.ballot >= proposal.ballot):",
    ): "no vote is above the promise",
    (
        "collectives/consensus/acceptor.py",
        "ballot, first = message.ballot, message.ballot.term <= 1",
    ): "terms below 1 are refused",
    (
        "collectives/consensus/acceptor.py",
        "abstains |= record.lineage == terms.lineage and record.round >= terms.round",
    ): "a record of this lineage and round is not seen here",
    (
        "collectives/consensus/acceptor.py",
        "return min(MAX_PAUSE, 0.125 * 2.0 ** min(ballots - BALLOTS, 15)) if ballots > BALLOTS else 0.0",
    ): CAPPED,
    (
        "collectives/consensus/acceptor.py",
        "return min(MAX_PAUSE, 0.125 * 2.0 ** min(ballots - BALLOTS, 17)) if ballots > BALLOTS else 0.0",
    ): CAPPED,
    ("collectives/consensus/acceptor.py", "self._in_view = ( 1, 0)"): "there are no ballots yet",
    ("collectives/consensus/acceptor.py", "self._in_view = ( -1, 0)"): "there are no ballots yet",
    ("collectives/consensus/acceptor.py", "self._in_view = (0, 1)"): "no member has precedence in view 0",
    ("collectives/consensus/acceptor.py", "self._in_view = (0, -1)"): "no member has precedence in view 0",
    (
        "collectives/consensus/acceptor.py",
        "if not (first or ballot <= self.promised or self._heed(ballot, now, LAST_TERM)):",
    ): "lower ballots were refused above",
    (
        "collectives/consensus/acceptor.py",
        "if ballot.term > highest or now < self._heeded_at.get(ballot.leader, -1.0) + pause:",
    ): "no clock begins below 0",
    (
        "collectives/consensus/acceptor.py",
        "return self._heeded.in_round.get(peer, -1) <= BALLOTS",
    ): "0 and -1 are both below BALLOTS",
    (
        "collectives/consensus/acceptor.py",
        "return self._heeded.in_round.get(peer, 1) <= BALLOTS",
    ): "0 and 1 are both below BALLOTS",
    (
        "collectives/consensus/blame.py",
        "if proposal.adopted is None and (accuser == proposal.ballot.leader or len(accusers) != 1 or not others):",
    ): "there is at least one",
    (
        "collectives/consensus/blame.py",
        "self.idle |= {peer for peer, accusers in self._unserved.items() if len(accusers) >= most}",
    ): "most is the largest",
    ("collectives/consensus/blame.py", "return self.idle > before"): "the set only grows",
    (
        "collectives/consensus/chain.py",
        "if not gaps and fork.round > (0 if here is None else here.round):",
    ): "earlier rounds were refused above",
    (
        "collectives/consensus/chain.py",
        "if len(set(members)) < len(members) or len(certificate.lives) != LIFE * len(members):",
    ): "a set has no more",
    (
        "collectives/consensus/chain.py",
        "while at != len(entry.certificates) and not _follows(certificate, here, agreed):",
    ): "it counts up in steps of one",
    (
        "collectives/consensus/electorate.py",
        "elif against[peer] != 1 and 2 * against[peer] > others:",
    ): "none is no majority",
    ("collectives/consensus/electorate.py", "if self._ask_at >= math.inf:"): "nothing is above infinity",
    (
        "collectives/consensus/electorate.py",
        "if self._ask_at != math.inf and not self._changed:",
    ): "nothing is above infinity",
    (
        "collectives/consensus/electorate.py",
        "self._note(sender, max(view, self._asked.get(sender, -1)), now)",
    ): "no view is negative",
    (
        "collectives/consensus/farewells.py",
        "if peer in self._known or peer not in terms.members or len(self._known) == MAX_FAREWELLS:",
    ): "it grows by one",
    (
        "collectives/consensus/farewells.py",
        "if not (proposal is None) <= (farewell.voted is None) == (farewell.digest is None):",
    ): "no proposal has the name None",
    (
        "collectives/consensus/members/quorum.py",
        "return max( 1, count - 1) // 3 if fraction >= TWO_THIRDS else 0",
    ): "a third of one is none",
    (
        "collectives/consensus/members/quorum.py",
        "if fraction <= 0.5 and base and 2 * have == len(base):",
    ): "no run has a fraction below a half",
    (
        "collectives/consensus/proposal.py",
        "doubted = [peer for peer in willing if peer in distrusted][: max( -1, len(willing) - terms.min_peers)]",
    ): "too few peers are willing anyway",
    (
        "collectives/consensus/proposal.py",
        "and all(len(one.announced) >= 32 or not (one.announced or terms.lineage) for one in proposal.contributors)",
    ): "the wire form bounds it",
    (
        "collectives/consensus/proposal.py",
        "and (not terms.lineage or len(lives_of(proposal.members, proposal.lives)) >= len(proposal.members))",
    ): "there are no more lives than members",
    (
        "collectives/consensus/proposal.py",
        "return terms.weights.get(peer, -1) if ready.weight else 0",
    ): "only weights above 0 contribute",
    (
        "collectives/consensus/proposal.py",
        "return terms.weights.get(peer, 0) if ready.weight else -1",
    ): "only weights above 0 contribute",
    ("collectives/consensus/proposal.py", "if len(able) >= MAX_GROUP:"): "a smaller group is cut and sorted to itself",
    (
        "collectives/consensus/proposal.py",
        "willing = [peer for peer in alive if _weight(ready[peer], peer, terms) != 0 and peer not in rejected]",
    ): "no weight is negative",
    ("collectives/consensus/proposal.py", "if len(able) != MAX_GROUP:"): "a smaller group is cut and sorted to itself",
    (
        "collectives/consensus/proposal.py",
        "if len(chosen) >= terms.max_contributors:",
    ): "a smaller group is cut and sorted to itself",
    (
        "collectives/consensus/proposal.py",
        "if len(chosen) != terms.max_contributors:",
    ): "a smaller group is cut and sorted to itself",
    ("collectives/consensus/proposal_check.py", "MAX_GENUINE = 5 * MAX_PROPOSALS"): "any bound suffices",
    ("collectives/consensus/proposal_check.py", "MAX_GENUINE = 3 * MAX_PROPOSALS"): "any bound suffices",
    (
        "collectives/consensus/proposal_check.py",
        "first = proposal.ballot.term <= 1",
    ): "no ballot has a term below 1",
    ("collectives/consensus/proposal_check.py", "if len(self._genuine) == MAX_GENUINE:"): "it grows by one",
    (
        "collectives/consensus/proposal_check.py",
        "enough = len(peers) != self._electorate.terms.min_peers",
    ): "a proposal with fewer is not sound",
    (
        "collectives/consensus/proposer.py",
        "peer for peer, ready in self._ready.items() if ready.weight != 0 and peer not in self.blame_book.rejected",
    ): "no weight is negative",
    (
        "collectives/consensus/proposer.py",
        "trial = {peer for peer, why in uncounted.items() if why >= ON_TRIAL}",
    ): "there are two reasons",
    (
        "collectives/consensus/proposer.py",
        "assert ballot is not None or promises is not None",
    ): "it is for the type checker",
    (
        "collectives/consensus/proposer.py",
        "if ballot.term != 1:  # Others may know other endorsements, and defer a proposal with a newcomer on trial.",
    ): "no ballot has a term below 1",
    (
        "collectives/consensus/proposer.py",
        "return min(GROWTH, 2.0 ** max(0, min(self._ballots - BALLOTS, 15)))",
    ): CAPPED,
    (
        "collectives/consensus/proposer.py",
        "return min(GROWTH, 2.0 ** max(0, min(self._ballots - BALLOTS, 17)))",
    ): CAPPED,
    ("collectives/consensus/proposer.py", "if ballot.term != 1:"): "no ballot has a term below 1",
    (
        "collectives/consensus/proposer.py",
        "return able, excluded, [peer for peer, why in uncounted.items() if why <= DISTRUSTED]",
    ): "there are two reasons",
    (
        "collectives/consensus/proposer.py",
        "return able, excluded, [peer for peer, why in uncounted.items() if why >= DISTRUSTED]",
    ): "peers on trial are left out above",
    ("collectives/consensus/proposer.py", "elif ballot.term <= 1:"): "no ballot has a term below 1",
    ("collectives/consensus/proposer.py", "self._free |= ballot.term != 1"): "no ballot has a term below 1",
    ("collectives/consensus/proposer.py", "self._reported = 1"): "every ballot has a higher term",
    ("collectives/consensus/proposer.py", "self._reported = -1"): "every ballot has a higher term",
    ("collectives/consensus/proposer.py", "self._prepared_at = 1.0"): "prepare() sets it before its first use",
    ("collectives/consensus/proposer.py", "self._prepared_at = -1.0"): "prepare() sets it before its first use",
    ("collectives/consensus/proposer.py", "self._opened_at = 1.0"): "propose() sets it before its first use",
    ("collectives/consensus/proposer.py", "self._opened_at = -1.0"): "propose() sets it before its first use",
    (
        "collectives/rounds/data_planes/butterfly.py",
        "return message.index != len(self.grid) and size <= self._reducer.nbytes(self.grid.size(message.index))",
    ): "a chunk beyond the grid has a negative size",
    (
        "collectives/rounds/data_planes/butterfly.py",
        "if message.attempt < ready.attempt or message.index >= len(self.grid) or self.agreement.commit is not None:",
    ): "chunks above the announced attempt wait elsewhere",
    (
        "collectives/rounds/data_planes/contributions.py",
        "return whole if len(whole) >= len(found) else None",
    ): "a part is never longer than all",
    (
        "collectives/rounds/data_planes/contributions.py",
        "for key, norm, limit in zip(known, norms, limits(norms, [weights[key] for key in known]), strict=False):",
    ): "all three have one entry for each key",
    (
        "collectives/rounds/data_planes/ring_schedule.py",
        "for added, before in zip(path.adds, path.before, strict=False):",
    ): "both have one entry for each member",
    ("collectives/topology/owner_pace.py", "self._began = 1.0"): "open() sets it before its first use",
    ("collectives/topology/owner_pace.py", "self._began = -1.0"): "open() sets it before its first use",
    (
        "collectives/topology/shards.py",
        "while largest != 1 << 19 and codec.nbytes(2 * largest) <= CHUNK_BYTES + CHUNK_BYTES // 16:",
    ): "largest is doubled from a power of two",
    ("node/membership/presence.py", 'self._lose(event.peer, gone=event.kind >= "left")'): KINDS,
    ("node/membership/presence.py", 'if event.kind <= "joined":'): KINDS,
    ("node/membership/presence.py", 'elif event.kind <= "banned" and event.peer == self.transport.peer_id:'): KINDS,
    ("node/membership/presence.py", 'if event.kind <= "banned":'): KINDS,
    ("node/membership/presence.py", 'if event.kind <= "duplicate":'): KINDS,
    ("node/outer/frame_router.py", "elif number <= current:"): "the round in progress was handled above",
    ("node/outer/frame_router.py", "if number != current.round + 1:"): "earlier rounds go elsewhere",
    (
        "node/outer/round_starter.py",
        'by_bandwidth = exchange.chunk_assignment <= "bandwidth"',
    ): "the only other value is greater",
    (
        "node/outer/round_starter.py",
        'max_contributors=max_contributors(replica.grid) if exchange.collective <= "all-gather" else MAX_GROUP,',
    ): "all other values are greater",
    ("swarm/lineage.py", "if not chain or len(chain) <= len(over) == common:"): SHARED,
    ("swarm/lineage.py", "if not chain or len(chain) == len(over) <= common:"): SHARED,
    ("swarm/lineage.py", "if len(chain) <= common:  # `over` was founded in it"): SHARED,
    ("swarm/lineage.py", "if len(over) <= common:"): SHARED,
    (
        "swarm/lineage.py",
        "return _rank(chain[common]) >= _rank(over[common])",
    ): "the ranks of two lineages differ at least in their names",
    (
        "swarm/lineage.py",
        "return 0 != fork.round == newest_round(parent) and set(fork.members).isdisjoint(fork.before)",
    ): "no round is negative",
    (
        "swarm/lineage.py",
        "for (peer, life), signature in zip(founders_of(fork), fork.signatures, strict=False)",
    ): "their numbers were compared above",
}
"""Module and the line after the mutation -> reason why no test can notice."""

NAMED = {
    "collectives/consensus/members/terms.py": (
        *("min_peers: int = 1", "max_weight: int = 2**53 - 1", "grace: float = 10.0", "limit: float = 0.0"),
        *("patience: float = 2.0",),
    ),
}
"""Module -> lines with defaults that only tests use: every run names another value."""
