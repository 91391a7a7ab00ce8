"""Message to the owner of a published run."""

import asyncio
from types import SimpleNamespace

import pytest
from thinwire.node.daemon import announcing
from thinwire.swarm.manifest.parser import parse


@pytest.mark.parametrize(("mode", "invite"), [("open", False), ("invited", True), ("closed", True)])
def test_owner_is_told_that_an_entry_of_a_directory_is_no_invite(monkeypatch, mode, invite):
    told = []

    async def announce(directory, card, published, addresses):
        published()

    async def main():
        monkeypatch.setattr(announcing, "open_directory", lambda config, **settings: SimpleNamespace())
        monkeypatch.setattr(announcing, "announce", announce)
        report = SimpleNamespace(emit=lambda name, fields: told.append((name, fields["detail"])))
        run = announcing.Announcing(None, report, public=False, lan=True)
        run.begin(lambda: SimpleNamespace(manifest=parse(f'[admission]\nmode = "{mode}"')))
        await asyncio.sleep(0)

    asyncio.run(main())
    ((name, detail),) = told
    assert name == "published" and detail.startswith("the run is in the directory")
    assert ("invite" in detail) == invite == (f"admission.mode = '{mode}'" in detail)
