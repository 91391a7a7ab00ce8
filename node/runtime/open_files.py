"""Limit of open files of this process: every link to a peer needs some."""

from __future__ import annotations

import sys
from typing import ClassVar

from thinwire.swarm.identity.errors import HintedError

OWN = 40
"""Files that a peer without links has open, rounded up."""

PER_LINK = 10
"""Files of one link: control connections, streams, their second descriptors for threads, relays."""

PLENTY = 1024
"""Limit that is enough for a large group: no warning from here on."""

ADVICE = "raise the limit before you start, for example with `ulimit -n 4096`"


class TooFewFilesError(HintedError):
    """The limit of open files is too low for even one link."""

    exit_code: ClassVar[int] = 3


def check_open_files(*, extend: bool = False) -> str:
    """Return a warning if the limit of open files is low, else "".

    `extend`: first raise the soft limit of this process to its hard limit. Raises TooFewFilesError.
    """
    if sys.platform == "win32":
        return ""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if extend and soft != hard:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            soft = hard
        except (ValueError, OSError):
            pass  # some systems allow less than the hard limit that they report
    if soft == resource.RLIM_INFINITY or soft >= PLENTY:
        return ""
    links = (soft - OWN) // PER_LINK
    if links < 1:
        raise TooFewFilesError(f"this process may open only {soft} files, too few for one link to a peer", ADVICE)
    return f"this process may open only {soft} files, enough for about {links} peers; {ADVICE}"
