"""Parameters of the roster, in three presets.

A crash is noticed after about T + ln 2 · T (a probe of the peer fails), declared after `suspicion_min` more, and known
to all a second later. n is the number of peers in the view, this one included; all times are in seconds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Preset:
    """Timing and limits of the roster.

    The mechanisms are those of SWIM (Das et al. 2002) and Lifeguard (Dadgar et al. 2018).

    - probe_period: T; one peer is probed every T · (awareness + 1). Shorter periods find crashes sooner, for 2/T more
      messages/s.
    - ping_min, ping_max: a direct ping waits 3·srtt + 4·rttvar between these bounds, then others are asked. ping_max plus two
      slow round trips must fit in T.
    - indirect: number of other peers asked. nack_share: share of its time-out after which a helper reports that it has no
      answer.
    - suspicion: shortest suspicion in units of max(1, log10 n) · T; must exceed 1.5 × the longest stall of the event loop.
    - suspicion_stretch: longest suspicion (one accuser) in units of the shortest (`confirmations` accusers).
    - confirmations: k; number of accusers that end a suspicion soonest, and that prove a death to peers without
      evidence.
    - awareness_max: maximum of this peer's health score, which slows its probing. lag_limit: a tick that is later than this
      counts as a stall of the event loop (node/membership/presence.py).
    - gossip_period, gossip_fanout: interval of gossip, and number of receivers. missed: average number of peers that an item
      does not reach by gossip; they get it with the next table. If each peer sends an item k times to random ones, a peer
      misses it with the probability e^-k, so k = ⌈ln(n / missed)⌉.
    - batch, piggyback: most bytes of items in a Gossip message, and in a probe or its answer, which must stay short.
    - push_pull_period: interval of the exchange of whole tables with a random peer (longer above 32 peers).
    - gossip_to_dead: time during which dead peers get messages that they are considered dead. reconnect_period: interval at
      which some dead peers are probed.
    - tombstone: time for which a departed peer's last sequence is stored.
    - refute_period: shortest time between two new records of this peer. open_accusations: maximum number of open accusations
      per accuser.
    - credit: number of refuted accusations after which a peer's accusations stop counting; one is forgiven every
      `credit_period`.
    - tick: interval at which the clock is read; at most the gossip period, and below the lag limit.
    """

    probe_period: float
    ping_min: float
    ping_max: float
    suspicion: float
    gossip_period: float
    gossip_fanout: int
    push_pull_period: float
    gossip_to_dead: float
    reconnect_period: float
    refute_period: float
    lag_limit: float = 0.25
    indirect: int = 3
    nack_share: float = 0.8
    suspicion_stretch: float = 6.0
    confirmations: int = 3
    awareness_max: int = 7
    missed: float = 0.01
    batch: int = 8192
    piggyback: int = 1200
    tombstone: float = 86_400.0
    open_accusations: int = 16
    credit: int = 16
    credit_period: float = 30.0
    tick: float = 0.1

    def suspicion_min(self, n: int) -> float:
        """Return the shortest suspicion in seconds."""
        return self.suspicion * max(1.0, math.log10(max(1, n))) * self.probe_period

    def copies(self, n: int) -> int:
        """Return how many times each item is sent."""
        return math.ceil(math.log(max(1, n) / self.missed))

    def push_pull(self, n: int) -> float:
        """Return the seconds between exchanges of tables; their number grows only with log n."""
        return self.push_pull_period * (1 if n <= 32 else math.ceil(math.log2(n) - 5) + 1)


LOCAL = Preset(
    probe_period=0.25,
    ping_min=0.05,
    ping_max=0.1,
    suspicion=5.0,
    gossip_period=0.05,
    gossip_fanout=4,
    push_pull_period=5.0,
    gossip_to_dead=10.0,
    reconnect_period=2.0,
    refute_period=0.1,
)
"""Preset for loopback and simulations: a crash of one of ten peers is known after 1.7 s.

Not for machines that stall for a second.
"""

LAN = Preset(
    probe_period=1.0,
    ping_min=0.1,
    ping_max=0.5,
    suspicion=5.0,
    gossip_period=0.2,
    gossip_fanout=4,
    push_pull_period=30.0,
    gossip_to_dead=30.0,
    reconnect_period=15.0,
    refute_period=0.5,
)
"""Preset for one site, or processes on one busy machine.

A crash of one of ten peers is known after 6.7 s. Stalls of 3 s are tolerated.
"""

WAN = Preset(
    probe_period=2.0,
    ping_min=0.3,
    ping_max=1.0,
    suspicion=5.0,
    gossip_period=0.25,
    gossip_fanout=4,
    push_pull_period=60.0,
    gossip_to_dead=60.0,
    reconnect_period=30.0,
    refute_period=1.0,
)
"""Preset for the open internet: a crash of one of ten peers is known after 13 s, of 64 after 21 s."""
