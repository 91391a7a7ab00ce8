import errno
import importlib.util
import inspect
import json
import os
import subprocess
import sys
import types
from importlib.metadata import entry_points
from pathlib import Path
from typing import get_args

import msgspec
import pytest
from thinwire.node.cli import main, recovery
from thinwire.node.daemon.options import Options
from thinwire.node.peer.recover_command_file import take_request
from thinwire.node.peer.status import PeerStatus, Stall, Status, write_status
from thinwire.node.runtime.directories import directories
from thinwire.node.runtime.process_lock import hold, this_process
from thinwire.swarm.identity.errors import HintedError
from thinwire.swarm.identity.identity import Identity
from thinwire.swarm.identity.invite import Invite, Seed

INVITE = Invite(b"\x05" * 32, (Seed("45.0.2.1:7400", b"\x06" * 32),)).code()


@pytest.fixture(autouse=True)
def no_settings_of_this_machine(monkeypatch):
    for name in [name for name in os.environ if name.startswith("THINWIRE_")]:
        monkeypatch.delenv(name)


@pytest.fixture
def home(tmp_path):
    """Folder whose lock this process holds, as a daemon does."""
    with hold(directories(tmp_path / "home").lock):
        yield tmp_path / "home"


@pytest.fixture
def run_toml(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text('[run]\nname = "toy"\n')
    return path


@pytest.fixture
def daemon(monkeypatch):
    """Stand-in for the daemon and for the launcher of local swarms, which records its calls."""
    module = types.ModuleType("thinwire.node.daemon.daemon")
    module.calls = []
    module.start = lambda *arguments: module.calls.append(("start", *arguments)) or 0
    module.join = lambda *arguments: module.calls.append(("join", *arguments)) or 0
    monkeypatch.setitem(sys.modules, "thinwire.node.daemon.daemon", module)
    monkeypatch.setattr(sys.modules["thinwire.node.daemon"], "daemon", module, raising=False)
    launcher = types.ModuleType("thinwire.node.local_swarm.launcher")
    launcher.start_local = lambda *arguments: module.calls.append(("local", *arguments)) or 0
    monkeypatch.setitem(sys.modules, "thinwire.node.local_swarm.launcher", launcher)
    return module


def outcome(capsys, *arguments):
    code = main.main([str(argument) for argument in arguments])
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


def test_join_with_a_manifest_names_the_command_that_takes_one(capsys, daemon, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.toml").touch()
    assert main.main(["join", "run.toml"]) == 2
    assert "hint: `thinwire start run.toml` begins the run" in capsys.readouterr().err and daemon.calls == []


@pytest.mark.parametrize(
    "arguments, hint",
    [
        (("join", "run.toml"), "`thinwire start run.toml` begins the run"),
        (("start", "tw1-abcd-efgh"), "`thinwire join tw1-abcd-efgh` joins its run"),
        (("start", "TW1-" + 300 * "a"), "`thinwire join TW1-aaaa"),
    ],
)
def test_argument_of_the_other_command_that_is_no_file_names_that_command(
    capsys, home, daemon, tmp_path, monkeypatch, arguments, hint
):
    monkeypatch.chdir(tmp_path)
    assert hint in refused(capsys, *arguments, "--home", home)[2] and daemon.calls == []


def test_path_that_is_too_long_for_a_file_is_no_internal_error(capsys, home, run_toml, daemon):
    long = 300 * "n"
    for command in (
        ("start", run_toml, "--data", long),
        ("join", f"{long}.toml"),
        ("init", long, "--model", f"hf:{long}"),
    ):
        code, error, _ = refused(capsys, *command, "--home", home)
        assert code == 2 and "internal" not in error
    outcome(capsys, "start", run_toml, "--model", f"hf:{long}", "--home", home)
    assert len(daemon.calls) == 1  # a library's name, for all we know


def test_id_command_creates_key_once(capsys, home):
    code, out, err = outcome(capsys, "id", "--home", home)
    identity = Identity.load(home / "identity.key")
    assert (
        code == 0 and err == [] and out.split() == ["peer", identity.peer_id.hex(), "key", str(home / "identity.key")]
    )
    assert os.stat(home / "identity.key").st_mode & 0o777 == 0o600
    code, out, _ = outcome(capsys, "id", "--json", "--home", home)
    assert json.loads(out) == {"peer": identity.peer_id.hex(), "key": str(home / "identity.key")}


@pytest.mark.parametrize(("content", "mode", "word"), [("x", 0o600, "key file"), (None, 0o644, "chmod 600")])
def test_id_command_refuses_unusable_key_file(capsys, home, content, mode, word):
    key = home / "identity.key"
    Identity.load_or_create(key)
    if content is not None:
        key.write_text(content)
    key.chmod(mode)
    code, error, hint = refused(capsys, "id", "--home", home)
    assert code == 3 and word in error + hint


def test_config_show_prints_settings(capsys, home, monkeypatch):
    monkeypatch.setenv("THINWIRE_DEVICE", "cpu")
    code, out, err = outcome(capsys, "config", "show", "--home", home)
    lines = {line.split()[0]: line.split()[1:] for line in out.splitlines()}
    assert code == 0 and err == [] and lines["device"] == ["cpu", "environment", "THINWIRE_DEVICE"]
    code, out, _ = outcome(capsys, "config", "show", "--json", "--home", home)
    assert json.loads(out)["device"] == {"value": "cpu", "source": "environment THINWIRE_DEVICE"}


def test_status_and_invite_without_daemon_fail_with_hint(capsys, home):
    for command in ("status", "invite"):
        code, error, hint = refused(capsys, command, "--home", home)
        assert code == 4 and "no daemon is running here" in error and "thinwire start" in hint
    running(home, process_started=0.0, round=7, run_name="toy")  # written by a dead process
    code, error, _ = refused(capsys, "status", "--home", home)
    assert code == 4 and "ended in round 7 of run toy" in error
    code, out, err = outcome(capsys, "status", "--json", "--home", home)
    answer = json.loads(out)
    assert code == 4 and answer["running"] is False and answer["status"]["round"] == 7 and len(err) == 2


def test_status_command_prints_running_daemon(capsys, home):
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
    for words in (
        "toy cdcdcdcd",
        "12 of 40",
        "3.214",
        "1.9 MB (212 times less",
        "2.0 GB",
        "41k tokens/s",
        "alarm: disk full",
    ):
        assert words in out
    rows = [line.split() for line in out.splitlines() if line.startswith(("efefefef", "01010101"))]
    # A name that another peer chose is shown as it is, never as markup or as control of the terminal.
    assert rows[0] == ["efefefef", "[red]b?[0m", "alive", "192.0.2.7:1", "12", "3.500", "3", "s"]
    assert rows[1][-2:] == ["no", "answer"] and "\x1b" not in out
    code, out, _ = outcome(capsys, "status", "--json", "--home", home)
    answer = json.loads(out)
    assert code == 0 and answer["running"] and answer["status"]["peers"][1]["reason"] == "no answer"


STALL = Stall(
    fragment=0, round=128, members=("ab" * 32, "ef" * 32, "01" * 32), absent=("ef" * 32, "01" * 32),
    founders=("ab" * 32,), seconds=42.0,
)  # fmt: skip
TEXT = "1 of 3 members continue as lineage 3f9ab210 since round 128"


PIPELINE = Path(__file__).parents[4] / "examples" / "pipelines" / "5c20_33.json"


@pytest.mark.parametrize(
    ("arguments", "package", "extra"),
    [
        (("page",), "uvicorn", "page"),
        (("join", "demo", "--lan"), "zeroconf", "lan"),
        (("join", "demo", "--public"), "hivemind", "hivemind"),
        (("plan", "--pipeline", PIPELINE, "--picture", "plan.png"), "matplotlib", "plots"),
    ],
)
def test_missing_package_has_one_exit_code_and_a_hint_that_installs_it(
    capsys, home, monkeypatch, arguments, package, extra
):
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == package else real(name))
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.delitem(sys.modules, "thinwire.node.cli.page.server", raising=False)
    where = () if arguments[0] == "plan" else ("--home", home)
    code, error, hint = refused(capsys, *arguments, *where)
    assert code == 2 and f"the package {package}" in error and f"pip install 'thinwire[{extra}]'" in hint


@pytest.mark.parametrize("flags", [(), ("--now",)])
@pytest.mark.parametrize(
    ("facts", "code", "words"),
    [
        ({"phase": "training"}, 6, "a quorum of the members is here; nothing to recover"),
        ({"phase": "training", "alike": False}, 6, "this run needs no quorum; nothing to recover"),
        ({"phase": "joining"}, 6, "no state of the run yet"),
        ({"process_started": 0.0}, 4, "no daemon is running here"),
    ],
)
def test_recover_without_need_is_refused(capsys, home, flags, facts, code, words):
    running(home, **facts)
    found, error, _ = refused(capsys, "recover", *flags, "--home", home)
    assert found == code and words in error


@pytest.mark.parametrize(("until", "itself"), [(None, "never (exchange.orphan = 0)"), (1e12, " s\n")])
def test_recover_shows_who_would_continue(capsys, home, until, itself):
    peers = (PeerStatus(peer="ef" * 32, state="dead"),)
    running(home, run_name="toy", stalls=(msgspec.structs.replace(STALL, until=until),), peers=peers)
    for run in ((), ("toy",), ("cdcd",), ("CDCD",)):
        code, out, err = outcome(capsys, "recover", *run, "--home", home)
        assert code == 0 and err == []
    for words in (
        "128: no quorum of its 3 members since ", "efefefef (dead), 01010101 (unknown)",
        "abababab (this peer): 1 of 3 members", itself, "thinwire recover --now",
    ):  # fmt: skip
        assert words in out
    assert not directories(home).run(b"\xcd" * 32).recover_request.exists()
    code, error, _ = refused(capsys, "recover", "other", "--home", home)
    assert code == 2 and "trains toy cdcdcdcd" in error


class StandIn:
    """Daemon that takes a request while the command sleeps. `facts`: its status afterwards."""

    def __init__(self, home, monkeypatch, *, takes=True, **facts):
        self.home, self.takes, self.facts, self.now, self.taken = home, takes, facts, 0.0, 0
        self.path = directories(home).run(b"\xcd" * 32).recover_request
        self.path.parent.mkdir(parents=True)
        running(home, phase="exchanging", stalls=(STALL,), continued=("an older one",))
        clock = types.SimpleNamespace(
            sleep=self.sleep, monotonic=lambda: self.now, time=lambda: 1.0 + self.now, strftime=str, localtime=str
        )
        monkeypatch.setattr(recovery, "time", clock)

    def sleep(self, seconds):
        self.now += seconds
        if self.takes and take_request(self.path, this_process(), 1.0 + self.now):
            self.taken += 1
            running(self.home, **{"phase": "training", "wall": 2.0, "continued": ("an older one",), **self.facts})


def test_recover_now_waits_for_the_lineage(capsys, home, monkeypatch):
    daemon = StandIn(home, monkeypatch, continued=("an older one", TEXT))
    assert outcome(capsys, "recover", "--now", "--home", home) == (0, f"{TEXT}\n", []) and daemon.taken == 1


def test_recover_now_names_a_lineage_that_was_taken_over(capsys, home, monkeypatch):
    StandIn(home, monkeypatch, lineage="3f9a")
    code, out, _ = outcome(capsys, "recover", "--now", "--home", home)
    assert (code, out) == (0, "this peer continues in lineage 3f9a\n")


@pytest.mark.parametrize(
    ("facts", "code", "words"),
    [
        ({}, 6, "a quorum of the members is here"),
        ({"takes": False}, 1, "the daemon does not answer"),
        ({"process_started": 0.0}, 1, "the daemon has ended"),
        ({"stalls": (STALL,)}, 1, "no lineage after 60 s: "),
        ({"stalls": (msgspec.structs.replace(STALL, obstacle="a state is being fetched"),)}, 1, "is being fetched"),
    ],
)
def test_recover_now_reports_why_there_is_no_lineage(capsys, home, monkeypatch, facts, code, words):
    daemon = StandIn(home, monkeypatch, **facts)
    found, error, _ = refused(capsys, "recover", "--now", "--home", home)
    assert found == code and words in error and not daemon.path.exists()


def test_runs_command_lists_the_runs_of_this_machine_also_without_a_directory(capsys, home, monkeypatch):
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, found=importlib.util.find_spec: found(name) if name != "hivemind" else None,
    )
    code, out, (warning,) = outcome(capsys, "runs", "--home", home, "--bootstrap", "/ip4/192.0.2.1/tcp/1/p2p/Qm")
    assert (code, out) == (0, "no runs on this machine\n")
    assert warning.startswith("warning: ") and "pip install 'thinwire[hivemind]'" in warning
    code, out, (warning,) = outcome(capsys, "runs", "--home", home)
    assert (code, out) == (0, "no runs on this machine\n")
    assert (
        "no directory was asked" in warning
        and "--lan" in warning
        and "--bootstrap" in warning
        and "node.toml" in warning
    )
    running(home, round=9)
    for run, name, step in ((b"\xcd", "first", 8), (b"\xef", "second", 12), (b"\x12", "third", None)):
        directory = directories(home).run(run * 32)
        directory.checkpoints.mkdir(parents=True)
        directory.manifest.write_text(f'[run]\nname = "{name}"\n')
        if step:
            (directory.checkpoints / "LATEST").write_text(f"step-{step:08d}.1\n")
    code, out, err = outcome(capsys, "runs", "--home", home)
    rows = [line.split() for line in out.splitlines()[2:]]
    folders = home / "state" / "runs"
    assert (
        code == 0
        and len(err) == 1
        and rows
        == [
            ["third", "12" * 8, "-", str(folders / ("12" * 8))],
            ["first", "cd" * 8, "9,", "running", str(folders / ("cd" * 8))],
            ["second", "ef" * 8, "12", str(folders / ("ef" * 8))],
        ]
    )
    code, out, _ = outcome(capsys, "runs", "--json", "--home", home)
    answer = json.loads(out)
    assert [(run["round"], run["running"]) for run in answer["here"]] == [(None, False), (9, True), (12, False)]
    assert answer["directory"] == []


