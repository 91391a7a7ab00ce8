import hashlib

import numpy as np
from thinwire.compression.core.noise import normal


def test_noise_bits_are_portable() -> None:
    assert hashlib.sha256(normal(7, "golden", 1000).astype("<f4").tobytes()).hexdigest()[:16] == "8084d763f48268e3"


def test_noise_is_nearly_normal_and_depends_on_seed_and_purpose() -> None:
    x = normal(1, "a", 200_000).astype(np.float64)
    assert abs(x.mean()) < 0.01 and abs(x.var() - 1) < 0.01 and abs((x**4).mean() - 2.9) < 0.05
    for other in (normal(2, "a", 200_000), normal(1, "b", 200_000)):
        assert abs((x * other).mean()) < 0.01
    assert (normal(1, "a", 10) == x[:10]).all()
