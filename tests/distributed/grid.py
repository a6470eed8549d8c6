"""What four processes run: two dimensions of a mesh."""

from distributed.test_shard_trees import with_data_parallel

SCENARIOS = {"grid": with_data_parallel}
