"""An optimizer, gradient clipping and learning rates for models with a head."""

from hstree.optim.adamw import AdamW
from hstree.optim.clip_grad import clip_grad_norm_
from hstree.optim.learning_rates import learning_rates

__all__ = ["AdamW", "clip_grad_norm_", "learning_rates"]
