"""Averages of one's own tensors with the swarm: tensors into bytes and back, and the handle of one that is under way."""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeAlias, TypeVar, cast

import blake3
import numpy as np
import torch
from numpy.typing import NDArray
from thinwire.collectives.callers import Place
from thinwire.collectives.elements import EXACT, TYPES, ElementError, Elements, elements, numpy_type
from thinwire.collectives.operation import MAX_WEIGHT, Ended, Operation, Share
from thinwire.collectives.operations import Operations
from thinwire.collectives.planned import plan_of
from thinwire.collectives.shards import Grid, grid
from thinwire.compression.codec import CodecError
from thinwire.compression.registry import dense
from thinwire.swarm.errors import HintedError
from thinwire.swarm.protocol import MAX_GROUP, Plan
from torch import Tensor

from .background import Background
from .peer import Peer

One: TypeAlias = Tensor | NDArray[Any] | float | int
Some = TypeVar("Some", bound=One | Sequence[One] | Mapping[str, One])


class AverageError(HintedError):
    """An average that came to nothing: the message says why. What was given to it is as it was."""

    exit_code: ClassVar[int] = 1


@dataclass(frozen=True, slots=True)
class Average(Generic[Some]):
    """What several peers' tensors have become.

    value: in the form in which tensors were given, new ones of the same types and shapes; bit-identical on all who have it.
    contributors: ids (hexadecimal) of the peers whose tensors are in it, sorted. missing: those that were here and are not
    in it, with reasons; this peer too, when it came late. seconds: from the call to the result.
    """

    value: Some
    contributors: tuple[str, ...]
    missing: Mapping[str, str]
    seconds: float


class Package(Generic[Some]):
    """Tensors of one element type, copied together: `array` holds their elements one after the other, on the CPU."""

    def __init__(self, tensors: Some) -> None:
        """Raises TypeError for what is no tensor, ElementError for tensors of several types."""
        self._form: Any
        if isinstance(tensors, Mapping):
            if not all(isinstance(key, str) for key in tensors):
                raise TypeError("the keys of tensors to be averaged are strings")
            self._keys, parts = tuple(sorted(tensors)), [tensors[key] for key in sorted(tensors)]
            order = list(tensors)
            self._form = lambda values: {key: dict(zip(self._keys, values, strict=True))[key] for key in order}
        elif isinstance(tensors, list | tuple):
            self._keys, parts = ("",) * len(tensors), list(tensors)
            self._form = type(tensors) if type(tensors) in (list, tuple) else list
        else:
            self._keys, parts = ("",), [cast(One, tensors)]
            self._form = lambda values: values[0]
        self._like = parts
        flats = [_flat(part) for part in parts]
        types = {element: name for (_, element), name in zip(flats, self._names(), strict=True)}
        if len(types) > 1:
            (one, first), (two, second) = sorted(types.items(), key=lambda item: item[1])[:2]
            raise ElementError(f"one call averages one element type: {first} is {one}, {second} is {two}")
        self.element = next(iter(types), "float32")
        self.shapes = [(key, tuple(np.shape(part))) for key, part in zip(self._keys, parts, strict=True)]
        arrays = [array for array, _ in flats]
        self.array: NDArray[Any] = np.concatenate(arrays) if arrays else np.empty(0, np.float32)

    def _names(self) -> list[str]:
        return [f"tensor {key!r}" if key else f"tensor number {at}" for at, key in enumerate(self._keys)]

    def unpack(self, array: NDArray[Any]) -> Some:
        """The form that was given, with these elements."""
        values, at = [], 0
        for like, (_, shape) in zip(self._like, self.shapes, strict=True):
            size = int(np.prod(shape))
            values.append(_alike(like, array[at : at + size].reshape(shape)))
            at += size
        made: Some = self._form(values)
        return made


def _flat(part: object) -> tuple[NDArray[Any], str]:
    """A flat copy or view of what was given, and its element type."""
    if isinstance(part, Tensor):
        if part.layout != torch.strided or part.is_quantized or part.device.type == "meta":
            raise TypeError(f"only dense tensors are averaged, not {part.layout} on {part.device}")
        element = _known(str(part.dtype).removeprefix("torch."))
        here = part.detach().cpu().contiguous().reshape(-1)
        return (here.view(torch.uint16) if here.dtype == torch.bfloat16 else here).numpy(), element
    if isinstance(part, np.ndarray | np.generic | float | int):
        array = np.asarray(part)
        element = _known(array.dtype.name)
        return np.ascontiguousarray(array, element).reshape(-1), element
    raise TypeError(f"tensors, numpy arrays and numbers are averaged, not {type(part).__name__}")


def _known(element: str) -> str:
    if element not in TYPES:
        raise ElementError(f"elements of type {element} cannot be averaged; those that can: {', '.join(TYPES)}")
    return element


