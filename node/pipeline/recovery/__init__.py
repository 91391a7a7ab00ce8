"""Recovery of stages whose holders have died: copies on neighbours, and the arbiter that decides."""
