"""Ports of a real peer, which are kept across restarts; and runs that a home has trained."""

import asyncio
import socket

import msgspec
import pytest
from thinwire.collectives.transport.zeromq.sockets.listener import PortTaken
from thinwire.node.membership.port_file import PortFile
from thinwire.node.peer.bootstrap import arriving, founding
from thinwire.node.runtime.disk import RealDisk
from thinwire.node.runtime.load_settings import load, member_ports
from thinwire.node.runtime.settings import PORT
from thinwire.swarm.identity.identity import Identity, IdentityError
from thinwire.swarm.identity.invite import Invite, Seed
from thinwire.swarm.manifest.manifest import ManifestMismatch
from thinwire.swarm.manifest.parser import parse
from thinwire.swarm.messages.registry import Refuse

RUN = b"r" * 32


def opened_at(home, **flags):
    """Return the port that a peer with these settings listens on, from one start."""
    config = load({"home": home, "host": "127.0.0.1", **flags}, {})
    found = []

    class Recorder:
        async def arrive(self, invite, opener, search):
            transport = await opener(lambda hello, record, source: Refuse("busy", ""))
            found.append(transport.port)
            await transport.close()

    invite = Invite(RUN, (Seed("127.0.0.1:1", Identity.generate(b"1" * 32).transport_public),)).code()
    asyncio.run(arriving(invite, config, 1.0).begin(Recorder()))
    return found[0]


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return sock.getsockname()[1]


def test_limit_of_the_uplink_is_a_number_that_messages_can_have(tmp_path):
    """Peers announce at most this limit."""

    async def main():
        entry = founding(b"", load({"home": tmp_path, "host": "127.0.0.1", "port": 0, "up": "2Mbit/s"}, {}), "run.toml")
        peer = entry.peer(lambda kind, fields: None)
        await entry.begin(peer)
        try:
            return peer.transport.up_limit
        finally:
            await peer.vanish()

    limit = asyncio.run(main())
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(limit)) == 250_000


def test_port_of_a_run_is_kept_across_restarts(tmp_path):
    first = opened_at(tmp_path, port=0)
    assert first and opened_at(tmp_path, port=0) == first
    assert opened_at(tmp_path) == first  # the setting's default gives way to it


def test_given_port_is_kept_too_and_replaced_by_another_given_one(tmp_path):
    one, two = free_port(), free_port()
    assert opened_at(tmp_path, port=one) == one
    assert opened_at(tmp_path, port=two) == two
    assert opened_at(tmp_path) == two


@pytest.mark.parametrize("given", [True, False])
def test_taken_port_is_an_error_with_a_hint(tmp_path, given):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        if not given:
            PortFile(load({"home": tmp_path}, {}).directories.run(RUN).port, RealDisk()).save(port)
        with pytest.raises(PortTaken, match=str(port)) as error:
            opened_at(tmp_path, **({"port": port} if given else {}))
    assert error.value.exit_code == 3 and "--port 0" in error.value.hint


