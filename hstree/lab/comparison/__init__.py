"""Comparison of runs: settings that differ, and means over seeds."""
