"""Subnets of addresses; tests of records and invites cover the rest."""

import pytest
from thinwire.swarm.identity.address import subnet_of


@pytest.mark.parametrize(
    ("host", "subnet"),
    [
        ("45.1.2.3", "45.1.2.0/24"),
        ("::ffff:45.1.2.3", "45.1.2.0/24"),
        ("2a00:1:2:3::1", "2a00:1:2::/48"),
    ],
)
def test_subnet_counts_as_one_source(host, subnet):
    assert subnet_of(host) == subnet


def test_name_has_no_subnet():
    with pytest.raises(ValueError):
        subnet_of("example.org")
