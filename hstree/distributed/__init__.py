"""Training of heads on several processes with torch.distributed."""

from hstree.distributed.clip_grad import clip_grad_norm_
from hstree.distributed.data_parallel import DistributedDataParallel, fully_shard
from hstree.distributed.sharded_trees import ShardedTreeEnsemble, gather_trees, shard_trees

__all__ = [
    "DistributedDataParallel",
    "ShardedTreeEnsemble",
    "clip_grad_norm_",
    "fully_shard",
    "gather_trees",
    "shard_trees",
]
