"""Invites for one peer, and revocations, between real daemons of a closed run."""

from __future__ import annotations

import json

from thinwire.node.peer.status import read_status
from thinwire.node.runtime.directories import directories
from thinwire.swarm.identity.invite import Invite


def code_of(done):
    """Return the code that `thinwire invite` printed, and the command that takes it back."""
    assert done.returncode == 0, done.stderr
    return done.stdout.split()[-1], done.stderr.strip().removeprefix("to take it back: thinwire ").split()


def id_of(daemon):
    return json.loads(daemon.command("id", "--json").stdout)["peer"]


def test_closed_run_admits_the_invited_and_excludes_the_revoked(machine):
    here = machine(exchange="[admission]\nmode = 'closed'")
    author = here.found("author")
    author.wait("ready")
    base = Invite.parse(author.newest_invite())
    code, _ = code_of(author.command("invite", "--for", id_of(here.daemon("ann")), "--expires", "7d"))
    ann = here.join("ann", code)
    ann.wait("round", contributors=2)

    other = here.join("other", code)
    assert other.exit() == 5 and "is for peer" in other.complaint()[0]
    bare = here.join("bare", Invite(base.run_id, base.seeds).code())
    assert bare.exit() == 5
    error, hint = bare.complaint()
    assert "refused us (token)" in error and "invite" in hint

    refused = ann.command("invite")
    assert refused.returncode == 4 and "may not invite" in refused.stderr
    refused = ann.command("revoke", author.id)
    assert refused.returncode == 5 and "only the author" in refused.stderr

    code, taken_back = code_of(author.command("invite", "--expires", "1h"))
    ben = here.join("ben", code)
    ben.wait("round", contributors=3)
    done = author.command(*taken_back)
    assert done.returncode == 0, done.stderr
    assert ben.exit() == 5
    assert "revoked" in ben.complaint()[0]
    author.wait("banned", peer=ben.id)
    ann.wait("banned", peer=ben.id)
    author.wait("round", least=author.round + 2, contributors=2)
    said = read_status(directories(author.home).status)
    assert "revoked" in next(peer.reason for peer in said.peers if peer.peer == ben.id)
    again = here.join("ben", code)
    assert again.exit() == 5

    done = author.command("revoke", ann.id[:8])
    assert done.returncode == 0 and ann.id in done.stdout
    assert ann.exit() == 5
    here.check()
