"""Singular values of the log P matrix of a model, its Press rank and its effective ranks."""
