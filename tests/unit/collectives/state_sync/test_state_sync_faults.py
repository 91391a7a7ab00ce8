"""Fetching a state from sources that fail, lie or disagree, in virtual time."""

from __future__ import annotations

import asyncio

import blake3
import numpy as np
import pytest
from kit.outer.chains import accepting, certificate, opened
from thinwire.collectives.consensus.chain import encode
from thinwire.collectives.state_sync.chunk_transfer import IN_FLIGHT, LATEST, SILENCE, PartialState
from thinwire.collectives.state_sync.offer_search import LAST_ROUND, MOST_PATIENCES
from thinwire.collectives.state_sync.state_offers import LocalState, state_digest
from thinwire.collectives.state_sync.state_sync import fetch_state
from thinwire.node.outer.state_transfer.state_progress import REPORT_SECONDS, StateProgress
from thinwire.sims.engine import virtual_loop
from thinwire.swarm.frame import Frame
from thinwire.swarm.identity.identity import short
from thinwire.swarm.lineage import lineage_of
from thinwire.swarm.messages.registry import CHUNK_BYTES, LIFE, ChainEntry, Fork, StateAsk, StateChunk, StateOffer

LAYOUT = bytes(32)
PEERS = [bytes([n]) * 32 for n in range(1, 8)]
SIZE = 9 * CHUNK_BYTES + 1000
PATIENCE = 2.0


def state(seed, *, like=None, change=()):
    """Return SIZE random bytes, equal to those of `like` except for these chunks."""
    raw = bytearray(like or np.random.default_rng(seed).bytes(SIZE))
    for index in change:
        raw[index * CHUNK_BYTES] ^= 1
    return bytes(raw)


def hashes(raw):
    return tuple(blake3.blake3(raw[at : at + CHUNK_BYTES]).digest() for at in range(0, len(raw), CHUNK_BYTES))


class Source:
    """Source that answers after `delay` seconds; `spoil(index, chunk)` changes chunks, None: no answer."""

    def __init__(
        self, raw, *, round=3, delay=0.01, mute=False, spoil=lambda index, chunk: chunk, members=None, chain=()
    ):
        self.chain = chain
        self.raw, self.delay, self.mute, self.spoil = raw, delay, mute, spoil
        members = tuple(sorted(PEERS[:2])) if members is None else members
        self.hashes = hashes(raw)
        digest = state_digest(round, LAYOUT, members, self.hashes, lineage=lineage_of(chain))
        self.offer = StateOffer(round, digest, LAYOUT, len(raw), members, lineage=lineage_of(chain))
        self.asked = []
        self.owed = self.most = 0

    def answer(self, message):
        if isinstance(message, StateAsk):
            return None if self.mute else Frame(self.offer, b"".join(self.hashes) + encode(self.chain))
        self.asked.append(message.index)
        self.owed += 1
        self.most = max(self.most, self.owed)
        chunk = self.spoil(message.index, self.raw[message.index * CHUNK_BYTES : (message.index + 1) * CHUNK_BYTES])
        return None if chunk is None else Frame(StateChunk(message.round, message.index), chunk)


def fetch(sources, have, **more):
    """Return the outcome and the seconds that it took."""
    named = dict(zip(PEERS, sources, strict=False))

    async def main():
        receive_queue, loop = asyncio.Queue(), virtual_loop.current()

        def send(peer, message):
            frame = named[peer].answer(message)
            if frame is not None:
                loop.call_later(named[peer].delay, arrive, peer, frame)

        def arrive(peer, frame):
            named[peer].owed -= isinstance(frame.message, StateChunk)
            receive_queue.put_nowait((peer, opened(frame)))

        fetched = await fetch_state(
            named, send, receive_queue, LocalState(LAYOUT, len(have), hashes(have)), patience=PATIENCE, **more
        )
        return fetched, loop.time()

    return virtual_loop.run(main(), seed=1)


def whole(fetched, have):
    """Return the state after installation."""
    raw = bytearray(have)
    for index, chunk in fetched.chunks.items():
        raw[index * CHUNK_BYTES : index * CHUNK_BYTES + len(chunk)] = chunk
    return bytes(raw)


NEW, OLD = state(1), state(2)


