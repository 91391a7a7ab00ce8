"""Limit of open files: too low, low, enough."""

import resource

import pytest
from thinwire.node.runtime import open_files
from thinwire.node.runtime.open_files import TooFewFilesError, check_open_files


@pytest.fixture
def limits(monkeypatch):
    """Limits of this process: [soft, hard]."""
    found = [1024, 1024]
    monkeypatch.setattr(resource, "getrlimit", lambda which: tuple(found))
    monkeypatch.setattr(resource, "setrlimit", lambda which, both: found.__setitem__(slice(None), both))
    return found


def test_open_files_too_few_for_one_link_are_an_error(limits):
    limits[:] = [24, 24]
    with pytest.raises(TooFewFilesError, match="only 24 files") as caught:
        check_open_files()
    assert caught.value.exit_code == 3 and "ulimit -n" in caught.value.hint


def test_open_files_for_few_links_are_a_warning_with_their_number(limits):
    limits[:] = [64, 64]
    links = (64 - open_files.OWN) // open_files.PER_LINK
    assert f"only 64 files, enough for about {links} peers" in check_open_files()


def test_open_files_soft_limit_is_extended_to_the_hard_one_if_asked(limits):
    limits[:] = [64, 4096]
    assert "only 64" in check_open_files() and limits == [64, 4096]
    assert check_open_files(extend=True) == "" and limits == [4096, 4096]
    limits[:] = [64, resource.RLIM_INFINITY]
    assert check_open_files(extend=True) == ""
