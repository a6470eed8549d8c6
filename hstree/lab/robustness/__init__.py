"""Robustness of the Press rank of a matrix against rounding and noise."""
