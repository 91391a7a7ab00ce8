"""Count of contributions and the warning of a peer that is always late."""

from thinwire.node.peer.reports.participation import ALWAYS, Participation


def counted(*contributed):
    count = Participation()
    return count, [count.add(one) for one in contributed]


def test_warning_is_due_once_per_series_of_missed_rounds():
    series = [False] * (ALWAYS + 2)
    _, due = counted(True, *series, True, *series)
    assert [place for place, one in enumerate(due) if one] == [ALWAYS, 2 * ALWAYS + 3]


def test_peer_that_missed_its_first_rounds_is_not_poor():
    """A peer that rejoined misses some rounds; if it leaves soon after that, there is nothing to warn of."""
    count, due = counted(False, False, False, True, True)
    assert not count.poor and not any(due)


def test_peer_that_missed_some_rounds_is_not_poor():
    assert not counted(*[True, False] * 10)[0].poor and not counted(*[False] * (2 * ALWAYS - 1))[0].poor
    assert counted(*[True, False, False] * 10)[0].poor


def test_warning_has_counts_reason_and_advice():
    count, _ = counted(False, True, False)
    text = count.text(10.0, [30.0, 40.0, 0.0, 35.0], balancing="equal")
    assert text == (
        "contributed to 1 of 3 rounds: this machine is 3.5 times slower than the others; "
        'set outer.step_balancing = "by-speed" in the run\'s manifest'
    )
    assert "always too late; lower outer.sync_every" in count.text(10.0, [11.0], balancing="by-speed")
    assert "always too late" in count.text(0.0, [], balancing="")


def test_peer_without_links_or_with_a_group_is_not_told_that_it_is_slow():
    count, _ = counted(False, True, False)
    assert count.text(10.0, [11.0], balancing="equal", unlinked=2) == (
        "contributed to 1 of 3 rounds: no link to 2 of the other members; `thinwire status --peers` gives the reasons"
    )
    assert "3.0 times slower" in count.text(10.0, [30.0], balancing="equal", unlinked=2), "one may just have died"
    assert count.text(10.0, [30.0], balancing="equal", group="2 of 3 stages") == (
        "contributed to 1 of 3 rounds: its group was too slow, or a stage was missing for a while (2 of 3 stages)"
    )


def test_peer_that_contributed_to_most_rounds_is_warned_only_when_it_is_poor():
    """A disturbance of some rounds is not lateness."""
    _, due = counted(*[True] * 8, *[False] * 10)
    assert [place for place, one in enumerate(due) if one] == [16], "in the ninth missed round of seventeen"
