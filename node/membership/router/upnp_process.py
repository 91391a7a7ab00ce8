"""Process for one UPnP request, which `upnp.py` passes in JSON; the answer is one line of JSON.

The file imports nothing of thinwire, so that the process starts at once.
"""

from __future__ import annotations

import json
import sys
from contextlib import suppress
from typing import Any

DISCOVER_MILLISECONDS = 2000
DESCRIPTION = "thinwire"


def main() -> None:
    """Answer the request."""
    request = json.loads(sys.argv[1])
    try:
        import miniupnpc
    except ImportError:
        print(json.dumps({"error": "miniupnpc is not installed; pip install 'thinwire[nat]'"}))
        return
    try:
        print(json.dumps({"address": answer(miniupnpc.UPnP(*filter(None, [request["interface"]])), request)}))
    except Exception as error:  # The library raises exceptions of any kind.
        print(json.dumps({"error": str(error) or type(error).__name__}))


def answer(upnp: Any, request: dict[str, Any]) -> str:
    """Map or remove ports; return the router's outside address. Raises exceptions of the library."""
    upnp.discoverdelay = DISCOVER_MILLISECONDS
    try:
        found = upnp.discover()
    except Exception:  # If no router answers, the text of the exception is "Success".
        found = 0
    if not found:
        raise LookupError("no router answers")
    upnp.selectigd()
    for port in request["ports"]:
        owner = upnp.getspecificportmapping(port, "TCP")
        foreign = owner is not None and owner[0] != upnp.lanaddr
        if request["do"] == "unmap":
            if owner is not None and not foreign:
                with suppress(Exception):  # The library raises exceptions of any kind; the other ports follow.
                    upnp.deleteportmapping(port, "TCP")
            continue
        if foreign:
            raise LookupError(f"port {port} is mapped to {owner[0]}")
        add(upnp, port, request["seconds"])
    return str(upnp.externalipaddress())


def add(upnp: Any, port: int, seconds: int) -> None:
    """Map one port, without an end if the router grants only such mappings (error 725)."""
    lease = [upnp.lanaddr, port, DESCRIPTION, ""]
    try:
        upnp.addportmapping(port, "TCP", *lease, seconds)
    except Exception as error:
        if "OnlyPermanentLeasesSupported" not in str(error):
            raise
        upnp.addportmapping(port, "TCP", *lease)


if __name__ == "__main__":
    main()
