"""Check that plots can be drawn: matplotlib is an optional dependency."""

from __future__ import annotations

from typing import ClassVar

from thinwire.swarm.identity.errors import HintedError


class NoPlots(HintedError):
    """Drawing needs a library that is not installed."""

    exit_code: ClassVar[int] = 1


def check() -> None:
    """Raise NoPlots when matplotlib is not installed."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise NoPlots("cannot draw plots: matplotlib is not installed", "pip install 'thinwire[plots]'") from None
