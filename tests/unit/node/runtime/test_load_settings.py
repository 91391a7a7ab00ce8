import errno
import fcntl
import os
from pathlib import Path

import pytest
from thinwire.node.cli import settings_table
from thinwire.node.runtime import load_settings
from thinwire.node.runtime.device import DeviceError, choose_device, devices
from thinwire.node.runtime.directories import directories
from thinwire.node.runtime.load_settings import ConfigError, load
from thinwire.node.runtime.process_lock import InUseError, hold, holder, this_process
from thinwire.node.runtime.settings import SETTINGS, model_setting
from thinwire.swarm.manifest.manifest import Manifest


@pytest.fixture
def home(tmp_path):
    return tmp_path / "home"


def node_toml(home, text):
    home.mkdir(exist_ok=True)
    (home / "node.toml").write_text(text)


def test_default_settings_name_their_source(home):
    settings = load({"home": home}, {})
    assert settings.port == 7400 and settings.device == "auto" and settings.data is None and settings.name
    assert settings.sources["port"] == "default" and settings.sources["home"] == "flag --home"
    assert set(settings.sources) == {setting.name for setting in SETTINGS}


def test_setting_precedence_is_flag_environment_file_default(home):
    node_toml(home, 'name = "f"\nport = 1\nthreads = 1\n')
    environment = {"THINWIRE_PORT": "2", "THINWIRE_THREADS": "2", "PATH": "x"}
    settings = load({"home": home, "threads": 3, "device": None}, environment)
    assert (settings.name, settings.port, settings.threads, settings.device) == ("f", 2, 3, "auto")
    assert [settings.sources[name] for name in ("name", "port", "threads", "device")] == [
        f"file {home / 'node.toml'}",
        "environment THINWIRE_PORT",
        "flag --threads",
        "default",
    ]


@pytest.mark.parametrize(
    ("text", "rate", "shown"),
    [
        ("20Mbit/s", 2_500_000, "20 Mbit/s"),
        ("2.5 MB/s", 2_500_000, "20 Mbit/s"),
        ("1000kbit/s", 125_000, "1 Mbit/s"),
        ("1 Gbit/s", 125_000_000, "1000 Mbit/s"),
    ],
)
def test_uplink_limit_is_parsed_with_unit(home, text, rate, shown):
    node_toml(home, f'up = "{text}"\n')
    settings = load({"home": home}, {})
    assert settings.up == rate and type(settings.port) is int
    assert ("up", shown, f"file {home / 'node.toml'}") in settings_table.rows(settings)
    assert settings_table.as_json(settings)["up"]["value"] == shown
    assert load({"home": home, "up": shown}, {}).up == rate, "what is shown can be given"
    assert load({"home": home, "up": ""}, {}).up is None


@pytest.mark.parametrize(
    "text", ['"20"', "20", '"20 Mbps"', '"0.5 Mbit/s"', '"-3MB/s"', '"9999999 GB/s"', '"1e3 MB/s"']
)
def test_invalid_rate_is_refused(home, text):
    node_toml(home, f"up = {text}\n")
    with pytest.raises(ConfigError, match="up .* cannot be used") as error:
        load({"home": home}, {})
    assert "20Mbit/s" in error.value.hint


@pytest.mark.parametrize(
    ("text", "size"), [('"500MB"', 500_000_000), ('"1GiB"', 1 << 30), ("2000000", 2_000_000), ("0", 0), ('"0"', 0)]
)
def test_limit_of_the_event_log_is_a_size(home, text, size):
    assert load({"home": home}, {}).events_limit == 10**9
    node_toml(home, f"events_limit = {text}\n")
    assert load({"home": home}, {}).events_limit == size


@pytest.mark.parametrize("text", ['""', '"lots"', "true", "false", "1", '"10kB"', '"9999999TB"', "[]", "-5"])
def test_invalid_limit_of_the_event_log_is_refused(home, text):
    node_toml(home, f"events_limit = {text}\n")
    with pytest.raises(ConfigError, match="events_limit .* cannot be used"):
        load({"home": home}, {})


