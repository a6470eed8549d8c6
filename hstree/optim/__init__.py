"""An optimizer, gradient clipping and learning rates for models with a head."""

from hstree.optim.adamw import AdamW
from hstree.optim.clip_grad import clip_grad_norm_

__all__ = ["AdamW", "clip_grad_norm_"]
