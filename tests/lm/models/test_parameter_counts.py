"""Parameters of the published language models, to the last one.

Three LSTM layers over word embeddings that are tied to the output layer. The study of output layers
on Penn Treebank (V = 10,000) and WikiText-2 (V = 33,278) gives the counts in millions, truncated.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hstree.lm.config import TrainConfig
from hstree.lm.data import CorpusStatistics
from hstree.lm.model import LanguageModel
from hstree.lm.train import build_model

PTB, WIKITEXT2 = 10_000, 33_278
# embedding, hidden layers 1 and 2, context vector
SIZES = {
    ("softmax", PTB): (400, 1150, 400),
    ("softmax", WIKITEXT2): (400, 1150, 400),
    ("mixture", PTB): (280, 960, 620),
    ("mixture", WIKITEXT2): (300, 1150, 650),
}


def published_model(head: str, n_classes: int) -> LanguageModel:
    """The model of the study, without storage."""
    mixture = head in ("mos", "moc")
    embedding, hidden, context = SIZES["mixture" if mixture else "softmax", n_classes]
    config = TrainConfig(
        head=head,
        embedding_size=embedding,
        hidden_size=hidden,
        context_size=context,
        layers=3,
        tied=True,
        head_option=("components=15",) if mixture else (),
    )
    statistics = CorpusStatistics(np.ones(n_classes, np.int64), np.zeros(0, np.int32))
    with torch.device("meta"):
        return build_model(config, n_classes, statistics)


@pytest.mark.parametrize(
    ("head", "n_classes", "count", "published"),
    [
        ("softmax", PTB, 24_221_600, "24.22M"),
        ("softmax", WIKITEXT2, 33_556_078, "33.55M"),
        ("sigsoftmax", PTB, 24_221_600, "24.22M"),
        ("sigsoftmax", WIKITEXT2, 33_556_078, "33.55M"),
        ("gss", PTB, 24_221_600, "24.22M"),
        ("gss", WIKITEXT2, 33_556_078, "33.55M"),
        ("plif", PTB, 24_321_600, "24.32M"),
        ("plif", WIKITEXT2, 33_656_078, "33.65M"),
        ("mos", PTB, 21_500_620, "21.50M"),
        ("mos", WIKITEXT2, 34_909_528, "34.90M"),
        ("moc", PTB, 21_500_620, "21.50M"),
        ("moc", WIKITEXT2, 34_909_528, "34.90M"),
    ],
)
def test_published_parameter_counts(head: str, n_classes: int, count: int, published: str) -> None:
    model = published_model(head, n_classes)
    assert sum(parameter.numel() for parameter in model.parameters()) == count
    assert f"{count // 10_000 / 100:.2f}M" == published
    assert all(parameter.is_meta for parameter in model.parameters())


def test_frozen_slopes_are_not_trained() -> None:
    model = published_model("plif-frozen", PTB)
    assert sum(p.numel() for p in model.parameters() if p.requires_grad) == 24_221_600