def test_home_from_environment_finds_its_file(home):
    node_toml(home, "port = 9\n")
    settings = load({}, {"THINWIRE_HOME": str(home)})
    assert settings.port == 9 and settings.directories.key == home / "identity.key"
    other = home.parent / "other"
    assert load({"home": other}, {"THINWIRE_HOME": str(home)}).directories.key == other / "identity.key"


def test_home_in_file_moves_the_directories(home, tmp_path, monkeypatch):
    node_toml(home, 'home = "elsewhere"\ndata = "text"\n')
    settings = load({}, {"THINWIRE_HOME": str(home)})
    assert settings.home == home and settings.data == str(home / "text")  # the environment beats the file
    monkeypatch.setattr(load_settings, "directories", lambda path: directories(path or home))
    assert load({}, {}).directories.state == home / "elsewhere" / "state"


def test_platform_directories_are_used_without_home():
    where = directories(None)
    assert {where.config.name, where.data.name} == {"thinwire"} and where.runs.is_absolute()
    assert Path.cwd() not in (where.config, *where.state.parents)


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        ("prot = 1\n", "unknown key 'prot'", "did you mean 'port'?"),
        ("zzzz = 1\n", "unknown key 'zzzz'", "known names: name, host"),
        ("port = 70000\n", "port 70000 cannot be used", "whole number from 0 to 65535"),
        ("port = true\n", "port True cannot be used", "whole number"),
        ("port = 1.5\n", "port 1.5 cannot be used", "whole number"),
        ('ports = "9-5"\n', "ports '9-5' cannot be used", "range of ports"),
        ("ports = 7\n", "ports 7 cannot be used", "range of ports"),
        ('device = "gpu"\n', "device 'gpu' cannot be used", '"cuda:N"'),
        ('name = ""\n', "name '' cannot be used", "printable"),
        ('name = "a\\u0007"\n', "cannot be used", "printable"),
        ('host = "a b"\n', "host 'a b' cannot be used", "without its port"),
        ('advertise = "224.0.0.1"\n', "cannot be used", "host:port"),
        ("advertise = [1]\n", "cannot be used", "host:port"),
        ("site = 3\n", "site 3 cannot be used", "printable"),
        (f'site = "{"x" * 65}"\n', "cannot be used", "up to 64"),
        ("data = 3\n", "data 3 cannot be used", "a path"),
        ("port = \n", "not TOML", "toml.io"),
        ("\udcff", "not TOML", "toml.io"),
    ],
)
def test_mistakes_in_config_file_are_reported(home, text, message, hint):
    home.mkdir()
    (home / "node.toml").write_bytes(text.encode("utf-8", "surrogateescape"))
    # A flag that would win does not hide the mistake.
    with pytest.raises(ConfigError) as error:
        load({"home": home, "port": 1, "device": "cpu", "name": "n"}, {})
    assert message in str(error.value) and hint in error.value.hint and "node.toml" in str(error.value)
    assert error.value.exit_code == 2


def test_mistakes_in_environment_and_flags_are_reported(home):
    with pytest.raises(ConfigError, match="unknown variable THINWIRE_PROT") as error:
        load({"home": home}, {"THINWIRE_PROT": "1"})
    assert error.value.hint == "did you mean 'THINWIRE_PORT'?"
    with pytest.raises(ConfigError, match="environment THINWIRE_PORT: port 'x'"):
        load({"home": home}, {"THINWIRE_PORT": "x"})
    with pytest.raises(ConfigError, match="flag --port: port -1"):
        load({"home": home, "port": -1}, {})
    with pytest.raises(TypeError):
        load({"prot": 1}, {})


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root reads everything")
def test_unreadable_config_file_is_reported(home):
    node_toml(home, "")
    (home / "node.toml").chmod(0)
    with pytest.raises(ConfigError, match="cannot read"):
        load({"home": home}, {})


def test_directory_as_config_file_is_reported(home):
    (home / "node.toml").mkdir(parents=True)
    with pytest.raises(ConfigError, match="cannot read"):
        load({"home": home}, {})


