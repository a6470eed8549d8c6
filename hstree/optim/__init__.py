"""An optimizer and gradient clipping for models with dense and row-sparse gradients."""

from hstree.optim.adamw import AdamW
from hstree.optim.clip_grad import clip_grad_norm_

__all__ = ["AdamW", "clip_grad_norm_"]
