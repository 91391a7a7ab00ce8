"""Keys and values with other names in version 0.1; errors name the new ones."""

from __future__ import annotations

KEYS: dict[str, dict[str, str]] = {
    "data": {"once": "exactly_once", "domains": "private"},
    "outer": {
        "steps": "sync_every",
        "work": "step_balancing",
        "spread": "max_step_ratio",
        "late": "lr_change_round",
        "late_lr": "lr_after",
        "fade": "staleness_exponent",
        "arrivals": "buffer_size",
        "alpha": "local_mix",
        "clip": "momentum_clip",
        "beta": "residual_decay",
        "decay": "weight_decay",
    },
    "exchange": {
        "grace": "straggler_timeout",
        "sick": "slow_peers",
        "group": "gossip_group_size",
        "keep": "owner_residual_decay",
        "shards": "chunk_assignment",
    },
    "pipeline": {
        "micro": "microbatches",
        "window": "max_in_flight",
        "room": "host_capacity",
        "holders": "peers_per_stage",
        "buddy": "backup_every",
        "recent": "backup_max_age",
        "swaps": "max_reorders",
        "skip": "skip_fraction",
    },
}
"""Table -> old key -> new key."""

VALUES: dict[tuple[str, str, object], str] = {
    ("outer", "step_balancing", "by-power"): "by-speed",
    ("exchange", "slow_peers", "isolate"): "no-ownership",
    ("exchange", "collective", "gather"): "all-gather",
    ("pipeline", "paths", "even"): "round-robin",
}
"""Table, key and old value -> new value."""
