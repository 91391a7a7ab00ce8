"""Commands that cannot work end with their exit code, one `error:` line and one `hint:` line."""

from __future__ import annotations

import json
import shutil
import signal
import socket
import subprocess
from pathlib import Path

import pytest
from kit.daemons import COMMAND
from thinwire.node.peer.status import read_status
from thinwire.node.runtime.directories import directories
from thinwire.swarm.identity.identity import Identity
from thinwire.swarm.identity.invite import Invite, Seed

DOCS = Path(__file__).parents[2] / "docs"
"""Text with words that a peer can learn by heart; in random words there is nothing to learn."""


@pytest.fixture(scope="module")
def founder(shared_machine):
    """Daemon that runs during all tests."""
    daemon = shared_machine.found("founder")
    daemon.wait("ready")
    return daemon


@pytest.fixture
def refused(shared_machine, tmp_path):
    """Run a command in a fresh home to its end; return exit code, error and hint.

    Fail on other output, and if a run's folder remains.
    """

    def run(*arguments):
        daemon = shared_machine.daemon(tmp_path.name)
        daemon.run(*arguments)
        code = daemon.exit()
        assert daemon.stdout == ""
        assert not list(directories(daemon.home).runs.glob("*"))
        return code, *daemon.complaint()

    return run


def _quiet(machine, tmp_path):
    """Return True if stderr has only the two lines."""
    return len(machine.daemon(tmp_path.name).stderr.splitlines()) == 2


def _start(machine, *more):
    return ["start", machine.manifest, "--host", "127.0.0.1", "--threads", 1, "--data", machine.text, *more]


def test_start_with_unknown_manifest_key_suggests_the_right_one(refused, shared_machine, tmp_path):
    manifest = tmp_path / "run.toml"
    manifest.write_text("[outer]\nsync_evry = 3\n")
    code, error, hint = refused("start", manifest)
    assert code == 2 and "sync_evry" in error and "did you mean" in hint and "sync_every" in hint
    assert _quiet(shared_machine, tmp_path)


def test_join_with_typo_in_invite_is_refused(refused, shared_machine, tmp_path):
    code = Invite(bytes(32), (Seed("127.0.0.1:9", bytes(32)),)).code()
    swapped = code[:20] + ("b" if code[20] != "b" else "c") + code[21:]
    exit_code, error, hint = refused("join", swapped)
    assert exit_code == 2 and "typo" in error and "copy" in hint
    assert _quiet(shared_machine, tmp_path)


def test_start_with_empty_data_folder_is_refused(refused, shared_machine, tmp_path):
    empty = tmp_path / "empty"
    empty.mkdir()
    code, error, hint = refused("start", shared_machine.manifest, "--data", empty)
    assert code == 2 and str(empty) in error and "text" in hint
    assert _quiet(shared_machine, tmp_path)


def test_start_with_missing_device_is_refused(refused, shared_machine, tmp_path):
    code, error, hint = refused(*_start(shared_machine, "--device", "cuda:63"))
    assert code == 3 and "cuda:63" in error and "cpu" in hint
    assert _quiet(shared_machine, tmp_path)


@pytest.mark.parametrize("content", ["", "not a key\n", "\0" * 100], ids=["empty", "text", "zeros"])
def test_garbage_in_key_file_is_refused_and_left_alone(refused, shared_machine, tmp_path, content):
    home = shared_machine.daemon(tmp_path.name).home
    home.mkdir()
    key = home / "identity.key"
    key.write_text(content)
    key.chmod(0o600)
    code, error, hint = refused("id")
    assert code == 3 and str(key) in error and "restore" in hint
    assert _quiet(shared_machine, tmp_path) and key.read_text() == content


def test_key_file_readable_by_others_is_refused(refused, shared_machine, tmp_path):
    home = shared_machine.daemon(tmp_path.name).home
    home.mkdir()
    key = home / "identity.key"
    key.write_text("whatever")
    key.chmod(0o644)
    code, error, hint = refused("id")
    assert code == 3 and "0644" in error and "chmod 600" in hint
    assert _quiet(shared_machine, tmp_path)


