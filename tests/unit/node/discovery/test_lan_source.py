"""The local network as a directory: services with names that are not allowed."""

import asyncio
from types import SimpleNamespace

import pytest
from thinwire.node.discovery import lan_source
from thinwire.node.discovery.lan_source import SERVICE, LanSource, txt_strings

zeroconf_asyncio = pytest.importorskip("zeroconf.asyncio")
NAMES = (f"a\x00b.{SERVICE}", f"{'a' * 63}.{'b' * 63}.{SERVICE}", "x._http._tcp.local.", f"good.{SERVICE}")


class Browser:
    """Browser that reports all NAMES at once."""

    def __init__(self, zeroconf, service, handlers):
        for name in NAMES:
            handlers[0](zeroconf=zeroconf, service_type=service, name=name, state_change=None)

    async def async_cancel(self):
        pass


def test_services_with_names_that_are_not_allowed_are_ignored(monkeypatch):
    """Anyone in the network can announce them."""
    asked, ended = [], []

    async def close():
        ended.append(len(asked))

    class Info(zeroconf_asyncio.AsyncServiceInfo):
        def __init__(self, service, name):
            super().__init__(service, name, properties=txt_strings(b"card"))

        async def async_request(self, zeroconf, milliseconds):
            asked.append(self.name)

    monkeypatch.setattr(
        zeroconf_asyncio, "AsyncZeroconf", lambda interfaces: SimpleNamespace(zeroconf=None, async_close=close)
    )
    monkeypatch.setattr(zeroconf_asyncio, "AsyncServiceBrowser", Browser)
    monkeypatch.setattr(zeroconf_asyncio, "AsyncServiceInfo", Info)
    monkeypatch.setattr(lan_source, "LOOK_SECONDS", 0)
    source = LanSource("127.0.0.1")
    assert asyncio.run(source.cards()) == [b"card"] and asked == [NAMES[-1]]
    asyncio.run(source.cards())
    assert ended == [1, 2], "names of a flood are not stored for the next search"
