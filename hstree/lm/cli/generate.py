"""``hstree generate``."""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any, cast

from hstree.heads import Head, load_head
from hstree.heads.tying import TyingError
from hstree.lm._arguments import Argument, count, flags_named, share, temperature
from hstree.lm._messages import shortened
from hstree.lm._terminal import fold, show
from hstree.lm.data import prompt_words
from hstree.lm.models import LanguageModel, generate, speculative
from hstree.lm.runs.flags import add_config_arguments, add_run_argument, open_run

_FLAGS = {
    "n_words": "--words",
    "n_samples": "--samples",
    "k": "--draft-words",
    "top_k": "--top-k",
    "top_p": "--top-p",
    "seed": "--seed",
}
"""The flags of arguments of the functions that draw."""

_DESCRIPTION = """\
Generate text with a trained model. Each word is drawn given all words before it: by the head's own
sampler, or from the probabilities of all words if --temperature, --top-k or --top-p is given. <unk>
is never drawn. For a run with --tokenizer, words are the tokens of that tokenizer.

With --draft, another head draws most of the words and the model's head accepts or replaces them
(speculative decoding). The text has the model's distribution; only the speed depends on the draft.

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
    Argument(
        "--draft",
        "saved head that drafts words, with the sizes of the model's head, such as a "
        "ScreenedSoftmax (not with --top-k or --top-p)",
        metavar="FILE",
    ),
    Argument(
        "--draft-words",
        "number of words to draft for each call of the model's head",
        4,
        metavar="K",
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
    if arguments.draft is not None:
        for flag, value in (("--top-k", arguments.top_k), ("--top-p", arguments.top_p)):
            if value is not None:
                raise ValueError(f"--draft: expected no {flag}, got {flag} {value}")
    run, _ = open_run(arguments)
    words = prompt_words(arguments.prompt, run.vocabulary, run.tokenizer)
    unknown = [word for word in words if word not in run.vocabulary]
    if unknown:
        listed = shortened(", ".join(unknown), 1000)
        line = f"hstree: not in the vocabulary, read as <unk>: {listed}"
        print(fold(line, sys.stderr), file=sys.stderr)
    prompt = [run.vocabulary.end, *run.vocabulary.encode(words)]
    with flags_named(_FLAGS):
        samples, speed = _draw(run.model, prompt, run.vocabulary.unknown, arguments)
    for number, sample in enumerate(samples):
        if number:
            show("-" * 40)
        show(run.tokenizer.join([*words, *run.vocabulary.decode(sample)]))
    sys.stdout.flush()
    print(fold(f"hstree: {speed}", sys.stderr), file=sys.stderr)
    return 0


def _draw(
    model: LanguageModel, prompt: list[int], avoid: int, arguments: argparse.Namespace
) -> tuple[list[list[int]], str]:
    size = arguments.words, arguments.samples
    options = {"seed": arguments.seed, "avoid": avoid}
    accepted = ""
    if arguments.draft is None:
        options |= {name: getattr(arguments, name) for name in ("temperature", "top_k", "top_p")}
        start = time.perf_counter()
        samples = generate(model, prompt, *size, **options)
    else:
        draft = _load_draft(arguments.draft, model).to(model.backbone.embedding.weight.device)
        temperature = 1.0 if arguments.temperature is None else arguments.temperature
        options |= {"k": arguments.draft_words, "temperature": temperature}
        start = time.perf_counter()
        output = speculative(model, draft, prompt, *size, **options)
        samples = output.classes
        accepted = (
            f"; a verification accepted {output.accepted:.2f} of {output.drafted:.2f} drafted words"
        )
    seconds = time.perf_counter() - start
    return samples, f"{arguments.words * arguments.samples / seconds:,.0f} tokens/s{accepted}"


def _load_draft(path: str, model: LanguageModel) -> Head:
    """The draft; a ScreenedSoftmax, which is saved without its weight, takes that of the model's
    head."""
    try:
        return load_head(path)
    except TyingError:
        if not hasattr(model.head, "weight"):
            raise
    return load_head(path, embedding=cast(Any, model.head))
