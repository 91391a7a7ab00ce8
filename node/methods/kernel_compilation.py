"""Compilation of the kernels that a run needs, before its first round."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial

from thinwire.collectives.gossip.pair_codec import SLOW
from thinwire.compression.compile_kernels import warm_up
from thinwire.node.runtime.console import LOGGER
from thinwire.swarm.manifest.manifest import Manifest

LOADING_SECONDS = 1.0
"""Seconds within which compiled kernels load from the disk cache on a busy machine."""


async def compile_kernels(manifest: Manifest, work: Callable[[Callable[[], None]], Awaitable[None]]) -> None:
    """Compile the kernels of the run's codecs, or load them from the disk cache.

    Log a line if that takes a while. work: runs a function where computing is allowed.
    """
    codec = manifest.exchange.codec
    specs = (codec, SLOW) if manifest.outer.gossip else (codec,)
    compiling = asyncio.ensure_future(work(partial(warm_up, *specs)))
    await asyncio.wait((compiling,), timeout=LOADING_SECONDS)
    if not compiling.done():
        LOGGER.info("preparing the kernels of %s: compiled for this processor once, then loaded from the cache", codec)
    await compiling
