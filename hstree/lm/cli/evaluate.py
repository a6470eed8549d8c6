"""``hstree evaluate``."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from hstree.lm._arguments import count, flags_named, not_negative, positive, share_below_one, theta
from hstree.lm._messages import quoted
from hstree.lm._terminal import show
from hstree.lm.data import CorpusStatistics
from hstree.lm.evaluation import NeuralCache, evaluate_dynamic, evaluate_stream, gradient_rms
from hstree.lm.runs import Run, perplexity
from hstree.lm.runs.flags import add_config_arguments, add_run_argument, open_run
from hstree.lm.training import evaluate

_DESCRIPTION = """\
Perplexity of a trained model on a text, and of the unigram model of its training text. Without
--data: the validation and test part of the text it was trained on. With --data: all of a file, or
the validation and test part of a folder or dataset, of which one suffices. The text is split into
words as the training text was. Bits per character and per byte count the characters of the text
before that; parts cut out of one file have no such figures. With --cache or --dynamic also the
perplexity of a model that keeps learning from the text it reads; the text is then one stream from
the first word to the last, and the unchanged model is evaluated on the same stream. The run folder
is not changed.
"""

# Numbers of --cache and --dynamic: name, kind, default, help.
_NUMBERS: dict[str, tuple[tuple[str, Callable[[str], float], float, str], ...]] = {
    "cache": (
        ("window", count, 500, "number of steps to remember"),
        ("lambda", share_below_one, 0.1, "weight of the cache in the mixture"),
        ("theta", theta, 1.0, "inverse temperature of the softmax over the remembered steps"),
    ),
    "dynamic": (
        ("learning-rate", positive, 5e-5, "step size"),
        ("decay", not_negative, 2e-3, "rate at which weights return to the saved ones"),
        ("epsilon", positive, 2e-5, "constant added to the RMS of the gradients"),
    ),
}
_STREAMS = 100  # of the training text, for the RMS


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
    for name, title, text in (
        ("cache", "neural cache", "mix in the words that recently followed similar hidden vectors"),
        (
            "dynamic",
            "dynamic evaluation",
            "gradient descent on each segment of the text after it has been scored, scaled by the "
            "RMS of the gradients on the training text; each part starts from the saved weights",
        ),
    ):
        group = parser.add_argument_group(title)
        group.add_argument(f"--{name}", action="store_true", help=text)
        for number, kind, default, text in _NUMBERS[name]:
            metavar = "N" if kind is count else "X"
            text += f" (default: {default})"
            group.add_argument(f"--{name}-{number}", type=kind, metavar=metavar, help=text)
        if name == "cache":
            group.add_argument(
                "--cache-wait",
                action="store_true",
                default=None,
                help="do not mix the cache in until its window is full, as AWD-LSTM's code does",
            )
    parser.set_defaults(handler=_run)


def _options(arguments: argparse.Namespace, name: str) -> dict[str, Any]:
    """The options of ``--name``, without their prefix. Raises ValueError if options were given
    without ``--name`` itself."""
    given = {
        key.removeprefix(f"{name}_"): value
        for key, value in vars(arguments).items()
        if key.startswith(f"{name}_") and value is not None
    }
    if given and not getattr(arguments, name):
        flag = f"{name}_{next(iter(given))}".replace("_", "-")
        raise ValueError(f"--{flag}: has no effect without --{name}")
    return {key.replace("-", "_"): default for key, _, default, _ in _NUMBERS[name]} | given


def _run(arguments: argparse.Namespace) -> int:
    cache_options, dynamic_options = (_options(arguments, name) for name in _NUMBERS)
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
    streams: dict[str, dict[str, Any]] = {}
    if arguments.cache or arguments.dynamic:
        streams["model"] = {
            split: evaluate_stream(run.model, tokens) for split, tokens in text.parts.items()
        }
    if arguments.cache:
        streams["cache"] = _cache_losses(run, text.parts, cache_options)
    if arguments.dynamic:
        flags = {name: f"--dynamic-{name.replace('_', '-')}" for name in dynamic_options}
        with flags_named(flags):
            streams["dynamic"] = _dynamic_losses(run, text.parts, dynamic_options)
    for stream in streams.values():
        for split in text.parts:
            loss = stream[split]
            stream[split] = {"loss": loss, "perplexity": perplexity(loss)}
    _check_finite({"the trained model": result} | streams, list(text.parts))
    if arguments.json:
        about = {"run": str(run.path), "corpus": text.name}
        print(json.dumps(about | result | ({"stream": streams} if streams else {}), indent=2))
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
    if streams:
        show(f"\n{'one stream':<25}{'loss':>9}{'perplexity':>12}")
    for split in text.parts:
        for name, stream in streams.items():
            loss, value = stream[split]["loss"], stream[split]["perplexity"]
            show(f"{split:<7}{name:<18}{loss:>9.4f}{value:>12.2f}")
    for name, stream in streams.items():
        used = [f"{key} {value}" for key, value in stream.get("settings", {}).items()]
        if used:
            show(f"{name}: {', '.join(used)}")
    return 0


def _check_finite(results: dict[str, dict[str, Any]], splits: list[str]) -> None:
    for name, parts in results.items():
        for split in splits:
            loss, value = parts[split]["loss"], parts[split]["perplexity"]
            if not math.isfinite(value):
                raise ValueError(
                    f"expected a finite perplexity, got {value} on the part {split} ({name}), "
                    f"with a loss of {loss} nats per token"
                )


_Parts = Mapping[str, npt.NDArray[np.int32]]


def _cache_losses(run: Run, parts: _Parts, options: dict[str, Any]) -> dict[str, Any]:
    options = options | {"wait": options.get("wait", False)}
    window, weight, inverse = (options[name] for name in ("window", "lambda", "theta"))
    cache = NeuralCache(window, weight, inverse, wait=options["wait"])
    losses = {split: evaluate_stream(run.model, tokens, cache) for split, tokens in parts.items()}
    return {**losses, "settings": options}


def _dynamic_losses(run: Run, parts: _Parts, options: dict[str, Any]) -> dict[str, Any]:
    text = run.corpus().train
    rms = gradient_rms(run.model, text, batch_size=min(_STREAMS, len(text) - 1))
    losses: dict[str, Any] = {
        split: evaluate_dynamic(run.model, tokens, rms, **options)
        for split, tokens in parts.items()
    }
    return losses | {"settings": options}