def test_failed_commands_put_nothing_into_the_log_that_logs_prints(capsys, home):
    for command in ("status", "logs", "logs"):
        code, error, _ = refused(capsys, command, "--home", home)
    assert code == 2 and "there is no log" in error and not directories(home).log.exists()
    directories(home).log.mkdir(parents=True)
    code, error, _ = refused(capsys, "logs", "--home", home)
    assert code == 2 and "cannot read" in error


def test_invite_command_prints_only_the_line(capsys, home):
    running(home)
    assert refused(capsys, "invite", "--home", home)[0] == 4  # not yet reachable
    running(home, invite=INVITE)
    assert outcome(capsys, "invite", "--home", home) == (0, f"thinwire join {INVITE}\n", [])


def test_invite_command_names_the_model_that_a_joiner_must_agree_to(capsys, home):
    running(home, invite=INVITE)
    manifest = directories(home).run(b"\xcd" * 32).manifest
    manifest.parent.mkdir(parents=True)
    manifest.write_text('[model]\nkind = "module"\nname = "mine:make"\n')
    assert outcome(capsys, "invite", "--home", home) == (0, f"thinwire join {INVITE} --model mine:make\n", [])


def test_invite_command_warns_of_private_addresses(capsys, home):
    code = Invite(b"\x05" * 32, (Seed("192.168.2.1:7400", b"\x06" * 32),)).code()
    running(home, invite=code)
    warning = "warning: this invite works only in this network: its addresses are private"
    assert outcome(capsys, "invite", "--home", home) == (0, f"thinwire join {code}\n", [warning])


