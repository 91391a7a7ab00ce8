"""Exhaustive model of one round: a few acceptors, three ballots, farewells, crashes, restarts, and lost folders.

`explore` visits every reachable state of single-decree Paxos as docs/design/agreement.md specifies it, breadth first, so
that a violation comes with a shortest trace. Quorums are counted by the product's `enough`.

State: for each acceptor its memory and the messages that it has sent, and for each ballot its proposal. Messages are
never taken back, and every later action may use them or not; so loss, delay and reordering need no state.

- Memory: status (up, down, left, lost), promised ballot, accepted proposal. A restart finds the memory as it was.
- Messages: votes, one promise for each ballot with the vote that it reports, and the farewell, which states the promised
  ballot and the accepted proposal. A promise is deleted when its ballot has been proposed: it has no other use.
- Proposal of a ballot: its value and F, the farewells that it carries. Ballot 1 needs no promises and carries none.

Acceptors are not interchangeable, because of the tie-breaker, so states are not merged by symmetry. Two reductions are
exact and can be switched off (`eager`); a test compares both. (1) A crash, a lost folder, or a farewell that no ballot
carries looks to all others like an acceptor that does nothing more. So it needs no state, and a farewell is sent when a
ballot first carries it. (2) Once all ballots are proposed, only votes can follow, and more votes decide no less; so all
that are still possible are cast at once, in ascending order.

Proof that two ballots b < b' with farewells F and F' decide equal values. Let W be a phase-2 quorum of b: half or more of
C - F, where C are the members. Let Q be the phase-1 quorum of b', half or more of C - F'. It suffices that a member of W
reports its vote to b', in a promise or in a farewell of F'; the rest is the usual induction over ballots.

- A member of W that is in F' reports it: its farewell contains the last vote of its life. So let W have no member in F'.
- A member x of F that is not in F' is not in Q: its farewell states a promise <= b < b', and after it x promises nothing.
- So W and Q are subsets of D = C - F - F'. If F' has members that F lacks, D is smaller than C - F, and W is more than
  half of D; else W is at least half of D. The same is true of Q if F has members that F' lacks. If both W and Q are
  exactly half of D, then F = F', and both contain the most senior member of D. So they have a common member.

The value of the highest reported vote is always safe. A proposer of b' may also choose freely if no reported value v can
have been decided (`Rule.POSSIBLE`). Let P be the reporters of v and the silent members (no promise, no farewell in F'),
and G the farewells of F' that do not report v. Then v cannot have been decided if P is no quorum of C - G. Proof: if W
decided v in a ballot with farewells F, W is in P. Compared with C - F, the set C - G lacks members that are not in P, and
has members of F, which are all in P: they are silent, or report v. So P is at least the same majority of C - G as W of
C - F, and if both are exactly half, then G = F, and P contains the same most senior member. A count with the farewells
of the reported ballot is wrong (`Rule.POSSIBLE_BY_VOTE`): a member of W may have left after its vote.
"""

from __future__ import annotations

import gc
import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import lru_cache
from typing import NamedTuple, TypeAlias

import msgspec
from thinwire.collectives.consensus.members.quorum import enough

UP, DOWN, LEFT, LOST = "up", "down", "left", "lost"


class Rule(Enum):
    """Condition under which a reported vote binds a proposer."""

    HIGHEST = "always the vote of the highest ballot"
    POSSIBLE = "the highest vote that may have been decided, counted without the farewells that lack it"
    POSSIBLE_BY_VOTE = "the highest vote that may have been decided, counted with the farewells of its own ballot"


MISTAKES = (
    "promise forgets votes",
    "restart forgets",
    "lost folder votes",
    "refused peers leave the quorum",
    "farewell without state",
    "farewell with later promise",
    "vote after farewell",
    "tie-breaker differs",
    "vote before it is durable",
    "vote raises no promise",
    "ballot proposed twice",
)
"""Mistakes that can be planted."""


