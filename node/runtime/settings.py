"""Settings of this machine: their names, defaults, valid values and texts of help."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from thinwire.collectives.transport.interface import Loan
from thinwire.node.runtime.disk import present
from thinwire.swarm.identity.address import split_address
from thinwire.swarm.identity.peer_record import MAX_NAME

PREFIX = "THINWIRE_"
HAS_PORT = re.compile(r"[^:]:\d+$")
"""Pattern of an address with a port."""

_RATE = re.compile(r"(\d{1,9}(?:\.\d{1,9})?) ?([kMG]bit/s|[kMG]B/s)")
_UNITS = {
    f"{prefix}{unit}": size * factor
    for prefix, size in (("k", 1e3), ("M", 1e6), ("G", 1e9))
    for unit, factor in (("bit/s", 1 / 8), ("B/s", 1.0))
}
PORT = 7400
"""Default port of the gate."""

MEMBER_PORTS = 99
"""Number of ports after the gate's that links use by default, when the gate has a fixed port."""

MAPPED_PORTS = 15
"""Number of ports for links when the router maps them."""

SLOWEST, FASTEST = 125_000, 2**40
"""Range of a rate limit in bytes/s; below it, other peers would wait too long for our data."""

EVENTS_LIMIT = 10**9
"""Default limit of an event log in bytes, about what a year of events takes."""

LEAST_RELAYED = 100 * 10**6
"""Smallest limit of relayed bytes a day."""

LEAST_EVENTS = 10**6
"""Least limit of an event log in bytes."""

_MULTIADDRESS = re.compile(r"(/[0-9A-Za-z.:_-]{1,128}){2,16}")
MONITORS = ("tensorboard", "wandb")
"""Experiment trackers that can show a run."""

HF = "hf:"
"""Prefix of the name of a model or a data set of the Hugging Face libraries."""

DEVICE = re.compile(r"auto|cpu|cuda(:\d{1,3})?")


class Rate(int):
    """Bytes per second; written in Mbit/s."""

    def __str__(self) -> str:
        return f"{int(self) * 8 / 1e6:g} Mbit/s"


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting.

    `read` converts text or a TOML value, or raises ValueError with a description of valid values. `path`: True if the value
    may be a path, which is relative to the file that contains it.
    """

    name: str
    default: object
    read: Callable[[Any], object]
    help: str
    path: bool = False

    @property
    def variable(self) -> str:
        """Name of its environment variable."""
        return PREFIX + self.name.upper()


def _name(value: Any) -> str:
    if not isinstance(value, str) or not value.isprintable() or not 1 <= len(value.encode()) <= MAX_NAME:
        raise ValueError(f"printable text of 1 to {MAX_NAME} bytes")
    return value


def _host(value: Any) -> str:
    if not isinstance(value, str) or not re.fullmatch(r"[0-9A-Za-z.:-]{1,64}", value):
        raise ValueError("an address of this machine without its port, such as 0.0.0.0, :: or 192.168.1.5")
    return value


def _integer(value: Any, low: int, high: int) -> int:
    text = value.strip() if isinstance(value, str) else value
    number = int(text) if isinstance(text, str) and re.fullmatch(r"\d{1,9}", text) else text
    if type(number) is not int or not low <= number <= high:
        raise ValueError(f"a whole number from {low} to {high}")
    return number


def _ports(value: Any) -> tuple[int, int] | None:
    if value == "":
        return None
    match = re.fullmatch(r"(\d{1,5})-(\d{1,5})", value) if isinstance(value, str) else None
    if match is None or not 1 <= int(match[1]) <= int(match[2]) <= 65_535:
        raise ValueError('a range of ports such as "7401-7499"')
    return int(match[1]), int(match[2])


def _advertise(value: Any) -> tuple[str, ...]:
    wanted = "host or host:port that others can dial; separate several with commas (IPv6 in brackets)"
    parts = [part.strip() for part in value.split(",")] if isinstance(value, str) else value
    if not isinstance(parts, list) or not all(isinstance(part, str) for part in parts):
        raise ValueError(wanted)
    result = tuple(part for part in parts if part)
    for part in result:
        try:
            split_address(part if HAS_PORT.search(part) else f"{part}:1")
        except ValueError as error:
            raise ValueError(f"{wanted}; {error}") from None
    return result


def _bootstrap(value: Any) -> tuple[str, ...]:
    parts = [part.strip() for part in value.split(",")] if isinstance(value, str) else value
    if not isinstance(parts, list) or not all(isinstance(part, str) for part in parts):
        raise ValueError("multiaddresses, separated with commas")
    result = tuple(part for part in parts if part)
    if len(result) > 32 or not all(_MULTIADDRESS.fullmatch(part) for part in result):
        raise ValueError(
            "at most 32 multiaddresses such as /ip4/192.0.2.1/tcp/4001/p2p/12D3KooW..., separated with commas"
        )
    return result


def _monitor(value: Any) -> tuple[str, ...]:
    parts = [part.strip() for part in value.split(",")] if isinstance(value, str) else value
    if not isinstance(parts, list) or not all(part in ("", *MONITORS) for part in parts):
        raise ValueError(f"some of {', '.join(MONITORS)}, separated with commas")
    return tuple(dict.fromkeys(part for part in parts if part))


def _command(value: Any) -> str:
    if not isinstance(value, str) or "\0" in value:
        raise ValueError("the name or the path of a Python interpreter")
    return value


def _site(value: Any) -> str:
    if not isinstance(value, str) or len(value) > 64 or not (value.isprintable() or not value):
        raise ValueError("up to 64 printable characters")
    return value


def _path(value: Any) -> Path | None:
    if value == "":
        return None
    if not isinstance(value, str | Path) or "\0" in str(value):
        raise ValueError("a path")
    path = Path(value).expanduser().absolute()
    try:
        str(path).encode()
    except UnicodeEncodeError:
        # status.json and the event log have the path.
        raise ValueError("a path in UTF-8") from None
    return path


def _of_library(value: str) -> str:
    """Make "hf:FOLDER" absolute, also with #FIELD behind it; other names stay."""
    name, mark, field = value.removeprefix(HF).partition("#")
    path = Path(name).expanduser()
    return f"{HF}{path.absolute() if name and present(path) else name}{mark}{field}"