@pytest.mark.parametrize(
    ("flags", "callee", "given"),
    [((), "start", {}), (("--local", 4, "--chaos"), "local", {"local": 4, "chaos": True})],
    ids=["one peer", "a local swarm"],
)
def test_start_passes_all_options_on(capsys, home, run_toml, daemon, tmp_path, flags, callee, given):
    (tmp_path / "text").write_text("words")
    code, out, err = outcome(
        capsys, "start", run_toml, *flags, "--rounds", 9, "--data", tmp_path / "text", "--device", "cpu",
        "--port", 7400, "--host", "127.0.0.1", "--ports", "7401-7499", "--advertise", "192.0.2.9", "--map-port", "--name", "me",
        "--threads", 2, "--place", 3, "--home", home, "--log", "json", "--debug",
    )  # fmt: skip
    assert (code, out, err) == (0, "", [])
    ((verb, path, config, options),) = daemon.calls
    assert verb == callee and path == run_toml
    assert options == Options(rounds=9, place=3, log="json", debug=True, **given)
    assert (config.port, config.host, config.ports) == (7400, "127.0.0.1", (7401, 7499))
    assert (config.advertise, config.name, config.threads) == (("192.0.2.9",), "me", 2)
    assert (config.data, config.device, config.home) == (str(tmp_path / "text"), "cpu", home)
    assert config.map_port