class Acceptor(msgspec.Struct, frozen=True, eq=False):
    """Memory and messages of one acceptor. There is one object for equal ones (`one_of`), so that states are hashed fast.

    accepted, and the entries of `reports`: number of a proposal from 1 on; 0: no vote. reports: by ballot; None: no promise.
    votes: bit mask over proposals. stated: promised ballot and accepted proposal of the farewell.
    """

    status: str
    promised: int
    accepted: int
    votes: int
    reports: tuple[int | None, ...]
    stated: tuple[int, int] | None


_ALL: dict[tuple[object, ...], Acceptor] = {}


def one_of(acceptor: Acceptor) -> Acceptor:
    """Return the object that stands for all acceptors equal to this one."""
    return _ALL.setdefault(msgspec.structs.astuple(acceptor), acceptor)


def replace(acceptor: Acceptor, **changes: object) -> Acceptor:
    """Return the acceptor with other values of these fields."""
    return one_of(msgspec.structs.replace(acceptor, **changes))


class Proposal(NamedTuple):
    """Value and farewells (bit mask) of a ballot."""

    value: int
    left: int


Proposals: TypeAlias = tuple[Proposal | None, ...]
Acceptors: TypeAlias = tuple[Acceptor, ...]
State: TypeAlias = tuple[Acceptors, Proposals]
Offer: TypeAlias = tuple[int | None, int | None, bool]
"""An acceptor's report to a ballot, the vote in its farewell, and True if it refuses connections."""


@dataclass(frozen=True)
class Outcome:
    """Result of an exploration.

    endings: pairs of the proposals and the bit mask of those that are decided, of all states in which one is decided.
    reached: for each proposal that is decided in a state, the statuses of all acceptors and the farewells that it carries.
    trace: the actions of a shortest path to two decided values; empty if there is none.
    """

    states: int
    endings: frozenset[tuple[Proposals, int]]
    reached: frozenset[tuple[int, tuple[str, ...], int]] = field(repr=False)
    trace: tuple[str, ...]


