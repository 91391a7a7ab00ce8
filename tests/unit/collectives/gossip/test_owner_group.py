"""Gossip group whose chunks have owners: means, traffic, members that fail or lie."""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace

import blake3
import numpy as np
import pytest
from thinwire.collectives.gossip.owner_group import OwnerGroup
from thinwire.collectives.gossip.pair import PairTerms
from thinwire.collectives.gossip.pair_codec import parse_pair_codec, payload_of
from thinwire.collectives.gossip.transfer import digest_of
from thinwire.collectives.topology.shards import Grid
from thinwire.swarm.frame import Frame
from thinwire.swarm.messages.registry import Base, Chunk, Fetch, Ready

PATIENCE, CHUNKS, ELEMENTS = 2.0, 24, 24 * 512
ONE = parse_pair_codec("fp32", lr=0.7, gamma=0.7)
TWO = parse_pair_codec("fp32", lr=0.7, gamma=0.5)
LOSSY = parse_pair_codec("int4(block=256)", lr=0.7, gamma=0.7)
TOPK = "topk(k=8,chunk=256)|2bit|rice"
SPARSE = parse_pair_codec(TOPK, lr=1.0, gamma=1.0)
PARTS = parse_pair_codec("fp32", lr=0.7, gamma=0.7, parts=5)
SPARSE_PARTS = parse_pair_codec(TOPK, lr=1.0, gamma=1.0, parts=2)


