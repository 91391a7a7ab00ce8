"""Chains: what they prove, which changes of theirs are refused, and how long they are."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from functools import partial

import msgspec
import pytest
from kit.outer.chains import RESULTS, certificate, fork_of, proven, sign, verify
from thinwire.collectives.consensus.chain import decode, encode, end_of, extended, founded
from thinwire.collectives.consensus.members.lives import by_seniority, electorate_digest
from thinwire.collectives.consensus.proposal import vote_for
from thinwire.swarm.lineage import later, lineage_of, newest_round, prevails
from thinwire.swarm.messages.registry import CHAIN_BYTES, LIFE, MAX_CHAIN_ENTRIES, ChainEntry, Commit, Proof

IDS = tuple(bytes([number]) * 32 for number in range(1, 20))
ANN, BEN, CAT, DAN, EVE = IDS[:5]


def life(peer, count=0):
    return bytes([peer[0], count]) + bytes(LIFE - 2)


def lived(*peers):
    return {peer: life(peer) for peer in peers}


def anyone(fork):
    return True


prove = partial(proven, fragment=0, trusted=anyone, fraction=0.5, verifier=lambda keys: verify)


@dataclass
class History:
    """Run that ANN founds. `members`: lives of the members, by seniority. `chain`: as a peer of all rounds has it."""

    members: dict = field(default_factory=lambda: lived(ANN))
    round: int = 0
    chain: tuple = field(default_factory=lambda: founded((), fork_of(0, bytes(32), (), lived(ANN))))

    def commit(self, after, voters=None):
        """Let a round decide these members, with the votes of `voters` or of all."""
        self.round += 1
        proof = certificate(self.round, lineage_of(self.chain), self.members, voters or self.members, after)
        self.chain = extended(self.chain, proof)
        self.members = {peer: after[peer] for peer in by_seniority(sorted(after), tuple(self.members))}
        return proof

    def fork(self, founders):
        before, self.members = tuple(self.members), dict(sorted(founders.items()))
        self.chain = founded(self.chain, fork_of(self.round, RESULTS, before, founders))

    def holds(self, chain=None):
        """Return True if the chain proves exactly the members of this history."""
        here = prove(self.chain if chain is None else chain)
        return here is not None and (here.lineage, here.round, here.members, dict(here.lives)) == (
            lineage_of(self.chain),
            self.round,
            tuple(self.members),
            self.members,
        )


def churn(history, rng, rounds, *, founder_leaves, forks=0.0):
    """Yield after each of a number of rounds with members that come, leave, and lose their folders."""
    lost = 0
    for _ in range(rounds):
        after, voters = dict(history.members), list(history.members)
        gone = [peer for peer in voters if founder_leaves or peer != ANN]
        if rng.random() < 0.4 and len(after) > 2 and gone:
            after.pop(rng.choice(gone))
        if rng.random() < 0.5 and len(after) < len(IDS):
            peer = rng.choice([peer for peer in IDS if peer not in after])
            lost += 1
            after[peer] = life(peer, rng.choice([0, lost % 200]))
        most = [peer for peer in voters if rng.random() < 0.8]
        history.commit(after, most if 2 * len(most) > len(voters) else voters)
        yield
        if rng.random() < forks:
            founders = rng.sample(sorted(history.members), max(1, len(history.members) // 2))
            history.fork({peer: history.members[peer] for peer in founders})
            yield


@pytest.mark.parametrize("founder_leaves", [False, True])
@pytest.mark.parametrize("seed", range(8))
def test_chain_of_any_history_proves_its_members_after_each_round(seed, founder_leaves):
    history, rng = History(), random.Random(seed)
    for _ in churn(history, rng, 60, founder_leaves=founder_leaves, forks=0.1):
        assert history.holds() and history.holds(decode(encode(history.chain)))
        assert end_of(history.chain) == prove(history.chain)


def test_chain_with_a_vote_of_the_founder_has_one_certificate_whatever_others_do():
    history, seen = History(), 0
    for _ in churn(history, random.Random(1), 300, founder_leaves=False):
        certificates = history.chain[0].certificates
        voted = ANN in {proof.peer for proof in certificates[-1].commit.votes}
        seen += voted
        assert len(certificates) == 1 or not voted
    assert seen > 100


def test_round_of_unknown_members_needs_the_votes_of_most_known_ones():
    """A certificate of an unknown electorate alone proves nothing: any peer can make one."""
    history = History()
    history.commit(lived(ANN, BEN, CAT, DAN))
    base, members = history.chain[0], lived(ANN, BEN, EVE)
    for voters, valid in (((EVE,), False), ((ANN, BEN, EVE), False), ((ANN, BEN, CAT), True)):
        electorate = members | lived(*voters)
        skipping = certificate(9, lineage_of(history.chain), electorate, voters, lived(ANN))
        chain = (ChainEntry(base.fork, (*base.certificates, skipping)),)
        assert (prove(chain) is not None) == valid, voters


def test_votes_of_other_lives_of_known_members_do_not_confirm_a_round():
    history = History()
    history.commit(lived(ANN, BEN, CAT))
    base, reborn = history.chain[0], {peer: life(peer, 7) for peer in (ANN, BEN)} | lived(CAT)
    skipping = certificate(9, lineage_of(history.chain), reborn, tuple(reborn), lived(ANN))
    assert prove((ChainEntry(base.fork, (*base.certificates, skipping)),)) is None


def _voted(proof, **changes):
    """Return a changed certificate with valid votes of its members for the changed round."""
    proposal = msgspec.structs.replace(proof.commit.proposal, **changes)
    vote = vote_for(proposal, RESULTS)
    votes = tuple(Proof(peer, sign(peer, vote)) for peer in sorted(set(proof.members)))
    return msgspec.structs.replace(proof, commit=Commit(proposal, RESULTS, votes))


def test_certificate_of_an_earlier_round_proves_nothing_after_a_later_one():
    history = History()
    history.commit(lived(ANN))
    entry, first = history.chain[0], history.chain[0].certificates[0]
    for number, valid in ((0, False), (1, False), (2, True)):
        chain = (ChainEntry(entry.fork, (first, _voted(first, round=number))),)
        assert (prove(chain) is not None) == valid, number


def test_electorate_with_a_peer_twice_proves_nothing():
    """Its vote would count twice."""
    history = History()
    proof = history.commit(lived(ANN, BEN))
    members, lives = (ANN, ANN), 2 * life(ANN)
    twice = msgspec.structs.replace(proof, members=members, lives=lives)
    twice = _voted(twice, electorate=electorate_digest(members, lives))
    assert prove((ChainEntry(history.chain[0].fork, (proof,)),)) is not None
    assert prove((ChainEntry(history.chain[0].fork, (twice,)),)) is None


@pytest.mark.parametrize(
    "changes",
    [
        *[{"lineage": lineage} for lineage in (bytes(LIFE), b"\xff" * LIFE)],
        {"fragment": 1},
        *[{"electorate": digest} for digest in (bytes(32), b"\xff" * 32)],
        {"kept": (BEN, ANN), "lives": life(BEN) + life(ANN)},
        {"kept": (ANN, ANN), "lives": 2 * life(ANN)},
        {"lives": life(ANN)},
    ],
)
def test_certificate_with_valid_votes_for_an_invalid_round_proves_nothing(changes):
    """Members that lie can sign anything."""
    history = History()
    proof = history.commit(lived(ANN, BEN))
    assert prove((ChainEntry(history.chain[0].fork, (_voted(proof),)),)) is not None
    assert prove((ChainEntry(history.chain[0].fork, (_voted(proof, **changes),)),)) is None


@pytest.mark.parametrize("change", [lambda lives: lives + b"x", lambda lives: lives[:-1]], ids=["more", "less"])
def test_electorate_with_more_or_fewer_lives_than_members_proves_nothing(change):
    history = History()
    proof = history.commit(lived(ANN, BEN))
    lives = change(proof.lives)
    other = _voted(msgspec.structs.replace(proof, lives=lives), electorate=electorate_digest(proof.members, lives))
    assert prove((ChainEntry(history.chain[0].fork, (other,)),)) is None


def test_electorate_with_a_shortened_life_proves_nothing_although_most_members_are_known():
    history = History()
    history.commit(lived(ANN, BEN, CAT))
    base = history.chain[0]
    proof, lives = history.commit(lived(ANN, BEN, CAT)), b"".join(map(life, (ANN, BEN, CAT)))
    for shortened in (lives, lives[:-1]):
        changed = msgspec.structs.replace(proof, members=(ANN, BEN, CAT), lives=shortened)
        changed = _voted(changed, electorate=electorate_digest((ANN, BEN, CAT), shortened))
        chain = (ChainEntry(base.fork, (*base.certificates, changed)),)
        assert (prove(chain) is not None) == (shortened == lives)


def test_round_that_names_no_lives_proves_its_members_in_any_life():
    history = History()
    proof = _voted(history.commit(lived(ANN, BEN)), lives=b"")
    here = prove((ChainEntry(history.chain[0].fork, (proof,)),))
    assert here is not None and here.members == (ANN, BEN) and not here.lives


def test_lineage_may_begin_at_a_later_round_only_where_gaps_are_allowed():
    history = History()
    history.commit(lived(ANN, BEN))
    later_fork = fork_of(history.round + 3, RESULTS, (ANN, BEN), lived(ANN, BEN))
    for chain in ((*history.chain, ChainEntry(later_fork)), (ChainEntry(fork_of(3, RESULTS, (), lived(ANN))),)):
        assert prove(chain) is None
        assert prove(chain, gaps=True) is not None


def _replaced(history, **changes):
    entry = history.chain[-1]
    last = entry.certificates[-1]
    proposal = msgspec.structs.replace(last.commit.proposal, **changes)
    commit = Commit(proposal, last.commit.digest, last.commit.votes)
    changed = msgspec.structs.replace(last, commit=commit)
    return (*history.chain[:-1], ChainEntry(entry.fork, (*entry.certificates[:-1], changed)))


def _certificate(history, **changes):
    entry = history.chain[-1]
    changed = msgspec.structs.replace(entry.certificates[-1], **changes)
    return (*history.chain[:-1], ChainEntry(entry.fork, (*entry.certificates[:-1], changed)))


def _fork(history, **changes):
    entry = history.chain[-1]
    return (*history.chain[:-1], ChainEntry(msgspec.structs.replace(entry.fork, **changes), entry.certificates))


CHANGES = {
    "later round": lambda h: _replaced(h, round=h.round + 1),
    "other lineage": lambda h: _replaced(h, lineage=b"x" * LIFE),
    "other fragment": lambda h: _replaced(h, fragment=1),
    "other members": lambda h: _replaced(h, kept=(ANN,), lives=life(ANN)),
    "other lives": lambda h: _replaced(h, lives=life(ANN, 9) * len(h.members)),
    "other electorate": lambda h: _replaced(h, electorate=bytes(32)),
    "fewer voters in the electorate": lambda h: _certificate(h, members=(ANN,), lives=life(ANN)),
    "short lives": lambda h: _certificate(h, lives=b""),
    "member twice": lambda h: _certificate(h, members=(ANN,) * len(h.members)),
    "few votes": lambda h: _certificate(
        h, commit=msgspec.structs.replace(h.chain[-1].certificates[-1].commit, votes=(Proof(ANN, bytes(64)),))
    ),
    "other results": lambda h: _certificate(
        h, commit=msgspec.structs.replace(h.chain[-1].certificates[-1].commit, digest=bytes(32))
    ),
    "other founders": lambda h: _fork(h, members=(EVE,)),
    "founders without lives": lambda h: _fork(h, lives=b"", signatures=()),
    "other parent": lambda h: _fork(h, before=(EVE,)),
    "parent without members": lambda h: _fork(h, before=()),
    "unsigned first fork": lambda h: (
        ChainEntry(
            msgspec.structs.replace(h.chain[0].fork, signatures=(bytes(64),) * len(h.chain[0].fork.members)),
            h.chain[0].certificates,
        ),
        *h.chain[1:],
    ),
    "unsigned fork": lambda h: _fork(h, signatures=(bytes(64),) * len(h.chain[-1].fork.members)),
    "fork of a later round": lambda h: _fork(h, round=h.chain[-1].fork.round + 1),
    "fork of an earlier round": lambda h: _fork(h, round=h.chain[-1].fork.round - 1),
    "rounds in another order": lambda h: (
        *h.chain[:-1],
        ChainEntry(h.chain[-1].fork, h.chain[-1].certificates[::-1]),
    ),
    "without the first lineage": lambda h: h.chain[1:],
    "without rounds of the parent": lambda h: (ChainEntry(h.chain[0].fork), *h.chain[1:]),
    "empty": lambda h: (),
}


def forked_history():
    """Return a run with a lineage of two of four members, and rounds after it that two certificates prove."""
    history = History()
    history.commit(lived(ANN, BEN, CAT, DAN))
    history.commit(lived(ANN, BEN, CAT, DAN))
    history.fork(lived(ANN, BEN))
    history.commit(lived(ANN, BEN, EVE))
    history.commit(lived(BEN, EVE))
    history.commit(lived(EVE))
    history.commit(lived(EVE, CAT))
    return history


@pytest.mark.parametrize("name", CHANGES)
def test_changed_chain_proves_nothing(name):
    history = forked_history()
    assert history.holds() and len(history.chain[-1].certificates) > 1
    assert prove(CHANGES[name](history)) is None


@pytest.mark.parametrize("seed", range(3))
def test_chain_without_a_certificate_proves_nothing_else(seed):
    """A shorter chain is either refused, or it proves an earlier or the same round of the same history."""
    history, proved = History(), {}
    for _ in churn(history, random.Random(seed), 80, founder_leaves=True):
        proved[history.round] = (tuple(history.members), dict(history.members))
    entry = history.chain[0]
    for at in range(len(entry.certificates)):
        here = prove((ChainEntry(entry.fork, entry.certificates[:at] + entry.certificates[at + 1 :]),))
        assert here is None or not here.round or (here.members, dict(here.lives)) == proved[here.round]


def test_certificate_that_does_not_follow_is_left_out_until_one_does():
    history = History()
    history.commit(lived(ANN, BEN, CAT))
    missed = History(dict(history.members), history.round, history.chain)
    history.commit(lived(CAT, DAN, EVE))
    history.commit(lived(DAN, EVE))
    proof = history.commit(lived(DAN, EVE, ANN))
    assert extended(missed.chain, proof) == missed.chain
    again = certificate(9, lineage_of(missed.chain), lived(ANN, BEN, DAN), (ANN, BEN, DAN), lived(ANN))
    assert end_of(extended(missed.chain, again)).round == 9


def test_chain_of_too_many_lineages_proves_nothing():
    """Each costs the check of a signature."""
    history = History()
    history.commit(lived(ANN, BEN))
    for _ in range(MAX_CHAIN_ENTRIES - 1):
        history.fork(lived(ANN))
    assert len(history.chain) == MAX_CHAIN_ENTRIES and history.holds()
    history.fork(lived(ANN))
    assert prove(history.chain) is None


@pytest.mark.parametrize("data", [b"\x00", b"\x90", b"\xff" * 9, bytes(CHAIN_BYTES + 1)])
def test_garbage_is_no_chain(data):
    try:
        assert decode(data) == () and data == b"\x90"
    except ValueError:
        assert data != b"\x90"


@pytest.mark.parametrize("seed", range(4))
def test_damaged_chain_is_refused_or_proves_the_same_members(seed):
    """Peers send what they like; no input may raise anything but ValueError."""
    history, rng = forked_history(), random.Random(seed)
    raw, decoded = encode(history.chain), 0
    for _ in range(500):
        damaged = bytearray(raw)
        for _ in range(rng.randrange(1, 4)):
            at = rng.randrange(len(damaged))
            damaged[at : at + rng.randrange(2)] = bytes([rng.randrange(256)])
        try:
            chain = decode(damaged)
        except ValueError:
            continue
        decoded += 1
        here = prove(chain)
        assert here is None or (here.round, here.members) == (history.round, tuple(history.members))
        for other in (history.chain, chain):
            prevails(chain, other), prevails(other, chain), later(chain, other)
    assert decoded > 50


@pytest.mark.trial
def test_chain_of_a_long_run_is_small_and_has_few_signatures():
    """10,000 rounds of 16 peers, one of which another replaces every ten rounds: at most 2 MB, checked in 2 s.

    A signature takes 0.2 ms to check at most (Ed25519), so 10,000 signatures would take as long.
    """
    peers = [number.to_bytes(2, "big") * 16 for number in range(1, 1100)]
    history = History(dict.fromkeys(peers[:1], life(b"\1")))
    history.chain = founded((), fork_of(0, bytes(32), (), history.members))
    history.commit({peer: life(peer) for peer in peers[:16]})
    for change in range(1, 1000):
        history.round = 10 * change
        history.commit({peer: life(peer) for peer in peers[change : change + 16]})
    checked = []

    def counting(peer, message, signature):
        checked.append(peer)
        return verify(peer, message, signature)

    assert proven(history.chain, 0, anyone, fraction=0.5, verifier=lambda keys: counting) is not None
    keys = sum(len(one.members) * 34 for one in history.chain[0].certificates)
    assert len(encode(history.chain)) + keys < 2_000_000 and len(checked) < 10_000
    assert newest_round(history.chain[0]) == 9991


def test_run_that_an_untrusted_peer_has_begun_is_refused():
    chain = History().chain
    assert prove(chain) is not None
    assert proven(chain, 0, lambda fork: False, fraction=0.5, verifier=lambda keys: verify) is None
    assert sign(ANN, chain[0].fork) != sign(BEN, chain[0].fork)