class Model:
    """Transitions of a round. ballots: number of each proposal; those with number 1 need no promises."""

    def __init__(
        self,
        acceptors: int,
        ballots: Sequence[int] = (1, 2, 3),
        rule: Rule = Rule.HIGHEST,
        mistake: str = "",
        eager: bool = False,
        fraction: float = 0.5,
    ) -> None:
        self.ballots, self.rule, self.mistake = tuple(ballots), rule, mistake
        self.eager = eager or bool(mistake)
        self.count = acceptors
        self._names = [f"ballot {number}" for number in ballots]
        members = range(acceptors)
        sets = [frozenset(i for i in members if mask >> i & 1) for mask in range(1 << acceptors)]
        orders = [
            tuple(reversed(members)) if mistake == "tie-breaker differs" and entry % 2 else tuple(members)
            for entry in range(len(self.ballots))
        ]
        self.quorum = [[[enough(a, order, left, fraction=fraction) for left in sets] for a in sets] for order in orders]
        # Acceptors and views are few, states are many.
        self._actions, self._offer = lru_cache(None)(self._find_actions), lru_cache(None)(self.find_offer)
        self._choices, self._after = lru_cache(None)(self.find_choices), lru_cache(None)(self.find_after)
        self._quorate = lru_cache(None)(self._find_quorate)

    def start(self) -> State:
        """Return the state in which nothing is promised, and ballot 1 is proposed."""
        acceptor = one_of(Acceptor(UP, 0, 0, 0, (None,) * len(self.ballots), None))
        proposals = tuple(Proposal(entry + 1, 0) if b == 1 else None for entry, b in enumerate(self.ballots))
        return (acceptor,) * self.count, proposals

    def decided(self, state: State) -> int:
        """Return the bit mask of the proposals with a quorum of votes."""
        acceptors, proposals = state
        return self._quorate(tuple([a.votes for a in acceptors]), proposals)

    def successors(self, state: State) -> Iterator[tuple[object, str | Proposal, State]]:
        """Yield each possible action: acceptor or ballot, label or proposal, and the state after it."""
        acceptors, proposals = state
        if None not in proposals and not self.eager:
            return
        for i, acceptor in enumerate(acceptors):
            for label, needed, absent, after in self._actions(acceptor):
                if needed is not None and (proposals[needed] is None) is not absent:
                    continue
                yield i, label, (acceptors[:i] + (after,) + acceptors[i + 1 :], proposals)
        for entry, proposal in enumerate(proposals):
            if proposal is None:
                last = proposals.count(None) == 1
                for new in self._choices(entry, tuple([self._offer(a, entry) for a in acceptors]), proposals):
                    after_all = [self._after(a, entry, bool(new.left >> i & 1), last) for i, a in enumerate(acceptors)]
                    yield (
                        self._names[entry],
                        new,
                        (tuple(after_all), proposals[:entry] + (new,) + proposals[entry + 1 :]),
                    )

    # --- acceptors

    def _find_actions(self, a: Acceptor) -> list[tuple[str, int | None, bool, Acceptor]]:
        """Return the actions of an acceptor: label, proposal, absent, state after it.

        The action needs this proposal (None: none), or needs its absence: a promise is only of use to a later proposal.
        """
        found: list[tuple[str, int | None, bool, Acceptor]] = []
        acts = a.status == UP or (a.status == LEFT and self.mistake == "vote after farewell")
        for entry, ballot in enumerate(self.ballots):
            if acts and self._may_vote(a, entry):
                after = self._voted(a, entry)
                found.append((f"votes for {entry + 1}", entry, False, after))
                if self.mistake == "vote before it is durable":
                    found.append(
                        (f"votes for {entry + 1} and crashes", entry, False, replace(a, votes=after.votes, status=DOWN))
                    )
            if a.status == UP and ballot > max(a.promised, 1):
                told = 0 if self.mistake == "promise forgets votes" else a.accepted
                promised = replace(a, promised=ballot)
                found.append(
                    (f"promises ballot {ballot}", entry, True, replace(promised, reports=_put(a.reports, entry, told)))
                )
                found.append((f"promises ballot {ballot}", entry, False, promised))
        if self.eager:
            found += [(label, None, False, after) for label, after in self.faults(a)]
        return found

    def faults(self, a: Acceptor) -> Iterator[tuple[str, Acceptor]]:
        empty = {"status": UP, "promised": 0, "accepted": 0}
        if a.status == UP:
            yield "crashes", replace(a, status=DOWN)
            yield "leaves", replace(a, status=LEFT, stated=(a.promised, a.accepted))
        if a.status == DOWN:
            yield "restarts", replace(a, **(empty if self.mistake == "restart forgets" else {"status": UP}))
            yield "loses its folder", replace(a, status=LOST, promised=0, accepted=0)
        if a.status == LOST and self.mistake == "lost folder votes":
            yield "starts without its folder", replace(a, **empty)

    def _may_vote(self, a: Acceptor, entry: int) -> bool:
        ballot = self.ballots[entry]
        return ballot >= a.promised and not (a.accepted and self.ballots[a.accepted - 1] == ballot)

    def _voted(self, a: Acceptor, entry: int) -> Acceptor:
        promised = a.promised if self.mistake == "vote raises no promise" else self.ballots[entry]
        return replace(a, promised=promised, accepted=entry + 1, votes=a.votes | 1 << entry)

    def _all_votes(self, a: Acceptor) -> Acceptor:
        for entry in range(len(self.ballots)):
            if a.status == UP and self._may_vote(a, entry):
                a = self._voted(a, entry)
        return a

    # --- proposers

    def _find_quorate(self, votes: Sequence[int], proposals: Proposals) -> int:
        found = 0
        for entry, proposal in enumerate(proposals):
            if proposal is not None:
                voters = sum((mask >> entry & 1) << i for i, mask in enumerate(votes))
                found |= self.quorum[entry][voters][proposal.left] << entry
        return found

    def find_offer(self, a: Acceptor, entry: int) -> Offer:
        stated = a.stated if self.eager or a.stated is not None else (a.promised, a.accepted)
        if stated is None or (stated[0] > self.ballots[entry] and self.mistake != "farewell with later promise"):
            return a.reports[entry], None, a.status == DOWN
        return a.reports[entry], 0 if self.mistake == "farewell without state" else stated[1], a.status == DOWN

    def find_choices(self, entry: int, view: Sequence[Offer], proposals: Proposals) -> frozenset[Proposal]:
        """Return what the proposer of a ballot may propose; it counts any of the promises and farewells in `view`."""
        found, members = set(), range(self.count)
        refuse = self.mistake == "refused peers leave the quorum"
        options = [
            ["silent"]
            + ["promise"] * (r is not None)
            + ["farewell"] * (f is not None)
            + ["refused"] * (refuse and down)
            for r, f, down in view
        ]
        for chosen in itertools.product(*options):
            left = sum(1 << i for i in members if chosen[i] in ("farewell", "refused"))
            promisers = sum(1 << i for i in members if chosen[i] == "promise")
            if self.quorum[entry][promisers][left]:
                reports = {i: view[i][chosen[i] == "farewell"] for i in members if chosen[i] in ("promise", "farewell")}
                farewells = [i for i in members if chosen[i] == "farewell"]
                bound = bound_by(self.rule, members, reports, farewells, proposals)
                found.add(Proposal(bound or entry + 1, left))
        return frozenset(found)

    def find_after(self, a: Acceptor, entry: int, carried: bool, last: bool) -> Acceptor:
        """Return an acceptor after the proposal of a ballot, which carries its farewell or not."""
        if self.eager:
            return replace(a, reports=_put(a.reports, entry, None))
        if carried and a.stated is None:
            a = replace(a, status=LEFT, stated=(a.promised, a.accepted))
        a = replace(a, reports=_put(a.reports, entry, None))
        return self._all_votes(a) if last else a


