"""``hstree generate``."""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any

from hstree.lm._arguments import Argument, count, flags_named, share, temperature
from hstree.lm._messages import shortened
from hstree.lm._terminal import fold, show
from hstree.lm.data import prompt_words
from hstree.lm.models import generate
from hstree.lm.runs.flags import add_config_arguments, add_run_argument, open_run

_FLAGS = {
    "n_words": "--words",
    "n_samples": "--samples",
    "top_k": "--top-k",
    "top_p": "--top-p",
    "seed": "--seed",
}
"""The flags of arguments of :func:`hstree.lm.models.generate`."""

_DESCRIPTION = """\
Generate text with a trained model. Each word is drawn given all words before it: by the head's own
sampler, or from the probabilities of all words if --temperature, --top-k or --top-p is given. <unk>
is never drawn. For a run with --tokenizer, words are the tokens of that tokenizer.

The words drawn per second are written to standard error.
"""


_ARGUMENTS = (
    Argument("--prompt", "text to continue (default: a new sentence)", "", metavar="TEXT"),
    Argument("--words", "number of words to draw", 60),
    Argument("--samples", "number of texts to draw", 1),
    Argument(
        "--temperature",
        "values below 1 sharpen the distribution, values above 1 flatten it",
        type=temperature,
    ),
    Argument("--top-k", "draw only from the K most probable words", type=count, metavar="K"),
    Argument(
        "--top-p",
        "draw only from the most probable words that together reach the probability P",
        type=share,
        metavar="P",
    ),
    Argument("--seed", "seed of the draws", 0, type=int),
)


def add_command(commands: Any) -> None:
    parser = commands.add_parser(
        "generate", help="text from a trained model", description=_DESCRIPTION
    )
    add_run_argument(parser)
    for argument in _ARGUMENTS:
        argument.add(parser)
    add_config_arguments(parser, only=("device", "threads"))
    parser.set_defaults(handler=_run)


def _run(arguments: argparse.Namespace) -> int:
    run, _ = open_run(arguments)
    words = prompt_words(arguments.prompt, run.vocabulary, run.tokenizer)
    unknown = [word for word in words if word not in run.vocabulary]
    if unknown:
        listed = shortened(", ".join(unknown), 1000)
        line = f"hstree: not in the vocabulary, read as <unk>: {listed}"
        print(fold(line, sys.stderr), file=sys.stderr)
    prompt = [run.vocabulary.end, *run.vocabulary.encode(words)]
    start = time.perf_counter()
    with flags_named(_FLAGS):
        samples = generate(
            run.model,
            prompt,
            arguments.words,
            arguments.samples,
            seed=arguments.seed,
            avoid=run.vocabulary.unknown,
            temperature=arguments.temperature,
            top_k=arguments.top_k,
            top_p=arguments.top_p,
        )
    speed = arguments.words * arguments.samples / (time.perf_counter() - start)
    for number, sample in enumerate(samples):
        if number:
            show("-" * 40)
        show(run.tokenizer.join([*words, *run.vocabulary.decode(sample)]))
    sys.stdout.flush()
    print(fold(f"hstree: {speed:,.0f} tokens/s", sys.stderr), file=sys.stderr)
    return 0
