"""All-reduce of a user's own tensors with the swarm.

Converts tensors to bytes and back, and provides the handle of a pending operation.
"""

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
from thinwire.collectives.allreduce.element_arithmetic import EXACT, TYPES, ElementError, Elements, elements, numpy_type
from thinwire.collectives.allreduce.group_round import MAX_CALL_WEIGHT, LocalPart
from thinwire.collectives.allreduce.operation import Operation, OperationResult
from thinwire.collectives.allreduce.rendezvous import PeerContext
from thinwire.collectives.allreduce.service import AllreduceService
from thinwire.collectives.allreduce.signature import plan_of
from thinwire.collectives.topology.shards import Grid, grid
from thinwire.compression.compile_kernels import warm_up
from thinwire.compression.core.codec import CodecError
from thinwire.compression.registry import dense
from thinwire.node.api.arguments import text, whole_number
from thinwire.node.membership.handler import Topic
from thinwire.node.peer.peer import Peer
from thinwire.node.runtime.loop_thread import LoopThread
from thinwire.swarm.identity.errors import HintedError
from thinwire.swarm.keyring import Keyring
from thinwire.swarm.messages.registry import MAX_GROUP, AveragePlan
from torch import Tensor

One: TypeAlias = Tensor | NDArray[Any] | float | int
Some = TypeVar("Some", bound=One | Sequence[One] | Mapping[str, One])


class AverageError(HintedError):
    """Failure of an operation; the message gives the reason. The input is unchanged."""

    exit_code: ClassVar[int] = 1


@dataclass(frozen=True, slots=True)
class Average(Generic[Some]):
    """Result of an all-reduce.

    - value: in the form of the input, new tensors of the same types and shapes; bit-identical on all peers that have it.
    - contributors: ids (hexadecimal) of the peers whose tensors are in it, sorted.
    - missing: ids of peers that were present but are not in it, with reasons; this peer too, if it was late.
    - seconds: time from the call to the result.
    """

    value: Some
    contributors: tuple[str, ...]
    missing: Mapping[str, str]
    seconds: float


class Package(Generic[Some]):
    """Tensors of one element type, copied together.

    `array` holds their elements one after the other, on the CPU.
    """

    def __init__(self, tensors: Some) -> None:
        """Copy the tensors.

        Raises TypeError for unsupported objects, ElementError for tensors of several types.
        """
        self._form: Any
        if isinstance(tensors, Mapping):
            if not all(isinstance(key, str) for key in tensors):
                raise TypeError("the keys of tensors to average must be strings")
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
            raise ElementError(
                f"all tensors of one call must have the same element type: {first} is {one}, {second} is {two}"
            )
        self.element = next(iter(types), "float32")
        self.shapes = [(key, tuple(np.shape(part))) for key, part in zip(self._keys, parts, strict=True)]
        arrays = [array for array, _ in flats]
        self.array: NDArray[Any] = np.concatenate(arrays) if arrays else np.empty(0, np.float32)

    def _names(self) -> list[str]:
        return [f"tensor {key!r}" if key else f"tensor number {at}" for at, key in enumerate(self._keys)]

    def unpack(self, array: NDArray[Any]) -> Some:
        """Return these elements in the form of the input."""
        values, at = [], 0
        for like, (_, shape) in zip(self._like, self.shapes, strict=True):
            size = int(np.prod(shape))
            values.append(_alike(like, array[at : at + size].reshape(shape)))
            at += size
        made: Some = self._form(values)
        return made


def _flat(part: object) -> tuple[NDArray[Any], str]:
    """Return a flat copy or view of the input, and its element type."""
    if isinstance(part, Tensor):
        if part.layout != torch.strided or part.is_quantized or part.device.type == "meta":
            raise TypeError(f"only dense tensors can be averaged, not {part.layout} on {part.device}")
        element = _known(str(part.dtype).removeprefix("torch."))
        here = part.detach().cpu().contiguous().reshape(-1)
        return (here.view(torch.uint16) if here.dtype == torch.bfloat16 else here).numpy(), element
    if isinstance(part, np.ndarray | np.generic | float | int):
        array = np.asarray(part)
        element = _known(array.dtype.name)
        return np.ascontiguousarray(array, element).reshape(-1), element
    raise TypeError(f"only tensors, numpy arrays and numbers can be averaged, not {type(part).__name__}")


def _known(element: str) -> str:
    if element not in TYPES:
        raise ElementError(f"elements of type {element} cannot be averaged; supported types: {', '.join(TYPES)}")
    return element


def _alike(like: object, values: NDArray[Any]) -> Any:
    """Return elements in the form of the input: a tensor on its device, an array, or a number."""
    if isinstance(like, Tensor):
        tensor = torch.from_numpy(np.ascontiguousarray(values).reshape(values.shape))
        return (tensor.view(torch.bfloat16) if like.dtype == torch.bfloat16 else tensor).to(like.device)
    return values if isinstance(like, np.ndarray) else values[()] if isinstance(like, np.generic) else values.item()


