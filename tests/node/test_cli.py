import json
import os
import subprocess
import sys
import types

import pytest
from thinwire.node import cli
from thinwire.node.directories import directories
from thinwire.node.options import Options
from thinwire.node.status import PeerStatus, Status, this_process, write_status
from thinwire.swarm.errors import HintedError
from thinwire.swarm.identity import Identity
from thinwire.swarm.invite import Invite, Seed

INVITE = Invite(b"\x05" * 32, (Seed("192.0.2.1:7400", b"\x06" * 32),)).code()


@pytest.fixture(autouse=True)
def no_settings_of_this_machine(monkeypatch):
    for name in [name for name in os.environ if name.startswith("THINWIRE_")]:
        monkeypatch.delenv(name)


@pytest.fixture
def home(tmp_path):
    return tmp_path / "home"


@pytest.fixture
def run_toml(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text('[run]\nname = "toy"\n')
    return path


@pytest.fixture
def daemon(monkeypatch):
    """Stands where the daemon stands and notes how it was called."""
    module = types.ModuleType("thinwire.node.daemon")
    module.calls = []
    module.start = lambda *arguments: module.calls.append(("start", *arguments)) or 0
    module.join = lambda *arguments: module.calls.append(("join", *arguments)) or 0
    monkeypatch.setitem(sys.modules, "thinwire.node.daemon", module)
    monkeypatch.setattr(sys.modules["thinwire.node"], "daemon", module, raising=False)
    return module


def outcome(capsys, *arguments):
    code = cli.main([str(argument) for argument in arguments])
    said = capsys.readouterr()
    return code, said.out, said.err.splitlines()


def refused(capsys, *arguments):
    code, out, err = outcome(capsys, *arguments)
    assert out == "" and len(err) == 2, (out, err)
    assert err[0].startswith("error: ") and err[1].startswith("hint: ")
    return code, err[0], err[1]


def running(home, **changes):
    process, started = this_process()
    facts = {
        "process": process,
        "process_started": started,
        "wall": 1.0,
        "peer": "ab" * 32,
        "run": "cd" * 32,
        **changes,
    }
    assert write_status(directories(home).status, Status(**facts))


def test_id_makes_a_key_once(capsys, home):
    code, out, err = outcome(capsys, "id", "--home", home)
    identity = Identity.load(home / "identity.key")
    assert (
        code == 0 and err == [] and out.split() == ["peer", identity.peer_id.hex(), "key", str(home / "identity.key")]
    )
    assert os.stat(home / "identity.key").st_mode & 0o777 == 0o600
    code, out, _ = outcome(capsys, "id", "--json", "--home", home)
    assert json.loads(out) == {"peer": identity.peer_id.hex(), "key": str(home / "identity.key")}


@pytest.mark.parametrize(("content", "mode", "word"), [("x", 0o600, "key file"), (None, 0o644, "chmod 600")])
def test_key_file_that_cannot_be_used(capsys, home, content, mode, word):
    key = home / "identity.key"
    Identity.load_or_create(key)
    if content is not None:
        key.write_text(content)
    key.chmod(mode)
    code, error, hint = refused(capsys, "id", "--home", home)
    assert code == 3 and word in error + hint


def test_config_show(capsys, home, monkeypatch):
    monkeypatch.setenv("THINWIRE_DEVICE", "cpu")
    code, out, err = outcome(capsys, "config", "show", "--home", home)
    lines = {line.split()[0]: line.split()[1:] for line in out.splitlines()}
    assert code == 0 and err == [] and lines["device"] == ["cpu", "environment", "THINWIRE_DEVICE"]
    code, out, _ = outcome(capsys, "config", "show", "--json", "--home", home)
    assert json.loads(out)["device"] == {"value": "cpu", "source": "environment THINWIRE_DEVICE"}


def test_status_and_invite_without_a_daemon(capsys, home):
    for command in ("status", "invite"):
        code, error, hint = refused(capsys, command, "--home", home)
        assert code == 4 and "no daemon is running here" in error and "thinwire start" in hint
    running(home, process_started=0.0, round=7, run_name="toy")  # written by a process that is gone
    code, error, _ = refused(capsys, "status", "--home", home)
    assert code == 4 and "ended in round 7 of run toy" in error
    code, out, err = outcome(capsys, "status", "--json", "--home", home)
    answer = json.loads(out)
    assert code == 4 and answer["running"] is False and answer["status"]["round"] == 7 and len(err) == 2


def test_status_of_a_daemon(capsys, home):
    peers = (
        PeerStatus(
            peer="ef" * 32, name="[red]b\x1b[0m", state="alive", address="192.0.2.7:1", round=12, age=3.2, loss=3.5
        ),
        PeerStatus(peer="01" * 32, state="dead", reason="no answer"),
    )
    running(
        home, run_name="toy", name="a", phase="training", round=12, rounds=40, loss=3.2139, bytes_up=1_900_000,
        fp32_bytes=402_800_000, bytes_down=2_000_000_000, tokens_per_second=41_300.0, peers=peers, alarm="disk full",
    )  # fmt: skip
    code, out, err = outcome(capsys, "status", "--home", home)
    assert code == 0 and err == []
    for words in ("toy cdcdcdcd", "12 of 40", "3.214", "1.9 MB (×212", "2.0 GB", "41k tokens/s", "alarm: disk full"):
        assert words in out
    rows = [line.split() for line in out.splitlines() if line.startswith(("efefefef", "01010101"))]
    # A name that another peer chose is shown as it is, never as markup or as control of the terminal.
    assert rows[0] == ["efefefef", "[red]b?[0m", "alive", "192.0.2.7:1", "12", "3.500", "3", "s"]
    assert rows[1][-2:] == ["no", "answer"] and "\x1b" not in out
    code, out, _ = outcome(capsys, "status", "--json", "--home", home)
    answer = json.loads(out)
    assert code == 0 and answer["running"] and answer["status"]["peers"][1]["reason"] == "no answer"


def test_invite_prints_the_line_alone(capsys, home):
    running(home)
    assert refused(capsys, "invite", "--home", home)[0] == 4  # not yet reachable
    running(home, invite=INVITE)
    assert outcome(capsys, "invite", "--home", home) == (0, f"thinwire join {INVITE}\n", [])


def test_start_hands_everything_to_the_daemon(capsys, home, run_toml, daemon, tmp_path):
    (tmp_path / "text").write_text("words")
    code, out, err = outcome(
        capsys, "start", run_toml, "--local", 4, "--chaos", "--rounds", 9, "--data", tmp_path / "text", "--device", "cpu",
        "--port", 7400, "--host", "127.0.0.1", "--ports", "7401-7499", "--advertise", "192.0.2.9", "--name", "me",
        "--threads", 2, "--place", 3, "--home", home, "--log", "json", "--debug",
    )  # fmt: skip
    assert (code, out, err) == (0, "", [])
    ((verb, path, config, options),) = daemon.calls
    assert verb == "start" and path == run_toml
    assert options == Options(local=4, chaos=True, rounds=9, place=3, log="json", debug=True)
    assert (config.port, config.host, config.ports) == (7400, "127.0.0.1", (7401, 7499))
    assert (config.advertise, config.name, config.threads) == (("192.0.2.9",), "me", 2)
    assert (config.data, config.device, config.home) == (tmp_path / "text", "cpu", home)


def test_join_hands_everything_to_the_daemon(capsys, home, daemon):
    code, out, err = outcome(capsys, "join", INVITE.upper(), "--rounds", 2, "--place", 1, "--home", home)
    assert (code, out, err) == (0, "", [])
    ((verb, code_, config, options),) = daemon.calls
    assert verb == "join" and Invite.parse(code_) == Invite.parse(INVITE) and config.home == home
    assert options == Options(rounds=2, place=1)


def test_the_daemons_code_is_the_exit_code(home, daemon):
    for code in (0, 1, 143):
        daemon.join = lambda *_, code=code: code
        assert cli.main(["join", INVITE, "--home", str(home)]) == code


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["strat"], 2, "start"),
        (["start"], 2, "RUN.toml"),
        (["start", "{run}", "--prot", "3"], 2, "--port"),
        (["start", "{run}", "--local", "x"], 2, "--local"),
        (["start", "{run}", "--local", "-1"], 2, "--local"),
        (["start", "{run}", "--chaos"], 2, "--local 4"),
        (["start", "{run}", "--log", "loud"], 2, "auto, rich, plain or json"),
        (["start", "{run}", "--port", "70000"], 2, "flag --port: port 70000"),
        (["start", "{run}", "--device", "gpu"], 2, "cuda:N"),
        (["start", "{run}", "--device", "cuda:99"], 3, "devices here: cpu"),
        (["start", "{run}", "--data", "{nothing}"], 2, "does not exist"),
        (["start", "{run}", "--data", "{empty}"], 2, "has no data"),
        (["start", "{run}", "--data", "{hollow}"], 2, "has no data"),
        (["start", "{nothing}"], 2, "cannot read"),
        (["start", "{typo}"], 2, "did you mean 'outer'?"),
        (["start", "{pickle}"], 2, "not TOML"),
        (["join"], 2, "INVITE"),
        (["join", "hello"], 2, "starts with tw1"),
        (["join", INVITE[:-1] + ("a" if INVITE[-1] != "a" else "b")], 2, "typo"),
        (["config"], 2, "config --help"),
    ],
)
def test_mistakes_are_two_lines_and_a_code(capsys, home, tmp_path, run_toml, daemon, arguments, code, words):
    (tmp_path / "empty").mkdir()
    (tmp_path / "hollow" / "deep").mkdir(parents=True)
    (tmp_path / "hollow" / "deep" / "a.txt").write_text("")
    (tmp_path / "typo.toml").write_text("[outr]\nsteps = 1\n")
    (tmp_path / "pickle.toml").write_bytes(b"\x80\x04\x95")
    names = {name: tmp_path / name for name in ("nothing", "empty", "hollow")}
    names |= {"run": run_toml, "typo": tmp_path / "typo.toml", "pickle": tmp_path / "pickle.toml"}
    arguments = [argument.format(**names) for argument in arguments]
    home_flag = [] if arguments in (["strat"], ["config"]) else ["--home", str(home)]
    found, error, hint = refused(capsys, *arguments, *home_flag)
    assert found == code and words in error + hint and daemon.calls == []


