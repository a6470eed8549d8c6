"""Correlation of two quantities of models, such as the rank of log P and the perplexity."""