def test_every_source_serves_a_part():
    """The sources are the peers that have answered when their offers decide: three of five."""
    sources = [Source(NEW, members=tuple(PEERS[:5])) for _ in range(5)]
    fetched, _ = fetch(sources, OLD)
    assert whole(fetched, OLD) == NEW
    asked = [index for source in sources for index in source.asked]
    assert sorted(asked) == list(range(10)), "each chunk once"
    assert all(source.most <= IN_FLIGHT for source in sources) and sum(bool(one.asked) for one in sources) == 3


def test_fetch_after_waiting_its_turn_uses_current_offers():
    """Only some of several states are fetched at a time, while rounds continue."""
    source, later = Source(OLD, round=3), Source(NEW, round=4)

    async def main():
        turn, receive_queue, loop = asyncio.Semaphore(), asyncio.Queue(), virtual_loop.current()
        await turn.acquire()
        loop.call_later(30.0, turn.release)

        def send(peer, message):
            frame = (source if loop.time() < 20.0 else later).answer(message)
            loop.call_later(0.01, receive_queue.put_nowait, (peer, opened(frame)))

        fetched = await fetch_state(
            PEERS[:1], send, receive_queue, LocalState(LAYOUT, SIZE, ()), patience=PATIENCE, turn=turn
        )
        return fetched, loop.time(), turn.locked()

    fetched, seconds, held = virtual_loop.run(main(), seed=1)
    assert fetched.offer.round == 4 and whole(fetched, bytes(SIZE)) == NEW
    assert 30.0 < seconds < 32.0 and not held and not source.asked


def test_frames_during_the_wait_for_a_turn_do_not_accumulate():
    """Unrequested chunks that arrive while another state is fetched must not fill the memory."""
    source, most = Source(NEW, round=3), []

    async def main():
        turn, receive_queue, loop = asyncio.Semaphore(), asyncio.Queue(), virtual_loop.current()
        await turn.acquire()
        loop.call_later(10.0, turn.release)

        def flood():
            most.append(receive_queue.qsize())
            receive_queue.put_nowait((PEERS[1], Frame(StateChunk(3, 0), bytes(1000))))
            if loop.time() < 9.0:
                loop.call_later(0.1, flood)

        loop.call_later(0.1, flood)

        def send(peer, message):
            receive_queue.put_nowait((peer, opened(source.answer(message))))

        return await fetch_state(
            PEERS[:1], send, receive_queue, LocalState(LAYOUT, SIZE, ()), patience=PATIENCE, turn=turn
        )

    fetched = virtual_loop.run(main(), seed=1)
    assert whole(fetched, bytes(SIZE)) == NEW and len(most) > 80 and max(most) <= 1


def test_state_that_nobody_offers_takes_no_turn():
    async def main():
        turn, receive_queue = asyncio.Semaphore(0), asyncio.Queue()

        def send(peer, message):
            receive_queue.put_nowait((peer, Frame(StateOffer(0, bytes(32), LAYOUT, SIZE, ()))))

        return await fetch_state(
            PEERS[:2], send, receive_queue, LocalState(LAYOUT, SIZE, ()), patience=PATIENCE, turn=turn
        )

    assert virtual_loop.run(main(), seed=1) is None


def test_equal_states_fetch_no_chunk():
    sources = [Source(NEW), Source(NEW)]
    fetched, _ = fetch(sources, NEW)
    assert fetched.chunks == {} and not any(source.asked for source in sources)


def test_only_differing_chunks_are_fetched():
    have = state(1, change=(4, 9))
    sources = [Source(NEW), Source(NEW)]
    fetched, _ = fetch(sources, have)
    assert sorted(fetched.chunks) == [4, 9] and whole(fetched, have) == NEW


@pytest.mark.parametrize(
    "spoil",
    [
        lambda index, chunk: bytes([chunk[0] ^ 1]) + chunk[1:],  # a wrong byte
        lambda index, chunk: chunk[:-1],
        lambda index, chunk: chunk + b"\0",
        lambda index, chunk: b"",  # no longer served
        lambda index, chunk: None,  # silence
        lambda index, chunk: chunk if index < 3 else None,  # silence in the middle
    ],
)
def test_bad_source_is_given_up_and_the_other_serves_all(spoil):
    bad, good = Source(NEW, spoil=spoil), Source(NEW)
    fetched, seconds = fetch([bad, good], OLD)
    assert whole(fetched, OLD) == NEW
    assert len(bad.asked) <= IN_FLIGHT + 3, "not asked again"
    assert seconds < (MOST_PATIENCES + 1) * PATIENCE


