"""Settings of this machine for display: as a table, or in JSON types."""

from __future__ import annotations

from pathlib import Path

from thinwire.node.runtime.load_settings import Config
from thinwire.node.runtime.settings import SETTINGS, Rate


def rows(config: Config) -> list[tuple[str, str, str]]:
    """Return (setting, value, source) for display, then the resulting files with the source "follows"."""
    table = [(s.name, _text(getattr(config, s.name)), config.sources[s.name]) for s in SETTINGS]
    where = config.directories
    files = {"node.toml": where.node_file, "key": where.key, "runs": where.runs, "cache": where.cache, "log": where.log}
    return table + [(name, str(path), "follows") for name, path in files.items()]


def _text(value: object) -> str:
    match value:
        case None | () | "":
            return "-"
        case bool():
            return str(value).lower()
        case (int() as low, int() as high):
            return f"{low}-{high}"
        case tuple():
            return ", ".join(str(part) for part in value)
        case _:
            return str(value)


def as_json(config: Config) -> dict[str, dict[str, object]]:
    """Return setting -> {"value", "source"} in JSON types; null if not set."""
    plain: dict[str, dict[str, object]] = {}
    for setting in SETTINGS:
        value = getattr(config, setting.name)
        if setting.name == "ports" and value:
            value = _text(value)
        if isinstance(value, Path | Rate):
            value = str(value)
        plain[setting.name] = {"value": value, "source": config.sources[setting.name]}
    return plain