@dataclass(frozen=True, slots=True)
class Prepared(Generic[Some]):
    """Prepared operation: the plan that peers must agree on, and this peer's input."""

    package: Package[Some]
    plan: AveragePlan
    share: LocalPart

    def value(self, ended: OperationResult) -> Some:
        """Return the decoded result."""
        chunks = self.share.grid
        out: NDArray[Any] = np.empty(chunks.total, numpy_type(self.package.element))
        for index, payload in enumerate(ended.outcome.results):
            self.share.elements.decode(payload, out[slice(*chunks.span(index))])
        return self.package.unpack(out)


def prepare(tensors: Some, *, op: str, codec: str | None, weight: int, least: int) -> Prepared[Some]:
    """Copy and encode tensors.

    Raises TypeError and ValueError (including ElementError, SpecError, CodecError).
    """
    if op != "mean" and weight != 1:
        raise ValueError(f"weight only applies to op='mean', not to {op!r}")
    # Numbers of other types cannot be sent.
    weight = whole_number("weight", weight, f"from 1 to {MAX_CALL_WEIGHT}", 1, MAX_CALL_WEIGHT)
    least = whole_number("least", least, f"of peers from 1 to {MAX_GROUP}", 1, MAX_GROUP)
    codec = None if codec is None else text("codec", codec)
    package = Package(tensors)
    arithmetic = elements(package.element, op, codec or EXACT, dense)
    if codec:  # Compile here: the thread of the peer has to answer others meanwhile.
        warm_up(codec)
    chunks = grid(package.array.size, arithmetic)
    payloads = [_encoded(arithmetic, package, chunks, index) for index in range(len(chunks))]
    hashes = b"".join(blake3.blake3(payload).digest() for payload in payloads)
    plan = plan_of(op, package.element, codec or EXACT, least, package.shapes)
    return Prepared(package, plan, LocalPart(payloads, hashes, weight, chunks, arithmetic))


def _encoded(arithmetic: Elements, package: Package[Any], chunks: Grid, index: int) -> Any:
    try:
        return arithmetic.encode(package.array[slice(*chunks.span(index))])
    except CodecError as error:
        raise CodecError(f"this codec cannot represent these tensors: {error}", error.reason) from None


def operations_of(peer: Peer) -> AllreduceService:
    """Create a peer's all-reduce service. Call it on the event loop, once the transport is open."""
    presence, gone = peer.presence, set[bytes]()
    roster = presence.roster

    context = PeerContext(
        keyring=Keyring(peer.identity, peer.run_id, roster.peers.key_of),
        send_queue=presence.send_queue,
        now=peer.environment.now,
        live=presence.live,
        gone=gone,
        here=lambda: roster.peers.view.peers,
        first_attempt=roster.record.first_attempt,
        link=presence.send_queue.bandwidth.known,
        aside=presence.aside,
    )
    service = AllreduceService(context, gone=gone)
    presence.attach(Topic.OPERATIONS, service)
    return service


class Pending(Generic[Some]):
    """Handle of a pending operation, from `Swarm.start_average`; awaitable in any event loop."""

    def __init__(
        self,
        background: LoopThread,
        begin: Callable[[], Operation],
        prepared: Prepared[Some],
        now: Callable[[], float],
    ) -> None:
        self._background, self._prepared, self._cancelled = background, prepared, False

        async def run() -> tuple[OperationResult, float]:
            if (
                self._cancelled
            ):  # cancelled before the loop ran this: do not begin an operation that others would count on
                raise asyncio.CancelledError
            began = now()
            ended = await begin().wait()
            return ended, now() - began

        self._future: concurrent.futures.Future[tuple[OperationResult, float]] = background.start(run())
        self._average: Average[Some] | None = None

    @property
    def done(self) -> bool:
        """True if there is a result, or an error."""
        return self._future.done()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait at most `timeout` seconds (None: no limit); return whether the operation has ended.

        Raises what `Swarm.check` raises.
        """
        return self._background.wait(self._future, timeout)

    def cancel(self) -> None:
        """Stop taking part. If the others already count on us, they continue without us a moment later."""
        self._cancelled = True
        self._future.cancel()

    def result(self, timeout: float | None = None) -> Average[Some]:
        """Wait for the result, without a limit if `timeout` is None.

        Raises AverageError as `Swarm.average` does, and if the operation was cancelled; TimeoutError after `timeout` seconds;
        and what `Swarm.check` raises.
        """
        if self._average is not None:
            return self._average
        if not self.wait(timeout):
            raise TimeoutError(f"no result within {timeout:g} s; the operation continues")
        try:
            ended, seconds = self._future.result()
        except concurrent.futures.CancelledError:
            self._background.check()
            raise AverageError("the operation was cancelled on this peer") from None
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
