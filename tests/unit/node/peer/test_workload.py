"""Inner steps and data of a peer, for scripted states of its run."""

from types import SimpleNamespace

import pytest
from thinwire.node.peer.workload import Workload
from thinwire.swarm.manifest.parser import parse

ME, OTHER, THIRD = (bytes([n]) * 32 for n in (1, 2, 3))


def workload(
    outer="", *, round=4, announced=(), members=(ME, OTHER), alive=(), alike=True, ledger=None, turn=0, trial=()
):
    view = SimpleNamespace(peers=(ME, OTHER, THIRD))
    roster = SimpleNamespace(
        peers=SimpleNamespace(is_live=lambda peer: peer in alive, view=view), on_trial=lambda peer: peer in trial
    )
    return Workload(
        parse(outer),
        ME,
        replica=SimpleNamespace(
            round=round, members=members, leaseholders=members, alike=alike, ledger=ledger, complete=True
        ),
        session=SimpleNamespace(announced=dict(enumerate(announced)), roster=roster),
        rounds=SimpleNamespace(turn=turn, next_cut=0, on_trial=False),
    )


@pytest.mark.parametrize(
    "round, members, group",
    [
        (0, (ME,), (ME, OTHER, THIRD)),  # the founder shares the data from the first round on
        (3, (ME, OTHER), (ME, OTHER)),
        (3, (OTHER, THIRD), (ME, OTHER, THIRD)),  # not yet a member: as if we were already counted
    ],
)
def test_data_is_divided_among_members_and_self(round, members, group):
    share = workload(round=round, members=members).share(0)
    assert (share.group, share.me, share.round, share.lease) == (group, ME, round, None)


@pytest.mark.parametrize(
    "round, members, group", [(0, (ME,), (ME, OTHER)), (3, (OTHER,), (ME, OTHER)), (3, (THIRD,), (ME, OTHER, THIRD))]
)
def test_keys_on_trial_take_no_data(round, members, group):
    """There may be any number of them; a member stays one. This peer may be on trial, too."""
    run = '[admission]\nmode = "open"\n'
    assert workload(run, round=round, members=members, trial=(ME, THIRD)).share(0).group == group


def test_data_is_divided_among_all_live_peers_when_replicas_differ():
    assert workload(round=3, alike=False).share(0).group == (ME, OTHER, THIRD)


def test_share_begins_after_the_steps_of_earlier_rounds_and_those_made_already():
    assert workload("[outer]\nsync_every = 12", turn=3).share(2).step == 3 * 12 + 2


@pytest.mark.parametrize(("members", "samples"), [((ME, OTHER, THIRD), 4), ((OTHER, ME, THIRD), 3), ((OTHER,), 5)])
def test_lease_has_this_members_part_of_the_global_batch(members, samples):
    """Of ten samples the first member has one more; a peer that is no member asks with its own batch."""
    asked = []
    ledger = SimpleNamespace(lease=lambda *given: asked.append(given) or "lease")
    once = "[data]\nexactly_once = true\n[inner]\nbatch = 5\nglobal_batch = 10"
    assert workload(once, members=members, ledger=ledger).share(0).lease == "lease"
    assert asked == [(members, ME, 4, samples)]


def test_inner_steps_follow_the_manifest_and_speed():
    power = "[outer]\nsync_every = 12\nstep_balancing = 'by-speed'"
    silent = SimpleNamespace(speed=7.0, round=1)  # for too long
    told = [SimpleNamespace(speed=400.0, round=4)] * 2 + [silent]
    assert workload("[outer]\nsync_every = 12", announced=told).steps(100.0) == 12
    assert workload(power, announced=told).steps(100.0) == 3
    assert workload(power, announced=told).steps(0.0) == 3  # not measured yet: a quarter
    assert workload(power).steps(100.0) == 12
    merge = "[outer]\nmethod = 'merge'\nsync_every = 9"
    assert (workload(merge, round=0).steps(100.0), workload(merge, round=1).steps(100.0)) == (0, 9)


def test_untrained_peer_contributes_only_where_needed():
    merge = "[outer]\nmethod = 'merge'"
    weights = [one.idle_weight for one in (workload(merge, round=0), workload(merge, round=1), workload())]
    assert weights == [1, 0, 0]
    once = "[data]\nexactly_once = true"
    stranger = workload(once, members=(OTHER, THIRD), alive=(THIRD,), ledger=object())
    orphan = workload(once, members=(OTHER, THIRD), ledger=object())
    assert (stranger.idle_weight, orphan.idle_weight) == (0, 1)
