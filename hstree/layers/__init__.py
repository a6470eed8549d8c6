"""Layers of the literature beside output layers."""
