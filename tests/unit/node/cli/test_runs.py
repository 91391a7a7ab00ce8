"""Runs that the command prints."""

import json

import pytest
from thinwire.node.cli import runs
from thinwire.node.discovery.public_runs import DirectoryError
from thinwire.node.runtime.load_settings import load


@pytest.mark.parametrize("as_json", [False, True])
def test_runs_of_this_machine_are_printed_although_the_directory_fails(tmp_path, monkeypatch, capsys, as_json):
    def open_directory(config, **options):
        raise DirectoryError("no bootstrap node answers", "check the bootstrap addresses")

    monkeypatch.setattr(runs, "open_directory", open_directory)
    with pytest.raises(DirectoryError):
        runs.show(load({"home": tmp_path}, {}), lan=True, as_json=as_json)
    out = capsys.readouterr().out
    assert (json.loads(out) == {"here": [], "directory": []}) if as_json else ("no runs in the directory" not in out)
