"""The synthetic bottleneck experiment: what a head of D features can express."""
