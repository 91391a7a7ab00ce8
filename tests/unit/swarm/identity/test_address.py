"""Subnets of addresses; tests of records and invites cover the rest."""

import pytest
from thinwire.swarm.identity.address import source_of, subnet_of


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


def test_source_of_an_address_is_its_subnet_or_its_name():
    addresses = ["45.1.2.3:7400", "45.1.2.4:7401", "45.1.3.3:7400", "[2a00:1:2:3::1]:7400", "example.org:7400"]
    for _ in range(2):  # the second time from the cache
        sources = [source_of(address) for address in addresses]
        assert sources == ["45.1.2.0/24", "45.1.2.0/24", "45.1.3.0/24", "2a00:1:2::/48", "example.org"]
        with pytest.raises(ValueError):
            source_of("45.1.2.3:0")
