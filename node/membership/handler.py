"""Topics of the messages that do not concern membership, and the interface of their handlers."""

from __future__ import annotations

from enum import Enum
from typing import Protocol, runtime_checkable

from thinwire.collectives.allreduce.service import belongs_to_operation
from thinwire.swarm.frame import Frame
from thinwire.swarm.messages.registry import (
    Activation,
    Apply,
    Close,
    FrozenRows,
    GradientSummary,
    Message,
    Outdated,
    Passed,
    PeerId,
    RecoveryPermit,
    RecoveryRequest,
    Route,
    StageAssignment,
)


class Topic(Enum):
    """Messages with one handler: training rounds, all-reduce operations, pipeline stages, lost stages."""

    ROUNDS = "rounds"
    OPERATIONS = "operations"
    STAGES = "stages"
    RECOVERY = "recovery"


STAGES = frozenset((Route, Activation, Passed, Close, GradientSummary, Apply, StageAssignment, FrozenRows))
RECOVERY = frozenset((RecoveryRequest, RecoveryPermit, Outdated))


def topic_of(message: Message) -> Topic:
    """Return the topic of a message that does not concern membership."""
    if type(message) in STAGES:
        return Topic.STAGES
    if type(message) in RECOVERY:
        return Topic.RECOVERY
    return Topic.OPERATIONS if belongs_to_operation(message) else Topic.ROUNDS


class Handler(Protocol):
    """Receiver of events about links, frames and time. The defaults ignore them."""

    def on_link_up(self, peer: PeerId) -> None:
        """Handle a new link to a peer."""
        return

    def on_link_down(self, peer: PeerId, *, gone: bool) -> None:
        """Handle a broken link; `gone` if the process at its other end is dead."""
        return

    def on_frame(self, peer: PeerId, frame: Frame) -> None:
        """Handle a checked frame that does not concern membership."""
        ...

    def on_tick(self) -> None:
        """Let time pass."""
        return


@runtime_checkable
class Timed(Protocol):
    """Handler with a deadline. The others get every tick."""

    def deadline(self) -> float:
        """Return the time before which `on_tick` changes nothing.

        After an event or `Presence.wake` the next tick counts in any case.
        """
        ...
