"""A small language model with any head, and what it reads, computed at once."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from hstree.heads import Head
from hstree.lm.model import AWDLSTM, LanguageModel

SIZE, LENGTH = 10, 300  # of a context vector, of the text


def toy_model(head: Head, seed: int = 0) -> LanguageModel:
    """The head behind an LSTM with random weights."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        layers = head.in_features
        model = LanguageModel(AWDLSTM(head.n_classes, 6, layers, dropout=0.5), head)
        for parameter in model.backbone.parameters():
            torch.nn.init.normal_(parameter, std=0.7)
    return model.eval()


def toy_text(n_classes: int, length: int = LENGTH) -> Any:
    """Ids of which the low ones are frequent, and the last class is missing."""
    return np.random.default_rng(5).geometric(0.1, length).clip(max=n_classes - 1) - 1


def all_contexts(model: LanguageModel, tokens: Any) -> tuple[Tensor, Tensor]:
    """Context vectors [n - 1, D] and next words [n - 1]."""
    ids = torch.from_numpy(np.asarray(tokens, np.int64))
    with torch.no_grad():
        return model.hidden(ids[:-1, None])[0][:, 0], ids[1:]