def _data(value: Any) -> str | None:
    """Make a path absolute, also with #FIELD behind it."""
    if isinstance(value, str) and value.startswith(HF):
        return _of_library(value)
    path = _path(value)
    return None if path is None else str(path)


def _model(value: Any) -> str:
    if not isinstance(value, str) or not value.isprintable() or (value and ":" not in value):
        raise ValueError('"MODULE:FUNCTION", or "hf:" with a folder or a name, such as "hf:gpt2-small"')
    return _of_library(value) if value.startswith(HF) else value


def _device(value: Any) -> str:
    if not isinstance(value, str) or not DEVICE.fullmatch(value):
        raise ValueError('"auto", "cpu", "cuda" or "cuda:N"')
    return value


def _rate(value: Any) -> Rate | None:
    if value == "":
        return None
    match = _RATE.fullmatch(value.strip()) if isinstance(value, str) else None
    rate = int(float(match[1]) * _UNITS[match[2]]) if match else 0
    if not SLOWEST <= rate <= FASTEST:
        raise ValueError('a rate with its unit, at least 1 Mbit/s, such as "20Mbit/s" or "2.5MB/s"')
    return Rate(rate)


def size_of(text: str, unit: int = 1024) -> int:
    """Return the bytes of a size such as "2GiB", "512 MiB" or "1.5G". Raises ValueError.

    unit: of K, M, G and T, if they are not followed by "i".
    """
    found = re.fullmatch(r"\s*(\d{1,12}(?:\.\d{1,6})?)\s*([KMGT]?)(i?)B?\s*", text, re.IGNORECASE)
    power = 0 if found is None else " KMGT".index(found[2].upper() or " ")
    if found is None or not (size := int(float(found[1]) * (1024 if found[3] else unit) ** power)):
        raise ValueError(f"{text!r} is no size")
    return size


def _limit(value: Any, least: int) -> int:
    if value in (0, "0") and value is not False:
        return 0
    try:
        size = size_of(str(value), 1000)
    except ValueError:
        size = 0
    if not least <= size < 1 << 50:
        raise ValueError(f'a size of at least {least // 10**6} MB, such as "500MB", or 0 for no limit')
    return size


