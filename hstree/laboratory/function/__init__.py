"""The increasing function that a head applies to its logits, and where the logits lie."""
