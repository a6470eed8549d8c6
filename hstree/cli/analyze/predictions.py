"""``hstree analyze predictions``."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from ..arguments import add_config_arguments, config_values, count
from ..results import add_output_argument, publish, results_folder
from ..runs import prompt_words, run_corpus, run_names

if TYPE_CHECKING:
    from hstree.analysis import ContextPredictions
    from hstree.data import Corpus
    from hstree.training import Run

_DESCRIPTION = """\
The most probable next words of several models, side by side, in contexts that are given or drawn
from the test text, with the probability and rank of the word that came. A given context is read
after a line end; at a drawn position a model has read the whole test text before it as one stream.
<unk> is a word like any other here.
"""
_BAR = " | "


def add_command(commands: Any) -> None:
    """Register the command."""
    parser = commands.add_parser(
        "predictions", help="next words of several models side by side", description=_DESCRIPTION
    )
    parser.add_argument("directories", metavar="RUN", nargs="+", help="run folders of hstree train")
    parser.add_argument(
        "--context",
        action="append",
        default=[],
        metavar="TEXT",
        help="words to read, and behind ' | ', if it is known, the word that came, of which a run "
        "with subwords takes the first token: 'the company said | it'; may be repeated",
    )
    parser.add_argument(
        "--random",
        type=count,
        metavar="N",
        help="draw N words of the test text, none of them <unk>, with all that comes before them",
    )
    parser.add_argument(
        "--seed", type=int, default=0, metavar="N", help="seed of --random (default: 0)"
    )
    parser.add_argument(
        "--preceding",
        type=count,
        default=15,
        metavar="N",
        help="words shown before a word that was drawn (default: 15)",
    )
    parser.add_argument(
        "--top-k", type=count, default=5, metavar="K", help="words to show (default: 5)"
    )
    add_config_arguments(parser, only=("data", "device", "threads"))
    add_output_argument(parser, "predictions")
    parser.set_defaults(handler=_run)


def _run(arguments: argparse.Namespace) -> int:
    from dataclasses import asdict

    from hstree.analysis import prediction_rows, prediction_tables
    from hstree.training import TrainConfig, choose_device, load_run, set_threads

    settings = TrainConfig(**config_values(arguments))
    if not arguments.context and arguments.random is None:
        raise ValueError("--context: expected at least one, or --random N, got neither")
    if settings.data is not None and arguments.random is None:
        raise ValueError("--data: has no effect without --random")
    if arguments.seed < 0:
        raise ValueError(f"--seed: expected at least 0, got {arguments.seed}")
    contexts = [_split(text) for text in arguments.context]
    names = run_names(arguments.directories)
    set_threads(settings)
    device = choose_device(settings.device)
    runs = [load_run(path, device) for path in arguments.directories]
    least = min(len(run.vocabulary) for run in runs)
    if arguments.top_k > least:
        raise ValueError(
            f"--top-k: expected at most {least} (the smallest vocabulary), got {arguments.top_k}"
        )
    folder = results_folder(arguments)
    notes: list[str] = []
    found = [
        _given(number, context, truth, runs, names, arguments.top_k, notes)
        for number, (context, truth) in enumerate(contexts, start=1)
    ]
    if arguments.random is not None:
        corpora = [run_corpus(run, settings.data) for run in runs]
        found += _drawn(arguments, runs, corpora, names)
        notes.append(
            f"{arguments.random} words of the test text of {corpora[0].name}, drawn with seed "
            f"{arguments.seed} among those that every model knows; each model has read the whole "
            f"test text before them, of which {arguments.preceding} words are shown"
        )
    publish(
        folder,
        "predictions",
        "Next words side by side",
        prediction_tables(found, names),
        {"models": names, "contexts": [asdict(context) for context in found]},
        {},
        notes,
        rows=prediction_rows(found, names),
    )
    return 0


def _split(text: str) -> tuple[str, str | None]:
    """Context, and the true word if there is one."""
    context, bar, truth = text.rpartition(_BAR)
    if not bar:
        context, truth = text, ""
    if not context.strip() or (bar and not truth.strip()):
        raise ValueError(f"--context: expected words, or words{_BAR}true word, got {text!r}")
    return context, truth.strip() or None


def _given(
    number: int,
    context: str,
    truth: str | None,
    runs: list[Run],
    names: list[str],
    k: int,
    notes: list[str],
) -> ContextPredictions:
    from hstree.analysis import ContextPredictions, log_prob_at, prediction

    predictions = []
    for run, name in zip(runs, names, strict=True):
        words = prompt_words(context, run.vocabulary, run.tokenizer)
        unknown = [word for word in words if word not in run.vocabulary]
        if unknown:
            notes.append(f"context {number}: {name} reads as <unk>: {', '.join(unknown)}")
        tokens = [run.vocabulary.end, *run.vocabulary.encode(words)]
        log_prob = log_prob_at(run.model, tokens, [len(tokens)])[0]
        true_word = None if truth is None else _true_word(context, words, truth, run)
        predictions.append(prediction(log_prob, run.vocabulary.words, k, true_word))
    return ContextPredictions(context, truth, None, tuple(predictions))


def _true_word(context: str, words: list[str], truth: str, run: Run) -> str:
    """The true word in the words of a run: with subwords the first token that it adds.

    Raises:
        ValueError: it is not one word.
    """
    if run.tokenizer is not None:
        longer = prompt_words(f"{context} {truth}", run.vocabulary, run.tokenizer)
        if len(longer) > len(words) and longer[: len(words)] == words:
            return longer[len(words)]
    found = prompt_words(truth, run.vocabulary, run.tokenizer)
    if run.tokenizer is None and len(found) != 1:
        raise ValueError(f"--context: expected one word behind{_BAR}, got {truth!r}")
    return found[0]


def _drawn(
    arguments: argparse.Namespace, runs: list[Run], corpora: list[Corpus], names: list[str]
) -> list[ContextPredictions]:
    from hstree.analysis import ContextPredictions, log_prob_at, prediction

    positions = _positions(arguments, corpora, names)
    log_probs = [
        log_prob_at(run.model, corpus.test, positions)
        for run, corpus in zip(runs, corpora, strict=True)
    ]
    text, vocabulary, tokenizer = corpora[0].test, corpora[0].vocabulary, runs[0].tokenizer
    found = []
    for row, position in enumerate(positions):
        begin = max(0, position - arguments.preceding)
        words = vocabulary.decode(text[begin:position].tolist())
        context = " ".join(words) if tokenizer is None else tokenizer.join(words)
        truth = vocabulary.words[text[position]]
        predictions = tuple(
            prediction(log_prob[row], run.vocabulary.words, arguments.top_k, truth)
            for log_prob, run in zip(log_probs, runs, strict=True)
        )
        dots = "\N{HORIZONTAL ELLIPSIS} " if begin else ""
        found.append(ContextPredictions(dots + context, truth, position, predictions))
    return found


def _positions(arguments: argparse.Namespace, corpora: list[Corpus], names: list[str]) -> list[int]:
    """Positions in the test text. Raises ValueError if it is not the same for all runs."""
    from hstree.analysis import random_positions

    def same(values: list[Any]) -> None:
        for value, name in zip(values, names, strict=True):
            if value != values[0]:
                raise ValueError(
                    f"--random: expected one test text, split alike for all runs, but those of "
                    f"{names[0]} and {name} differ; name one text with --data, or use --context"
                )

    same([(corpus.tokenizer.identity, len(corpus.test)) for corpus in corpora])
    unknown = [corpus.vocabulary.unknown for corpus in corpora]
    texts = [corpus.test for corpus in corpora]
    positions = random_positions(texts, unknown, arguments.random, arguments.seed)
    same([corpus.vocabulary.decode(corpus.test[positions].tolist()) for corpus in corpora])
    return positions
