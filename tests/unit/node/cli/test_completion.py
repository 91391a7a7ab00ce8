"""Completion in the shell: what a shell gets when a person presses the tab key."""

import os
import shutil
import subprocess
import sys

import pytest
from thinwire.node.peer.status import PeerStatus, Status, write_status
from thinwire.node.runtime.directories import directories


def suggested(line, home, shell="bash"):
    """Return the suggestions for the last word of a line, and the heavy modules that were loaded."""
    code = (
        "import atexit, sys; from thinwire.node.cli.main import main; atexit.register(lambda: print("
        "[name for name in ('torch', 'numpy', 'zmq', 'rich') if name in sys.modules], file=sys.stderr)); main([])"
    )
    environment = {
        **{key: value for key, value in os.environ.items() if not key.startswith("THINWIRE_")},
        **{"_THINWIRE_COMPLETE": f"complete_{shell}", "COMP_WORDS": line, "THINWIRE_HOME": str(home)},
        **{"COMP_CWORD": str(len(line.split()) - (not line.endswith(" "))), "_TYPER_COMPLETE_ARGS": line},
    }
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240, env=environment)
    return done.stdout.split(), done.stderr.strip()


@pytest.fixture
def home(tmp_path):
    """Home with three runs, two of them with the same name, and the status of a daemon."""
    where = directories(tmp_path)
    for number, name in ((1, "alpha"), (2, "beta"), (3, "beta")):
        run = where.run(bytes([number]) * 32)
        run.path.mkdir(parents=True)
        run.manifest.write_text(f'[run]\nname = "{name}"\n')
    peers = (PeerStatus(peer="ef" * 32, name="b"), PeerStatus(peer="01" * 32))
    assert write_status(where.status, Status(process=1, process_started=0.0, wall=1.0, peer="ab" * 32, peers=peers))
    return tmp_path


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("thinwire gen", ["generate"]),
        ("thinwire generate ", ["alpha", "02" * 8, "03" * 8]),
        ("thinwire evaluate al", ["alpha"]),
        ("thinwire export --run 02", ["02" * 8]),
        ("thinwire recover 01", ["01" * 8]),
        ("thinwire join al", ["alpha"]),
        ("thinwire revoke e", ["ef" * 32]),
        ("thinwire status --js", ["--json"]),
    ],
)
def test_completion_suggests_commands_runs_and_peers(home, line, words):
    found, loaded = suggested(line, home)
    assert found == words and loaded == "[]"


def test_completion_of_an_unusable_home_suggests_no_runs(home):
    (home / "node.toml").write_text("= no toml")
    assert suggested("thinwire generate ", home)[0] == []


def test_completion_for_zsh_has_the_ids_as_help(home):
    assert '"alpha":"' + "01" * 8 + '"' in "".join(suggested("thinwire generate al", home, "zsh")[0])


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash")
def test_completion_script_works_in_bash(home, tmp_path):
    program = tmp_path / "thinwire"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m thinwire "$@"\n')
    program.chmod(0o755)
    script = (
        'eval "$(_THINWIRE_COMPLETE=source_bash thinwire)"; COMP_WORDS=(thinwire evaluate al); COMP_CWORD=2; '
        "$(complete -p thinwire | sed 's/.*-F \\([^ ]*\\).*/\\1/') thinwire; echo ${COMPREPLY[@]}"
    )
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "THINWIRE_HOME": str(home)}
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=240, env=environment)
    assert done.stdout.split() == ["alpha"], done.stderr


def test_names_of_strangers_reach_no_shell_that_would_run_them(tmp_path):
    """zsh evaluates the help of a suggestion, and a backslash undoes the shell's own quoting."""
    peers = (PeerStatus(peer="ef" * 32, name=r"\$(touch owned) `id` ;|&'\""),)
    where = directories(tmp_path)
    assert write_status(where.status, Status(process=1, process_started=0.0, wall=1.0, peer="ab" * 32, peers=peers))
    words, _ = suggested("thinwire revoke ", tmp_path, "zsh")
    told = " ".join(words)
    assert "ef" * 32 in told and "touch owned" in told
    assert not set("\\$`;|&") & set(told.partition("ef" * 32)[2])
