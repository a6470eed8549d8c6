"""``hstree evaluate``."""

from __future__ import annotations

import argparse
import json
import math
from typing import Any

import numpy as np

from hstree.lm._arguments import count
from hstree.lm._messages import quoted
from hstree.lm._terminal import show
from hstree.lm.data import CorpusStatistics
from hstree.lm.runs import perplexity
from hstree.lm.runs.flags import add_config_arguments, add_run_argument, open_run
from hstree.lm.training import evaluate

_DESCRIPTION = """\
Perplexity of a trained model on a text, and of the unigram model of its training text. Without
--data: the validation and test part of the text it was trained on. With --data: all of a file, or
the validation and test part of a folder or dataset, of which one suffices. The text is split into
words as the training text was. Bits per character and per byte count the characters of the text
before that; parts cut out of one file have no such figures. The run folder is not changed.
"""


def _streams(text: str) -> tuple[int, int]:
    try:
        numbers = [count(number) for number in text.split(",")]
    except ValueError:
        numbers = []
    if not 1 <= len(numbers) <= 2:
        raise argparse.ArgumentTypeError(f"expected one whole number or two, got {quoted(text)}")
    return numbers[0], numbers[-1]


def add_command(commands: Any) -> None:
    parser = commands.add_parser(
        "evaluate", help="perplexity of a trained model", description=_DESCRIPTION
    )
    add_run_argument(parser)
    add_config_arguments(parser, only=("data", "column", "device", "threads"))
    parser.add_argument(
        "--streams",
        type=_streams,
        metavar="N[,N]",
        help="number of parallel streams into which the texts are cut, or one number for the "
        "validation and one for the test text; published perplexities: 10,1 (default: at most 20 "
        "of at least 50 tokens)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(handler=_run)


def _run(arguments: argparse.Namespace) -> int:
    run, settings = open_run(arguments)
    text = run.held_out(settings.data, settings.column)
    unigram = CorpusStatistics(run.vocabulary.frequencies, np.empty(0, np.int32))
    streams_valid, streams_test = arguments.streams or (None, None)
    result: dict[str, dict[str, Any]] = {}
    for split, tokens in text.parts.items():
        if len(tokens) < 2:
            raise ValueError(
                f"{text.name}: the part {split} has {len(tokens)} tokens, at least 2 are needed"
            )
        loss = evaluate(run.model, tokens, streams_valid if split == "valid" else streams_test)
        bits = loss * len(tokens) / math.log(2)
        length = text.lengths.get(split)
        result[split] = {
            "tokens": len(tokens) - 1,
            "unknown_share": float((tokens == run.vocabulary.unknown).mean()),
            "loss": loss,
            "perplexity": perplexity(loss),
            "unigram_perplexity": perplexity(unigram.unigram_loss(tokens[1:])),
            "bits_per_character": None if length is None else bits / length.characters,
            "bits_per_byte": None if length is None else bits / length.bytes,
        }
    for split, row in result.items():
        if not math.isfinite(row["perplexity"]):
            raise ValueError(
                f"expected a finite perplexity, got {row['perplexity']} on the part {split}, "
                f"with a loss of {row['loss']} nats per token"
            )
    if arguments.json:
        about = {"run": str(run.path), "corpus": text.name}
        print(json.dumps(about | result, indent=2))
        return 0
    show(f"{run.path}, head {run.model.head.name!r}, on {text.name}")
    show(f"{'':<7}{'tokens':>10}{'<unk>':>8}{'loss':>9}{'perplexity':>12}{'unigram':>10}")
    for split, row in result.items():
        print(
            f"{split:<7}{row['tokens']:>10,}{row['unknown_share']:>8.1%}{row['loss']:>9.4f}{row['perplexity']:>12.2f}"
            f"{row['unigram_perplexity']:>10.1f}"
        )
    if text.lengths:
        show(f"\n{'bits':<7}{'per character':>15}{'per byte':>10}")
    for split, row in result.items() if text.lengths else ():
        show(f"{split:<7}{row['bits_per_character']:>15.4f}{row['bits_per_byte']:>10.4f}")
    return 0