def test_joiner_with_the_key_of_the_peer_that_answers_is_refused_at_once(refused, shared_machine, tmp_path, founder):
    """The other one continues. Two processes that are alone with one key cannot learn this from a third peer."""
    home, before = shared_machine.daemon(tmp_path.name).home, founder.round
    home.mkdir()
    shutil.copy(founder.home / "identity.key", home / "identity.key")
    code, error, hint = refused("join", founder.newest_invite(), "--host", "127.0.0.1", "--search", "600")
    assert code == 5 and "another process with the key of this peer runs at 127.0.0.1:" in error and "--home" in hint
    founder.wait("round", least=before + 1)


def test_start_on_taken_port_is_refused(refused, shared_machine):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, error, hint = refused(*_start(shared_machine, "--port", port))
    assert code == 3 and str(port) in error and "port" in hint


def test_start_in_home_of_running_daemon_is_refused(shared_machine, founder):
    """The running daemon is not affected."""
    before, process, stdout = founder.round, founder.process, founder.stdout
    other = shared_machine.daemon("visitor")
    other.home.symlink_to(founder.home)
    code = other.run(*_start(shared_machine)).exit()
    error, hint = other.complaint()
    assert code == 3 and str(process.pid) in error and "--home" in hint
    founder.wait("round", least=before + 1)
    assert founder.stdout == stdout


def test_join_with_invite_of_another_run_is_refused(refused, founder):
    """The address is right but the run is not: the error names the run there, and there is no retry."""
    invite = Invite.parse(founder.invite())
    other = Invite(bytes(range(32)), invite.seeds)
    code, error, hint = refused("join", other.code(), "--host", "127.0.0.1")
    assert code == 5 and invite.seeds[0].address in error and "invite" in hint


def test_join_with_unreachable_seed_is_refused(refused):
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    invite = Invite(bytes(32), (Seed(f"127.0.0.1:{port}", bytes(32)),))
    code, error, hint = refused("join", invite.code(), "--host", "127.0.0.1", "--search", 1)
    assert code == 4 and str(port) in error and "invite" in hint


def test_second_signal_ends_daemon_at_once(machine):
    """The first signal lets it finish the round, which takes long here: one of two needed peers is missing."""
    here = machine(exchange="min_peers = 2")
    lonely = {130: (here.found("a"), signal.SIGINT), 143: (here.found("b"), signal.SIGTERM)}
    for code, (daemon, number) in lonely.items():
        daemon.wait("phase", phase="announce")
        daemon.signal(number)
        daemon.wait_for_stderr("once more to stop at once")
        daemon.signal(number)
        assert daemon.exit() == code


@pytest.mark.trial
@pytest.mark.parametrize(
    ("command", "number"),
    [
        ("start --local 2 {run}", signal.SIGINT),
        ("sim churn-storm --out {out}", signal.SIGTERM),
        ("doctor {invite}", signal.SIGINT),
        pytest.param("start --local 2 {run}", signal.SIGTERM, marks=pytest.mark.soak),
        pytest.param("sim churn-storm --out {out}", signal.SIGINT, marks=pytest.mark.soak),
        pytest.param("doctor {invite}", signal.SIGTERM, marks=pytest.mark.soak),
    ],
)
def test_first_signal_ends_a_command_that_does_not_train_with_its_code(command, number, shared_machine, tmp_path):
    """Each command runs in a separate process, and is at work when the signal comes."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        invite = Invite(
            bytes(32), (Seed(f"127.0.0.1:{silent.getsockname()[1]}", Identity.generate().transport_public),)
        )
        words = command.format(run=shared_machine.manifest, out=tmp_path / "sim", invite=invite.code()).split()
        home = () if words[0] == "sim" else ("--home", tmp_path / "home")
        started = subprocess.Popen(
            [COMMAND, *words, *home],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            cwd=tmp_path,
            start_new_session=True,
        )
        assert started.stdout is not None
        if words[0] == "doctor":
            silent.accept()
        else:
            started.stdout.readline()
        started.send_signal(number)
        said = started.communicate(timeout=120)[0].decode()
        assert started.returncode == 128 + number, said
        assert "Traceback" not in said


def test_first_signal_ends_search_for_peers(machine):
    """The daemon does not wait for a round, because there is none."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        invite = Invite(bytes(32), (Seed(f"127.0.0.1:{silent.getsockname()[1]}", bytes(32)),))
        daemon = machine().join("seeker", invite.code())
        daemon.wait("start")
        daemon.signal(signal.SIGTERM)
        assert daemon.exit() == 0