def _alike(like: object, values: NDArray[Any]) -> Any:
    """Elements as what was given: a tensor on its device, an array, or a number."""
    if isinstance(like, Tensor):
        tensor = torch.from_numpy(np.ascontiguousarray(values).reshape(values.shape))
        return (tensor.view(torch.bfloat16) if like.dtype == torch.bfloat16 else tensor).to(like.device)
    return values if isinstance(like, np.ndarray) else values[()] if isinstance(like, np.generic) else values.item()


@dataclass(frozen=True, slots=True)
class Prepared(Generic[Some]):
    """An average as this peer wants it: what all have to agree on, and what it brings."""

    package: Package[Some]
    plan: Plan
    share: Share

    def value(self, ended: Ended) -> Some:
        """What came of it."""
        package, parts, cut = self.package, self.share.elements, self.share.grid
        out: NDArray[Any] = np.empty(cut.total, numpy_type(package.element))
        for index, payload in enumerate(ended.outcome.results):
            parts.decode(payload, out[slice(*cut.span(index))])
        return package.unpack(out)


def prepare(tensors: Some, *, op: str, codec: str | None, weight: int, least: int) -> Prepared[Some]:
    """Copy and encode. Raises TypeError, ValueError (ElementError, SpecError, CodecError among them)."""
    if op != "mean" and weight != 1:
        raise ValueError(f"a weight says something of a mean only, not of {op!r}")
    if not 0 < weight <= MAX_WEIGHT or weight != int(weight):
        raise ValueError(f"a weight of {weight}: it is a whole number from 1 to {MAX_WEIGHT}")
    if not 0 < least <= MAX_GROUP or least != int(least):
        raise ValueError(f"least is a number of peers from 1 to {MAX_GROUP}, not {least}")
    weight, least = int(weight), int(least)  # numbers of other types do not travel
    package = Package(tensors)
    parts = elements(package.element, op, codec or EXACT, dense)
    cut = grid(package.array.size, parts)
    payloads = [_encoded(parts, package, cut, index) for index in range(len(cut))]
    hashes = b"".join(blake3.blake3(payload).digest() for payload in payloads)
    plan = plan_of(op, package.element, codec or EXACT, least, package.shapes)
    return Prepared(package, plan, Share(payloads, hashes, weight, cut, parts))


def _encoded(parts: Elements, package: Package[Any], cut: Grid, index: int) -> Any:
    try:
        return parts.encode(package.array[slice(*cut.span(index))])
    except CodecError as error:
        raise CodecError(f"these tensors cannot be said with this codec: {error}", error.reason) from None


def operations_of(peer: Peer) -> Operations:
    """Let a peer average. Once its transport is open, on the loop."""
    presence, gone = peer.presence, set[bytes]()
    roster = presence.roster

    def key(other: bytes) -> bytes | None:
        record = roster.record_of(other)
        return record.public_key if record else None

    place = Place(
        peer.identity,
        peer.run_id,
        presence.outbox,
        peer.doors.now,
        presence.live,
        gone,
        lambda: roster.view.peers,
        key,
        roster.record.sequence // 1000 % 2**31,
        lambda: presence.link(),
    )
    presence.operations = made = Operations(place, gone=gone)
    return made


class Pending(Generic[Some]):
    """An average under way, from `Swarm.start_average`; awaitable in any event loop."""

    def __init__(
        self,
        background: Background,
        begin: Callable[[], Operation],
        prepared: Prepared[Some],
        now: Callable[[], float],
    ) -> None:
        self._background, self._prepared, self._cancelled = background, prepared, False

        async def run() -> tuple[Ended, float]:
            if self._cancelled:  # before it was on its way: it would count until the loop comes to cancel it
                raise asyncio.CancelledError
            began = now()
            ended = await begin().wait()
            return ended, now() - began

        self._future: concurrent.futures.Future[tuple[Ended, float]] = background.start(run())
        self._average: Average[Some] | None = None

    @property
    def done(self) -> bool:
        """Whether there is a result, or an error."""
        return self._future.done()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for its end, at most `timeout` seconds; whether there is one. Raises what `Swarm.check` raises."""
        return self._background.wait(self._future, timeout)

    def cancel(self) -> None:
        """Take no part any more. When the others count on us already, they go on without us a moment later."""
        self._cancelled = True
        self._future.cancel()

    def result(self, timeout: float | None = None) -> Average[Some]:
        """Wait for the result. Raises AverageError, TimeoutError after `timeout` seconds, and what `Swarm.check` raises."""
        if self._average is not None:
            return self._average
        if not self.wait(timeout):
            raise TimeoutError(f"no result within {timeout:g} s; the average goes on")
        try:
            ended, seconds = self._future.result()
        except concurrent.futures.CancelledError:
            self._background.check()
            raise AverageError("the average was cancelled here") from None
        if ended.failure:
            raise AverageError(ended.failure, ended.hint)
        self._average = Average(
            self._prepared.value(ended),
            tuple(peer.hex() for peer in ended.outcome.contributors),
            {peer.hex(): reason for peer, reason in ended.missing.items()},
            seconds,
        )
        return self._average

    def __await__(self) -> Generator[Any, None, Average[Some]]:
        yield from asyncio.wait([asyncio.wrap_future(self._future)]).__await__()
        return self.result()
