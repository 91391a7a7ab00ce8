"""UPnP (Internet Gateway Device): port mappings by miniupnpc, in a separate process each time.

The library is C code that reads what any machine of the local network sends, and it blocks. A crash or a hanging
router ends the process, not the peer.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Sequence

from thinwire.node.membership.router import upnp_process
from thinwire.node.membership.router.port_mapping import MappingFailed
from thinwire.node.runtime.console import plain

SECONDS = 30.0
"""Longest duration of a request, with the search for the router and 16 mappings."""

ANSWER_BYTES = 4096


class Upnp:
    """UPnP through the network of `interface`, an address of this machine; "": the default one."""

    name = "UPnP"

    def __init__(self, interface: str = "") -> None:
        self._interface = interface

    async def map(self, ports: Sequence[int], seconds: int) -> str:
        """Map the ports; return the outside host. Raises MappingFailed."""
        return await self._run("map", seconds, ports)

    async def unmap(self, ports: Sequence[int]) -> None:
        """Remove the mappings of the ports. Raises MappingFailed."""
        await self._run("unmap", 0, ports)

    async def _run(self, action: str, seconds: int, ports: Sequence[int]) -> str:
        request = json.dumps({"do": action, "interface": self._interface, "seconds": seconds, "ports": list(ports)})
        try:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                str(upnp_process.__file__),
                request,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C must not end it half-way.
            )
        except OSError as error:
            raise MappingFailed(f"no process for it: {error.strerror}") from None
        assert process.stdout is not None
        try:
            async with asyncio.timeout(SECONDS):
                output = await process.stdout.read(ANSWER_BYTES)
                await process.wait()
        except TimeoutError:
            raise MappingFailed(f"no answer within {SECONDS:g} s") from None
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        return outside_host(output)


def outside_host(output: bytes) -> str:
    """Return the outside host in the answer of the process.

    Raises MappingFailed, with the reason in printable letters.
    """
    try:
        answer = json.loads(output)
        host, failure = str(answer.get("address", "")), str(answer.get("error", ""))
    except (ValueError, AttributeError, RecursionError):
        raise MappingFailed("the request failed without a reason") from None
    if failure:
        raise MappingFailed(plain(" ".join(failure.split())[:200]))
    return host
