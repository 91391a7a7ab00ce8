"""Certificates: commits of other peers, believed when their votes are a quorum."""

import msgspec
import pytest
from thinwire.collectives.consensus.certificates import CertificateCollector
from thinwire.collectives.consensus.electorate import Electorate
from thinwire.collectives.consensus.proposal import RoundTerms, name_of
from thinwire.swarm.messages.registry import Ballot, Commit, Contribution, Exclusion, Open, Proof, Vote

IDS = tuple(bytes([number]) * 32 for number in range(5))
ANN, BEN, CAT, DAN, EVE = IDS
TERMS = RoundTerms(5, 0, IDS, bytes(32), bytes(32), max_weight=100)
GOOD, BAD = b"g" * 64, b"b" * 64
RESULTS, OTHER = b"r" * 32, b"o" * 32


def opened(**changes):
    entries = tuple(Contribution(peer, 1, 10) for peer in IDS)
    return msgspec.structs.replace(Open(5, 0, Ballot(1, ANN), IDS, IDS, entries, (), None, ()), **changes)


def commit(*voters, digest=RESULTS, signature=GOOD, **changes):
    return Commit(opened(**changes), digest, tuple(Proof(peer, signature) for peer in voters))


class Scene:
    """Collector and electorate of peer ANN. `verified`: votes whose signatures were checked."""

    def __init__(self, live=IDS, gone=()):
        self.verified = []
        self.electorate = Electorate(ANN, TERMS, live, gone)
        self.collector = CertificateCollector(self._verify)

    def _verify(self, peer, vote, signature):
        self.verified.append((peer, vote))
        return signature == GOOD

    def take(self, message):
        self.collector.on_message(message, self.electorate)
        return self.collector.believed(self.electorate)


def test_commit_with_votes_of_a_quorum_is_believed():
    scene, message = Scene(), commit(ANN, BEN, CAT)
    assert scene.take(message) is message
    vote = Vote(5, 0, Ballot(1, ANN), name_of(opened()), RESULTS)
    assert sorted(scene.verified) == [(peer, vote) for peer in (ANN, BEN, CAT)]


@pytest.mark.parametrize(
    "message",
    [
        commit(ANN, BEN),
        commit(ANN, BEN, CAT, signature=BAD),
        commit(ANN, CAT, BEN),
        commit(ANN, ANN, BEN, CAT),
        commit(ANN, BEN, CAT, alive=(ANN, BEN)),
        commit(ANN, BEN, CAT, alive=(ANN, BEN, BEN)),
        commit(ANN, BEN, CAT, round=6),
        commit(ANN, BEN, CAT, contributors=()),
    ],
)
def test_commit_with_few_unsorted_repeated_or_invalid_votes_is_not_believed(message):
    assert Scene().take(message) is None


def test_commit_of_void_results_is_not_believed_before_or_after():
    scene, message = Scene(), commit(ANN, BEN, CAT)
    assert scene.take(message) is message
    scene.collector.void(RESULTS)
    assert scene.collector.believed(scene.electorate) is None
    assert scene.take(message) is None
    other = commit(ANN, BEN, CAT, digest=OTHER)
    assert scene.take(other) is other


def test_commit_with_more_votes_replaces_one_with_fewer_and_not_the_reverse():
    scene = Scene()
    few, more, last = commit(CAT, digest=OTHER), commit(ANN, BEN), commit(DAN, digest=OTHER)
    gone = tuple(Exclusion(peer, "gone") for peer in (DAN, EVE))
    more = msgspec.structs.replace(more, opened=opened(excluded=gone))
    assert [scene.take(message) for message in (few, more, last)] == [None, None, None]
    scene.electorate.live -= {DAN, EVE}
    assert scene.collector.believed(scene.electorate) is more


def test_commit_with_a_quorum_replaces_one_with_as_many_votes_without():
    scene = Scene()
    gone = tuple(Exclusion(peer, "gone") for peer in (DAN, EVE))
    hidden = commit(DAN, EVE, digest=OTHER)
    assert scene.take(hidden) is None
    scene.electorate.live -= {DAN, EVE}
    real = msgspec.structs.replace(commit(ANN, BEN), opened=opened(excluded=gone))
    assert scene.take(real) is real


def test_peers_that_are_reachable_count_although_a_commit_calls_them_gone():
    gone = tuple(Exclusion(peer, "gone") for peer in (CAT, DAN, EVE))
    message = commit(ANN, BEN, excluded=gone)
    assert Scene().take(message) is None
    assert Scene(live=(ANN, BEN)).take(message) is message
    assert Scene(gone=(CAT, DAN)).take(message) is message
