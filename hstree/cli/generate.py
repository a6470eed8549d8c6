"""``hstree generate``."""

from __future__ import annotations

import argparse
from typing import Any

from hstree._arguments import count, positive, share
from hstree._terminal import fold
from hstree.runs.flags import add_config_arguments, add_run_argument, config_values

_DESCRIPTION = """\
Generate text with a trained model. Each word is drawn given all words before it: by the head's own
sampler, or from the probabilities of all words if --temperature, --top-k or --top-p is given. <unk>
is never drawn. For a run with --tokenizer, words are the tokens of that tokenizer.
"""


def add_command(commands: Any) -> None:
    """Register the command."""
    parser = commands.add_parser(
        "generate", help="text from a trained model", description=_DESCRIPTION
    )
    add_run_argument(parser)
    parser.add_argument(
        "--prompt", default="", metavar="TEXT", help="text to continue (default: a new sentence)"
    )
    parser.add_argument(
        "--words", type=count, default=60, metavar="N", help="number of words to draw (default: 60)"
    )
    parser.add_argument(
        "--samples", type=count, default=1, metavar="N", help="number of texts to draw (default: 1)"
    )
    parser.add_argument(
        "--temperature",
        type=positive,
        metavar="X",
        help="values below 1 sharpen the distribution, values above 1 flatten it",
    )
    parser.add_argument(
        "--top-k", type=count, metavar="K", help="draw only from the K most probable words"
    )
    parser.add_argument(
        "--top-p",
        type=share,
        metavar="P",
        help="draw only from the most probable words that together reach the probability P",
    )
    parser.add_argument(
        "--seed", type=int, default=0, metavar="N", help="seed of the draws (default: 0)"
    )
    add_config_arguments(parser, only=("device", "threads"))
    parser.set_defaults(handler=_run)


def _run(arguments: argparse.Namespace) -> int:
    import sys

    from hstree.data import detokenize, prompt_words
    from hstree.models import generate
    from hstree.runs import TrainConfig, choose_device, load_run, set_threads

    settings = TrainConfig(**config_values(arguments))
    set_threads(settings)
    run = load_run(arguments.directory, choose_device(settings.device))
    words = prompt_words(arguments.prompt, run.vocabulary, run.tokenizer)
    unknown = [word for word in words if word not in run.vocabulary]
    if unknown:
        line = f"hstree: not in the vocabulary, read as <unk>: {', '.join(unknown)}"
        print(fold(line, sys.stderr), file=sys.stderr)
    samples = generate(
        run.model,
        [run.vocabulary.end, *run.vocabulary.encode(words)],
        arguments.words,
        arguments.samples,
        seed=arguments.seed,
        avoid=run.vocabulary.unknown,
        temperature=arguments.temperature,
        top_k=arguments.top_k,
        top_p=arguments.top_p,
    )
    join = detokenize if run.tokenizer is None else run.tokenizer.join
    for number, sample in enumerate(samples):
        if number:
            print("-" * 40)
        print(join([*words, *run.vocabulary.decode(sample)]))
    return 0