def test_traceback_only_with_debug_but_always_in_the_log(capsys, home, daemon):
    def broken(*_):
        raise RuntimeError("the\nwheel came off \x1b[31m")

    daemon.join = broken
    code, error, hint = refused(capsys, "join", INVITE, "--home", home)
    log = home / "state" / "thinwire.log"
    assert code == 1 and error == "error: internal error: RuntimeError: the wheel came off  [31m" and str(log) in hint
    assert "Traceback" in log.read_text() and "the\nwheel came off" in log.read_text()
    code, _, err = outcome(capsys, "join", INVITE, "--home", home, "--debug")
    assert code == 1 and "Traceback" in err[0] and err[-1].startswith("hint: ")


def test_traceback_where_no_log_can_be_written(capsys, tmp_path, daemon):
    daemon.join = lambda *_: 1 / 0
    (tmp_path / "state").write_text("in the way")
    code, error, hint = refused(capsys, "join", INVITE, "--home", tmp_path)
    assert code == 1 and "ZeroDivisionError" in error and "--debug" in hint


def test_signals_and_hints_of_the_daemon(capsys, home, daemon):
    class Unreachable(HintedError):
        exit_code = 4

    def no_one(*_):
        raise Unreachable("nobody answered", "ask for a new invite")

    daemon.join = no_one
    assert refused(capsys, "join", INVITE, "--home", home) == (
        4,
        "error: nobody answered",
        "hint: ask for a new invite",
    )

    def stopped(*_):
        raise KeyboardInterrupt

    daemon.join = stopped
    assert outcome(capsys, "join", INVITE, "--home", home)[0] == 130


def test_reader_that_leaves_early(home):
    code = (
        f"import sys; from thinwire.node.cli import main; sys.exit(main(['config', 'show', '--home', {str(home)!r}]))"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process.stdout.close()
    assert process.stderr.read() == b""
    process.wait(60)


def test_cheap_commands_load_no_torch(home):
    running(home, invite=INVITE)
    code = (
        "import sys; from thinwire.node.cli import main\n"
        f"for words in (['id'], ['config', 'show'], ['status'], ['invite']): main([*words, '--home', {str(home)!r}])\n"
        "print([name for name in ('torch', 'numba', 'zmq') if name in sys.modules], file=sys.stderr)"
    )
    keep_alive = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240, check=True)
    assert keep_alive.stderr == "[]\n" and "thinwire join tw1" in keep_alive.stdout
