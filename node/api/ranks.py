"""Several processes of torch.distributed that are one peer: the first one leads, the others follow.

A control group of gloo carries decisions and parameters. It is separate from the user's group, which may use another
backend, and in which collectives of the training are in progress.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, ClassVar, TypeVar

import msgspec
import numpy as np
import torch
import torch.distributed as dist
from thinwire.compression.core.types import Floats
from thinwire.swarm.identity.errors import HintedError
from torch import Tensor

JOIN_SECONDS = 60.0
"""Seconds that a rank waits until all ranks of its group have called `join`."""

WAIT_SECONDS = 86_400.0
"""Longest wait of a rank for another one, which may wait for a round.

The end of a process is noticed at once, because its connections close; a loss of power of its machine is not.
"""

HEAD = 1024
"""Bytes of the first part of a shared message: length and content.

The rest follows, if it is a message of the first rank.
"""

T = TypeVar("T")


class GroupError(HintedError):
    """Process group that cannot be one peer, or failure of another rank."""

    exit_code: ClassVar[int] = 2


class _RankResult(msgspec.Struct):
    """Message of a rank: a value, or an error."""

    value: Any = None
    error: str = ""
    hint: str = ""

    @staticmethod
    def failure(error: BaseException) -> _RankResult:
        """Return a message about an error, which fits into HEAD bytes."""
        texts = f"{error}" or type(error).__name__, getattr(error, "hint", "")
        return _RankResult(None, *(text.encode(errors="replace")[:480].decode(errors="ignore") for text in texts))

    def result(self, rank: str) -> Any:
        """Return the value. Raises GroupError if the message is about an error of that rank."""
        if self.error:
            raise GroupError(f"{rank} of the group: {self.error}", self.hint)
        return self.value


def _framed(data: bytes) -> Tensor:
    """Return the first part of a message: HEAD bytes that begin with its length."""
    raw = torch.zeros(HEAD, dtype=torch.uint8)
    body = (len(data).to_bytes(4, "big") + data)[:HEAD]
    raw[: len(body)] = torch.frombuffer(bytearray(body), dtype=torch.uint8)
    return raw


def _read(head: Tensor, rest: bytes = b"") -> _RankResult:
    body = head.numpy().tobytes() + rest
    return msgspec.msgpack.decode(body[4 : 4 + int.from_bytes(body[:4], "big")], type=_RankResult)


def check_launch(environment: Mapping[str, str]) -> None:
    """Raise GroupError in a process of torchrun that has not initialized torch.distributed.

    Without the error, the processes would train separately and nothing would show it. `environment`: of this process.
    """
    launched = dist.is_available() and dist.is_torchelastic_launched() and not dist.is_initialized()
    if launched and (count := int(environment.get("WORLD_SIZE", "1"))) > 1:
        raise GroupError(
            f"this process is one of {count} that torchrun has started, and thinwire.join was called without `group`",
            "call torch.distributed.init_process_group, and pass group=torch.distributed.group.WORLD, so that all ranks are "
            "one peer",
        )


def check_alone() -> None:
    """Raise GroupError in one of several processes of torch.distributed.

    Without the error, the processes would train separately and nothing would show it.
    """
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        raise GroupError(
            f"this process is rank {dist.get_rank()} of {dist.get_world_size()} in torch.distributed, "
            "and thinwire.join was called without `group`",
            "pass group=torch.distributed.group.WORLD, so that all ranks are one peer; for a peer in each process, pass "
            "a group that has only this rank",
        )


class Ranks:
    """The processes of one peer. All ranks make the same calls in the same order."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        """Connect the ranks. Raises GroupError if one of them does not call `join` within JOIN_SECONDS."""
        if not (dist.is_available() and dist.is_initialized()) or dist.get_rank(group) < 0:
            raise GroupError(
                "this process is not in the group that was given to thinwire.join",
                "call torch.distributed.init_process_group first, and pass the group on its ranks only",
            )
        self.size, members = dist.get_world_size(group), dist.get_process_group_ranks(group)
        self.first = dist.get_rank(group) == 0
        self._source = members[0]
        try:
            # Two groups, because the time-out of a group cannot change later: the first one only finds out whether all
            # ranks are here. It is never used again and not destroyed: torch would give its name, and with it its old
            # addresses in the store, to another group.
            self._arrivals = self._connect(members, JOIN_SECONDS)
            self._control = self._connect(members, WAIT_SECONDS)
        except RuntimeError as error:
            raise GroupError(
                f"not all {self.size} ranks of the group have called thinwire.join within {JOIN_SECONDS:g} s "
                f"({str(error).splitlines()[0]})",
                "call thinwire.join with the same group on every rank",
            ) from None

    @staticmethod
    def _connect(members: Sequence[int], seconds: float) -> dist.ProcessGroup:
        """Return a new group of these ranks of the world."""
        group: dist.ProcessGroup = dist.new_group(
            list(members), timeout=timedelta(seconds=seconds), backend="gloo", use_local_synchronization=True
        )
        return group

    def lead(self, work: Callable[[], T]) -> T:
        """Run `work` on the first rank, and return its result on all.

        The result has only numbers, strings, lists and dicts on the other ranks. An exception is raised on the first
        rank as it is, on the others as GroupError.
        """
        if self.first:
            try:
                value = work()
            except BaseException as error:
                self._share(_RankResult.failure(error))
                raise
            self._share(_RankResult(value))
            return value
        result: T = self._share(None).result("the first rank")
        return result

    def each(self, work: Callable[[], bytes]) -> list[bytes]:
        """Run `work` on every rank, and return the results of all, in order of their ranks, on all.

        A result has at most 960 bytes. An exception is raised on its rank as it is, on the others as GroupError.
        """
        try:
            result = _RankResult(work())
        except BaseException as error:
            self._exchange(_RankResult.failure(error))
            raise
        return [one.result(f"rank {rank}") for rank, one in enumerate(self._exchange(result))]

    def _exchange(self, result: _RankResult) -> list[_RankResult]:
        """Send a message of every rank to all others; return those of all."""
        heads = [torch.zeros(HEAD, dtype=torch.uint8) for _ in range(self.size)]
        own = _framed(msgspec.msgpack.encode(result))
        self._collective(lambda: dist.all_gather(heads, own, group=self._control))
        return [_read(head) for head in heads]

    def _share(self, result: _RankResult | None) -> _RankResult:
        """Send a message of the first rank to the others; return it."""
        data = b"" if result is None else msgspec.msgpack.encode(result)
        head = _framed(data)
        self.broadcast(head)
        length = int.from_bytes(head[:4].numpy().tobytes(), "big")
        rest = torch.zeros(max(0, length + 4 - HEAD), dtype=torch.uint8)
        if rest.numel():
            if self.first:
                rest.copy_(torch.frombuffer(bytearray(data[HEAD - 4 :]), dtype=torch.uint8))
            self.broadcast(rest)
        return _read(head, rest.numpy().tobytes())

    def total(self, weight: int, loss: float | None) -> tuple[int, float | None]:
        """Return the sum of the ranks' weights, and the mean of the losses that they know."""
        known = loss is not None and math.isfinite(loss)
        values = torch.tensor([weight, loss if known else 0.0, known], dtype=torch.float64)
        self._collective(lambda: dist.all_reduce(values, group=self._control))
        return int(values[0]), float(values[1] / values[2]) if values[2] else None

    def broadcast(self, tensor: Tensor) -> None:
        """Set a tensor on the host to that of the first rank."""
        self._collective(lambda: dist.broadcast(tensor, src=self._source, group=self._control))

    def broadcast_floats(self, values: Floats) -> None:
        """Set an array to that of the first rank."""
        self.broadcast(torch.from_numpy(values if values.flags.writeable else np.array(values)))

    def average_floats(self, values: Floats) -> None:
        """Set an array to the mean of those of all ranks."""
        values /= np.float32(self.size)
        if values.size:
            self._collective(lambda: dist.all_reduce(torch.from_numpy(values), group=self._control))

    @staticmethod
    def _collective(run: Callable[[], Any]) -> None:
        try:
            run()
        except RuntimeError as error:
            raise GroupError(
                f"another rank of the group has ended or does not answer ({str(error).splitlines()[0]})",
                "see the output of the other ranks; restart all of them, as torchrun does",
            ) from None