@pytest.mark.parametrize(
    ("given", "read", "dialled"),
    [
        ("", (), ()),
        ("203.0.113.5", ("203.0.113.5",), ("203.0.113.5:7",)),
        (
            "node.example.org:40, [2001:db8::1]",
            ("node.example.org:40", "[2001:db8::1]"),
            ("node.example.org:40", "[2001:db8::1]:7"),
        ),
        ("[2001:db8::1]:9", ("[2001:db8::1]:9",), ("[2001:db8::1]:9",)),
    ],
)
def test_advertised_addresses_get_the_default_port(home, given, read, dialled):
    settings = load({"home": home, "advertise": given}, {})
    assert settings.advertise == read
    assert load_settings.advertised(settings, 7) == dialled


def test_bootstrap_addresses_are_checked(home):
    one, two = "/ip4/192.0.2.1/tcp/4001/p2p/12D3KooWexample", "/dns4/dht.example.org/tcp/4001/p2p/12D3KooWother"
    assert load({"home": home, "bootstrap": f"{one}, {two}"}, {}).bootstrap == (one, two)
    for wrong in ("192.0.2.1:4001", "/ip4", f"{one} {two}", ",".join([one] * 33)):
        with pytest.raises(ConfigError, match="bootstrap"):
            load({"home": home, "bootstrap": wrong}, {})


def test_config_show_has_every_setting_with_its_source(home):
    settings = load({"home": home, "advertise": "10.0.0.1"}, {"THINWIRE_PORTS": "7401-7499"})
    rows = {name: (value, source) for name, value, source in settings_table.rows(settings)}
    assert rows["ports"] == ("7401-7499", "environment THINWIRE_PORTS") and rows["data"] == ("-", "default")
    assert rows["key"] == (str(home / "identity.key"), "follows")
    plain = settings_table.as_json(settings)
    assert plain["ports"] == {"value": "7401-7499", "source": "environment THINWIRE_PORTS"}
    assert plain["home"]["value"] == str(home) and plain["data"]["value"] is None
    # The printed settings can be read again.
    again = {name: entry["value"] for name, entry in plain.items() if entry["value"] is not None}
    again |= {name: ",".join(again[name]) for name in ("advertise", "bootstrap", "monitor")}
    assert {k: v["value"] for k, v in settings_table.as_json(load(again, {})).items()} == {
        k: v["value"] for k, v in plain.items()
    }


def test_missing_device_is_an_error():
    assert devices()[0] == "cpu" and choose_device("cpu") == "cpu" and choose_device("auto") in devices()
    with pytest.raises(DeviceError, match="no device cuda:99") as error:
        choose_device("cuda:99")
    assert error.value.exit_code == 3 and "available: cpu" in error.value.hint


def test_home_lock_has_one_holder_and_ends_with_it(tmp_path):
    path = tmp_path / "state" / "daemon.lock"
    with hold(path):
        with pytest.raises(InUseError, match=f"process {os.getpid()}") as error, hold(path):
            pass
        assert error.value.exit_code == 3 and "--home" in error.value.hint
    with hold(path):
        pass
    (tmp_path / "file").write_text("")
    with pytest.raises(InUseError, match="cannot write"), hold(tmp_path / "file" / "daemon.lock"):
        pass


