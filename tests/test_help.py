"""Frozen help of all commands. After an intended change, `python tests/test_help.py` rewrites it."""

import io
import os
import subprocess
import sys
from contextlib import redirect_stdout
from pathlib import Path

import pytest

GOLDEN = Path(__file__).parent / "golden" / "help.txt"
COMMANDS = [
    *(
        "",
        "init",
        "start",
        "join",
        "runs",
        "status",
        "top",
        "logs",
        "page",
        "replay",
        "recover",
        "invite",
        "doctor",
        "revoke",
        "id",
        "export",
        "generate",
        "evaluate",
        "plan",
        "sim",
    ),
    *("config", "config show"),
]
HEAVY = ("torch", "numba", "zmq", "numpy", "rich", "cryptography", "blake3", "msgspec", "psutil", "asyncio")


def help_of(command):
    from thinwire.node.cli.main import main

    text = io.StringIO()
    with redirect_stdout(text):
        assert main([*command.split(), "--help"]) == 0
    return text.getvalue()


def all_help():
    parts = (f"$ thinwire {command} --help".replace("  ", " ") + f"\n{help_of(command)}" for command in COMMANDS)
    return "\n".join(parts)


def test_help_texts_are_frozen(monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    assert all_help() == GOLDEN.read_text()


def test_summaries_of_commands_fit_a_terminal_of_80_columns(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert "..." not in help_of("").partition("Commands:")[2].partition("Exit codes:")[0]


def test_every_command_has_a_frozen_help_text():
    from thinwire.node.cli.main import command_line

    commands = command_line().commands
    names = set(commands) | {f"config {name}" for name in commands["config"].commands}
    assert names == set(COMMANDS) - {""}


@pytest.mark.parametrize("command", ["", "start", "join", "plan", "sim", "config show"])
def test_help_imports_nothing_heavy(command):
    code = (
        "import sys; from thinwire.node.cli.main import main; "
        f"code = main({[*command.split(), '--help']!r}); "
        f"print(code, [name for name in {HEAVY!r} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240, check=True)
    assert done.stdout.splitlines()[-1] == "0 []", done.stdout + done.stderr


def test_help_and_errors_have_no_colour():
    code = "from thinwire.node.cli.main import main; main(['start', '--help']); main(['strat'])"
    colour = {**os.environ, "FORCE_COLOR": "1", "NO_COLOR": "1"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, env=colour, timeout=240, check=True)
    assert b"--local" in done.stdout and b"error: " in done.stderr and b"\x1b" not in done.stdout + done.stderr


if __name__ == "__main__":
    os.environ["COLUMNS"] = "100"
    GOLDEN.parent.mkdir(exist_ok=True)
    GOLDEN.write_text(all_help())
    print(f"wrote {GOLDEN}")
