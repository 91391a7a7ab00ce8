"""The model of one round with one acceptor that lies: `small_model` without crashes, with farewells.

The liar votes for every proposal, promises every ballot at any time with any report, also of a proposal that does not
exist, and sends a farewell with any vote. It leads ballots, too: every ballot may propose any value that honest acceptors
accept, and two proposals may have one ballot. Honest acceptors accept what the promises of a quorum justify, as
`consensus/justification.py` does; the liar's promises are among them. In a free choice they accept any reported value, which
is more than the product's peers do.

The value of the proposal that does not exist stands for false results. No honest acceptor computes these; it can only adopt
them. If the announced norms show that they are excessive, or no owner has claimed them, an honest acceptor votes for them
only if more members report them than may lie (`Electorate.confirmed`).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from kit.reference.small_model import LEFT, UP, Acceptor, Model, Offer, Proposal, Proposals, State, one_of, replace
from thinwire.collectives.consensus.members.quorum import possible, tolerated

LIES = "lies"

MISTAKES = ("no justification", "highest report binds", "liars are not counted")
"""Mistakes that can be planted.

In this order: an acceptor votes for any value; of several possible values that of the highest ballot binds; a value is
possible only if its reported voters and the silent members are a quorum.
"""

ABSENT = 99
"""Value of a proposal that only the liar reports."""


class LiarModel(Model):
    """Transitions of a round in which the last acceptor lies.

    fraction: share of the members that a quorum exceeds. refutable: True if norms, or missing claims, exclude the false ones.
    """

    def __init__(
        self, acceptors: int, ballots: Sequence[int], fraction: float, mistake: str = "", *, refutable: bool = False
    ) -> None:
        super().__init__(acceptors, ballots, eager=True, fraction=fraction)
        self._fraction, self._lie = fraction, mistake
        self._liars = tolerated(acceptors, fraction)
        self._doubted = max(1, self._liars) if refutable else 0
        """Number of voters from which an honest acceptor does not adopt the false results."""

    def start(self) -> State:
        """Return the state in which nothing is promised, and ballots 1 are proposed."""
        acceptors, proposals = super().start()
        liar = one_of(Acceptor(LIES, 0, 0, (1 << len(self.ballots)) - 1, (None,) * len(self.ballots), None))
        return (*acceptors[:-1], liar), proposals

    def faults(self, a: Acceptor) -> Iterator[tuple[str, Acceptor]]:
        if a.status == UP:
            yield "leaves", replace(a, status=LEFT, stated=(a.promised, a.accepted))

    def find_offer(self, a: Acceptor, entry: int) -> Offer:
        return (None, None, True) if a.status == LIES else super().find_offer(a, entry)

    def find_choices(self, entry: int, view: Sequence[Offer], proposals: Proposals) -> frozenset[Proposal]:
        members, found = range(self.count), set()
        values = {one.value for one in proposals if one is not None} | {entry + 1, ABSENT}
        false = {ABSENT, *(at for at, one in enumerate(proposals, 1) if one is not None and one.value == ABSENT)}
        lies = [0, ABSENT, *(at for at, one in enumerate(proposals, 1) if one is not None)]
        options: list[list[tuple[str, int]]] = [
            [("silent", 0)]
            + [("promise", report)] * (report is not None)
            + [("farewell", stated)] * (stated is not None)
            for report, stated, _ in view[:-1]
        ]
        options.append([("silent", 0), *itertools.product(("promise", "farewell"), lies)])
        for chosen in itertools.product(*options):
            left = [i for i in members if chosen[i][0] == "farewell"]
            promisers = sum(1 << i for i in members if chosen[i][0] == "promise")
            carried = sum(1 << i for i in left)
            if self.quorum[entry][promisers][carried]:
                reports = {i: chosen[i][1] for i in members if chosen[i][0] != "silent"}
                allowed = self._allowed(reports, left, proposals)
                doubted = sum(report in false for report in reports.values()) <= self._doubted
                found |= {
                    Proposal(value, carried)
                    for value in (values if allowed is None else allowed)
                    if value != ABSENT or not doubted
                }
        return frozenset(found)

    def _allowed(self, reports: dict[int, int], left: Sequence[int], proposals: Proposals) -> set[int] | None:
        """Return the values that the reports justify; None: any."""
        members = range(self.count)
        silent = set(members) - set(reports)
        voters: dict[int, set[int]] = {}
        highest: dict[int, int] = {}
        for i, report in reports.items():
            if report:
                proposal = proposals[report - 1] if report != ABSENT else Proposal(ABSENT, 0)
                assert proposal is not None
                voters.setdefault(proposal.value, set()).add(i)
                ballot = self.ballots[report - 1] if report != ABSENT else ABSENT
                highest[proposal.value] = max(ballot, highest.get(proposal.value, 0))
        able = []
        for value, who in voters.items():
            base = set(left) - who
            if self._lie == "liars are not counted":
                chosen = self.quorum[0][_mask(silent | who)][_mask(base)]
            else:
                chosen = possible(silent | who, members, base, fraction=self._fraction)
            if chosen:
                able.append(value)
        if not able or self._lie == "no justification":
            return None
        if len(able) > 1 and self._liars and self._lie != "highest report binds":
            return set()
        return {max(able, key=lambda value: highest[value])}

    def find_after(self, a: Acceptor, entry: int, carried: bool, last: bool) -> Acceptor:
        return a if a.status == LIES else super().find_after(a, entry, carried, last)


def _mask(members: set[int]) -> int:
    return sum(1 << i for i in members)