def test_lock_on_a_full_disk_is_refused_with_a_hint(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(InUseError, match="No space left") as caught, hold(tmp_path / "lock"):
        pass
    assert caught.value.exit_code == 3 and "make room" in caught.value.hint


def test_lock_that_the_file_system_does_not_support_blames_no_daemon(tmp_path, monkeypatch):
    def unsupported(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", unsupported)
    with pytest.raises(InUseError, match="No locks available"), hold(tmp_path / "lock"):
        pass


@pytest.mark.parametrize("content", [b"", b"12", b"\xff\x00garbage", b"123456789012345678901234567890123"])
def test_lock_left_half_written_by_a_dead_process_is_taken_over(tmp_path, content):
    path = tmp_path / "lock"
    path.write_bytes(content)
    with hold(path):
        assert holder(path) == this_process()


def test_lock_whose_holder_is_unreadable_names_no_process(tmp_path):
    path = tmp_path / "lock"
    with hold(path):
        path.write_bytes(b"\x1b[31mgarbage")
        with pytest.raises(InUseError, match=r"process unknown"), hold(path):
            pass


@pytest.mark.parametrize(("text", "value"), [("true", True), ("false", False), ('"false"', False)])
def test_relaying_is_switched_by_the_settings(home, text, value):
    node_toml(home, f"relay = {text}\n")
    settings = load({"home": home}, {})
    assert settings.relay is value and settings_table.as_json(settings)["relay"]["value"] is value
    assert ("relay", str(value).lower(), f"file {home / 'node.toml'}") in settings_table.rows(settings)
    assert load({"home": home, "relay": "false"}, {}).relay is False, "the flag --no-relay"


def test_relay_has_limits_by_default(home):
    settings = load({"home": home}, {})
    assert (settings.relay_limit, settings.relay_circuits) == (20 * 10**9, 512)
    node_toml(home, 'relay_limit = "5GB"\nrelay_circuits = 10\n')
    settings = load({"home": home}, {})
    assert (settings.relay_limit, settings.relay_circuits) == (5 * 10**9, 10)
    node_toml(home, "relay_limit = 0\n")
    assert load({"home": home}, {}).relay_limit == 0


@pytest.mark.parametrize(
    "line", ['relay_limit = "1MB"', 'relay_limit = ""', "relay_circuits = 0", "relay_circuits = 9999"]
)
def test_invalid_limits_of_a_relay_are_refused(home, line):
    node_toml(home, f"{line}\n")
    with pytest.raises(ConfigError, match="relay_.* cannot be used"):
        load({"home": home}, {})


@pytest.mark.parametrize("text", ["1", '"yes"', '""', "[]"])
def test_relaying_is_true_or_false(home, text):
    node_toml(home, f"relay = {text}\n")
    with pytest.raises(ConfigError, match="relay"):
        load({"home": home}, {})


def test_data_and_model_are_absolute_paths_or_names_of_libraries(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny").mkdir()
    (tmp_path / "node.toml").write_text('data = "text.jsonl#body"\nmodel = "mymodel:make"\n')
    settings = load({"home": tmp_path}, {})
    assert settings.data == f"{tmp_path}/text.jsonl#body" and settings.model == "mymodel:make"
    settings = load({"home": tmp_path, "data": "hf:some/set:en#body", "model": "hf:tiny"}, {})
    assert settings.data == "hf:some/set:en#body" and settings.model == f"hf:{tmp_path}/tiny"
    assert load({"home": tmp_path, "data": "hf:tiny#body"}, {}).data == f"hf:{tmp_path}/tiny#body"
    assert load({"home": tmp_path, "model": "hf:on-the-hub"}, {}).model == "hf:on-the-hub"
    with pytest.raises(ConfigError) as caught:
        load({"model": "mymodel"}, {})
    assert "MODULE:FUNCTION" in caught.value.hint
    assert model_setting("hf", "tiny", tmp_path) == f"hf:{tmp_path}/tiny"
    assert model_setting("hf", "gpt2", tmp_path) == "hf:gpt2"
    assert model_setting("module", "a:b", tmp_path) == "a:b" and model_setting("custom", "", tmp_path) == ""


def test_run_whose_manifest_has_no_name_is_found_by_the_default_one(tmp_path):
    home = directories(tmp_path)
    for run, toml in (
        ("aa" * 8, "[model]\nlayers = 1\n"),
        ("bb" * 8, '[run]\nname = "mine"\n'),
        ("cc" * 8, "run = 3\n"),
    ):
        (home.runs / run).mkdir(parents=True)
        (home.runs / run / "run.toml").write_text(toml)
    assert home.run_names() == {"aa" * 8: "demo", "bb" * 8: "mine", "cc" * 8: ""}
    assert Manifest().run.name == "demo" and home.runs_called("demo") == ["aa" * 8]


def test_home_that_is_not_utf8_is_refused():
    """The status file has the path, and JSON is UTF-8."""
    with pytest.raises(ConfigError) as error:
        load({"home": os.fsdecode(b"a/\xff")}, {})
    assert "UTF-8" in error.value.hint