def test_join_passes_all_options_to_daemon(capsys, home, daemon):
    code, out, err = outcome(capsys, "join", INVITE.upper(), "--rounds", 2, "--place", 1, "--home", home)
    assert (code, out, err) == (0, "", [])
    ((verb, code_, config, options),) = daemon.calls
    assert verb == "join" and Invite.parse(code_) == Invite.parse(INVITE) and config.home == home
    assert options == Options(rounds=2, place=1)


def test_exit_code_is_that_of_the_daemon(home, daemon):
    for code in (0, 1, 143):
        daemon.join = lambda *_, code=code: code
        assert main.main(["join", INVITE, "--home", str(home)]) == code


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["strat"], 2, "start"),
        (["start"], 2, "RUN.toml"),
        (["start", "{run}", "--prot", "3"], 2, "--port"),
        (["start", "{run}", "--local", "x"], 2, "--local"),
        (["start", "{run}", "--local", "-1"], 2, "--local: '-1' is not a whole number from 0 to 64"),
        (["start", "{run}", "--threads", "nan"], 2, "--threads: 'nan' is not a whole number"),
        (["generate", "--temperature", "nan"], 2, "--temperature: 'nan' is not a number from 0 to"),
        (["start", "{run}", "--chaos"], 2, "--local 4"),
        (["start", "{run}", "--log", "loud"], 2, "auto, rich, plain or json"),
        (["start", "{run}", "--port", "70000"], 2, "flag --port: port 70000"),
        (["start", "{run}", "--device", "gpu"], 2, "cuda:N"),
        (["start", "{run}", "--device", "cuda:99"], 3, "available: cpu"),
        (["start", "{run}", "--data", "{nothing}"], 2, "does not exist"),
        (["start", "{run}", "--data", "{empty}"], 2, "contains no data"),
        (["start", "{run}", "--data", "{hollow}"], 2, "contains no data"),
        (["start", "{nothing}"], 2, "cannot read"),
        (["start", "/dev/zero"], 2, "cannot read /dev/zero: not a regular file"),
        (["start", "{empty}"], 2, "Is a directory"),
        (["start", "{run}", "--data", "/dev/zero"], 2, "contains no data"),
        (["start", "{typo}"], 2, "did you mean 'outer'?"),
        (["start", "{pickle}"], 2, "not TOML"),
        (["join"], 2, "INVITE"),
        (["join", "hello!"], 2, "starts with tw1"),
        (["join", "foo"], 2, "no run of this machine is called 'foo'"),
        (["join", INVITE[:-1] + ("a" if INVITE[-1] != "a" else "b")], 2, "typo"),
        (["config"], 2, "config --help"),
    ],
)
def test_command_mistakes_print_two_lines_and_exit_code(
    capsys, home, tmp_path, run_toml, daemon, arguments, code, words
):
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


