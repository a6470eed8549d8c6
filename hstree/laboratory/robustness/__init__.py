"""How robust the Press rank of a matrix is against rounding and noise."""
