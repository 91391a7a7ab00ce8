"""Settings of every test."""

from hypothesis import settings

# How long one example takes depends on the machine; it never decides a test.
settings.register_profile("thinwire", deadline=None)
settings.load_profile("thinwire")