def test_fetch_without_good_source_fails():
    bad = [Source(NEW, spoil=lambda index, chunk: None) for _ in range(2)]
    assert fetch(bad, OLD)[0] is None
    wrong = [Source(NEW, spoil=lambda index, chunk: b"x" * len(chunk)) for _ in range(2)]
    fetched, seconds = fetch(wrong, OLD)
    assert fetched is None and seconds < PATIENCE


def watched(sources):
    """Return the events of a failed fetch that is watched each second, and the parts of the state that were here."""
    events, seen, partial = [], [], PartialState()

    def now():
        return virtual_loop.current().time()

    progress = StateProgress(now, lambda kind, fields: events.append((now(), kind, fields)))

    def tick():
        progress.look(partial)
        if progress.transfer is not None:
            seen.append(progress.transfer.here)
        virtual_loop.current().call_later(1.0, tick)

    def accept(offer, chain):
        tick()
        return True

    assert fetch(sources, OLD, accept=accepting(accept), partial=partial)[0] is None
    assert partial.transfer is None
    return events, seen


def test_transfer_is_reported_with_its_size_the_part_that_is_here_and_the_wait_for_chunks():
    """The only source sends nine of ten chunks."""
    events, seen = watched([Source(NEW, spoil=lambda index, chunk: None if index == 9 else chunk)])
    assert {kind for _, kind, _ in events} == {"fetching"} and seen[-1] == 9 * CHUNK_BYTES
    times, _, fields = zip(*events, strict=True)
    first, last = fields[0], fields[-1]
    assert (first["round"], first["bytes"], first["sources"], first["detail"]) == (3, SIZE, [short(PEERS[0])], "")
    assert all(later - earlier > REPORT_SECONDS - 0.1 for earlier, later in zip(times, times[1:], strict=False))
    assert len(times) > 0.9 * SILENCE / REPORT_SECONDS and last["here"] == 9 * CHUNK_BYTES
    assert last["detail"].startswith("no chunk for 5") and f"ends {SILENCE:.0f} s after" in last["detail"]
    assert last["seconds"] == pytest.approx(times[-1] - times[0])


def test_unresponsive_source_is_given_up_soon():
    fetched, seconds = fetch([Source(NEW, mute=True), Source(NEW), Source(NEW)], OLD)
    assert whole(fetched, OLD) == NEW and seconds < 2 * PATIENCE


def test_slow_source_does_not_delay_a_fast_one():
    slow, quick = Source(NEW, delay=1.0), Source(NEW, delay=0.001)
    fetched, _ = fetch([slow, quick], OLD)
    assert whole(fetched, OLD) == NEW and len(slow.asked) <= IN_FLIGHT


class Pausing(Source):
    """Source that offers its state at once, and sends chunks after `pauses`; the last one is for all later chunks."""

    def __init__(self, raw, *pauses):
        self.times, self.pauses = -1, pauses
        super().__init__(raw)

    @property
    def delay(self):
        self.times += 1
        return 0.01 if not self.times else self.pauses[min(self.times, len(self.pauses)) - 1]

    @delay.setter
    def delay(self, _):
        pass


def test_sources_that_pause_between_chunks_on_slow_uplinks_are_no_failure():
    """A chunk of 1 MiB at 1 Mbit/s, of which state has a twelfth, takes 104 s."""
    fetched, _ = fetch([Pausing(NEW, 104.0), Pausing(NEW, 104.0)], OLD)
    assert fetched is not None and whole(fetched, OLD) == NEW


def test_source_that_delays_every_chunk_cannot_delay_the_transfer_without_limit():
    """Its chunks come nearly three times later each; the last one is not waited for."""
    pauses = [0.95 * MOST_PATIENCES * PATIENCE * 2.9**n for n in range(IN_FLIGHT)]
    fetched, seconds = fetch([Pausing(NEW, *pauses), Source(NEW)], OLD)
    assert whole(fetched, OLD) == NEW and seconds < pauses[-2] + LATEST + 1 < pauses[-1]


