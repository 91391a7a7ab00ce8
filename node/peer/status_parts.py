"""Parts of a peer's status: lineages, links, fragments, transfers of states, and waits for a quorum."""

from __future__ import annotations

from thinwire.node.outer.round_session import RoundSession
from thinwire.node.peer.peer import Peer
from thinwire.node.peer.status import FragmentStatus, LinkStatus, Stall, StateTransfer
from thinwire.node.runtime.console import bytes_text
from thinwire.swarm.identity.identity import short
from thinwire.swarm.messages.announcement import SPAN_PREFIX
from thinwire.swarm.quantized_links import LEAST_RATE, LEAST_RTT, value


def lineages(peer: Peer) -> list[str]:
    """Return the names of the lineages of a peer's fragments, without the first one."""
    return sorted({one.lineage.hex() for _, one, _ in peer.replica.each(peer.layout) if len(one.chain) > 1})


def links_known(peer: Peer) -> tuple[LinkStatus, ...]:
    """Return what this peer has measured of its links, and what present peers have announced of theirs."""
    me, rates = peer.identity.peer_id, peer.presence.send_queue.link_rates.rates(peer.environment.now())
    roster, announced = peer.session.roster, peer.session.announced
    trips = {other: roster.distances.rtt(other) for other in peer.session.live}
    found = [(me[:SPAN_PREFIX], other[:SPAN_PREFIX], trip, rates.get(other, 0.0)) for other, trip in trips.items()]
    for sender in peer.session.live:
        ready = announced.get(sender)
        for span in ready.spans if ready is not None else ():
            found.append((sender[:SPAN_PREFIX], span.peer, value(span.rtt, LEAST_RTT), value(span.rate, LEAST_RATE)))
    return tuple(
        LinkStatus(sender.hex(), receiver.hex(), rtt, rate)
        for sender, receiver, rtt, rate in sorted(found)
        if rtt or rate
    )


def fragments_of(peer: Peer) -> tuple[FragmentStatus, ...]:
    """Return the fragments with separate rounds; empty if there is only one."""
    if peer.manifest.outer.fragment_count == 1:
        return ()
    return tuple(
        FragmentStatus(
            fragment=number,
            round=one.round,
            members=tuple(short(member) for member in one.members),
            lineage=one.lineage.hex() if len(one.chain) > 1 else "",
        )
        for number, one, _ in peer.replica.each(peer.layout)
    )


def stalls(peer: Peer) -> tuple[Stall, ...]:
    """Return the waits of a peer for a quorum, by fragment.

    Empty if quorums are here, or if the method needs none.
    """
    now = peer.environment.now()
    return tuple(_stall(session, now) for session in without_quorum(peer))


def transfers(peer: Peer) -> tuple[StateTransfer, ...]:
    """Return the transfers of states to a peer that are in progress, by fragment."""
    return tuple(
        StateTransfer(
            fragment=number,
            round=one.round,
            bytes=one.nbytes,
            here=one.here,
            sources=tuple(source.hex() for source in one.sources),
            seconds=session.catch_up.fetcher.progress.seconds,
            silence=session.catch_up.fetcher.progress.silence,
        )
        for number, session in sorted(peer.session.sessions.items())
        if (one := session.catch_up.fetcher.progress.transfer) is not None
    )


def fetching(peer: Peer) -> str:
    """Return the transfers of states to a peer, and the waits for them, as text; empty if there is none."""
    texts = []
    for session in peer.session.sessions.values():
        progress = session.catch_up.fetcher.progress
        if (one := progress.transfer) is not None:
            parts = f"{bytes_text(one.here)} of {bytes_text(one.nbytes)} of the state of round {one.round}"
            count = len(one.sources)
            text = f"{parts} from {count} peer{'' if count == 1 else 's'}, for {progress.seconds:.0f} s"
            texts.append(", ".join(filter(None, (text, progress.waits))))
        elif text := progress.search:
            texts.append(f"waits {text}")
    return " · ".join(texts)


def without_quorum(peer: Peer) -> list[RoundSession]:
    """Return the sessions that wait for a quorum."""
    sessions = peer.session.sessions.values() if peer.ready else ()
    return [one for one in sessions if isinstance(one, RoundSession) and one.quorum_wait.since is not None]


def _stall(session: RoundSession, now: float) -> Stall:
    agreement, wait, members = session.current.agreement, session.quorum_wait, session.replica.members
    here = [peer for peer in members if peer in session.live and peer not in agreement.electorate.nonvoters]
    obstacle = ""
    if session.states.held:
        obstacle = "a state is being fetched"
    elif agreement.diverged:
        obstacle = "most of the members have another state, which must be fetched"
    return Stall(
        fragment=session.fragment,
        round=session.replica.round,
        members=tuple(peer.hex() for peer in members),
        absent=tuple(peer.hex() for peer in agreement.electorate.absent if peer != session.me),
        founders=tuple(peer.hex() for peer in sorted({session.me, *here})),
        seconds=max(0.0, now - (wait.since or 0.0)),
        until=None if wait.until is None else max(0.0, wait.until - now),
        obstacle=obstacle,
    )
