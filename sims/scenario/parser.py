"""Strict parser of scenarios; every error names the line."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
from thinwire.collectives.costs.access_links import ACCESS, MBIT, AccessKind
from thinwire.node.runtime.disk import present
from thinwire.sims.network import regions
from thinwire.sims.network.translator import Nat
from thinwire.sims.scenario.fault_kinds import ALONE, problem_of, unknown_lie_hint
from thinwire.sims.scenario.faults import KINDS, Fault
from thinwire.sims.scenario.scenario import PeerSpec, Scenario
from thinwire.sims.scenario.tables import MOST_PEERS, FaultEntry, Links, PeerGroup, SiteLine, Top
from thinwire.sims.scenario.toml_lines import Place, as_toml, lines_of
from thinwire.sims.scenario.toml_table_reader import Reader, ScenarioError, nearest
from thinwire.swarm.identity.regular_file import content_of
from thinwire.swarm.manifest.manifest import ManifestError
from thinwire.swarm.manifest.parser import parse as parse_manifest

SHIPPED = Path(__file__).parents[1] / "scenarios"
_LARGEST = 1 << 16
_BYTES = 24
"""Bytes per parameter and peer: value, swarm's value, momentum, buffers, copies of invariants."""


def shipped() -> dict[str, Path]:
    """Return the shipped scenarios: name -> file."""
    return {file.stem: file for file in sorted(SHIPPED.glob("*.toml"))}


def load(named: str, *, peers: int | None = None) -> Scenario:
    """Load a shipped scenario by name, or a file. `peers`: total, groups in proportion.

    Raises ScenarioError.
    """
    known = shipped()
    file = known.get(named) or Path(named)
    if named not in known and file.suffix != ".toml" and not present(file):
        hint = nearest(named, known, "shipped are: ") + "; a file ends in .toml"
        raise ScenarioError(f"there is no scenario {named!r}", hint)
    try:
        text = content_of(file, _LARGEST).decode()
    except OSError as error:
        raise ScenarioError(
            f"cannot read {file}: {error.strerror}", "`thinwire sim new FILE` writes one to begin with"
        ) from None
    except UnicodeDecodeError:
        raise ScenarioError(f"{file} is not text in UTF-8", "name a scenario's TOML file") from None
    return parse(text, file, peers=peers)


def load_faults(file: Path, peers: int) -> tuple[Fault, ...]:
    """Load a list of faults as the driver writes it: JSON. Raises ScenarioError."""
    try:
        faults = msgspec.json.decode(content_of(file), type=tuple[Fault, ...])
    except OSError as error:
        raise ScenarioError(f"cannot read {file}: {error.strerror}", "name a JSON list of faults") from None
    except msgspec.MsgspecError as error:
        raise ScenarioError(f"{file}: {error}", 'write [{"at": 60, "kind": "kill", "peers": [3]}]') from None
    for number, fault in enumerate(faults, start=1):
        if problem := problem_of(fault, peers):
            raise ScenarioError(f"{file}: fault {number}: {problem[0]}", problem[1])
    return faults