def test_traceback_is_printed_with_debug_and_always_logged(capsys, home, daemon):
    def broken(*_):
        raise RuntimeError("the\nwheel came off \x1b[31m")

    daemon.join = broken
    code, error, hint = refused(capsys, "join", INVITE, "--home", home)
    log = home / "state" / "thinwire.log"
    assert code == 1 and error == "error: internal error: RuntimeError: the wheel came off  [31m" and str(log) in hint
    assert "Traceback" in log.read_text() and "the\nwheel came off" in log.read_text()
    code, _, err = outcome(capsys, "join", INVITE, "--home", home, "--debug")
    assert code == 1 and "Traceback" in err[0] and err[-1].startswith("hint: ")


def test_traceback_is_printed_when_log_is_not_writable(capsys, tmp_path, daemon):
    daemon.join = lambda *_: 1 / 0
    (tmp_path / "state").write_text("in the way")
    code, error, hint = refused(capsys, "join", INVITE, "--home", tmp_path)
    assert code == 1 and "ZeroDivisionError" in error and "--debug" in hint


def test_daemon_signals_and_hints_set_exit_code(capsys, home, daemon):
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


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        OSError(errno.ENOMEM, "Cannot allocate memory"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:124] . DefaultCPUAllocator: can't allocate memory"),
        type("OutOfMemoryError", (RuntimeError,), {})("CUDA out of memory. Tried to allocate 2.00 GiB"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_lack_of_memory_is_no_internal_error(capsys, home, daemon, error):
    def full(*_):
        raise error

    daemon.join = full
    code, message, hint = refused(capsys, "join", INVITE, "--home", home)
    assert code == 3 and "memory" in message and "internal" not in message and "smaller model" in hint


def test_closed_stdout_is_no_error(home):
    code = f"import sys; from thinwire.node.cli.main import main; sys.exit(main(['config', 'show', '--home', {str(home)!r}]))"
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process.stdout.close()
    assert process.stderr.read() == b""
    process.wait(60)


def test_cheap_commands_do_not_import_torch(home):
    running(home, invite=INVITE)
    code = (
        "import sys; from thinwire.node.cli.main import main\n"
        f"for words in (['id'], ['config', 'show'], ['status'], ['invite']): main([*words, '--home', {str(home)!r}])\n"
        "print([name for name in ('torch', 'numba', 'zmq') if name in sys.modules], file=sys.stderr)"
    )
    keep_alive = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240, check=True)
    assert keep_alive.stderr == "[]\n" and "thinwire join tw1" in keep_alive.stdout


