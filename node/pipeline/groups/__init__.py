"""Groups of peers that form a replica: who holds which stage, and the learners that drive them."""
