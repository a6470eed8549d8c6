"""Experiments of the literature: what trains or computes something of its own to measure it."""