@pytest.mark.trial
@pytest.mark.parametrize("out", ["closed", "unread"])
def test_start_runs_on_when_stdout_is_closed_or_unread(machine, out):
    here = machine()
    daemon = here.daemon("founder")
    words = {"closed": 'exec "$@" >&-', "unread": '"$@" | true; exit ${PIPESTATUS[0]}'}
    daemon.program = ("bash", "-c", words[out], "bash", COMMAND)
    here.found("founder", "--rounds", 2)
    assert daemon.exit() == 0, daemon.stderr
    assert daemon.of("round")[-1]["round"] == 2 and "error:" not in daemon.stderr


@pytest.mark.trial
def test_daemon_under_nohup_survives_sighup(machine):
    here = machine()
    daemon = here.daemon("founder")
    daemon.program = ("nohup", COMMAND)
    here.found("founder").wait("ready")
    daemon.wait("round", after=daemon.signal(signal.SIGHUP))
    daemon.signal(signal.SIGTERM)
    assert daemon.exit() == 0


def _code_of(done):
    """Return the code that `thinwire invite` printed, and the command that takes it back."""
    assert done.returncode == 0, done.stderr
    return done.stdout.split()[-1], done.stderr.splitlines()[-1].removeprefix("to take it back: thinwire ").split()


def _id_of(daemon):
    return json.loads(daemon.command("id", "--json").stdout)["peer"]


@pytest.mark.trial
def test_closed_run_admits_the_invited_and_excludes_the_revoked(machine):
    here = machine(exchange="[admission]\nmode = 'closed'")
    author = here.found("author")
    author.wait("ready")
    base = Invite.parse(author.newest_invite())
    code, _ = _code_of(author.command("invite", "--for", _id_of(here.daemon("ann")), "--expires", "7d"))
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

    refused = author.command("revoke", author.id)
    assert refused.returncode == 2 and "the author of the run" in refused.stderr

    code, taken_back = _code_of(author.command("invite", "--expires", "1h"))
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
    refused = author.command("invite", "--for", ben.id)
    assert refused.returncode == 2 and "is banned (" in refused.stderr

    done = author.command("revoke", ann.id[:8])
    assert done.returncode == 0 and ann.id in done.stdout
    assert ann.exit() == 5
    here.check()


def test_open_run_makes_a_stranger_a_member_after_its_trial(machine):
    """The second peer has an invite for its key, the third one only an address."""
    here = machine(exchange="[admission]\nmode = 'open'\ntrial_rounds = 3", steps=20)
    here.text.write_text("\n".join(page.read_text() for page in sorted(DOCS.glob("*.md"))))
    author = here.found("author")
    author.wait("ready")
    assert not Invite.parse(author.newest_invite()).token
    code, _ = _code_of(author.command("invite", "--for", _id_of(here.daemon("ann"))))
    ann = here.join("ann", code)
    ann.wait("round", contributors=2)
    bob = here.join("bob", author.newest_invite())
    bob.wait("round")
    name = _id_of(bob)
    author.wait("trial", peer=name)
    for daemon in (author, ann):
        daemon.wait("endorsed", peer=name)
    # Of two members the senior one is a quorum, so the other one may have scored fewer.
    assert len(author.of("trial", peer=name)) >= 3
    bob.wait("round", contributors=3)
    first = author.wait("round", contributors=3)["round"]
    before = [event for event in author.of("round") if event["round"] < first and event["peers"] == 3]
    assert len(before) >= 3 and here.check() > 0