def parse(text: str, file: Path = Path("scenario.toml"), *, peers: int | None = None) -> Scenario:
    """Parse a scenario. `file` is for messages, and the base of relative file names. Raises ScenarioError."""
    text = text.replace("\r\n", "\n")
    try:
        document = tomllib.loads(text)
        lines = lines_of(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise ScenarioError(f"{file}: not TOML: {error}", "see https://toml.io for the format") from None
    return _ScenarioReader(file, lines).scenario(document, peers)


class _ScenarioReader(Reader):
    """Reader of one scenario."""

    def scenario(self, document: dict[str, Any], wanted: int | None) -> Scenario:
        top = self.table(Top, document, ())
        links = self.table(Links, top.links, ("links",))
        paths = self._paths(links)
        groups = [self.table(PeerGroup, value, ("peers", index)) for index, value in enumerate(top.peers)]
        self._rescaled = wanted is not None
        if wanted is not None:
            groups = self._scaled(groups, wanted)
        peers: list[PeerSpec] = []
        for index, group in enumerate(groups):
            peers += self._peers(group, ("peers", index), len(peers), {region for region, _ in paths})
        if not peers:
            raise self.error(("peers",), "there are no peers", "add a [[peers]] table")
        self._check_names(groups, peers)
        self._check_size(top, len(peers))
        if len(peers) > MOST_PEERS:
            raise self.error(("peers",), f"{len(peers)} peers are more than {MOST_PEERS}", "lower a count")
        self._check_memory(top, groups, peers[0])
        if peers[0].join > 0:
            raise self.error(
                ("peers", 0, "join"), "the first peer founds the run, so it is there from the start", "remove its join"
            )
        lines, nats = self._site_lines(top.sites, peers)
        if peers[0].nat != "none" or peers[0].site in nats:
            place: Place = ("peers", 0, "nat") if peers[0].nat != "none" else ("sites", peers[0].site, "nat")
            raise self.error(place, "the first peer founds the run: the others must reach it", "remove its nat")
        return Scenario(
            name=top.name or re.sub(r"[^a-z0-9]+", "-", self.file.stem.lower()).strip("-")[:64] or "scenario",
            about=" ".join(top.about.split()),
            seed=top.seed,
            duration=top.duration,
            interval=top.interval,
            compute=top.compute,
            parameters=top.parameters,
            manifest=self._manifest(top),
            peers=tuple(peers),
            paths=paths,
            jitter=links.jitter,
            loss=links.loss,
            faults=tuple(
                fault for i, value in enumerate(top.faults) for fault in self._faults(value, ("faults", i), peers, top)
            ),
            mix=self._mix(top.random),
            lines=lines,
            nats=nats,
        )

    # Parts

    def _manifest(self, top: Top) -> str:
        place: Place = ("manifest",)
        given = top.manifest
        try:
            if isinstance(given, str):
                file = self.file.parent / given
                text, name = content_of(file).decode(), str(file)
            else:
                text, name = as_toml(given), "manifest"
            found = parse_manifest(text, name)
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "not text in UTF-8"
            raise self.error(place, f"manifest: cannot read {given}: {reason}", "name a run's TOML") from None
        except ManifestError as error:
            match = re.match(r"manifest: (?:unknown table \[)?(\w+)(?:\.(\w+))?", str(error))
            where = (*place, *(part for part in match.groups() if part)) if match else place
            raise self.error(where, str(error), error.hint) from None
        if top.compute == "torch" and found.model.kind != "transformer":
            where = (*place, "model", "kind")
            raise self.error(where, f"a {found.model.kind} model cannot be trained here", 'write compute = "stub"')
        return text

    def _peers(self, group: PeerGroup, place: Place, first: int, known: set[str]) -> list[PeerSpec]:
        if group.access and (group.up_mbit or group.down_mbit):
            raise self.error((*place, "access"), "a link has a kind or rates, not both", "remove one of them")
        if bool(group.up_mbit) is not bool(group.down_mbit):
            key = "up_mbit" if group.up_mbit else "down_mbit"
            raise self.error((*place, key), "a link needs both up_mbit and down_mbit", "add the other")
        kind = group.access or "fibre"
        if kind not in ACCESS:
            raise self.error((*place, "access"), f"{kind!r} is no kind of link", nearest(kind, ACCESS, "kinds: "))
        access = ACCESS[kind]
        if group.up_mbit and group.down_mbit:
            access = AccessKind(group.up_mbit * MBIT, group.down_mbit * MBIT)
        homes = [group.region] if isinstance(group.region, str) else group.region
        for home in homes:
            if home not in known:
                hint = nearest(home, sorted(known), "regions: ")
                raise self.error((*place, "region"), f"there is no region {home!r}", hint)
        if group.liar and (hint := unknown_lie_hint(group.liar)):
            raise self.error((*place, "liar"), f"{group.liar!r} is no way to lie", hint)
        if group.leave is not None and group.leave <= group.join:
            raise self.error((*place, "leave"), "a peer leaves after it has joined", f"join is {group.join:g}")
        return [
            PeerSpec(
                index=first + i,
                name=f"{group.name}-{i + 1}" if group.count > 1 else group.name,
                region=homes[i % len(homes)],
                step_seconds=group.step,
                up=access.up,
                down=access.down,
                join=group.join + i * group.every,
                leave=None if group.leave is None else group.leave + i * group.every,
                liar=group.liar,
                loss=access.loss,
                jitter=access.jitter,
                group=group.name,
                site=group.site,
                memory=(group.memory_mib or 0.0) * 2**20,
                nat=group.nat,
            )
            for i in range(group.count)
        ]

    def _site_lines(
        self, tables: dict[str, Any], peers: list[PeerSpec]
    ) -> tuple[dict[str, tuple[float, float]], dict[str, Nat]]:
        """Return site -> bytes/s down and up of its shared link, and site -> kind of its address translator."""
        known = {peer.site for peer in peers}
        found: dict[str, tuple[float, float]] = {}
        nats: dict[str, Nat] = {}
        for name, table in tables.items():
            if name not in known or not name:
                sites = sorted(known - {""})
                hint = nearest(name, sites, "sites: ") if sites else f"write site = {name!r} in its [[peers]]"
                raise self.error(("sites", name), f"no peer is at the site {name!r}", hint)
            line = self.table(SiteLine, table, ("sites", name))
            if bool(line.up_mbit) is not bool(line.down_mbit):
                key = "up_mbit" if line.up_mbit else "down_mbit"
                raise self.error(("sites", name, key), "a link needs both up_mbit and down_mbit", "add the other")
            if line.down_mbit and line.up_mbit:
                found[name] = (line.down_mbit * MBIT, line.up_mbit * MBIT)
            if line.nat != "none":
                if any(peer.site == name and peer.nat != "none" for peer in peers):
                    hint = "remove nat from the site or from its peers"
                    raise self.error(("sites", name, "nat"), "a peer has at most one address translator", hint)
                nats[name] = line.nat
        return found, nats

    def _check_memory(self, top: Top, groups: list[PeerGroup], founder: PeerSpec) -> None:
        """Check that peers with little memory hold a part of a real model, and the founder all of it."""
        index = next((index for index, group in enumerate(groups) if group.memory_mib), None)
        if index is not None and (top.compute != "torch" or founder.memory):
            raise self.error(
                ("peers", index, "memory_mib"),
                "memory_mib needs a model that is really trained, and a first peer that can hold all of it",
                'write compute = "torch", and let the first peers have enough memory',
            )

    def _check_size(self, top: Top, peers: int) -> None:
        """Check that the data of peers with a stub model fits this machine."""
        import psutil

        needed, there = top.parameters * peers * _BYTES, psutil.virtual_memory().total
        if top.compute == "stub" and needed > there:
            raise self.error(
                ("parameters",),
                f"{peers} peers of {top.parameters} parameters take {needed >> 30} GiB, this machine has {there >> 30}",
                "lower parameters or the peers",
            )

    def _check_names(self, groups: list[PeerGroup], peers: list[PeerSpec]) -> None:
        """Check that names of groups and peers are distinct: faults refer to them."""
        names = [group.name for group in groups]
        for index, name in enumerate(names):
            if name in names[:index]:
                raise self.error(("peers", index, "name"), f"two groups are called {name!r}", "give one another name")
        known = {name: index for index, name in enumerate(names)}
        for peer in peers:
            if known.get(peer.name, names.index(peer.group)) != names.index(peer.group):
                raise self.error(
                    ("peers", known[peer.name], "name"),
                    f"{peer.name!r} is a peer of {peer.group!r}",
                    "give one another name",
                )

    def _scaled(self, groups: list[PeerGroup], wanted: int) -> list[PeerGroup]:
        """Return the same groups with `wanted` peers in total, at least one each.

        Each further peer goes to the group that has the fewest for its share (method of Sainte-Laguë). The number of
        peers of the file gives the groups of the file.
        """
        if wanted < len(groups):
            raise ScenarioError(
                f"{wanted} peers are fewer than the {len(groups)} groups of {self.file}", "ask for more"
            )
        counts = [1] * len(groups)
        for _ in range(wanted - len(groups)):
            shares = [group.count / (2 * count + 1) for group, count in zip(groups, counts, strict=True)]
            counts[shares.index(max(shares))] += 1
        return [msgspec.structs.replace(group, count=count) for group, count in zip(groups, counts, strict=True)]

    def _paths(self, links: Links) -> Mapping[tuple[str, str], regions.Path]:
        names = links.regions or list(regions.REGIONS)
        if links.rtt_ms is None and links.stream_mbit is None and links.regions is None:
            return regions.PATHS
        if links.regions is not None and not isinstance(links.rtt_ms, list):
            raise self.error(("links", "regions"), "own regions need a matrix rtt_ms", "rtt_ms = [[1, 40], [40, 1]]")
        if links.regions is None and (isinstance(links.rtt_ms, list) or isinstance(links.stream_mbit, list)):
            raise self.error(("links",), "a matrix needs the names of its regions", 'regions = ["home", "office"]')
        if len(set(names)) < len(names):
            raise self.error(("links", "regions"), "two regions have one name", "rename one")
        rtts, streams = self._matrix(links, "rtt_ms", names), self._matrix(links, "stream_mbit", names)
        return {
            (a, b): regions.Path(
                regions.PATHS[a, b].rtt if rtts is None else rtts[i][j] / 1e3,
                (None if links.regions or links.rtt_ms is not None else regions.PATHS[a, b].stream)
                if streams is None
                else streams[i][j] * MBIT,
            )
            for i, a in enumerate(names)
            for j, b in enumerate(names)
        }

    def _matrix(self, links: Links, key: str, names: list[str]) -> list[list[float]] | None:
        value: float | list[list[float]] | None = getattr(links, key)
        if not isinstance(value, list):
            return None if value is None else [[value] * len(names)] * len(names)
        if len(value) != len(names) or any(len(row) != len(names) for row in value):
            raise self.error(
                ("links", key), f"{key} is not {len(names)} × {len(names)}", "a row and a column per region"
            )
        if any(value[i][j] != value[j][i] for i in range(len(names)) for j in range(i)):
            raise self.error(("links", key), f"{key} differs with the direction", "make the matrix symmetric")
        return value

    def _faults(self, value: object, place: Place, peers: list[PeerSpec], top: Top) -> list[Fault]:
        """Parse faults; a fault of one peer is repeated for each named peer."""
        read = self.table(FaultEntry, value, place)
        named: dict[str, tuple[int, ...]] = {}
        for peer in peers:
            named[peer.group] = (*named.get(peer.group, ()), peer.index)
        named |= {peer.name: (peer.index,) for peer in peers}
        chosen: list[int] = []
        for one in read.peers:
            if isinstance(one, str) and one not in named:
                hint = nearest(one, named, "peers and groups: ")
                hint = f"--peers has changed the groups; {hint}" if self._rescaled else hint
                raise self.error((*place, "peers"), f"there is no peer or group {one!r}", hint)
            chosen += [one] if isinstance(one, int) else named[one]
        if read.at > top.duration:
            raise self.error((*place, "at"), "the fault would start after the end", f"duration is {top.duration:g}")
        whole = tuple(dict.fromkeys(chosen))
        split = [(one,) for one in whole] if read.kind in ALONE and whole else [whole]
        faults = [read.fault(some) for some in split]
        for fault in faults:
            if problem := problem_of(fault, len(peers)):
                key = "kind" if fault.kind not in KINDS else problem[0].partition(":")[0]
                raise self.error((*place, key if key in ("kind", "detail", "amount") else "peers"), *problem)
        return faults

    def _mix(self, table: dict[str, Any]) -> dict[str, float]:
        for kind, rate in table.items():
            if kind not in KINDS:
                hint = nearest(kind, KINDS, "kinds: ")
                raise self.error(("random", kind), f"{kind!r} is no kind of fault", hint)
            if isinstance(rate, bool) or not isinstance(rate, int | float) or not 0 <= rate <= 1e4:
                raise self.error(("random", kind), f"{rate!r} is not a number of faults per minute", "0.5, for example")
        return {kind: float(rate) for kind, rate in table.items()}