def test_chunk_that_two_sources_have_sent_counts_once_as_here():
    """The first source is late, so its chunks come from the second one, too; neither sends the last chunk."""
    sources = [Pausing(NEW, 1.5 * MOST_PATIENCES * PATIENCE), Source(NEW)]
    for source in sources:
        source.spoil = lambda index, chunk: None if index == 9 else chunk
    _, seen = watched(sources)
    assert max(seen) == seen[-1] == 9 * CHUNK_BYTES


def test_fetch_of_different_states_takes_that_of_most_members():
    """Members of the round count; other peers only if no member answers."""
    other, five = state(1, change=(0,)), tuple(PEERS[:5])
    for right, wrong, members, found in (
        (1, 1, PEERS[:2], False),
        (2, 1, PEERS[:3], True),
        (2, 2, PEERS[:4], False),
        (3, 2, five, True),
        (2, 3, PEERS[:2], True),
        (2, 1, PEERS[5:], True),
        (1, 1, PEERS[5:], False),
    ):
        sources = [Source(NEW, members=tuple(members)) for _ in range(right)]
        sources += [Source(other, members=tuple(members)) for _ in range(wrong)]
        fetched, _ = fetch(sources, OLD)
        assert (fetched is not None) == found, (right, wrong)
        assert not found or (whole(fetched, OLD) == NEW and fetched.sources == tuple(PEERS[:right]))


def test_offers_that_are_not_accepted_count_as_no_answer():
    @accepting
    def newer(offer, chain):
        return offer.round > 3

    assert fetch([Source(NEW, round=3)], OLD, accept=newer)[0] is None
    assert fetch([Source(NEW, round=4)], OLD, accept=newer)[0].offer.round == 4
    assert (
        fetch([*(Source(OLD, round=3) for _ in range(4)), Source(NEW, round=4)], OLD, accept=newer)[0].offer.round == 4
    )


def test_tampered_offer_is_ignored():
    """One digest vouches for round, members and every hash."""
    for change in ("round", "members", "hashes"):
        bad = Source(NEW)
        if change == "hashes":
            bad.hashes = (*bad.hashes[:-1], bytes(32))
        elif change == "round":
            bad.offer = StateOffer(9, bad.offer.digest, LAYOUT, SIZE, bad.offer.members)
        else:
            bad.offer = StateOffer(3, bad.offer.digest, LAYOUT, SIZE, (PEERS[5],))
        assert fetch([bad], OLD)[0] is None
        fetched, _ = fetch([bad, Source(NEW)], OLD)
        assert fetched.sources == (PEERS[1],)


def test_next_attempt_resumes_partial_fetch():
    """The only source stops after four chunks; another one has the rest, of this round or the next."""
    partial = PartialState()
    first = Source(NEW, spoil=lambda index, chunk: chunk if index < 4 else None)
    assert fetch([first], OLD, partial=partial)[0] is None
    second = Source(state(1, change=(2,)), round=4)
    fetched, _ = fetch([second], OLD, partial=partial)
    assert whole(fetched, OLD) == second.raw and fetched.offer.round == 4
    assert sorted(second.asked) == [2, 4, 5, 6, 7, 8, 9]


def test_partial_fetches_keep_at_most_one_state():
    partial = PartialState()
    for round in range(3, 7):
        source = Source(state(round), round=round, spoil=lambda index, chunk: chunk if index < 6 else None)
        assert fetch([source], OLD, partial=partial)[0] is None
        assert set(partial.chunks) == set(source.hashes[:6])


def test_next_attempt_skips_liars_but_asks_exhausted_sources():
    partial = PartialState()
    liar = Source(NEW, spoil=lambda index, chunk: b"x" * len(chunk))
    over = Source(NEW, spoil=lambda index, chunk: b"")
    assert fetch([liar, over], OLD, partial=partial)[0] is None
    liar, again = Source(NEW), Source(NEW)
    fetched, _ = fetch([liar, again], OLD, partial=partial)
    assert whole(fetched, OLD) == NEW and not liar.asked and again.asked


