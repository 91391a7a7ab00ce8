"""Level L2: network namespaces with the kernel's TCP between them, where this machine allows it."""

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest
from thinwire.sims.processes import netns_testbed
from thinwire.sims.processes.netns_testbed import NetnsTestbed
from thinwire.sims.processes.testbed import EmulationError, Unplayable
from thinwire.sims.scenario.parser import parse

REASON = netns_testbed.obstacle()
needed = pytest.mark.skipif(bool(REASON), reason=REASON)
netem = pytest.mark.skipif(bool(REASON) or not netns_testbed.has_netem(), reason=REASON or "the kernel has no netem")
tun = pytest.mark.skipif(bool(REASON) or not netns_testbed.TUN.exists(), reason=REASON or "there is no /dev/net/tun")

SCENARIO = """
duration = 60
[links]
rtt_ms = 80
[[peers]]
count = 3
up_mbit = 50
down_mbit = 50
"""

SERVER = """
import socket
with socket.create_server(("{host}", 7400)) as server:
    print("up", flush=True)
    while True:
        connection, _ = server.accept()
        while data := connection.recv(65536):
            connection.sendall(b"!" * data.count(b"\\n"))
"""

CLIENT = """
import socket, sys, time
began = time.perf_counter()
with socket.create_connection(("{host}", 7400), timeout=60) as link:
    connected = time.perf_counter() - began
    print(f"{{connected:.4f}}", flush=True)
    for line in sys.stdin:
        sent = time.perf_counter()
        link.sendall(line.encode())
        link.recv(1)
        print(f"{{time.perf_counter() - sent:.4f}}", flush=True)
"""


def python(site, source, host):
    program = [*site.prefix, sys.executable, "-c", source.format(host=host)]
    return subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


async def heard(process, seconds=60):
    return await asyncio.wait_for(asyncio.to_thread(process.stdout.readline), seconds)


def namespaces_of_children():
    """Return the network namespaces, other than ours, of all processes on this machine."""
    found = set()
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            try:
                found.add(os.readlink(process / "ns/net"))
            except OSError:
                continue
    return found


@needed
@pytest.mark.parametrize(
    "kind", [pytest.param(False, marks=tun, id="tun"), pytest.param(True, marks=netem, id="netem")]
)
def test_namespaces_have_round_trip_times_and_cuts_and_are_removed(kind):
    async def main():
        before = namespaces_of_children()
        ground = NetnsTestbed(parse(SCENARIO), netem=kind)
        processes = []
        try:
            sites = await ground.open()
            assert len(namespaces_of_children() - before) >= 3
            server = python(sites[0], SERVER, sites[0].host)
            processes.append(server)
            assert await heard(server) == "up\n"
            client = python(sites[1], CLIENT, sites[0].host)
            processes.append(client)
            assert float(await heard(client)) >= 0.079
            client.stdin.write("ping\n")
            client.stdin.flush()
            assert float(await heard(client)) >= 0.079
            # One direction suffices to stop a conversation; afterwards TCP continues.
            ground.hold(0, 1)
            client.stdin.write("still there?\n")
            client.stdin.flush()
            with pytest.raises(TimeoutError):
                answer = asyncio.ensure_future(heard(client))
                await asyncio.wait_for(asyncio.shield(answer), 1.0)
            ground.release(0, 1)
            assert float(await answer) >= 1.0
            with pytest.raises(Unplayable):
                ground.disturb("reset", 0, 1, 0.0)
            ground.lose(0.0)
        finally:
            for process in processes:
                process.kill()
                process.wait()
                process.stdin.close()
                process.stdout.close()
            await ground.close()
        for _ in range(300):  # Another test may have namespaces, too.
            if namespaces_of_children() <= before:
                break
            await asyncio.sleep(0.1)
        assert namespaces_of_children() <= before

    asyncio.run(main())


@needed
@tun
def test_namespace_link_carries_at_most_its_rate():
    async def main():
        ground = NetnsTestbed(parse(SCENARIO.replace("rtt_ms = 80", "rtt_ms = 2")), netem=False)
        processes = []
        try:
            sites = await ground.open()
            processes.append(python(sites[2], SERVER, sites[2].host))
            assert await heard(processes[0]) == "up\n"
            processes.append(python(sites[0], CLIENT, sites[2].host))
            await heard(processes[1])
            processes[1].stdin.write("x" * 2_000_000 + "\n")
            processes[1].stdin.flush()
            # 2 MB at 50 Mbit/s, less the burst of the token buckets.
            assert float(await heard(processes[1])) >= 0.9 * 2e6 / (50e6 / 8)
        finally:
            for process in processes:
                process.kill()
                process.wait()
                process.stdin.close()
                process.stdout.close()
            await ground.close()

    asyncio.run(main())


@needed
def test_namespaces_end_with_their_creator():
    code = (
        "import asyncio, sys\n"
        "from thinwire.sims.processes.netns_testbed import NetnsTestbed\n"
        "from thinwire.sims.scenario.parser import parse\n"
        "ground = NetnsTestbed(parse(sys.argv[1]))\n"
        "asyncio.run(ground.open())\n"
        "print(*[holder.pid for holder in ground._holders], flush=True)\n"
        "sys.stdin.read()\n"
    )
    maker = subprocess.Popen(
        [sys.executable, "-c", code, SCENARIO], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    holders = [int(word) for word in maker.stdout.readline().split()]
    assert len(holders) >= 3
    maker.kill()
    maker.wait()
    maker.stdin.close()
    maker.stdout.close()

    def gone(holder):
        try:
            return Path(f"/proc/{holder}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
        except FileNotFoundError:
            return True

    async def wait():
        async with asyncio.timeout(60):
            while not all(gone(holder) for holder in holders):
                await asyncio.sleep(0.05)

    asyncio.run(wait())


def test_machine_without_namespaces_reports_the_reason(monkeypatch):
    monkeypatch.setattr(netns_testbed, "obstacle", lambda: "it needs root")
    with pytest.raises(EmulationError, match="it needs root") as caught:
        asyncio.run(NetnsTestbed(parse(SCENARIO)).open())
    assert caught.value.exit_code == 3 and caught.value.hint


def test_netem_arguments_match_link():
    ground = NetnsTestbed(parse(SCENARIO + "[random]\n"), netem=True)
    lines = list(ground.uplink_commands(1))
    assert "qdisc add dev eth0 parent 1:10 handle 10: netem limit 20000 delay 40.000ms 0.000ms loss 0.0000%" in lines
    assert sum(line.startswith("filter") for line in lines) == 2 and not any(
        ground.addresses[1] in line for line in lines
    )
    ground.hold(1, 2)
    assert ground.netem_of(1, 2).endswith("loss 100.0000%")
    ground.release(1, 2)
    ground.lose(0.25)
    assert ground.netem_of(1, 2).endswith("loss 25.0000%")