class Room:
    """Members of one group with a queue of frames between them.

    `held`: pairs of peers whose frames are dropped. `lost`: whether another frame is dropped.
    """

    def __init__(self, size=12, how=TWO, elements=ELEMENTS, chunks=CHUNKS, round=1):
        self.now, self.how, self.cut = 1.0, how, Grid(elements, elements // chunks)
        self.ids = [bytes([index + 1]) * 32 for index in range(size)]
        self.frames, self.held, self.bulk = deque(), set(), dict.fromkeys(self.ids, 0)
        self.lost, self.early = (lambda sender, to, message: False), []
        rng = np.random.default_rng(3)
        self.fast = rng.standard_normal((size, elements)).astype(np.float32)
        self.slow = rng.standard_normal((size, elements)).astype(np.float32)
        self.groups = {peer: self.group(peer, size, round) for peer in self.ids}

    def group(self, peer, size, round=1):
        def bulk(to, frame):
            self.bulk[peer] += memoryview(frame.payload).nbytes
            self.frames.append((peer, to, frame))

        send_queue = SimpleNamespace(
            control=lambda to, message: self.frames.append((peer, to, Frame(message))),
            bulk=bulk,
            drop_data=lambda *of: None,
            received_over_relay=lambda peer: None,
            note_debtor=lambda peer, before: None,
        )
        terms = PairTerms(round, bytes(32), self.cut, self.how, 10**9, send_queue, lambda: self.now, PATIENCE)
        return OwnerGroup(terms, me=peer, size=size)

    def encoded(self, values, codec, places=None):
        chunks = []
        for index in range(len(self.cut)) if places is None else places:
            start, stop = self.cut.span(index)
            chunks.append(payload_of(codec, np.ascontiguousarray(values[start:stop])))
        return chunks, b"".join(blake3.blake3(chunk).digest() for chunk in chunks)

    def choose(self, members=None, of=None):
        members = self.ids if members is None else members
        for peer in of if of is not None else members:
            self.frames.extend(self.early)  # as a session does
            self.early = []
            self.groups[peer].choose(tuple(sorted(set(members) - {peer})), self.ids)

    def post(self, *peers):
        for at, peer in enumerate(self.ids):
            if peer in (peers or self.ids) and self.how.slow is not None:
                mixed = self.how.mixed(self.cut, self.groups[peer].round)
                self.groups[peer].post(*self.encoded(self.slow[at], self.how.slow, mixed))
        self.deliver()

    def announce(self, *peers):
        for at, peer in enumerate(self.ids):
            if peer in (peers or self.ids):
                values = self.fast[at] + self.slow[at] if self.how.slow is None else self.fast[at]
                chunks, hashes = self.encoded(values, self.how.fast)
                self.groups[peer].announce(chunks, hashes, weight=1, loss=0.0, speed=0.0, deadline=10.0)
                self.frames.extend(self.early)
                self.early = []
        self.deliver()

    def deliver(self):
        while self.frames:
            sender, to, frame = self.frames.popleft()
            lost = (sender, to) in self.held or self.lost(sender, to, frame.message)
            if lost or to not in self.groups:
                continue
            if isinstance(frame.message, (Base, Ready)) and not self.groups[to].accepts(sender, frame.message):
                self.early.append((sender, to, frame))
            else:
                self.groups[to].on_frame(sender, frame)

    def wait(self, seconds):
        for _ in range(int(seconds / 0.1)):
            self.now += 0.1
            for group in self.groups.values():
                group.tick()
            self.deliver()

    def means(self, peer):
        """Return the decoded means of Δ (or θ) and of φ minus ours, with NaN where there is none."""
        means, out = self.groups[peer].means(self.ids), np.full((2, self.cut.total), np.nan, np.float32)
        for index in range(len(self.cut)):
            start, stop = self.cut.span(index)
            for which, find in enumerate((means.fast, means.pull)):
                if not find(index, out[which, start:stop]):
                    out[which, start:stop] = np.nan
        return out


@pytest.mark.parametrize("how", [ONE, TWO, LOSSY], ids=["one", "two", "lossy"])
def test_each_member_gets_the_mean_of_all(how):
    room = Room(how=how)
    room.choose()
    room.post()
    room.announce()
    fast, slow = room.fast.mean(axis=0), room.slow.mean(axis=0)
    step = np.abs(room.fast).max() / 7 if how is LOSSY else 2e-6  # half a step of int4 in each value, averaged
    for at, peer in enumerate(room.ids):
        assert not room.groups[peer].outstanding
        found = room.means(peer)
        if how is ONE:
            np.testing.assert_allclose(found[0], fast + slow, atol=2e-6)
            assert np.isnan(found[1]).all()
        else:
            np.testing.assert_allclose(found[0], fast, atol=step)
            np.testing.assert_allclose(found[1], slow - room.slow[at], atol=0.05 if how is LOSSY else 2e-6)


@pytest.mark.parametrize("how", [SPARSE, PARTS, SPARSE_PARTS], ids=["sparse", "parts", "sparse parts"])
def test_each_member_gets_the_mean_of_sparse_contributions_and_of_a_part_of_the_slow_weights(how):
    room = Room(how=how)
    room.choose()
    room.post()
    room.announce()
    chunks = [slice(*room.cut.span(index)) for index in range(CHUNKS)]
    offers = [room.encoded(values, how.fast)[0] for values in room.fast]
    wanted = np.empty(ELEMENTS, np.float32)
    for index, here in enumerate(chunks):
        payloads = [offer[index] for offer in offers]
        if how.averaged:
            decoded = np.empty((len(payloads), here.stop - here.start), np.float32)
            for payload, one in zip(payloads, decoded, strict=True):
                how.fast.decode(payload, one)
            wanted[here] = decoded.mean(axis=0)
        else:
            how.fast.mean(payloads, wanted[here])
    drawn = np.repeat([chunk % how.parts == 1 % how.parts for chunk in range(CHUNKS)], ELEMENTS // CHUNKS)
    for at, peer in enumerate(room.ids):
        assert not room.groups[peer].outstanding
        fast, pull = room.means(peer)
        np.testing.assert_allclose(fast, wanted, atol=2e-6)
        np.testing.assert_allclose(pull[drawn], (room.slow.mean(axis=0) - room.slow[at])[drawn], atol=0.05)
        assert np.isnan(pull[~drawn]).all()
    # Δ goes to all others, slow weights to the owners and back.
    deltas = 11 * sum(len(payload) for payload in room.encoded(room.fast[0], how.fast)[0])
    if how is not PARTS:
        slow = how.slow.nbytes(512) * len(how.mixed(room.cut, 1))
        sent = room.bulk[room.ids[0]]
        assert sent == pytest.approx(deltas + 2 * 11 / 12 * slow, rel=0.1)


@pytest.mark.parametrize("parts", [1, 30])
def test_member_of_a_sparse_group_takes_the_mean_of_those_whose_data_has_arrived(parts):
    """With more parts than chunks some rounds mix no slow weights."""
    room = Room(how=parse_pair_codec(TOPK, lr=1.0, gamma=1.0, parts=parts), round=29)
    room.choose()
    cut, other = room.ids[2], room.ids[7]
    room.held = {(cut, other), (other, cut)}
    room.post()
    room.announce()
    room.wait(4 * PATIENCE)
    assert not any(group.outstanding for group in room.groups.values())
    first = [room.encoded(values, room.how.fast)[0][0] for values in room.fast]
    for at, peer in enumerate(room.ids):
        lacks = {2: 7, 7: 2}.get(at)
        here = [one for index, one in enumerate(room.ids) if index != lacks]
        found, out, expected = room.groups[peer].means(here), np.empty(512, np.float32), np.empty(512, np.float32)
        room.how.fast.mean([payload for index, payload in enumerate(first) if index != lacks], expected)
        assert found.fast(0, out)
        np.testing.assert_array_equal(out, expected)
        assert lacks is not None or found.pull(0, out) == (parts == 1)


def test_sparse_contribution_of_a_peer_alone_has_no_mean():
    room = Room(how=SPARSE)
    room.choose()
    room.post()
    room.announce()
    me, out = room.ids[0], np.empty(512, np.float32)
    assert not room.groups[me].means((me,)).fast(0, out) and room.groups[me].means(room.ids[:2]).fast(0, out)


def test_pulls_cancel_out():
    room = Room(how=TWO)
    room.choose()
    room.post()
    room.announce()
    assert np.abs(sum(room.means(peer)[1] for peer in room.ids)).max() < 1e-5


def test_member_sends_each_value_twice_and_not_once_per_member():
    room = Room(size=12, how=TWO)
    room.choose()
    room.post()
    room.announce()
    vector = 4 * ELEMENTS
    for sent in room.bulk.values():
        assert sent == 2 * (2 * 11 * vector // 12)  # two vectors; 11/12 of each to the owners, and as much back


def test_slow_weights_are_averaged_before_anybody_is_ready():
    room = Room()
    room.choose()
    room.post()
    assert all(np.isfinite(room.means(peer)[1]).all() and np.isnan(room.means(peer)[0]).all() for peer in room.ids)


def test_last_member_that_posts_sends_its_means_at_once():
    room = Room()
    room.choose()
    last = room.ids[-1]
    room.post(*room.ids[:-1])
    room.post(last)
    assert all(np.isfinite(room.means(peer)[1]).all() for peer in room.ids)


def test_chunks_of_a_dead_owner_have_no_mean_and_the_others_lack_its_contribution():
    room = Room()
    room.choose()
    dead = room.ids[4]
    del room.groups[dead]
    rest = [peer for peer in room.ids if peer != dead]
    room.post(*rest)
    room.announce(*rest)
    for peer in rest:
        room.groups[peer].drop(dead, "gone")
    room.deliver()
    fast = np.delete(room.fast, 4, axis=0).mean(axis=0)
    for peer in rest:
        assert not room.groups[peer].outstanding
        found = room.means(peer)[0]
        lost = np.isnan(found)
        assert lost.sum() == 2 * 512  # two of 24 chunks for each of twelve members
        np.testing.assert_allclose(found[~lost], fast[~lost], atol=2e-6)


def test_mean_goes_only_to_members_that_are_part_of_it():
    """A member whose contribution does not reach an owner makes its step alone for these chunks."""
    room = Room()
    room.choose()
    cut, owner = room.ids[2], room.ids[7]
    room.held = {(cut, owner), (owner, cut)}
    room.post()
    room.announce()
    room.wait(4 * PATIENCE)
    assert not any(group.outstanding for group in room.groups.values())
    for which in (0, 1):
        means = np.array([room.means(peer)[which] for peer in room.ids])
        lacks = np.isnan(means)
        assert {room.ids[at] for at in np.flatnonzero(lacks.any(axis=1))} == {cut, owner}
        where = lacks[2] & ~lacks[7]  # chunks of the owner
        assert where.sum() == 2 * 512
        with_others = np.delete(room.fast if which == 0 else room.slow, 2, axis=0).mean(axis=0)
        expected = with_others if which == 0 else with_others - room.slow[7]
        np.testing.assert_allclose(means[7][where], expected[where], atol=2e-6)


def test_silent_member_costs_one_patience():
    """It announces, and none of its chunks arrives."""
    room = Room()
    room.choose()
    silent = room.ids[5]
    rest = [peer for peer in room.ids if peer != silent]
    room.lost = lambda sender, to, message: sender == silent and isinstance(message, Chunk)
    room.post()
    room.announce()
    began = room.now
    while any(room.groups[peer].outstanding for peer in rest) and room.now < 100:
        room.wait(0.1)
    assert room.now - began < 1.5 * PATIENCE
    assert all(room.groups[peer].pairs[silent].result.reason for peer in rest)
    assert all(room.groups[peer].exchanged(other) for peer in rest for other in rest if other != peer)


def test_peer_that_drew_another_group_is_refused_at_once():
    room = Room()
    other = room.ids[0]
    room.choose(of=room.ids[1:])
    room.choose(members=room.ids[:7], of=[other])
    room.post()
    room.announce()
    for peer in room.ids[1:]:
        results = [pair.result for pair in room.groups[peer].pairs.values() if pair.partner == other]
        assert [result.reason for result in results] in (["other group or plan"], ["declined: other partner"])
    assert not any(room.groups[peer].outstanding for peer in room.ids[1:])


def test_peer_that_draws_the_group_of_the_others_before_it_is_ready_takes_part():
    """Its view lags: it has sent slow weights for another group, and the others are ready first."""
    room = Room()
    late = room.ids[3]
    room.choose(members=room.ids[:7], of=[late])
    room.choose(of=[peer for peer in room.ids if peer != late])
    room.post()
    room.announce(*(peer for peer in room.ids if peer != late))
    room.choose(of=[late])
    room.announce(late)
    assert all(room.groups[peer].exchanged(other) for peer in room.ids for other in room.ids if other != peer)


def test_group_is_drawn_again_when_a_member_has_left_and_no_other_replaces_it():
    room = Room()
    room.choose()
    room.post()
    gone, rest = room.ids[4], [peer for peer in room.ids if peer != room.ids[4]]
    del room.groups[gone]
    for peer in rest:
        room.groups[peer].drop(gone, "gone")
    room.choose(rest)
    room.announce(*rest)
    for peer in rest:
        assert np.isfinite(room.means(peer)).all(), "each chunk has an owner that is here"


def test_member_that_draws_another_group_and_then_ours_again_gets_its_means():
    room = Room()
    room.choose()
    room.post()
    other = room.ids[3]
    room.choose(room.ids[:7], of=[other])
    room.deliver()
    room.choose(of=[other])
    room.deliver()
    room.announce()
    assert not any(group.outstanding for group in room.groups.values())
    for at, peer in enumerate(room.ids):
        found = room.means(peer)
        np.testing.assert_allclose(found[0], room.fast.mean(axis=0), atol=2e-6)
        np.testing.assert_allclose(found[1], room.slow.mean(axis=0) - room.slow[at], atol=2e-6)


def test_member_that_announces_another_contribution_after_its_mean_was_given_is_refused():
    room = Room()
    room.choose()
    room.post()
    silent, again = room.ids[2], room.ids[6]
    room.lost = lambda sender, to, message: (sender, to) == (silent, again) and isinstance(message, Chunk)
    room.announce()
    room.lost = lambda *of: False
    at = room.ids.index(again)
    fresh = room.groups[again] = room.group(again, len(room.ids))
    fresh.attempt = 100
    room.fast[at] += 1
    room.choose(of=[again])
    room.post(again)
    room.announce(again)
    room.wait(6 * PATIENCE)
    assert not any(group.outstanding for group in room.groups.values())
    assert any(pair.result.reason == "declined: announced again" for pair in fresh.pairs.values())


def test_group_that_is_drawn_again_counts_no_mean_of_the_former_one():
    room = Room()
    room.choose()
    room.post()
    before = room.means(room.ids[0])[1]
    members = room.ids[:10]
    late = [(sender, to, frame) for sender, to, frame in room.frames]
    room.choose(members)
    for sender, to, frame in late:
        room.groups[to].on_frame(sender, frame)
    room.deliver()
    room.announce(*members)
    after = room.means(room.ids[0])[1]
    np.testing.assert_allclose(after, room.slow[:10].mean(axis=0) - room.slow[0], atol=2e-6)
    assert np.abs(after - before).max() > 0.1


def test_contribution_a_thousand_times_too_long_is_left_out():
    room = Room(how=TWO)
    room.fast[3] *= 1e6
    room.choose()
    room.post()
    room.announce()
    fast = np.delete(room.fast, 3, axis=0).mean(axis=0)
    for at, peer in enumerate(room.ids):
        if at == 3:
            continue
        found = room.means(peer)[0]
        lost = np.isnan(found)
        np.testing.assert_allclose(found[~lost], fast[~lost], atol=2e-6)
        assert room.groups[peer].pairs[room.ids[3]].result.reason == "norm" and lost.mean() < 0.1


def test_member_that_needs_no_chunk_of_another_still_answers_it():
    """Six of twelve members own a chunk; a member that trains for longer is not silent."""
    room = Room(chunks=6)
    room.choose()
    room.post()
    late = room.ids[8]
    room.announce(*(peer for peer in room.ids if peer != late))
    room.wait(2 * PATIENCE)
    assert all(room.groups[peer].pairs[other].result is None for peer in room.ids[:6] for other in (late,))
    room.announce(late)
    assert not any(group.outstanding for group in room.groups.values())
    assert all(room.groups[peer].exchanged(other) for peer in room.ids for other in room.ids if other != peer)


def test_liar_among_equal_replicas_is_left_out():
    """All others have the same slow weights, so that no distance is usual, and none has trained."""
    room = Room()
    room.slow[:] = room.slow[0]
    room.fast[:] = 0.0
    room.slow[3] += 1e4
    room.fast[3] += 1e4
    room.choose()
    room.post()
    room.announce()
    for at, peer in enumerate(room.ids):
        if at != 3:
            found = room.means(peer)
            assert np.nanmax(np.abs(found)) < 1e-5


def test_only_trained_member_is_compared_with_the_parameters_near_its_chunks():
    """The first parameters are small, those where the member has trained are not."""
    room = Room(how=PARTS)
    start, _ = room.cut.span(5)
    room.slow[:], room.slow[:, :start], room.fast[:] = 1.0, 1e-6, 0.0
    room.fast[3, start:] = 0.01
    room.choose()
    room.post()
    room.announce()
    for peer in room.ids:
        np.testing.assert_allclose(room.means(peer)[0], room.fast.mean(axis=0), atol=2e-6)


def test_chunks_of_dense_codec_have_means_in_a_round_without_slow_weights():
    room = Room(how=parse_pair_codec("fp32", lr=0.7, gamma=0.5, parts=CHUNKS + 6), round=CHUNKS + 1)
    room.choose()
    room.post()
    room.announce()
    for peer in room.ids:
        fast, slow = room.means(peer)
        np.testing.assert_allclose(fast, room.fast.mean(axis=0), atol=2e-6)
        assert np.isnan(slow).all() and not room.groups[peer].outstanding


def test_owner_without_a_mean_ends_the_exchange_at_once():
    """Two liars send values whose sum is not finite; the owners cannot tell which of three is honest."""
    room = Room(size=3, chunks=3, elements=3 * 512)
    room.fast[1:] = 3.3e38
    room.choose()
    room.post()
    room.announce()
    assert not room.groups[room.ids[0]].outstanding


def test_member_gets_only_the_chunks_that_it_owns():
    room = Room(how=ONE)
    room.choose()
    greedy, other = room.ids[0], room.ids[1]
    room.announce()
    digest = room.groups[other].pairs[greedy].ours.hashes
    before = room.bulk[other]
    every = Fetch(1, 0, digest_of(digest, 0), tuple(range(CHUNKS)))
    room.groups[other].on_link_down(greedy)
    room.groups[other].on_frame(greedy, Frame(every))
    assert room.bulk[other] - before == 2 * 4 * 512  # two of 24 chunks


def test_means_lost_with_a_link_are_sent_again():
    room = Room()
    room.choose()
    room.post()
    a, b = room.ids[0], room.ids[1]
    room.lost = lambda sender, to, message: (
        (sender, to) == (a, b) and isinstance(message, Chunk) and message.index >= 2 * CHUNKS
    )
    room.announce()
    room.lost = lambda *of: False
    assert room.groups[b].outstanding == (a,)
    for one, other in ((a, b), (b, a)):
        room.groups[one].on_link_down(other)
    for one, other in ((a, b), (b, a)):
        room.groups[one].on_link_up(other)
    room.deliver()
    assert not room.groups[b].outstanding and np.isfinite(room.means(b)).all()
