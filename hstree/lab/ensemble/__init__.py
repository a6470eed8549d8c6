"""Trees of an ensemble: clusters of words, agreement, and the loss by level and frequency."""