def test_port_zero_takes_another_port_if_the_stored_one_is_taken(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        PortFile(load({"home": tmp_path}, {}).directories.run(RUN).port, RealDisk()).save(port)
        assert opened_at(tmp_path, port=0) not in (0, port)


def test_links_use_the_ports_after_a_fixed_gate(tmp_path):
    settings = load({"home": tmp_path}, {})
    assert settings.port == PORT == 7400 and member_ports(settings) == range(7401, 7500)
    assert member_ports(load({"home": tmp_path, "port": 0}, {})) is None
    assert member_ports(load({"home": tmp_path, "port": 65_535}, {})) is None
    assert member_ports(load({"home": tmp_path, "port": 65_530}, {})) == range(65_531, 65_536)
    assert member_ports(load({"home": tmp_path, "ports": "9000-9001"}, {})) == range(9000, 9002)


def trained(home, toml, author, round=8):
    """Write what a daemon leaves after some rounds of a run: its manifest and the name of a checkpoint."""
    run = load({"home": home}, {}).directories.run(parse(toml).run_id(author.public_key))
    name = f"step-{round:08d}"
    (run.checkpoints / name).mkdir(parents=True)
    (run.checkpoints / "LATEST").write_text(f"{name}\n")
    run.manifest.write_text(toml)


OLD = '[run]\nname = "mine"\n[inner]\nlr = 0.001\n'
CHANGED = OLD.replace("0.001", "0.002")


def test_founding_with_a_changed_manifest_is_refused_with_the_changes(tmp_path):
    config = load({"home": tmp_path}, {})
    founding(OLD.encode(), config, "run.toml")  # creates the key
    trained(tmp_path, OLD, Identity.load(config.directories.key))
    assert founding(OLD.encode(), config, "run.toml").run_id
    with pytest.raises(ManifestMismatch, match=r"run\.toml has changed .* inner\.lr was 0\.001, is 0\.002\n") as error:
        founding(CHANGED.encode(), config, "run.toml")
    assert error.value.exit_code == 5 and "--new" in error.value.hint and "step-00000008" in error.value.hint
    assert founding(CHANGED.encode(), config, "run.toml", new=True).run_id
    many = OLD + "batch = 3\naccumulate = 2\nclip = 2.0\nwarmup = 3\n[outer]\nsync_every = 7\nmethod = 'sparseloco'\n"
    many += "[data]\nshards = 3\nholdout = 0.2\n[model]\nlayers = 1\nwidth = 32\n"
    with pytest.raises(ManifestMismatch, match=r"outer\.method was|and \d+ more keys\n"):
        founding(many.encode(), config, "run.toml")


def test_founding_without_the_key_of_trained_runs_is_refused(tmp_path):
    """The founder's key may be lost; without it the same manifest is another run, at round 0."""
    config = load({"home": tmp_path}, {})
    founding(OLD.encode(), config, "run.toml")
    trained(tmp_path, OLD, Identity.load(config.directories.key))
    config.directories.key.unlink()
    with pytest.raises(IdentityError, match="identity.key is missing") as error:
        founding(OLD.encode(), config, "run.toml")
    assert "--new" in error.value.hint and not config.directories.key.exists()
    assert founding(OLD.replace("mine", "other").encode(), config, "run.toml").run_id, "a run of another name"
    config.directories.key.unlink()
    assert founding(OLD.encode(), config, "run.toml", new=True).run_id


def test_founding_beside_a_run_that_was_joined_with_a_lost_key_is_allowed(tmp_path):
    config = load({"home": tmp_path}, {})
    author = Identity.generate(b"2" * 32)
    trained(tmp_path, OLD, author)
    config.directories.run(parse(OLD).run_id(author.public_key)).token.write_bytes(b"token")
    assert founding(OLD.encode(), config, "run.toml").run_id


@pytest.mark.parametrize("content", [b"\xff\xfe\x80", b"a\0b", b""])
def test_damaged_name_of_the_newest_checkpoint_does_not_prevent_founding(tmp_path, content):
    config = load({"home": tmp_path}, {})
    founding(OLD.encode(), config, "run.toml")
    author = Identity.load(config.directories.key)
    trained(tmp_path, OLD, author)
    run = config.directories.run(parse(OLD).run_id(author.public_key))
    (run.checkpoints / "LATEST").write_bytes(content)
    assert founding(OLD.encode(), config, "run.toml").run_id == parse(OLD).run_id(author.public_key)


@pytest.mark.parametrize("case", ["another name", "another author", "no round"])
def test_founding_beside_other_runs_is_allowed(tmp_path, case):
    config = load({"home": tmp_path}, {})
    founding(OLD.encode(), config, "run.toml")
    ours = Identity.load(config.directories.key)
    author = Identity.generate(b"2" * 32) if case == "another author" else ours
    old = OLD.replace("mine", "other") if case == "another name" else OLD
    trained(tmp_path, old, author, round=0 if case == "no round" else 8)
    assert founding(CHANGED.encode(), config, "run.toml").run_id