def bound_by(
    rule: Rule, members: Sequence[int], reports: Mapping[int, int], farewells: Collection[int], proposals: Proposals
) -> int:
    """Return the value that a proposer must propose; 0 if it may choose.

    members: in the order of seniority. reports: number of the proposal that each promiser, and each member with a farewell
    in `farewells`, has voted for last; 0 for none.
    """
    silent = set(members) - set(reports)
    for highest in sorted({entry for entry in reports.values() if entry}, reverse=True):
        proposal = proposals[highest - 1]
        assert proposal is not None
        if rule is Rule.HIGHEST:
            return proposal.value
        voters = {i for i, entry in reports.items() if entry and proposals[entry - 1].value == proposal.value}
        own = {i for i in members if proposal.left >> i & 1}
        if enough(silent | voters, members, set(farewells) - voters if rule is Rule.POSSIBLE else own):
            return proposal.value
    return 0


def _put(reports: tuple[int | None, ...], entry: int, report: int | None) -> tuple[int | None, ...]:
    return reports[:entry] + (report,) + reports[entry + 1 :]


def explore(model: Model) -> Outcome:
    """Visit all states; stop at the first one in which two values are decided."""
    collects = gc.isenabled()
    gc.disable()  # There are millions of tuples and no cycles.
    try:
        return _explored(model)
    finally:
        if collects:
            gc.enable()


def _explored(model: Model) -> Outcome:
    start = model.start()
    before: dict[State, State] = {start: start}
    found, trace, level = set(), (), [start]
    while level and not trace:
        following = []
        for state in level:
            for _, _, after in model.successors(state):
                if after not in before:
                    before[after] = state
                    following.append(after)
                    if done := model.decided(after):
                        found.add((after[1], done, tuple([a.status for a in after[0]])))
                        if done & done - 1 and len({p.value for p in _listed(after[1], done).values()}) > 1:
                            trace = trace or _trace(model, before, after)
        level = following
    endings = frozenset((proposals, done) for proposals, done, _ in found)
    reached = {
        (entry, status, proposal.left)
        for proposals, done, status in found
        for entry, proposal in _listed(proposals, done).items()
    }
    return Outcome(len(before), endings, frozenset(reached), trace)


def _listed(proposals: Proposals, done: int) -> dict[int, Proposal]:
    return {entry: proposal for entry, proposal in enumerate(proposals) if proposal is not None and done >> entry & 1}


def _trace(model: Model, before: dict[State, State], state: State) -> tuple[str, ...]:
    lines: list[str] = []
    while (parent := before[state]) != state:
        lines.append(next(f"{actor}: {label}" for actor, label, after in model.successors(parent) if after == state))
        state = parent
    return tuple(reversed(lines))
