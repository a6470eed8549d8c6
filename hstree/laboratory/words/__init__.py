"""Word similarity: do vectors that a model has learned order pairs of words as people do?"""
