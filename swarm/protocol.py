"""Every message that can travel, and its number on the wire. Layers: gate (strangers), membership, rounds, state."""

from __future__ import annotations

from .ballots import (
    Ask,
    Ballot,
    Behind,
    Blame,
    Commit,
    Contribution,
    Exclusion,
    Open,
    Prepare,
    Promise,
    Proof,
    Ready,
    Record,
    Vote,
)
from .greetings import Ack, Gossip, Hello, Items, Nack, Ping, PingRequest, PushPull, Refuse, Welcome
from .message import (
    CHUNK_BYTES,
    MAX_CHUNKS,
    MAX_GROUP,
    U16,
    U32,
    U53,
    Blob,
    Digest,
    Id,
    Message,
    PeerId,
    Reason,
    Signature,
    Text,
)
from .transfers import Chunk, Fetch, Result, StateAsk, StateChunk, StateFetch, StateOffer

__all__ = [
    "Ack",
    "Ask",
    "Ballot",
    "Behind",
    "Blame",
    "Blob",
    "CHUNK_BYTES",
    "Chunk",
    "Commit",
    "Contribution",
    "Digest",
    "Exclusion",
    "Fetch",
    "Gossip",
    "Hello",
    "Id",
    "Items",
    "MAX_CHUNKS",
    "MAX_GROUP",
    "Message",
    "NUMBERS",
    "Nack",
    "Open",
    "PeerId",
    "Ping",
    "PingRequest",
    "Prepare",
    "Promise",
    "Proof",
    "PushPull",
    "Ready",
    "Reason",
    "Record",
    "Refuse",
    "Result",
    "Signature",
    "StateAsk",
    "StateChunk",
    "StateFetch",
    "StateOffer",
    "TYPES",
    "Text",
    "U16",
    "U32",
    "U53",
    "VERSION",
    "Vote",
    "Welcome",
]

VERSION = 1
"""Version of the wire protocol; peers of another version are refused with both numbers named."""

TYPES: dict[int, type[Message]] = dict(
    enumerate(
        [
            Hello,
            Welcome,
            Refuse,
            Ping,
            PingRequest,
            Ack,
            Nack,
            Gossip,
            PushPull,
            Ready,
            Open,
            Prepare,
            Promise,
            Blame,
            Record,
            Vote,
            Commit,
            Behind,
            Chunk,
            Result,
            Fetch,
            StateAsk,
            StateOffer,
            StateFetch,
            StateChunk,
            Ask,
        ],
        start=1,
    )
)
"""Type number on the wire -> message type. Numbers are never reused."""

NUMBERS: dict[type[Message], int] = {kind: number for number, kind in TYPES.items()}
