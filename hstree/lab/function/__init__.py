"""The increasing function that a head applies to its logits, and their distribution."""
