"""Check that plots can be drawn: matplotlib is an optional dependency."""

from __future__ import annotations

from thinwire.swarm.identity.errors import NotInstalled


def check() -> None:
    """Raise NotInstalled when matplotlib is not installed."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise NotInstalled("plots need the package matplotlib", "pip install 'thinwire[plots]'") from None
