"""Admission tokens: chains of grants, invites that carry them, and their limits."""

from dataclasses import replace

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from thinwire.swarm.identity.admission_token import (
    MAX_GRANTS,
    AdmissionPolicy,
    Inviter,
    TokenError,
    decode,
    encode,
    expiry,
    is_revoked,
    preferred,
    revoke,
    serial,
    token_of,
)
from thinwire.swarm.identity.identity import Identity
from thinwire.swarm.identity.invite import Invite, Seed
from thinwire.swarm.identity.peer_record import MAX_NAME, PeerRecord
from thinwire.swarm.messages.registry import MAX_TOKEN, MemberProof

RUN = b"r" * 32
AUTHOR, ANN, BEN, CAROL = (Identity.generate(bytes([number]) * 32) for number in range(4))
CLOSED, INVITED, OPEN = (AdmissionPolicy(RUN, AUTHOR.public_key, longest) for longest in (2, MAX_GRANTS, 0))
BASE = Invite(RUN, (Seed("192.0.2.1:7000", b"k" * 32),))


def joined(policy, inviter, token, peer, *, named=False, expires=0):
    """Return the token of `peer` after an invite of `inviter`, which has `token`."""
    made = Inviter(inviter, token, policy).invite(BASE, peer.peer_id if named else None, expires=expires)
    assert made.secret == b"" if named else len(made.secret) == 32
    return token_of(Invite.parse(made.code()), peer)


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("policy", [CLOSED, INVITED])
def test_author_admits_a_peer_and_no_other(policy, named):
    token = joined(policy, AUTHOR, b"", ANN, named=named)
    assert policy.refusal(token, ANN.peer_id) == "" and policy.refusal(b"", AUTHOR.peer_id) == ""
    assert policy.refusal(b"", ANN.peer_id) and policy.refusal(token, BEN.peer_id)
    assert AdmissionPolicy(b"s" * 32, AUTHOR.public_key, 4).refusal(token, ANN.peer_id), "a token of another run"
    assert AdmissionPolicy(RUN, BEN.public_key, 4).refusal(token, ANN.peer_id), "of another author"
    assert OPEN.refusal(b"", ANN.peer_id) == ""


@pytest.mark.parametrize("policy", [CLOSED, INVITED])
def test_author_that_came_back_by_an_invite_still_invites_as_the_author(policy):
    token = joined(policy, AUTHOR, b"", AUTHOR)
    assert policy.refusal(joined(policy, AUTHOR, token, BEN), BEN.peer_id) == ""


def test_members_of_an_invited_run_invite_and_those_of_a_closed_one_do_not():
    ann = joined(INVITED, AUTHOR, b"", ANN)
    ben = joined(INVITED, ANN, ann, BEN)
    assert INVITED.refusal(ben, BEN.peer_id) == "" and CLOSED.refusal(ben, BEN.peer_id)
    with pytest.raises(TokenError, match="may not invite"):
        joined(INVITED, BEN, ben, CAROL)
    ann = joined(CLOSED, AUTHOR, b"", ANN)
    for named in (False, True):
        with pytest.raises(TokenError, match="may not invite"):
            joined(CLOSED, ANN, ann, BEN, named=named)
        with pytest.raises(TokenError, match="may not invite"):
            joined(INVITED, BEN, b"", CAROL, named=named)


@pytest.mark.parametrize("named", [False, True])
def test_invites_of_a_peer_end_with_its_own_token(named):
    ann = joined(INVITED, AUTHOR, b"", ANN, expires=100)
    made = Inviter(ANN, ann, INVITED, 100.0).invite(BASE, BEN.peer_id if named else None, expires=200)
    assert expiry(made.token) == 100
    with pytest.raises(TokenError, match="may not invite"):
        Inviter(ANN, ann, INVITED, 101.0).invite(BASE, BEN.peer_id if named else None)
    assert Inviter(AUTHOR, ann, INVITED, 101.0).invite(BASE).token, "the author needs no token"


def test_returning_peer_keeps_the_token_after_which_more_grants_may_follow():
    first = joined(INVITED, AUTHOR, b"", ANN, expires=100)
    longer = joined(INVITED, BEN, joined(INVITED, AUTHOR, b"", BEN), ANN)
    assert preferred(b"", longer, ANN.peer_id, 50.0) == longer, "nothing is stored"
    assert preferred(first, longer, ANN.peer_id, 50.0) == first
    assert preferred(longer, first, ANN.peer_id, 50.0) == first
    assert preferred(first, longer, ANN.peer_id, 101.0) == longer, "the stored one has expired"
    assert preferred(first, longer, BEN.peer_id, 50.0) == longer, "the stored one is of another key"
    assert preferred(b"damaged", longer, ANN.peer_id, 50.0) == longer
    assert preferred(first, b"", ANN.peer_id, 50.0) == first, "an invite of an open run has none"


def test_named_peers_may_invite_as_much_as_others():
    ann = joined(INVITED, AUTHOR, b"", ANN, named=True)
    assert decode(ann)[-1].further == decode(joined(INVITED, AUTHOR, b"", ANN))[-1].further
    assert INVITED.refusal(joined(INVITED, ANN, ann, BEN), BEN.peer_id) == ""


