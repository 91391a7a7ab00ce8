"""Look-ups of host names, with a name server that answers at a chosen time."""

from __future__ import annotations

import asyncio
import socket
import threading

import pytest
from thinwire.collectives.transport.addresses.name_resolver import AT_ONCE, WAITING, NameResolver


class Answers:
    """Look-ups that wait until `open` is set; `asked`: the names so far."""

    def __init__(self, *, open=True):
        self.open, self.asked, self.lock = threading.Event(), [], threading.Lock()
        if open:
            self.open.set()

    def __call__(self, host, port, **options):
        with self.lock:
            self.asked.append(host)
        self.open.wait()
        if host.startswith("gone"):
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return [(2, 1, 6, "", ("192.0.2.7", 0))]


def test_numeric_addresses_are_not_looked_up():
    answers = Answers()

    async def main():
        resolver = NameResolver(answers)
        for address in ("192.0.2.1", "2001:db8::1"):
            assert await resolver.numeric(address) == (address,)

    asyncio.run(main())
    assert not answers.asked


def test_answers_and_failures_are_kept_for_a_while():
    answers = Answers()

    async def main():
        resolver = NameResolver(answers)
        for _ in range(3):
            assert await resolver.numeric("peer.example") == ("192.0.2.7",)
            with pytest.raises(OSError, match="not known"):
                await resolver.numeric("gone.example")

    asyncio.run(main())
    assert answers.asked == ["peer.example", "gone.example"]


def test_names_that_are_never_answered_hold_few_threads_and_no_numeric_address():
    answers = Answers(open=False)

    async def main():
        resolver = NameResolver(answers)
        stuck = [asyncio.ensure_future(resolver.numeric(f"a{at}.example")) for at in range(AT_ONCE + WAITING)]
        await asyncio.sleep(0)
        with pytest.raises(OSError, match="too many names"):
            await resolver.numeric("one-more.example")
        again = asyncio.ensure_future(resolver.numeric("a0.example"))
        assert await resolver.numeric("192.0.2.1") == ("192.0.2.1",)
        for one in stuck:
            one.cancel()  # as a dial that has timed out
        await asyncio.gather(*stuck, return_exceptions=True)
        await asyncio.sleep(0)
        assert len(answers.asked) <= AT_ONCE, "a cancelled look-up holds its thread until it ends"
        answers.open.set()
        assert await again == ("192.0.2.7",)
        assert await resolver.numeric(f"a{AT_ONCE + WAITING - 1}.example") == ("192.0.2.7",)

    asyncio.run(main())
    assert sorted(answers.asked) == sorted(set(answers.asked)), "each name was looked up once"


def test_host_is_dialled_at_each_of_its_addresses():
    """Such as a name with an address of version 6, of a process that listens at version 4 only."""

    async def main():
        server = await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        entries = [(0, 0, 0, "", ("127.0.0.2", 0)), (0, 0, 0, "", ("127.0.0.2", 0)), (0, 0, 0, "", ("127.0.0.1", 0))]
        resolver = NameResolver(lambda host, port, **options: entries)
        transport, _ = await resolver.connect(asyncio.Protocol, "both.example", port)
        assert transport.get_extra_info("peername")[0] == "127.0.0.1"
        transport.close()
        server.close()
        with pytest.raises(ConnectionRefusedError):
            await resolver.connect(asyncio.Protocol, "both.example", port)

    asyncio.run(main())


def test_look_up_without_a_thread_or_with_an_error_fails_and_frees_its_turn(monkeypatch):
    async def main():
        resolver = NameResolver(Answers())
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", lambda thread: (_ for _ in ()).throw(RuntimeError("no threads")))
            for at in range(2 * AT_ONCE):
                with pytest.raises(OSError, match="no threads"):
                    await resolver.numeric(f"a{at}.example")
        assert await resolver.numeric("b.example") == ("192.0.2.7",)

    asyncio.run(main())


def test_name_that_cannot_be_encoded_is_refused():
    def fails(host, port, **options):
        return host.encode("idna")

    async def main():
        with pytest.raises(OSError, match="not a host name"):
            await NameResolver(fails).numeric("nonsense..x")

    asyncio.run(main())
