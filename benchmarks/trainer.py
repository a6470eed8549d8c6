"""Steps of ``hstree train`` beside a bare training loop over the same model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.nn.utils import clip_grad_norm_

from benchmarks.contest import Build, Contestant, Size
from hstree.lm.config import TrainConfig
from hstree.lm.data import Corpus, Vocabulary
from hstree.lm.model import LanguageModel, detach
from hstree.lm.train import Trainer, build_model
from hstree.optim import AdamW

TRAINER_SIZE = Size(700, 200, 10_000, 200)
COLUMNS = 20


def endless_steps(trainer: Trainer) -> Iterator[Any]:
    """Make steps, epoch after epoch, without validation."""
    while True:
        yield from trainer.steps()
        trainer.note_validation(0.0)


def _corpus(classes: int) -> Corpus:
    """Random words, by Zipf's law."""
    frequencies = 1.0 / np.arange(1, classes + 1)
    random = np.random.default_rng(0)
    tokens = random.choice(classes, 50_000, p=frequencies / frequencies.sum()).astype(np.int32)
    words = ["<unk>", "<eos>", *map(str, range(2, classes))]
    counts = np.bincount(tokens, minlength=classes)
    return Corpus("random", Vocabulary(words, counts), tokens, tokens[:1000], tokens[:1000])


def _model(size: Size) -> tuple[TrainConfig, Corpus, LanguageModel]:
    corpus = _corpus(size.classes)
    config = TrainConfig(
        embedding_size=size.features,
        hidden_size=size.features,
        layers=1,
        batch_size=COLUMNS,
        bptt=size.rows // COLUMNS,
        optimizer="adamw",
        learning_rate=1e-3,
        recipe="huffman",
    )
    return config, corpus, build_model(config, size.classes, corpus.statistics())


def _train(size: Size, device: str) -> Contestant:
    config, corpus, model = _model(size)
    steps = endless_steps(Trainer(model, corpus, config))
    return Contestant(lambda: next(steps))


def _bare_steps(config: TrainConfig, corpus: Corpus, model: LanguageModel) -> Iterator[None]:
    text = torch.from_numpy(corpus.train.astype(np.int64))
    text = text[: len(text) // COLUMNS * COLUMNS].view(COLUMNS, -1).t().contiguous()
    backbone = [{"params": list(model.backbone.parameters())}]
    rate, factor = config.learning_rate, config.head_learning_rate_factor
    optimizer = AdamW([*backbone, *model.head.parameter_groups(rate, factor=factor)], lr=rate)
    while True:
        state = None
        for begin in range(0, len(text) - config.bptt, config.bptt):
            window = text[begin : begin + config.bptt + 1]
            (_, loss), state, _ = model(window[:-1], window[1:], state)
            state = detach(state)
            optimizer.zero_grad()
            loss.backward()
            clip_grad_norm_(model.parameters(), config.clip)
            optimizer.step()
            yield


def _bare(size: Size, device: str) -> Contestant:
    steps = _bare_steps(*_model(size))
    return Contestant(lambda: next(steps))


TRAINER_CONTESTS: dict[str, dict[str, Build]] = {
    "trainer": {"a bare loop": _bare, "hstree train": _train}
}
