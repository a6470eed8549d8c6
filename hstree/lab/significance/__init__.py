"""Significance of differences between models, by t-tests over their seeds."""
