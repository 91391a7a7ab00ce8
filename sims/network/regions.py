"""Locations of peers: ten regions of the world, and the paths between them.

Round-trip times and rates of one connection come from public scheduler tables for ten regions of a large cloud. The
rate is what TCP reached over such a path; it limits a connection, not a peer.
"""

from __future__ import annotations

from dataclasses import dataclass

from thinwire.collectives.costs.access_links import MBIT

REGIONS = ("Oregon", "LA", "Iowa", "Canada", "London", "Germany", "Japan", "Taiwan", "Singapore", "Australia")
"""Names of the regions, in the order of the table."""

# Upper triangle of the table, row by row: "round-trip time in ms/rate of one connection in Mbit/s".
_TABLE = """
1/2000 25/1018 39/776 61/405 128/182 136/128 92/262 119/200 157/144 136/126
1/2000 47/528 70/262 136/128 146/157 100/239 128/139 159/145 138/126
1/2000 28/650 96/188 107/229 145/120 176/110 203/109 168/96
1/2000 77/312 88/274 148/155 178/126 214/103 196/113
1/2000 13/1621 214/76 219/77 170/135 264/81
1/2000 224/95 204/108 160/107 251/90
1/2000 38/659 71/335 116/118
1/2000 46/532 134/180
1/2000 96/256
1/2000
"""


@dataclass(frozen=True, slots=True)
class Path:
    """Path between two regions: `rtt` in seconds, `stream` in bytes/s of one connection (None: unlimited)."""

    rtt: float
    stream: float | None


def _paths() -> dict[tuple[str, str], Path]:
    paths = {}
    for row, line in enumerate(_TABLE.split("\n")[1:-1]):
        for column, cell in enumerate(line.split(), start=row):
            rtt, rate = cell.split("/")
            path = Path(float(rtt) / 1e3, float(rate) * MBIT)
            paths[REGIONS[row], REGIONS[column]] = paths[REGIONS[column], REGIONS[row]] = path
    return paths


PATHS = _paths()
"""Maps (region, region) to a Path, for both orders."""
