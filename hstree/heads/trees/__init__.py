"""An output layer of hierarchical softmaxes: the ensemble of trees."""

from hstree.heads.trees.head import TreeEnsemble
from hstree.heads.trees.levels import LevelLogProbs, level_log_probs

__all__ = ["LevelLogProbs", "TreeEnsemble", "level_log_probs"]
