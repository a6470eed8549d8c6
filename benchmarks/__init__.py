"""Benchmarks: ``pytest --benchmark-only`` runs them, ``python -m benchmarks.table`` makes their
table."""
