"""Grids of training runs, described by a file, in one table."""
