"""``hstree evaluate``."""

from __future__ import annotations

import argparse
from typing import Any

from .arguments import add_config_arguments, add_run_argument, config_values

_DESCRIPTION = """\
Perplexity of a trained model on the validation and test part of a text, beside that of the unigram
model of its training text. Without --data: the text it was trained on.
"""


def add_command(commands: Any) -> None:
    """Register the command."""
    parser = commands.add_parser(
        "evaluate", help="perplexity of a trained model", description=_DESCRIPTION
    )
    add_run_argument(parser)
    add_config_arguments(parser, only=("data", "device", "threads"))
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(handler=_run)


def _run(arguments: argparse.Namespace) -> int:
    import json

    from hstree.data import CorpusStatistics, load_corpus
    from hstree.training import (
        TrainConfig,
        choose_device,
        evaluate,
        load_run,
        perplexity,
        set_threads,
    )

    settings = TrainConfig(**config_values(arguments))
    set_threads(settings)
    run = load_run(arguments.directory, choose_device(settings.device))
    corpus = load_corpus(settings.data or run.config.data, vocabulary=run.vocabulary)
    unigram = CorpusStatistics(run.vocabulary.frequencies, corpus.train)
    result: dict[str, dict[str, float]] = {}
    for split, tokens in (("valid", corpus.valid), ("test", corpus.test)):
        if len(tokens) < 2:
            raise ValueError(
                f"{corpus.name}: the {split} part has {len(tokens)} tokens, at least 2 are needed"
            )
        loss = evaluate(run.model, tokens)
        result[split] = {
            "tokens": len(tokens) - 1,
            "unknown_share": float((tokens == run.vocabulary.unknown).mean()),
            "loss": loss,
            "perplexity": perplexity(loss),
            "unigram_perplexity": perplexity(unigram.unigram_loss(tokens[1:])),
        }
    if arguments.json:
        print(json.dumps({"run": str(run.path), "corpus": corpus.name} | result, indent=2))
        return 0
    print(f"{run.path}, head {run.model.head.name!r}, on {corpus.name}")
    print(f"{'':<7}{'tokens':>10}{'<unk>':>8}{'loss':>9}{'perplexity':>12}{'unigram':>10}")
    for split, row in result.items():
        print(
            f"{split:<7}{row['tokens']:>10,}{row['unknown_share']:>8.1%}{row['loss']:>9.4f}{row['perplexity']:>12.2f}"
            f"{row['unigram_perplexity']:>10.1f}"
        )
    return 0
