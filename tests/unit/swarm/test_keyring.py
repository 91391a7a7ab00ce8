"""Keyring: signatures of a peer, and keys that are only known for a while."""

from thinwire.swarm.identity.identity import Identity
from thinwire.swarm.keyring import Keyring
from thinwire.swarm.messages.registry import Ask

RUN = bytes(32)
ANN, BEN, CAT = (Identity.generate(bytes([index]) * 32) for index in range(3))
ASK = Ask(1, 0)


def ring(identity, *known):
    keys = {one.peer_id: one.public_key for one in known}
    return Keyring(identity, RUN, keys.get)


def test_verify_accepts_signatures_of_this_peer_and_of_known_peers_only():
    ours, signed = ring(ANN, BEN), {one.peer_id: ring(one).sign(ASK) for one in (ANN, BEN, CAT)}
    assert [ours.verify(one.peer_id, ASK, signed[one.peer_id]) for one in (ANN, BEN, CAT)] == [True, True, False]
    assert not ours.verify(ANN.peer_id, ASK, signed[BEN.peer_id]) and not ours.verify(
        BEN.peer_id, Ask(2, 0), signed[BEN.peer_id]
    )


def test_borrowed_keys_count_for_the_named_peers_until_they_are_forgotten():
    ours, signature = ring(ANN), ring(CAT).sign(ASK)
    ours.borrow([CAT.public_key, BEN.public_key], [CAT.peer_id])
    assert ours.verify(CAT.peer_id, ASK, signature) and ours.key_of(BEN.peer_id) is None
    ours.forget()
    assert not ours.verify(CAT.peer_id, ASK, signature)


def test_with_keys_knows_more_peers_without_storing_them():
    ours, signature = ring(ANN, BEN), ring(CAT).sign(ASK)
    verify = ours.with_keys([CAT.public_key])
    assert verify(CAT.peer_id, ASK, signature) and verify(BEN.peer_id, ASK, ring(BEN).sign(ASK))
    assert ours.key_of(CAT.peer_id) is None
