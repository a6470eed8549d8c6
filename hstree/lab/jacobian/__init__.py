"""Conditioning of layers: singular values of their Jacobians dy/dx."""
