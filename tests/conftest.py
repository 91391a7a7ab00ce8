"""Settings of every test."""

import os

from hypothesis import settings

# How long one example takes depends on the machine; it never decides a test.
settings.register_profile("thinwire", deadline=None)
settings.load_profile("thinwire")

# Tiny models on shared cores: more threads only wait for each other. Daemons that tests start inherit it.
os.environ.setdefault("OMP_NUM_THREADS", "1")
