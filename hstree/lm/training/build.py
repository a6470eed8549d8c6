"""What a run needs before its first step: a model and a large enough text."""

from __future__ import annotations

import torch
from torch import nn

from hstree.heads import Head, build_head, head_options
from hstree.heads.tying import TyingError
from hstree.lm.data import Corpus, CorpusStatistics
from hstree.lm.models import AWDLSTM, LanguageModel
from hstree.lm.runs import ConfigError, TrainConfig


def build_model(config: TrainConfig, n_classes: int, statistics: CorpusStatistics) -> LanguageModel:
    """The untrained model of a configuration; the same for the same seed.

    Raises:
        ConfigError: the head does not accept the given options, or cannot be tied.
        ValueError: the head is unknown, or an option has a value that the head rejects.
    """
    torch.manual_seed(config.seed)
    backbone = AWDLSTM(
        n_classes,
        config.embedding_size,
        config.hidden_size,
        config.layers,
        context_size=config.context_size,
        dropout=config.dropout,
        dropout_input=config.dropout_input,
        dropout_hidden=config.dropout_hidden,
        dropout_embedding=config.dropout_embedding,
        weight_dropout=config.weight_dropout,
        embedding_noise=config.embedding_noise,
        sparse_embedding=config.sparse_embedding,
    )
    if config.tied and "embedding" not in head_options(config.head):
        raise ConfigError(f"--tied: the head {config.head!r} cannot be tied to the word embeddings")
    try:
        head = build_head(
            config.head,
            backbone.out_features,
            n_classes,
            frequencies=statistics.frequencies,
            tokens=statistics.tokens,
            embedding=backbone.embedding if config.tied else None,
            seed=config.seed,
            **config.head_options(),
        )
    except TypeError as error:
        raise ConfigError(
            f"--head-option: the head {config.head!r} does not accept these options: {error}"
        ) from error
    except TyingError as error:
        advice = ""
        if error.expected == (n_classes, backbone.out_features):
            advice = (
                f"; make --context-size (now {backbone.context_size}) and --embedding-size "
                f"(now {backbone.embedding_size}) equal"
            )
        raise ConfigError(f"--tied: {error}{advice}") from error
    return LanguageModel(backbone, head)


def own_parameter_count(head: Head, backbone: nn.Module) -> int:
    """Number of parameters of the head that it does not share with the backbone."""
    shared = {id(parameter) for parameter in backbone.parameters()}
    return sum(parameter.numel() for parameter in head.parameters() if id(parameter) not in shared)


def check_size(corpus: Corpus, config: TrainConfig, processes: int = 1) -> None:
    streams = config.batch_size * processes
    needed = {"train": streams + 1, "valid": 2, "test": 2}
    for split, least in needed.items():
        size = len(getattr(corpus, split))
        if size < least:
            flag = "--batch-size" if split == "train" else "--data"
            raise ConfigError(
                f"{flag}: expected at least {least} tokens in the {split} part of {corpus.name}, "
                f"got {size}"
            )