@pytest.mark.parametrize("place", range(4))
def test_a_chain_with_any_bit_changed_is_refused(place):
    chain = decode(joined(INVITED, ANN, joined(INVITED, AUTHOR, b"", ANN), BEN))
    good = chain[place]
    for changes in (
        {"subject": CAROL.peer_id},
        {"expires": good.expires + 1},
        {"further": (good.further + 1) % MAX_GRANTS},
        {"key": CAROL.public_key},
        {"signature": bytes(64)},
    ):
        bad = (*chain[:place], msgspec.structs.replace(good, **changes), *chain[place + 1 :])
        assert INVITED.refusal(encode(bad), BEN.peer_id), changes
    for shorter in (chain[:place], chain[place + 1 :], (*chain[:place], *chain[place + 1 :])):
        assert INVITED.refusal(encode(shorter), BEN.peer_id)


def test_a_subject_cannot_lengthen_what_it_was_granted():
    """Ann, who may not invite any more, signs a grant that gives more than she has."""
    ann = decode(joined(CLOSED, AUTHOR, b"", ANN))
    for further in range(MAX_GRANTS):
        forged = joined(INVITED, ANN, encode((*ann[:-1], msgspec.structs.replace(ann[-1], further=3))), BEN)
        grants = (*ann, msgspec.structs.replace(decode(forged)[2], further=further))
        assert INVITED.refusal(encode(grants), ANN.peer_id) and INVITED.refusal(forged, BEN.peer_id)


def test_an_invite_for_one_peer_or_with_another_secret_helps_no_other():
    named = Inviter(AUTHOR, b"", CLOSED).invite(BASE, ANN.peer_id)
    with pytest.raises(TokenError, match="is for peer"):
        token_of(named, BEN)
    with pytest.raises(TokenError, match="is for peer"):
        token_of(replace(Inviter(AUTHOR, b"", CLOSED).invite(BASE), secret=bytes(32)), BEN)


def test_standing_invite_stays_the_same_and_differs_by_run():
    made = Inviter(AUTHOR, b"", INVITED).invite(BASE)
    assert made == Inviter(AUTHOR, b"", INVITED).invite(BASE)
    other = AdmissionPolicy(b"s" * 32, AUTHOR.public_key, MAX_GRANTS)
    assert made.secret != Inviter(AUTHOR, b"", other).invite(BASE).secret
    assert Inviter(AUTHOR, b"", OPEN).invite(BASE) == BASE and serial(BASE) == ""


def test_expiry_is_the_first_of_the_chain():
    ann = joined(INVITED, AUTHOR, b"", ANN, expires=2000)
    assert expiry(ann) == 2000 and expiry(joined(INVITED, AUTHOR, b"", ANN)) == expiry(b"") == 0
    assert expiry(joined(INVITED, ANN, ann, BEN, expires=1000)) == 1000


def test_revocations_are_the_authors_and_touch_peers_and_invites():
    made = Inviter(AUTHOR, b"", INVITED).invite(BASE)
    ann = token_of(made, ANN)
    ben = joined(INVITED, ANN, ann, BEN)
    statement = revoke(AUTHOR, RUN, bytes.fromhex(serial(made)))
    target = INVITED.revocation(statement)
    assert is_revoked(ann, ANN.peer_id, target) and is_revoked(ben, BEN.peer_id, target)
    assert is_revoked(ben, BEN.peer_id, ANN.peer_id), "Ann has invited Ben"
    assert not is_revoked(ann, ANN.peer_id, BEN.peer_id) and not is_revoked(b"", CAROL.peer_id, target)
    assert is_revoked(b"", CAROL.peer_id, CAROL.peer_id)
    assert INVITED.revocation(revoke(ANN, RUN, BEN.peer_id)) == b""
    assert INVITED.revocation(revoke(AUTHOR, b"s" * 32, BEN.peer_id)) == b""
    for wrong in (b"", bytes(64), statement[:-1], b"x" + statement):
        assert INVITED.revocation(wrong) == b""
    for length in (7, 33):
        with pytest.raises(ValueError, match="bytes"):
            revoke(AUTHOR, RUN, bytes(length))


@pytest.mark.parametrize(("named", "expires", "size"), [(True, 0, 106), (False, 2**32 - 1, 247)])
def test_proof_of_a_new_member_has_the_size_that_the_documents_name(named, expires, size):
    """docs/design/agreement.md, "Lives": 142 bytes, and the token of an invite for one key, or for any peer."""
    token = joined(CLOSED, AUTHOR, b"", ANN, named=named, expires=expires)
    assert len(token) == size
    bare = MemberProof(2**32 - 1, bytes(32), ANN.public_key, bytes(64))
    assert len(msgspec.msgpack.encode(bare)) == 142


def test_longest_token_fits_in_a_record_with_the_longest_addresses():
    token = joined(INVITED, ANN, joined(INVITED, AUTHOR, b"", ANN), BEN, expires=2**32 - 1)
    assert len(decode(token)) == MAX_GRANTS and len(token) <= MAX_TOKEN
    hosts = tuple(f"{number}{'a' * 49}.example:65535" for number in range(8))
    made = PeerRecord.create(
        BEN, run_id=RUN, addresses=hosts, sequence=2**53 - 1, issued=2**32 - 1, token=token, name="n" * MAX_NAME
    )
    assert PeerRecord.parse(made.wire, run_id=RUN, now=2**32 - 1).token == token


@given(st.binary(max_size=700))
@settings(max_examples=100)
def test_random_bytes_are_no_token(data):
    assert INVITED.refusal(data, ANN.peer_id) and (not data or is_revoked(data, ANN.peer_id, BEN.peer_id))
