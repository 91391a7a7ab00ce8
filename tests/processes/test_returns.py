"""Return of the only daemon that can be dialled: the others announce an address without a process."""

import pytest

pytestmark = pytest.mark.trial
NOWHERE = "--advertise", "127.0.0.1:1"


@pytest.mark.parametrize("founder", [True, False])
def test_only_peer_that_can_be_dialled_returns(machine, founder):
    """The founder, or another one after the founder is gone for good, joins the peers that come to its gate."""
    shared = machine(rounds=100_000, steps=4)
    only = first = shared.found("first", "--wait-for", 3)
    invite = first.invite()
    if not founder:
        only = shared.join("second", invite)
    others = [shared.join(name, invite, *NOWHERE) for name in (("third", "fourth") if founder else ("third",))]
    for daemon in shared.daemons.values():
        daemon.wait("round", contributors=3, least=3)
    if not founder:
        first.kill()
        first.exit()
    for daemon in others:
        daemon.wait("round", contributors=1 + len(others), least=max(one.round for one in others) + 1)
    only.kill()
    only.exit()
    left = max(daemon.round for daemon in others)
    again = shared.found("first") if founder else shared.join("second", invite)
    for daemon in (again, *others):
        daemon.wait("round", contributors=1 + len(others), least=left + 2)
    assert not again.of("lineage")
    assert shared.check()
