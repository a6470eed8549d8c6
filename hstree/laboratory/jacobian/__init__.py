"""How well conditioned layers are: singular values of their Jacobians dy/dx."""
