"""``hstree evaluate``."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterable, Mapping
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

# Options of each rule of dynamic evaluation, with their defaults.
_RULES: dict[str, dict[str, Any]] = {
    "rms": {
        "learning_rate": 5e-5,
        "decay": 2e-3,
        "epsilon": 2e-5,
        "segment": 5,
        "batch_size": 100,
        "batches": None,
    },
    "sgd": {"learning_rate": 0.1, "decay": 2e-3, "segment": 5},
}


_CACHE = (
    ("window", count, "number of steps to remember (default: 500)"),
    ("lambda", share_below_one, "weight of the cache in the mixture (default: 0.1)"),
    ("theta", theta, "inverse temperature of the softmax over the remembered steps (default: 1.0)"),
)
_DYNAMIC = (
    ("learning-rate", positive, "step size (default: 5e-5 with rms, 0.1 with sgd)"),
    ("decay", not_negative, "rate at which weights return to the saved ones (default: 0.002)"),
    ("epsilon", positive, "rms: constant added to the RMS (default: 2e-5)"),
    (
        "segment",
        count,
        "time steps between updates; longer ones need a larger learning rate and decay "
        "(default: 5)",
    ),
    ("batch-size", count, "rms: parallel streams of the training text (default: 100)"),
    ("batches", count, "rms: number of batches of the training text to use (default: all)"),
)


def _streams(text: str) -> tuple[int, int]:
    """Numbers of streams of the validation and the test text."""
    try:
        numbers = [count(number) for number in text.split(",")]
    except ValueError:
        numbers = []
    if not 1 <= len(numbers) <= 2:
        raise argparse.ArgumentTypeError(f"expected one whole number or two, got {quoted(text)}")
    return numbers[0], numbers[-1]


def add_command(commands: Any) -> None:
    """Register the command."""
    parser = commands.add_parser(
        "evaluate", help="perplexity of a trained model", description=_DESCRIPTION
    )
    add_run_argument(parser)
    add_config_arguments(parser, only=("data", "device", "threads"))
    parser.add_argument(
        "--streams",
        type=_streams,
        metavar="N[,N]",
        help="number of parallel streams into which the texts are cut, or one number for the "
        "validation and one for the test text; published perplexities: 10,1 (default: at most 20 "
        "of at least 50 tokens)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    cache = parser.add_argument_group("neural cache")
    cache.add_argument(
        "--cache",
        action="store_true",
        help="mix in the words that recently followed similar hidden vectors",
    )
    _add_numbers(cache, "cache", _CACHE)
    cache.add_argument(
        "--cache-wait",
        action="store_true",
        default=None,
        help="do not mix the cache in until its window is full, as AWD-LSTM's code does",
    )
    dynamic = parser.add_argument_group("dynamic evaluation")
    dynamic.add_argument(
        "--dynamic",
        action="store_true",
        help="gradient descent on each segment of the text after it has been scored; each part "
        "starts from the saved weights",
    )
    dynamic.add_argument(
        "--dynamic-rule",
        choices=tuple(_RULES),
        help="rms: scale steps and decay by the RMS of gradients on the training text; sgd: plain "
        "gradient descent (default: rms)",
    )
    _add_numbers(dynamic, "dynamic", _DYNAMIC)
    parser.set_defaults(handler=_run)


def _add_numbers(group: Any, of: str, options: Iterable[tuple[str, Any, str]]) -> None:
    for name, kind, text in options:
        metavar = "N" if kind is count else "X"
        group.add_argument(f"--{of}-{name}", type=kind, metavar=metavar, help=text)


def _given(arguments: argparse.Namespace, name: str) -> dict[str, Any]:
    """The options of ``--name`` that were given, without their prefix. Raises ValueError if options
    were given without ``--name`` itself."""
    prefix = f"{name}_"
    given = {
        key.removeprefix(prefix): value
        for key, value in vars(arguments).items()
        if key.startswith(prefix) and value is not None
    }
    if given and not getattr(arguments, name):
        flag = f"{prefix}{next(iter(given))}".replace("_", "-")
        raise ValueError(f"--{flag}: has no effect without --{name}")
    return given


def _run(arguments: argparse.Namespace) -> int:
    cache_options = _given(arguments, "cache")
    dynamic_settings = _dynamic_settings(_given(arguments, "dynamic"))
    run, settings = open_run(arguments)
    text = run.held_out(settings.data)
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
        flags = {name: f"--dynamic-{name.replace('_', '-')}" for name in dynamic_settings}
        with flags_named(flags):
            streams["dynamic"] = _dynamic_losses(run, text.parts, dynamic_settings)
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
        used = [
            f"{key} {value}"
            for key, value in stream.get("settings", {}).items()
            if value is not None
        ]
        if used:
            show(f"{name}: {', '.join(used)}")
    return 0


def _check_finite(results: dict[str, dict[str, Any]], splits: list[str]) -> None:
    """Raises ValueError for a perplexity that is no finite number."""
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
    if "lambda" in options:
        options["weight"] = options.pop("lambda")
    cache = NeuralCache(**options)
    used = {"window": cache.window, "lambda": cache.weight, "theta": cache.theta}
    losses = {split: evaluate_stream(run.model, tokens, cache) for split, tokens in parts.items()}
    return {**losses, "settings": {**used, "wait": cache.wait}}


def _dynamic_settings(options: dict[str, Any]) -> dict[str, Any]:
    """The rule with all its options. Raises ValueError for an option that the rule does not
    have."""
    rule = options.pop("rule", "rms")
    for name in options:
        if name not in _RULES[rule]:
            raise ValueError(f"--dynamic-{name.replace('_', '-')}: has no effect with {rule}")
    return {"rule": rule} | _RULES[rule] | options


def _dynamic_losses(run: Run, parts: _Parts, settings: dict[str, Any]) -> dict[str, Any]:
    rms = None
    if settings["rule"] == "rms":
        rms = gradient_rms(
            run.model,
            run.corpus().train,
            segment=settings["segment"],
            batch_size=settings["batch_size"],
            max_batches=settings["batches"],
        )
    names = ("learning_rate", "decay", "epsilon", "segment")
    options = {name: settings[name] for name in names if name in settings}
    losses: dict[str, Any] = {
        split: evaluate_dynamic(run.model, tokens, rms, **options)
        for split, tokens in parts.items()
    }
    return losses | {"settings": settings}
