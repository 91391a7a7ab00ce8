"""NoLoCo: outer steps with a few partners by gossip, without a global round."""
