"""Mistakes of the agreement that matter for safety and for progress; each mutation run (`mutants.py`) plays all of them."""

from __future__ import annotations

PAXOS, TURN = "collectives/consensus/paxos.py", "collectives/consensus/turn.py"
PROPOSER, ACCEPTOR = "collectives/consensus/proposer.py", "collectives/consensus/acceptor.py"
DECISION = "collectives/consensus/decision.py"
JUSTIFICATION = "collectives/consensus/justification.py"
PROPOSAL_CHECK = "collectives/consensus/proposal_check.py"

PLANTED: tuple[tuple[str, str, str, str], ...] = (
    # --- what is stored before it is sent
    (
        PAXOS,
        "a vote is sent that could not be stored",
        "if not self.acceptor.vote(proposal, digest):",
        "if self.acceptor.vote(proposal, digest) is None:",
    ),
    (
        ACCEPTOR,
        "a record is used before it is stored",
        "        try:\n            self._store.save(record)",
        "        self._record = record\n        try:\n            self._store.save(record)",
    ),
    (
        ACCEPTOR,
        "a peer whose disk has failed votes again",
        "        except OSError:\n            self.abstains = True\n            return False",
        "        except OSError:\n            return False",
    ),
    # --- promises and votes after a restart
    (
        PAXOS,
        "the first leader begins the first ballot again",
        "fresh = self.terms.members[0] == self.me and self.acceptor.promised.term == 0",
        "fresh = self.terms.members[0] == self.me and self.proposal is None",
    ),
    (
        PAXOS,
        "a peer with another life than the member's votes",
        "abstains = not voter or terms.other_life(self.me, store.life)",
        "abstains = not voter",
    ),
    (ACCEPTOR, "a restart forgets the record", "self._record = record or VoteRecord(", "self._record = VoteRecord("),
    (
        ACCEPTOR,
        "a peer with votes of a later round votes in this one",
        "abstains |= record.lineage == terms.lineage and record.round > terms.round",
        "pass",
    ),
    (
        ACCEPTOR,
        "a peer that has left votes after a restart",
        "self.abstains = abstains or self._record.left",
        "self.abstains = abstains",
    ),
    # --- comparison of ballots
    (
        PAXOS,
        "a promise for any Prepare",
        "if self._turn.too_early(sender, self.proposal, now) or not self.acceptor.heed_prepare(sender, message, now):",
        "if self._turn.too_early(sender, self.proposal, now):",
    ),
    (
        PAXOS,
        "our ballots may be below our promise",
        "self._proposer.next(self.acceptor.promised, highest, now)",
        "self._proposer.next(Ballot(1, self.me), highest, now)",
    ),
    (
        PROPOSER,
        "our ballots may be below our promise, unless others have reported it",
        "term = max(promised.term, min(",
        "term = max(min(",
    ),
    (PROPOSER, "terms without an end", "if not early and term <= highest else None", "if not early else None"),
    (
        PROPOSER,
        "promises of other ballots count",
        "if self._promises is None or message.ballot != self.ballot or (",
        "if self._promises is None or (",
    ),
    (
        PROPOSER,
        "reported votes may be in later ballots",
        "(sound(voted, self._terms) and voted.ballot < message.ballot)",
        "sound(voted, self._terms)",
    ),
    (
        PAXOS,
        "votes for a ballot that was given up count",
        "if self.proposal is None or not self._proposer.leads(self.proposal):",
        "if self.proposal is None:",
    ),
    (
        ACCEPTOR,
        "a vote below the promise",
        "proposal.ballot < self.promised or (voted is not None",
        "(voted is not None",
    ),
    (ACCEPTOR, "two votes in a ballot", "or (voted is not None and voted.ballot == proposal.ballot):", ":"),
    (
        ACCEPTOR,
        "a vote is no promise",
        "return self._save(proposal.ballot, proposal, digest)",
        "return self._save(self._record.promised, proposal, digest)",
    ),
    (
        ACCEPTOR,
        "a proposal below the promise is followed",
        "        if ballot < self.promised:\n            return False\n",
        "",
    ),
    # --- quorums, and peers without a vote
    (
        PAXOS,
        "a newcomer votes",
        "if proposal is None or self.commit is not None or self.me not in self.terms.members:",
        "if proposal is None or self.commit is not None:",
    ),
    (
        DECISION,
        "a commit needs no proof",
        "if self.commit is None and certified(message, self._electorate, self._verify):",
        "if self.commit is None:",
    ),
    (
        PAXOS,
        "strangers begin ballots",
        "isinstance(message, (Propose, Prepare, ViewChange)) and",
        "isinstance(message, Propose) and",
    ),
    (
        PAXOS,
        "Prepare of another lineage",
        "if message.lineage != self.terms.lineage or not self.voter or sender in",
        "if not self.voter or sender in",
    ),
    (
        PROPOSER,
        "promises of another lineage count",
        "        if message.lineage != self._terms.lineage:\n            return\n",
        "",
    ),
    (PROPOSER, "promises of peers without a vote count", "if sender in self._electorate.nonvoters:", "if not sender:"),
    (
        PROPOSER,
        "a ballot opens without a quorum of promises",
        "if not electorate.enough(promises, left):",
        "if not promises:",
    ),
    (
        DECISION,
        "votes with different results commit",
        "same = {peer for peer, (digest, _) in self._votes.items() if digest == message.digest}",
        "same = set(self._votes)",
    ),
    (
        DECISION,
        "votes for another proposal of the ballot count",
        "or message != vote_for(proposal, message.digest):",
        ":",
    ),
    (
        DECISION,
        "votes of an earlier ballot count",
        "self._votes, self._informed = {}, set(self._electorate.live)",
        "self._informed = set(self._electorate.live)",
    ),
    # --- which earlier value binds
    (PROPOSER, "the choice is always free", "choices = possible or [", "choices = ["),
    (
        PROPOSER,
        "two possible values do not stop a ballot",
        "several = self._electorate.liars > 0 and len(possible) > 1",
        "several = False",
    ),
    (PROPOSER, "a contested value is tried again and again", "if one.digest not in self._tried", "if one.digest"),
    (
        ACCEPTOR,
        "a promise hides the last vote",
        "return Promise(terms.round, terms.fragment, ballot, record.voted, record.digest, terms.lineage)",
        "return Promise(terms.round, terms.fragment, ballot, None, None, terms.lineage)",
    ),
    (
        JUSTIFICATION,
        "silent members have not voted",
        "if possible({*silent, *one.voters}, set(left).difference(one.voters))]",
        "if possible(one.voters, set(left).difference(one.voters))]",
    ),
    (
        JUSTIFICATION,
        "the lowest ballot binds",
        "(c.proposal.ballot, len(c.voters), c.digest), reverse=True)",
        "(c.proposal.ballot, len(c.voters), c.digest))",
    ),
    (
        PROPOSAL_CHECK,
        "proposals need no justification",
        "if proposal.ballot.term > 1 and not self.justified(message):",
        "if not proposal:",
    ),
    (
        PAXOS,
        "reported votes need no proofs of members",
        "if first and (message.voted is None or self._check.genuine(message.voted)):",
        "if first:",
    ),
    (
        PAXOS,
        "farewells with votes need no proofs of members",
        "if farewells.add(message, sender, self._check.genuine):",
        "if farewells.add(message):",
    ),
    (
        PAXOS,
        "a vote for a proposal that contradicts announcements",
        "if self.announcements.contradicted(proposal):",
        "if not proposal:",
    ),
    # --- progress
    (
        PAXOS,
        "a new link gets no farewells",
        "messages = (*self.electorate.farewells.messages(), self.ready.get(self.me))",
        "messages = (self.ready.get(self.me),)",
    ),
    (
        PAXOS,
        "a ballot brings no farewells",
        "        self._out += [(None, leave) for leave in self.electorate.farewells.messages()]\n",
        "",
    ),
    (
        PAXOS,
        "the commit of a leader that is gone is not repeated",
        "elif peer == self.commit.proposal.ballot.leader and",
        "elif not peer and",
    ),
    (
        PAXOS,
        "a candidate does not learn of the commit",
        "if isinstance(message, (Ready, Prepare, ViewChange, Blame, Ask)):",
        "if isinstance(message, (Ready, ViewChange, Blame, Ask)):",
    ),
    (
        TURN,
        "a ballot against the precedence of another member",
        "        if self.too_early(self._electorate.me, proposal, now):\n            return False  #",
        "        if False:\n            return False  #",
    ),
    (
        PAXOS,
        "votes do not restart the patience",
        "            self._proposer.on_vote(sender)\n            self._turn.progress(now)\n",
        "            self._proposer.on_vote(sender)\n",
    ),
    (
        PAXOS,
        "a farewell begins no new ballot",
        "            self._proposer.on_peer_lost(peer, self.proposal)\n\n    def _on_vote",
        "\n    def _on_vote",
    ),
    (
        TURN,
        "ballots in vain do not make a peer hasty",
        "in_vain = sender in self._hasty or sender in self._acceptor.heeded",
        "in_vain = sender in self._hasty",
    ),
    (
        TURN,
        "ballots in vain in earlier rounds do not make a peer hasty",
        "in_vain = sender in self._hasty or sender in self._acceptor.heeded",
        "in_vain = sender in self._acceptor.heeded",
    ),
    (TURN, "data does not restart the patience", "self._moved = max(self._moved, now)", "self._moved = self._moved"),
    (
        TURN,
        "later ballots extend the first view",
        "if self._acceptor.promised.term == 1:",
        "if self._acceptor.promised.term:",
    ),
    (TURN, "each ballot of a leader restarts the patience", "if self._acceptor.trusts(leader):", "if leader:"),
    (TURN, "no member has precedence", "return sender != preceding", "return False"),
    (
        TURN,
        "a proposal of an earlier ballot delays hasty peers",
        "return proposal is not None and proposal.ballot == promised and",
        "return proposal is not None and",
    ),
    (
        TURN,
        "a leader that is gone delays hasty peers",
        "if promised.leader not in self._electorate.live:",
        "if not promised.leader:",
    ),
    (
        TURN,
        "all members begin at once",
        "return self._quorum_since + grace + turn * terms.patience",
        "return self._quorum_since + grace",
    ),
    (
        TURN,
        "a lost quorum does not restart the grace",
        "            self._quorum_since = None\n            return None",
        "            return None",
    ),
    (
        TURN,
        "a stuck leader has one patience",
        "self._moved + (2 + turn) * self._proposer.growth * patience",
        "self._moved + (1 + turn) * self._proposer.growth * patience",
    ),
    (
        TURN,
        "ballots that fail do not grow the patience",
        "self._moved + (2 + turn) * self._proposer.growth * patience",
        "self._moved + (2 + turn) * patience",
    ),
    (
        TURN,
        "members replace a stuck leader at once",
        "self._moved + (2 + turn) * self._proposer.growth * patience",
        "self._moved + 2 * self._proposer.growth * patience",
    ),
    (
        TURN,
        "a leader without trust has no time",
        "answer = self._followed + (1 + turn) * patience if able else 0.0",
        "answer = 0.0",
    ),
    (
        TURN,
        "a refused leader has the time of an honest one",
        "able = leader in electorate.live and leader not in refused",
        "able = leader in electorate.live",
    ),
    (TURN, "precedence does not shorten the patience", "if views.member == self._electorate.me:", "if not views:"),
    (
        PROPOSER,
        "a ballot does not wait for answers",
        "if any(map(electorate.reaches, self._asked)) and not late:",
        "if False:",
    ),
    (
        PROPOSER,
        "a ballot waits for peers without a vote",
        "if any(map(electorate.reaches, self._asked)) and not late:",
        "if self._asked & electorate.live and not late:",
    ),
    (
        PROPOSER,
        "a ballot waits for peers on trial",
        "self._asked = {peer for peer in self._asked if not self._electorate.on_trial(peer)}",
        "pass",
    ),
    (PROPOSER, "ballots without pauses", "if not early and term <= highest else None", "if term <= highest else None"),
    (
        PROPOSER,
        "a ballot without answers goes on for ever",
        "                if late:\n                    self.yield_to_others()\n                return None",
        "                return None",
    ),
)
"""Module, what is wrong, the text, and the mutation of it. Each text occurs once."""
