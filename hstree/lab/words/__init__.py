"""Word similarity: correlation of learned word vectors with human judgments."""
