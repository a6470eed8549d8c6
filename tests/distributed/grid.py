"""What four processes run: two dimensions of a mesh."""

from distributed.test_shard_trees import GRID as SCENARIOS

__all__ = ["SCENARIOS"]
