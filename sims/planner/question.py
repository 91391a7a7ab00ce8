"""Input of `thinwire plan`: a model, its peers and their links, from a manifest and from flags."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from pathlib import Path

import msgspec
from thinwire.collectives.costs.access_links import ACCESS, MBIT
from thinwire.collectives.costs.cost_question import ModelSize, PeerMachine, PlanError, Question, question_of
from thinwire.compression.registry import SpecError
from thinwire.swarm.identity.errors import HintedError
from thinwire.swarm.manifest.manifest import Manifest
from thinwire.swarm.manifest.parser import parse as parse_manifest

MAX_PEERS = 10_000
"""Maximum number of peers of a plan."""

GIVE_SIZE = "give --parameters, such as 350M, and --layers"
_SUFFIX = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "g": 1e9, "t": 1e12}
_COUNT = re.compile(r"([0-9]+(?:\.[0-9]*)?(?:e[0-9]{1,2})?)([kmbgt]?)", re.IGNORECASE)
_LINK = re.compile(
    r"(?:(?P<count>[0-9]{1,6})x)?(?:(?P<kind>[a-z]+)|(?P<down>[0-9.]{1,12})/(?P<up>[0-9.]{1,12}))(?:@(?P<step>[0-9.]{1,12}))?"
)


def question(
    toml: bytes = b"",
    name: str = "",
    *,
    parameters: str = "",
    layers: int | None = None,
    width: int | None = None,
    tokens: int | None = None,
    step: float | None = None,
    speed: float | None = None,
    peers: int | None = None,
    usual: int = 8,
    links: Sequence[str] = (),
    rtt: float = 50.0,
    every: int | None = None,
    codec: str = "",
    memory: int = 0,
    line: str = "",
    here: Path = Path(),
) -> Question:
    """Build a question from flags and a manifest (its TOML and file name); a flag overrides the manifest.

    step: seconds; or speed: TFLOP/s. links: such as "4x300/300" (Mbit/s down/up), "dsl" or "2x50/10@0.8" (with their
    own step in seconds). usual: peers if neither `peers` nor the links give a number. line: such as "4x50/10", four peers
    behind one line. rtt: ms. memory: bytes; 0: not known. here: directory of the manifest, whose model is counted there.
    Raises PlanError, ManifestError.
    """
    manifest = parse_manifest(toml, name) if toml else None
    assumed: list[str] = []
    settings = manifest or Manifest()
    inner, model = settings.inner, settings.model
    machines = _machines(links, peers, usual, step or 0.0)
    size = _size(manifest, here, parameters, layers or 0, width or 0)
    if not size.layers:
        raise PlanError("the model's layers are not known", GIVE_SIZE)
    if not size.width:
        wide = max(1, round(math.sqrt((size.parameters + size.frozen) / 12 / size.layers)))
        assumed.append(f"a width of {wide:,}, as of a transformer with {size.layers} layers and so many parameters")
        size = msgspec.structs.replace(size, width=wide)
    if not tokens and manifest is not None:
        tokens = inner.batch * inner.accumulate * model.context
    if not all(machine.step for machine in machines):
        if not speed:
            raise PlanError(
                "how long an inner step takes is not known", "give --step SECONDS, or --speed TFLOPS and --tokens"
            )
        if not tokens:
            raise PlanError("how many tokens an inner step has is not known", "give --tokens, or --step SECONDS")
        step = _step_seconds(size, tokens, speed, assumed)
        machines = _machines(links, peers, usual, step)
    if not every and manifest is None:
        assumed.append(f"H = {settings.outer.sync_every}, the default of a manifest")
    try:
        return question_of(
            settings,
            size,
            name=settings.run.name if manifest else "",
            tokens=tokens or 0,
            machines=machines,
            rtt=rtt / 1e3,
            every=every or 0,
            codec=codec,
            memory=memory,
            line=_line(line, sum(machine.count for machine in machines)) if line else None,
            assumed=tuple(assumed),
        )
    except SpecError as error:
        raise PlanError(str(error), "the default is int8(block=256)") from None


def _step_seconds(size: ModelSize, tokens: int, speed: float, assumed: list[str]) -> float:
    """Return the seconds of an inner step at `speed` TFLOP/s; add the rule to `assumed`."""
    step = (6.0 * size.parameters + 4.0 * size.frozen) * tokens / (speed * 1e12)
    flop = "6 flop per parameter and token" + (" (4 if it is frozen)" if size.frozen else "")
    assumed.append(f"{step:.3g} s for an inner step: {flop} at {speed:g} TFLOP/s")
    return step


def count(text: str) -> int:
    """Parse a number such as "1.3B", "350M" or "7e9". Raises PlanError."""
    match = _COUNT.fullmatch(text.strip())
    value = float(match[1]) * _SUFFIX[match[2].lower()] if match else 0.0
    if not 1 <= value <= 1e13:
        raise PlanError(f"{text!r} is no number of parameters", "it is written 350M, 1.3B or 7e9")
    return round(value)


def _size(manifest: Manifest | None, here: Path, parameters: str, layers: int, width: int) -> ModelSize:
    """Return the size of the model by the flags, else by the manifest."""
    if parameters:
        if manifest is None or manifest.model.kind != "transformer":
            return ModelSize(count(parameters), 0, layers, width)
        return ModelSize(count(parameters), 0, layers or manifest.model.layers, width or manifest.model.width)
    if manifest is None:
        raise PlanError("the size is not known", f"{GIVE_SIZE}, or name a RUN.toml")
    from thinwire.node.training.models.model_size import size_of

    try:
        size = size_of(manifest, here)
    except HintedError as error:
        raise PlanError(f"the size of the model is not known: {error}", f"{error.hint}; or {GIVE_SIZE}") from error
    return msgspec.structs.replace(size, layers=layers or size.layers, width=width or size.width)


def _machines(links: Sequence[str], peers: int | None, usual: int, step: float) -> tuple[PeerMachine, ...]:
    """Return the machines of the given links; by default 100 Mbit/s in each direction.

    A single link without a count applies to all peers. step: of links without one; 0 if it is not known.
    """
    found = [_machine(text, step) for text in links or ("100/100",)]
    if len(found) == 1 and not found[0][0]:
        found = [(peers or usual, found[0][1])]
    total = sum(number or 1 for number, _ in found)
    if peers and total != peers:
        raise PlanError(f"the links are those of {total} peers, but --peers is {peers}", "give one of the two")
    if not 1 <= total <= MAX_PEERS:
        raise PlanError(f"{total} peers cannot be planned", f"1 to {MAX_PEERS} can")
    return tuple(msgspec.structs.replace(machine, count=number or 1) for number, machine in found)


def _line(text: str, peers: int) -> PeerMachine:
    number, machine = _machine(text, 1.0)
    if number < 2 or "@" in text:
        raise PlanError(f"{text!r} is no line that peers share", "it is NxDOWN/UP in Mbit/s, as 4x50/10")
    if number > peers:
        raise PlanError(f"{number} peers share the line, but there are {peers}", "--peers or --link gives their number")
    return msgspec.structs.replace(machine, count=number)


def _machine(text: str, step: float) -> tuple[int, PeerMachine]:
    match = _LINK.fullmatch(text.strip())
    kinds = ", ".join(ACCESS)
    wrong = PlanError(f"{text!r} is no link", f"it is DOWN/UP in Mbit/s, as 50/10 or 4x50/10, or one of {kinds}")
    if match is None or match["count"] is not None and not int(match["count"]):
        raise wrong
    if match["kind"] and match["kind"] not in ACCESS:
        raise wrong
    try:
        own = float(match["step"]) if match["step"] else step
        if match["kind"]:
            down, up = ACCESS[match["kind"]].down, ACCESS[match["kind"]].up
        else:
            down, up = float(match["down"]) * MBIT, float(match["up"]) * MBIT
    except ValueError:
        raise wrong from None
    if min(down, up) <= 0 or match["step"] and not own:
        raise PlanError(f"{text!r}: bandwidths and step times must be above 0", "leave out peers that are absent")
    return int(match["count"] or 0), PeerMachine(1, down, up, own)