def _switch(value: Any) -> bool:
    values = {"true": True, "false": False}
    if type(value) is not bool and not (isinstance(value, str) and value in values):
        raise ValueError("true or false")
    return value if type(value) is bool else values[value]


SETTINGS = (
    Setting(
        "name",
        "",
        _name,
        "name that others see beside this peer's id; default: this machine's name, which is not sent",
    ),
    Setting("host", "0.0.0.0", _host, "address to listen on; 127.0.0.1 keeps the swarm on this machine"),
    Setting(
        "port",
        PORT,
        lambda v: _integer(v, 0, 65_535),
        "port of the gate, where joiners connect; 0: any free port, the same after a restart",
    ),
    Setting("ports", None, _ports, f'ports for links, such as "7401-7499"; "": the {MEMBER_PORTS} after the gate\'s'),
    Setting("advertise", (), _advertise, "host[:port] that others dial, if it differs from this machine's own address"),
    Setting(
        "site", "", _site, 'name of the fast network that this machine shares with peers of the same site; "": none'
    ),
    Setting(
        "data",
        None,
        _data,
        'file, directory or "hf:DATASET" to train on, also with #FIELD; "": Python\'s standard library',
        path=True,
    ),
    Setting(
        "model",
        "",
        _model,
        'model of the user that may be trained here: "MODULE:FUNCTION" or "hf:FOLDER"; "": built-in',
    ),
    Setting("device", "auto", _device, '"cpu", "cuda", "cuda:N", or "auto": a GPU if there is one'),
    Setting("compile", False, _switch, "whether to compile the model, which takes a minute and makes steps faster"),
    Setting(
        "gradient_checkpointing",
        False,
        _switch,
        "whether to compute activations twice instead of storing them: less memory, slower steps",
    ),
    Setting(
        "evaluate_every",
        10,
        lambda v: _integer(v, 0, 1_000_000),
        "rounds between two evaluations on held-out text, each of which takes a tenth of a round at most; 0: never",
    ),
    Setting("threads", 0, lambda v: _integer(v, 0, 1024), "threads for computing; 0: torch's default"),
    Setting("up", None, _rate, 'limit for outgoing rounds and state, such as "20Mbit/s"; "": no limit'),
    Setting(
        "shared_memory", True, _switch, "whether peers of this user and machine exchange data through shared memory"
    ),
    Setting("relay", True, _switch, "whether to pass data on between peers that cannot reach each other"),
    Setting(
        "relay_limit",
        Loan().daily,
        lambda v: _limit(v, LEAST_RELAYED),
        'most bytes a day that this peer passes on between such peers, such as "5GB"; 0: no limit',
    ),
    Setting(
        "relay_circuits",
        Loan().circuits,
        lambda v: _integer(v, 1, 1024),
        "most connections that it passes on at one time; two peers need five",
    ),
    Setting(
        "map_port", False, _switch, "whether to ask the router to forward ports to this machine (PCP, NAT-PMP, UPnP)"
    ),
    Setting(
        "bootstrap",
        (),
        _bootstrap,
        "multiaddresses of nodes of the DHT with the public directory; empty: those seen before",
    ),
    Setting("directory_python", "", _command, 'Python interpreter that has hivemind; "": the one of thinwire'),
    Setting(
        "events_limit",
        EVENTS_LIMIT,
        lambda v: _limit(v, LEAST_EVENTS),
        'most bytes of the event log of a run, such as "500MB", whose oldest events are then removed; 0: no limit',
    ),
    Setting("monitor", (), _monitor, "tools that show the run, too: tensorboard, wandb; each must be installed"),
    Setting("home", None, _path, "one directory for all files, so that several daemons can share a machine", path=True),
)
"""All settings, in the order of `thinwire config show`."""


def model_setting(kind: str, name: str, folder: Path) -> str:
    """Return the setting `model` for the kind and name in a manifest's [model].

    A path is relative to `folder`.
    """
    if kind != "hf":
        return name
    place = (folder / name).absolute()
    return f"{HF}{place if present(place) else name}"
