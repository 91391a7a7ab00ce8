"""Judgement of the addresses at which others see a peer."""

import pytest
from thinwire.collectives.transport.addresses.observed_addresses import Reach, Sighting, judge

OUT, LIE, LOCAL = "198.51.7.9", "6.6.6.6", "192.168.0.5:50000"
A, B, C, D = "45.1.1.1:7400", "45.2.1.1:7400", "45.3.1.1:7400", "45.1.1.2:7400"  # A and D: one /24


def sight(by, host, port=50000, reached=None, local=LOCAL):
    return Sighting(by, local, f"{host}:{port}", reached, 7400)


@pytest.mark.parametrize(
    ("sightings", "nat", "host", "reached"),
    [
        ([], "unknown", "", None),
        ([sight(A, "192.168.0.5")], "none", "192.168.0.5", None),
        ([sight(A, "192.168.0.5", reached=True)], "none", "192.168.0.5", True),
        ([sight(A, OUT)], "unknown", OUT, None),  # one peer cannot tell the kind of the mapping
        ([sight(A, OUT), sight(B, OUT)], "cone", OUT, None),
        ([sight(A, OUT, 1), sight(B, OUT, 2)], "symmetric", OUT, None),
        ([sight(A, OUT, 1), sight(B, OUT, 2, local="192.168.0.5:50001")], "unknown", OUT, None),
        ([sight(A, OUT, reached=False), sight(B, OUT, reached=True)], "cone", OUT, True),
        ([sight(A, OUT, reached=False), sight(B, OUT)], "cone", OUT, False),
        # A peer of our own network cannot tell the outside.
        ([sight("192.168.0.9:7400", "192.168.0.5"), sight(A, OUT)], "unknown", OUT, None),
        # Liars: one against one, one against two subnets, two of one subnet against two subnets.
        ([sight(A, OUT), sight(B, LIE)], "unknown", "", None),
        ([sight(A, OUT), sight(B, OUT), sight(C, LIE, reached=True)], "cone", OUT, None),
        ([sight(A, LIE), sight(D, LIE), sight(B, OUT), sight(C, OUT)], "cone", OUT, None),
        ([sight(A, LIE), sight(D, LIE), sight(B, OUT)], "unknown", "", None),
        # Two hosts that two subnets claim each: a machine with two ways out, or liars. Neither is believed.
        ([sight(A, OUT), sight(B, OUT), sight(C, LIE), sight(D, LIE)], "unknown", "", None),
        # A liar against peers that see the internet address that we have.
        ([*(sight(one, OUT, local=f"{OUT}:50000") for one in (A, B)), sight(C, LIE, reached=True, local=f"{OUT}:50000")],
         "none", OUT, None),
        # What is no address counts as nothing.
        ([sight(A, OUT), sight(B, "0.0.0.0"), Sighting(C, LOCAL, "x", True), Sighting("y:1", LOCAL, "z:1", None)],
         "unknown", OUT, None),
    ],
)  # fmt: skip
def test_believed_host_needs_two_subnets_or_no_other_claim(sightings, nat, host, reached):
    for order in (sightings, sightings[::-1]):
        assert judge(order) == Reach(nat, f"{host}:7400" if host else "", reached)


def test_announced_addresses_begin_with_the_one_that_was_reached():
    own, gate = ("192.168.0.5:7400",), f"{OUT}:7400"
    assert Reach("cone", gate, True).addresses(own) == (gate, *own)
    assert Reach("cone", gate, False).addresses(own) == own
    assert Reach("cone", gate, None).addresses(own) == own
    assert Reach("none", "192.168.0.5:7400", True).addresses(own) == own
    seen = Sighting(A, "[fd00::5]:1", "[2a00::1]:1", True, 7400)
    assert judge([seen]).addresses(own)[0] == "[2a00::1]:7400"


def test_text_for_people():
    assert str(Reach()) == "" and str(Reach("none")) == "no address translation"
    assert str(Reach("symmetric", f"{OUT}:7400", False)) == (
        f"{OUT}:7400, not reached there by others, symmetric address translation"
    )
