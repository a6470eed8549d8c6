"""An output layer of hierarchical softmaxes: the ensemble of trees."""

from hstree.heads.trees.ensemble import TreeEnsemble
from hstree.heads.trees.levels import LevelLogProbs, level_log_probs
from hstree.heads.trees.shape import TreeShape

__all__ = ["LevelLogProbs", "TreeEnsemble", "TreeShape", "level_log_probs"]
