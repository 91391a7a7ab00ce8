"""PowerSGD: rounds that exchange the low-rank factors of an update."""
