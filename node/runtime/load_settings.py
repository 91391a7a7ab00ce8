"""Settings of this machine: flag, then environment, then node.toml, then default.

Every value records its source.

Settings that all peers of a run share are in the manifest (run.toml) instead. Strict: an unknown key is an error.
"""

from __future__ import annotations

import difflib
import platform
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, TypeAlias

from thinwire.node.runtime.directories import Directories, directories
from thinwire.node.runtime.settings import HAS_PORT, HF, MAPPED_PORTS, MEMBER_PORTS, PREFIX, SETTINGS, Rate
from thinwire.swarm.identity.address import join_address
from thinwire.swarm.identity.errors import HintedError
from thinwire.swarm.identity.regular_file import content_of

MOST_SHOWN = 200
"""Most characters of a wrong value in an error."""

Flags: TypeAlias = Mapping[str, "str | int | Path | None"]
"""Values from the command line by name of the setting; None if the flag was not given."""


class ConfigError(HintedError):
    """Invalid setting; the message names where it was set and the hint a valid value."""

    exit_code: ClassVar[int] = 2


@dataclass(frozen=True, slots=True)
class Config:
    """Checked settings; see settings.py for their meanings. `sources` gives the origin of each value."""

    name: str
    host: str
    port: int
    ports: tuple[int, int] | None
    advertise: tuple[str, ...]
    site: str
    data: str | None
    model: str
    device: str
    compile: bool
    gradient_checkpointing: bool
    evaluate_every: int
    threads: int
    up: Rate | None
    shared_memory: bool
    relay: bool
    relay_limit: int
    relay_circuits: int
    map_port: bool
    bootstrap: tuple[str, ...]
    directory_python: str
    events_limit: int
    monitor: tuple[str, ...]
    home: Path | None
    directories: Directories
    sources: Mapping[str, str]


_BY_NAME = {setting.name: setting for setting in SETTINGS}


def load(flags: Flags, environment: Mapping[str, str], named: str = "flag --{}") -> Config:
    """Collect and check the settings. Raises ConfigError.

    named: how errors and sources name a value of `flags`.

    node.toml is read from the home that a flag or the environment names, else from the platform's configuration
    directory; a `home` in that file moves everything but the file itself.
    """
    if unknown := flags.keys() - _BY_NAME.keys():
        raise TypeError(f"no such settings: {unknown}")
    given = [*_from_environment(environment), *_from_flags(flags, named)]
    homes = [_checked(*item) for item in given if item[0] == "home"]
    file = directories(_as_path(homes[-1] if homes else None)).node_file
    values = {setting.name: setting.default for setting in SETTINGS}
    values["name"] = platform.node()[:64] or "peer"
    sources = dict.fromkeys(values, "default")
    # Later values override earlier ones; but all are checked, so that no mistake stays hidden.
    for name, raw, source in [*_from_file(file), *given]:
        values[name] = _checked(name, raw, source)
        sources[name] = source
    checked: dict[str, Any] = values
    return Config(**checked, directories=directories(_as_path(values["home"])), sources=sources)


def _as_path(value: object) -> Path | None:
    assert value is None or isinstance(value, Path)
    return value


def _checked(name: str, raw: object, source: str) -> object:
    try:
        return _BY_NAME[name].read(raw)
    except ValueError as error:
        shown = repr(str(raw) if isinstance(raw, Path) else raw)
        shown = shown if len(shown) <= MOST_SHOWN else shown[:MOST_SHOWN] + "…"
        raise ConfigError(f"{source}: {name} {shown} cannot be used", f"valid: {error}") from None


def _from_flags(flags: Flags, named: str) -> Iterator[tuple[str, object, str]]:
    for name, value in flags.items():
        if value is not None:
            yield name, value, named.format(name.replace("_", "-"))


def _from_environment(environment: Mapping[str, str]) -> Iterator[tuple[str, object, str]]:
    variables = {setting.variable: setting for setting in SETTINGS}
    for variable, text in sorted(environment.items()):
        if variable in variables:
            yield variables[variable].name, text, f"environment {variable}"
        elif variable.startswith(PREFIX):
            raise ConfigError(f"environment: unknown variable {variable}", nearest(variable, list(variables)))


def _from_file(file: Path) -> Iterator[tuple[str, object, str]]:
    try:
        table = tomllib.loads(content_of(file).decode())
    except (FileNotFoundError, NotADirectoryError):
        return
    except OSError as error:
        hint = "check its owner and mode, or choose another directory with --home"
        raise ConfigError(f"cannot read {file}: {error.strerror}", hint) from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{file}: not TOML: {error}", "see https://toml.io for the format") from None
    for name, value in table.items():
        if name not in _BY_NAME:
            raise ConfigError(f"{file}: unknown key {name!r}", nearest(name, list(_BY_NAME)))
        if _BY_NAME[name].path and isinstance(value, str) and value and not value.startswith(HF):
            value = str(file.parent / Path(value).expanduser())  # relative to the file, not to the current directory
        yield name, value, f"file {file}"


def nearest(word: str, known: list[str]) -> str:
    """Return a hint for an unknown name."""
    close = difflib.get_close_matches(word, known, n=1)
    return f"did you mean {close[0]!r}?" if close else f"known names: {', '.join(known)}"


def member_ports(config: Config) -> range | None:
    """Return the ports for links: those of the setting, else those after a fixed port; None: any.

    With `map_port` these are at most MAPPED_PORTS, because the router is asked for each of them.
    """
    most, first = MAPPED_PORTS if config.map_port else MEMBER_PORTS, config.port + 1
    if config.ports is not None:
        found = range(config.ports[0], config.ports[1] + 1)
        return found[:most] if config.map_port else found
    return range(first, min(first + most, 65_536)) if 1 < first < 65_536 else None


def advertised(config: Config, port: int) -> tuple[str, ...]:
    """Return `advertise` as addresses "host:port", with `port` (the gate's) where the setting names none.

    Raises ConfigError if a port is needed and `port` is 0, chosen at random.
    """
    return tuple(part if HAS_PORT.search(part) else _with_port(part, port) for part in config.advertise)


def _with_port(part: str, port: int) -> str:
    if not port:
        raise ConfigError(
            f"advertise {part!r} has no port, and port is 0 (any)", "give --port, or --advertise HOST:PORT"
        )
    return join_address(part.strip("[]"), port)
