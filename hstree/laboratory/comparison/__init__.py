"""Runs side by side: what they differ in, and means over seeds."""