@pytest.fixture
def package(tmp_path, monkeypatch):
    """Function that installs a package, with one module and some entry points, during a test."""

    def install(name, source, **commands):
        folder = tmp_path / name
        metadata = folder / f"{name}-1.0.dist-info"
        metadata.mkdir(parents=True)
        (folder / f"{name}_module.py").write_text(source)
        (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        lines = [f"{command} = {name}_module:{function}" for command, function in commands.items()]
        (metadata / "entry_points.txt").write_text("\n".join(["[thinwire.commands]", *lines]))
        monkeypatch.syspath_prepend(folder)
        monkeypatch.delitem(sys.modules, f"{name}_module", raising=False)

    return install


def test_another_package_adds_a_command(capsys, package):
    package("extra", "def greet(name: str) -> int:\n    print('hello', name)\n    return 7\n", greet="greet")
    assert outcome(capsys, "greet", "you") == (7, "hello you\n", [])
    code, out, err = outcome(capsys, "--help")
    assert code == 0 and err == [] and "greet" in out and "sim" in out


BROKEN = {
    "a missing library": ("import no_such_library", "ModuleNotFoundError: No module named 'no_such_library'"),
    "a syntax error": ("def f(:", "SyntaxError"),
    "an exit on import": ("raise SystemExit(5)", "SystemExit: 5"),
    "no function of this name": ("", "AttributeError"),
    "no function at all": ("broken = 3", "TypeError"),
    "an annotation that does not exist": ("def broken(x: 'Missing'): pass", "NameError"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_command_of_another_package_disturbs_no_other_command(capsys, package, home, case):
    source, words = BROKEN[case]
    package("wreck", source, broken="broken")
    code, error, hint = refused(capsys, "broken", "--x", 1)
    assert code == 1 and "'broken' of wreck cannot be loaded" in error and words in error and "remove wreck" in hint
    code, out, err = outcome(capsys, "--help")
    assert code == 0 and "sim" in out and "broken" not in out
    assert len(err) == 1 and err[0].startswith("warning: the command 'broken' of wreck") and words in err[0]
    assert outcome(capsys, "id", "--home", home)[2] == []
    assert outcome(capsys, "sim", "list")[2] == []


def test_another_package_cannot_replace_a_built_in_command(capsys, package, home):
    package("thief", "def steal():\n    return 9\n", id="steal")
    assert outcome(capsys, "id", "--home", home)[0] == 0
    code, _, err = outcome(capsys, "--help")
    assert code == 0 and err == ["warning: skipped the command 'id' of thief: there is one of this name"]


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (errno.ENOSPC, "make room"),
        (errno.EROFS, "--home"),
        (errno.EMFILE, "ulimit -n"),
        (errno.EIO, "disk"),
        (errno.EACCES, "as the user"),
    ],
)
def test_main_gives_errors_of_the_machine_a_hint(capsys, monkeypatch, number, words):
    def fail(*_):
        raise OSError(number, os.strerror(number), "/somewhere")

    monkeypatch.setattr(main, "command_line", fail)
    assert main.main(["id"]) == 3
    error, hint = capsys.readouterr().err.splitlines()
    assert error == f"error: {os.strerror(number)}: /somewhere" and words in hint


def test_doctor_prints_one_line_a_check_and_fails_with_one_of_them(capsys, home, monkeypatch):
    from thinwire.node.doctor import doctor
    from thinwire.node.doctor.check import failed, passed, skipped

    checks = [passed("port", "7400"), skipped("nat", "no peer")]
    asked = []
    monkeypatch.setattr(doctor, "examine", lambda config, invite: asked.append((config.port, invite)) or checks)
    assert outcome(capsys, "doctor", "--home", home, "--port", 9) == (
        0, "OK   port        7400\nSKIP nat         no peer\n", []
    )  # fmt: skip
    checks.append(failed("disk", "full", "make room"))
    code, out, _ = outcome(capsys, "doctor", INVITE, "--home", home, "--json")
    assert code == 1 and msgspec.json.decode(out)[2] == {
        "name": "disk", "result": "FAIL", "detail": "full", "fix": "make room"
    }  # fmt: skip
    assert asked == [(9, None), (7400, Invite.parse(INVITE))]
    assert refused(capsys, "doctor", INVITE[:-1], "--home", home)[0] == 2


def test_doctor_imports_no_torch_without_a_gpu(home):
    code = (
        "import sys; from thinwire.node.cli.main import main\n"
        f"main(['doctor', '--home', {str(home)!r}, '--host', '127.0.0.1', '--port', '0'])\n"
        "print([name for name in ('torch', 'numba') if name in sys.modules], file=sys.stderr)"
    )
    environment = {**os.environ, "THINWIRE_DEVICE": "cpu"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240, env=environment)
    assert done.stderr == "[]\n" and "port" in done.stdout and "SKIP gpu" in done.stdout


def test_start_of_local_peers_says_that_they_train_on_the_default_data(capsys, home, run_toml, daemon, tmp_path):
    code, _, err = outcome(capsys, "start", run_toml, "--local", 2, "--home", home)
    assert code == 0 and len(err) == 1 and "Python's standard library" in err[0] and "--data" in err[0]
    (tmp_path / "text.txt").write_text("text")
    assert outcome(capsys, "start", run_toml, "--local", 2, "--home", home, "--data", tmp_path / "text.txt")[2] == []


LATE = """
import contextlib, sys
from thinwire.node.cli.main import main
print("ready", flush=True)
sys.stdin.readline()
with contextlib.suppress(OSError):
    print("a message after the terminal was closed", file=sys.stderr)
sys.exit(main(["--version"]))
"""


def test_output_to_a_closed_terminal_does_not_change_the_exit_code():
    controller, terminal = os.openpty()
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": terminal}
    process = subprocess.Popen([sys.executable, "-c", LATE], text=True, env=buffered, **pipes)
    os.close(terminal)
    assert process.stdout.readline() == "ready\n"
    os.close(controller)
    process.communicate("\n", timeout=60)
    assert process.returncode == 0


@pytest.mark.parametrize("words", ["logs", "nonsense"])
def test_command_whose_reader_closes_the_pipe_ends_quietly_like_unix_tools(home, words):
    directories(home).log.parent.mkdir(parents=True, exist_ok=True)
    directories(home).log.write_text("a line\n" * 50)
    ours, theirs = os.pipe()
    os.close(ours)
    closed, other = ("stdout", "stderr") if words == "logs" else ("stderr", "stdout")
    ended = subprocess.run(
        [sys.executable, "-m", "thinwire", words, *(["--home", str(home)] if words == "logs" else [])],
        **{closed: theirs, other: subprocess.PIPE},
    )
    os.close(theirs)
    assert ended.returncode == 141 and not ended.stdout and not ended.stderr


def numeric_options():
    """Yield each option that takes a number: its command with all required arguments, its name, and the number's type."""
    commands = [(one.name, one.callback) for one in main.app.registered_commands]
    commands += [(entry.name, entry.load()) for entry in entry_points(group=main.ENTRY_POINTS)]
    for command, function in commands:
        parameters = [
            one for one in inspect.signature(function, eval_str=True).parameters.values() if get_args(one.annotation)
        ]
        words = [command, *("x" for one in parameters if one.default is one.empty)]
        for parameter in parameters:
            kind, option = get_args(parameter.annotation)
            if number := {int, float}.intersection({kind, *get_args(kind)}):
                yield (
                    words,
                    next(one for one in (option.default, *option.param_decls) if one.startswith("--")),
                    number.pop(),
                )


def test_no_option_takes_a_number_that_is_not_finite_or_far_too_large(capsys, daemon):
    options = list(numeric_options())
    assert {"--seed", "--search", "--threads", "--step"} <= {option for _, option, _ in options}
    taken = []
    for words, option, kind in options:
        for value in ("nan", "inf", "-inf", "1e400", *((10**30, -(10**30)) if kind is int else ())):
            code, out, err = outcome(capsys, *words, f"{option}={value}")
            if code != 2 or out or len(err) != 2 or option not in err[0] or daemon.calls:
                taken.append((*words, option, value, code, err))
    assert not taken


@pytest.mark.parametrize("name", ["stdout", "stderr"])
def test_stream_that_the_parent_process_has_closed_is_replaced(tmp_path, monkeypatch, name):
    monkeypatch.setattr(sys, name, None)
    assert main.main(["status", "--json", "--home", str(tmp_path)]) == 4
    assert main.main(["id", "--home", str(tmp_path)]) == 0
    getattr(sys, name).close()
