"""The most probable next words of models in a context."""