def test_unrequested_chunks_are_ignored():
    class Pusher(Source):
        def answer(self, message):
            if isinstance(message, StateAsk):
                return super().answer(message)
            wanted = super().answer(message)
            return Frame(StateChunk(message.round, (message.index + 1) % 10), wanted.payload)

    pusher, good = Pusher(NEW), Source(NEW)
    fetched, _ = fetch([pusher, good], OLD)
    assert whole(fetched, OLD) == NEW


def test_offer_without_proof_does_not_end_the_wait_for_others():
    """Honest peers apply a round first and answer later; the liar answers at once."""

    @accepting
    def proved(offer, chain):
        return offer.round < 900

    liar = Source(state(5), round=900)
    sources = [Source(NEW, delay=2.5 * PATIENCE), Source(NEW, delay=2.7 * PATIENCE), liar]
    fetched, _ = fetch(sources, OLD, accept=proved)
    assert whole(fetched, OLD) == NEW and not liar.asked
    mute = [Source(NEW, mute=True), Source(NEW, mute=True), liar]
    fetched, seconds = fetch(mute, OLD, accept=proved)
    assert fetched is None and not liar.asked and seconds <= MOST_PATIENCES * PATIENCE + 0.1


def test_newcomers_without_state_are_not_waited_for():
    """A founder and two newcomers like us, which have no state of any round."""
    newcomers = [Source(OLD), Source(OLD)]
    for one in newcomers:
        one.offer = StateOffer(0, state_digest(0, LAYOUT, (), one.hashes), LAYOUT, SIZE, ())
    fetched, _ = fetch([*newcomers, Source(NEW, delay=1.5 * PATIENCE)], OLD)
    assert whole(fetched, OLD) == NEW


def test_state_of_the_last_possible_round_is_refused():
    """The next round would have no number."""
    for round, good in ((LAST_ROUND, False), (LAST_ROUND - 1, True)):
        assert (fetch([Source(NEW, round=round)], OLD)[0] is not None) == good


RUN = (
    ChainEntry(
        Fork(0, LAYOUT, (), (PEERS[0],), bytes(LIFE), ()),
        (certificate(3, b"", {PEERS[0]: bytes(LIFE)}, PEERS[:1], {}),),
    ),
)
"""Chain of a run after round 3. The tests accept it as it is."""


def taken_over(founder, *before, round=3):
    """Return the chain of a lineage that this peer has founded alone after a round of the run."""
    return (*RUN, ChainEntry(Fork(round, LAYOUT, before, (founder,), bytes(LIFE), ())))


@pytest.mark.parametrize("first", [True, False])
def test_newcomer_takes_no_state_of_a_stranger_that_answers_first_or_last(first):
    """Any peer can found a lineage in a round that was published. It prevails until the run has its next round."""
    members, evil = PEERS[:3], PEERS[5]
    honest = [Source(NEW, members=tuple(members), chain=RUN, delay=0.1) for _ in members]
    stranger = Source(OLD, members=(evil,), chain=taken_over(evil, *members), delay=0.01 if first else 1.0)
    sources = [*honest, *(Source(NEW, mute=True) for _ in PEERS[3:5]), stranger]
    fetched, _ = fetch(sources, OLD)
    assert {*fetched.sources} <= {*members} and whole(fetched, OLD) == NEW


def test_newcomer_takes_the_state_of_peers_that_continued_without_any_member():
    """The members are gone; others that had joined have their state."""
    others = PEERS[2:4]
    sources = [
        *(Source(OLD, mute=True) for _ in PEERS[:2]),
        *(Source(NEW, members=tuple(others), chain=taken_over(others[0], *PEERS[:2])) for _ in others),
    ]
    fetched, _ = fetch(sources, OLD)
    assert fetched.sources == tuple(others)


def test_newcomer_takes_the_state_of_a_lineage_of_members():
    """Its parent has not continued, and a member that has not noticed yet offers it."""
    members = PEERS[:3]
    chain = taken_over(members[1], *members)
    sources = [
        Source(OLD, members=tuple(members), chain=RUN),
        *(Source(NEW, members=tuple(members[1:2]), chain=chain) for _ in members[1:]),
    ]
    fetched, _ = fetch(sources, OLD)
    assert fetched.chain == chain
