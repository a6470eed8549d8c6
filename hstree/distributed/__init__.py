"""Heads on several processes, by torch.distributed."""

from hstree.distributed.data_parallel import DistributedDataParallel, fully_shard

__all__ = ["DistributedDataParallel", "fully_shard"]
