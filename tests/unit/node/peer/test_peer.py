"""Construction of a real peer without a swarm; tests/swarms and tests/processes run whole peers."""

import asyncio
import threading

from thinwire.node.peer.bootstrap import founding
from thinwire.node.runtime.load_settings import load


def test_peer_announces_site_of_its_settings(tmp_path):
    entry = founding(b"", load({"home": tmp_path, "site": "loft"}, {}), "run.toml")
    assert entry.peer(lambda kind, fields: None).admission.site == "loft"


def test_daemon_executor_runs_in_a_thread(tmp_path):
    peer = founding(b"", load({"home": tmp_path}, {}), "run.toml").peer(lambda kind, fields: None)
    assert asyncio.run(peer.environment.aside(threading.get_ident)) != threading.get_ident()
