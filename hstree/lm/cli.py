"""The command line."""

from __future__ import annotations

import argparse
import errno
import io
import json
import math
import os
import platform
import re
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

import hstree
from hstree._extension import describe_cuda
from hstree._files import write_atomic
from hstree._memory import ran_out
from hstree._progress import duration
from hstree.heads import TreeEnsemble
from hstree.heads.trees import TreeShape
from hstree.lm.config import (
    PRESETS,
    RESUMABLE,
    ConfigError,
    TrainConfig,
    add_config_arguments,
    check_read,
    check_text,
    choose_device,
    config_values,
    flag_name,
    merged,
    read_settings,
    set_threads,
)
from hstree.lm.data import CorpusStatistics, Vocabulary, load_corpus, prompt_words
from hstree.lm.generate import generate
from hstree.lm.report import (
    ConsoleReporter,
    against_time,
    command_line,
    draw_tree,
    fold,
    format_summary,
    has_pictures,
    meant,
    perplexity,
    quoted,
    shortened,
    show,
    shown,
)
from hstree.lm.run import (
    COMPARISON,
    CONFIG,
    CURVE,
    Run,
    RunResults,
    counterpart,
    finetuning,
    load_run,
    read_run,
)
from hstree.lm.train import (
    TrainingError,
    TrainingInterrupted,
    TrainResult,
    evaluate,
    is_main_process,
    resume,
    train,
)
from hstree.trees import Tree, build_tree
from hstree.trees import describe as description

# Arguments of commands, with limits and defaults that the help shows.

_LONG = 40  # characters of choices beyond which a usage line would not fit 80 columns


class Argument:
    """An argument of a command. ``options`` are those of ``add_argument`` of argparse; what follows
    from the default, a whole number for a :func:`count` or a list for several values, need not be
    among them. The default and a long list of choices are added to the help."""

    def __init__(self, flag: str, help: str, default: Any = None, **options: Any) -> None:
        values = default if isinstance(default, list) else [default]
        if isinstance(default, list) and default:
            options.setdefault("nargs", "+")
        if values and type(values[0]) is int:
            options.setdefault("type", count)
        if "type" in options:
            options.setdefault("metavar", "N" if options["type"] in (int, count) else "X")
        choices = ", ".join(options.get("choices", ()))
        if len(choices) * (2 if "nargs" in options else 1) > _LONG:
            options["metavar"] = "NAME"
            help += f"; one of {choices}"
        if default not in (None, "", []):
            help += f" (default: {' '.join(map(str, values))})"
        self.flag, self.options = flag, {"help": help, "default": default, **options}

    def add(self, parser: Any) -> None:
        parser.add_argument(self.flag, **self.options)


def output_file(flag: str, path: str | Path, *suffixes: str) -> Path:
    """The path of a file to write. Raises ValueError, which begins with the flag, unless its folder
    exists and it ends in one of the suffixes, if there are any."""
    file = Path(path)
    if suffixes and file.suffix.lower() not in suffixes:
        *others, last = suffixes
        ends = f"{', '.join(others)} or {last}" if others else last
        raise ValueError(f"{flag}: expected a name that ends in {ends}, got {file}")
    if not file.absolute().parent.is_dir():
        raise ValueError(f"{flag}: there is no folder {file.parent}")
    return file


@contextmanager
def flags_named(flags: Mapping[str, str]) -> Iterator[None]:
    """A context in which errors about these arguments of a function name the flags instead."""
    try:
        yield
    except ValueError as error:
        name, colon, rest = str(error).partition(":")
        if name not in flags:
            raise
        raise ValueError(f"{flags[name]}{colon}{rest}") from error


def number(expected: str, fits: Callable[[float], bool]) -> Callable[[str], float]:
    """A conversion to a finite number that ``fits``; the error says what was expected."""

    def convert(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not (math.isfinite(value) and fits(value)):
            raise argparse.ArgumentTypeError(f"expected {expected}, got {text}")
        return value

    return convert


positive = number("a positive number", lambda value: value > 0)
share = number("a number above 0 and at most 1", lambda value: 0 < value <= 1)
temperature = number("a number from 1e-6 to 1e6", lambda value: 1e-6 <= value <= 1e6)


def count(text: str) -> int:
    """A whole number from 1 to 2**31 - 1."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected at least 1, got {value}")
    if value >= 2**31:
        raise argparse.ArgumentTypeError(f"expected at most {2**31 - 1}, got {value}")
    return value


NUMBER: dict[str, Any] = {"type": count, "metavar": "N"}
"""Options of an argument that is a whole number above 0."""


# Runs


def open_run(arguments: argparse.Namespace) -> tuple[Run, TrainConfig]:
    """The run of :func:`add_run_argument`, on the device and with the threads that were given, and
    all settings that were given."""
    settings = TrainConfig(**config_values(arguments))
    set_threads(settings)
    return load_run(arguments.directory, choose_device(settings.device)), settings


def add_run_argument(parser: argparse.ArgumentParser, nargs: str | None = None) -> None:
    """The positional argument RUN, as ``directory``; with ``nargs`` several, as ``directories``."""
    if nargs is None:
        parser.add_argument("directory", metavar="RUN", help="run folder of hstree train")
    else:
        name, text = "directories", "run folders of hstree train"
        parser.add_argument(name, metavar="RUN", nargs=nargs, help=text)


# The parser of ``hstree`` and what every command shares: progress, errors as one line, exit
# statuses.
#
# Exit status: 0 success; 1 training failed, memory ran out, or an error inside hstree; 2 an
# argument, file or setting is not valid, or a file cannot be written; 130 interrupted by Ctrl-C,
# 143 by SIGTERM. ``HSTREE_DEBUG=1`` shows tracebacks.

_LONGEST = 2000  # characters of a message, whatever it quotes
_FULL = (errno.ENOSPC, errno.EDQUOT)


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are one line, folded on a terminal, with what may have been meant. An
    unknown argument is an error of the command that it was given to."""

    def parse_known_args(self, *arguments: Any, **options: Any) -> Any:
        found, unknown = super().parse_known_args(*arguments, **options)
        if unknown:
            flags = [flag for flag in self._option_string_actions if flag.startswith("--")]
            hint = meant(unknown[0].partition("=")[0], flags)
            self.error(f"unrecognized arguments: {shortened(' '.join(unknown), _LONGEST)}{hint}")
        return found, unknown

    def error(self, message: str) -> NoReturn:
        choice = re.search(r"invalid choice: '([^']*)' \(choose from (.*)\)$", message)
        if choice:
            message += meant(choice[1], re.findall(r"[\w.-]+", choice[2]))
        line = f"{self.prog}: error: {shortened(message, _LONGEST)} (see {self.prog} --help)"
        self.exit(2, f"{fold(line, sys.stderr)}\n")


AddCommand: TypeAlias = Callable[[Any], None]
"""Registers a command with its subcommands on what ``add_subparsers`` returns. Each command sets
``handler``, a function of the parsed arguments that returns the exit status."""


def build_parser(commands: Iterable[AddCommand], description: str) -> argparse.ArgumentParser:
    parser = _Parser(
        prog="hstree",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    versions = f"torch {torch.__version__}, Python {platform.python_version()}"
    version = fold(f"hstree {hstree.__version__} ({versions}), {describe_cuda()}", sys.stdout)
    parser.add_argument(
        "--version", action="version", version=version, help="show versions and exit"
    )
    added = parser.add_subparsers(
        title="commands", metavar="COMMAND", required=True, parser_class=_Parser
    )
    for add_command in commands:
        add_command(added)
    return parser


def run(commands: Iterable[AddCommand], description: str, argv: Sequence[str] | None = None) -> int:
    """Run one of the commands with the given arguments (default: those of the process) and return
    the exit status. Characters that a terminal cannot show are printed as escapes."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="backslashreplace")
    try:
        try:
            arguments = build_parser(commands, description).parse_args(argv)
        except SystemExit as exit_:
            return exit_.code if isinstance(exit_.code, int) else 2
        with _terminable(), shown():
            status: int = arguments.handler(arguments)
        sys.stdout.flush()
        return status
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt as interrupt:
        return _interrupted(interrupt)
    except OSError as error:
        full = error.errno in _FULL and error.filename is None  # of print; other errors name a file
        message = f"cannot write the output: {error.strerror}" if full else str(error)
        return _fail(error, message, 2)
    except ValueError as error:
        return _fail(error, str(error), 2)
    except Exception as error:
        if isinstance(error, TrainingError):
            return _fail(error, str(error), 1)
        if ran_out(error):
            return _fail(error, f"memory ran out: {error}", 1)
        message = f"unexpected {type(error).__name__}: {error} (HSTREE_DEBUG=1 shows where)"
        return _fail(error, message, 1)


class _Terminated(KeyboardInterrupt):
    signal = signal.SIGTERM


@contextmanager
def _terminable() -> Iterator[None]:
    """A context in which SIGTERM does what Ctrl-C does, unless it is ignored."""
    main = threading.current_thread() is threading.main_thread()
    if not main or signal.getsignal(signal.SIGTERM) is signal.SIG_IGN:
        yield
        return

    def end(*_: object) -> NoReturn:
        raise _Terminated

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _interrupted(interrupt: KeyboardInterrupt) -> int:
    status: int = 128 + (getattr(interrupt, "signal", None) or signal.SIGINT)
    return _fail(interrupt, f"interrupted{_kept(interrupt)}", status)


def _kept(interrupt: KeyboardInterrupt) -> str:
    if not isinstance(interrupt, TrainingInterrupted):
        return f": {interrupt}" if str(interrupt) else ""
    if interrupt.run is None:
        return " before training began; nothing was written"
    best = interrupt.best
    kept = " before the first epoch ended"
    if best is not None:
        value = perplexity(best.valid_loss)
        kept = (
            f"; epoch {best.epoch} (validation perplexity {value:.1f}) is kept in {interrupt.run}"
        )
    return f"{kept}; resume with hstree train --resume {interrupt.run}"


def _fail(error: BaseException, message: str, status: int) -> int:
    if os.environ.get("HSTREE_DEBUG", "") not in ("", "0"):
        traceback.print_exception(error)
    line = shortened(" ".join(message.split()), _LONGEST)
    if is_main_process():  # the others end for the same reason
        print(fold(f"hstree: {line}", sys.stderr), file=sys.stderr)
    return status


# hstree train
#
# ``hstree train``.

_TRAIN = """\
Train an LSTM language model and write a run folder with its settings, vocabulary, metrics,
learning curve and best weights. Without arguments it trains on the docstrings and help topics of
this Python installation, with four clustered trees, in about 4 minutes on two CPU cores. --preset
uses the published settings of an AWD-LSTM, which need a GPU and hours; --finetune starts from the
best weights of another run. Ctrl-C and SIGTERM save the state and stop; --resume continues from the
last saved state. To train in several processes: torchrun -m -- hstree train.
"""


def _add_train(commands: Any) -> None:
    parser = commands.add_parser("train", help="train a language model", description=_TRAIN)
    parser.add_argument(
        "--preset",
        choices=tuple(PRESETS),
        metavar="NAME",
        help="published settings, which flags override: " + ", ".join(PRESETS),
    )
    parser.add_argument(
        "--config",
        metavar="FILE",
        help="settings, which flags override: what --print-config wrote, or a part of it",
    )
    parser.add_argument(
        "--resume",
        metavar="RUN",
        help="resume this run where it stopped; only "
        + ", ".join(f"--{flag_name(name)}" for name in RESUMABLE)
        + " can be changed",
    )
    parser.add_argument(
        "--print-config",
        action="store_true",
        help="print all settings as JSON, as --config reads them, and exit",
    )
    add_config_arguments(parser)
    parser.set_defaults(handler=_train)


def _train(arguments: argparse.Namespace) -> int:
    if arguments.resume is not None:
        _refuse_both(arguments, "resume", "preset", "config", "print_config")
        result = resume(arguments.resume, ConsoleReporter(), **config_values(arguments))
    else:
        with _named(arguments.config):
            config = _config(arguments)
            if arguments.print_config:
                print(config.to_json(), end="")
                return 0
            check_text(arguments.preset, config)
            result = train(config, ConsoleReporter())
    if is_main_process():
        _print_end(result)
    return 0


def _print_end(result: TrainResult) -> None:
    """The final figures, where the files are, and what to try next."""
    run, summary = read_run(result.run), result.summary
    other = counterpart(run, "trees" if run.head == "softmax" else "softmax")
    show(f"\n{format_summary(summary, other.final if other else None)}\n")
    show(f"run folder:      {run.path}   ({duration(summary.seconds)})")
    curve = run.path / CURVE if has_pictures() else "needs matplotlib: pip install 'hstree[lm]'"
    show(f"learning curve:  {curve}")
    if other is not None and has_pictures():
        write_atomic(
            run.path / COMPARISON, against_time([(of.head, of.epochs) for of in (run, other)])
        )
        show(f"beside {other.head + ':':9} {run.path / COMPARISON}")
    show("\nNext:")
    for purpose, command in _next_commands(run, other):
        show(f"  {purpose}\n{command_line(command, sys.stdout, indent='    ')}")


def _next_commands(run: RunResults, other: RunResults | None) -> Iterator[tuple[str, list[str]]]:
    """Commands to try on a run that has finished, and what each is for; ``other``: a run with the
    same settings and another head."""
    folder, config = str(run.path), run.config
    prompt = ["--prompt", "return the"] if config.data is None else []
    yield "generate text", ["hstree", "generate", folder, *prompt]
    if other is not None:
        yield (
            f"compare with the head {other.head!r}",
            ["hstree", "compare", folder, str(other.path)],
        )
    elif config.finetune is None:
        head, time = "trees" if run.head == "softmax" else "softmax", ""
        new = [] if config.run is None else ["--run", f"{folder}-{head}"]
        if run.final is not None and head == "softmax":
            cost = run.final.cost
            more = run.epochs[-1].step * (cost.flat_seconds - cost.head_seconds)
            time = f", about {duration(max(run.final.seconds + more, 1.0))}"
        yield (
            f"train with the head {head!r} and the same settings, to compare{time}",
            ["hstree", "train", "--config", str(run.path / CONFIG), "--head", head, *new],
        )
    if run.head == "trees":
        yield "look into the trees", ["hstree", "analyze", "tree", folder]
    else:
        yield "the rank of the log-probabilities", ["hstree", "analyze", "rank", folder]


def _config(arguments: argparse.Namespace) -> TrainConfig:
    given = config_values(arguments)
    _refuse_both(arguments, "finetune", "preset")
    _refuse_both(arguments, "config", "preset")
    base: Mapping[str, Any] = {}
    if arguments.preset is not None:
        base = PRESETS[arguments.preset]
    elif arguments.config is not None:
        base = _read_config(arguments.config)
    settings = merged(base, given)
    run = settings.pop("finetune", None)
    config = TrainConfig(**settings) if run is None else finetuning(run, **settings)
    check_read(config, given)
    return config


@contextmanager
def _named(file: str | None) -> Iterator[None]:
    """A context whose errors about settings and texts name the file of ``--config``."""
    try:
        yield
    except ValueError as error:
        if file is None or file in str(error):
            raise
        raise ConfigError(f"{error} (with --config {file})") from error


def _read_config(path: str) -> dict[str, Any]:
    try:
        return read_settings(path)
    except FileNotFoundError:
        raise ConfigError(f"--config: {path}: no such file") from None
    except ConfigError as error:
        raise ConfigError(f"--config: {error}") from None


def _refuse_both(arguments: argparse.Namespace, one: str, *others: str) -> None:
    for other in others if getattr(arguments, one, None) else ():
        if getattr(arguments, other, None):
            raise ConfigError(f"--{flag_name(other)}: expected this or --{one}, got both")


# hstree evaluate
#
# ``hstree evaluate``.

_EVALUATE = """\
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


def _add_evaluate(commands: Any) -> None:
    parser = commands.add_parser(
        "evaluate", help="perplexity of a trained model", description=_EVALUATE
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
    parser.set_defaults(handler=_evaluate)


def _evaluate(arguments: argparse.Namespace) -> int:
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


# hstree generate
#
# ``hstree generate``.

_FLAGS = {
    "n_words": "--words",
    "n_samples": "--samples",
    "top_k": "--top-k",
    "top_p": "--top-p",
    "seed": "--seed",
}
"""The flags of arguments of :func:`hstree.lm.generate.generate`."""

_GENERATE = """\
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


def _add_generate(commands: Any) -> None:
    parser = commands.add_parser(
        "generate", help="text from a trained model", description=_GENERATE
    )
    add_run_argument(parser)
    for argument in _ARGUMENTS:
        argument.add(parser)
    add_config_arguments(parser, only=("device", "threads"))
    parser.set_defaults(handler=_generate)


def _generate(arguments: argparse.Namespace) -> int:
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


# hstree tree
#
# ``hstree tree build | describe | draw``.

_TREE_BUILD = """\
Build a tree over the words of a corpus and save it as TREE (safetensors) and its words as
TREE.vocabulary.txt. Clustered trees use word vectors, computed from the neighbors of each word in
the corpus.
"""
_TREE_SOURCE = (
    Argument(
        "source",
        "file written by hstree tree build, or run folder of a model with trees",
        metavar="TREE|RUN",
    ),
    Argument("--index", "index of the tree in a run, from 0", 0, type=int, metavar="T"),
)
_BUILT = (Argument("output", "file to write; it must not exist", metavar="TREE"),)
_DESCRIBED = (
    *_TREE_SOURCE,
    Argument("--word", "show the path of a word", [], action="append", metavar="W"),
    Argument("--levels", "number of levels to show", 3),
)
_DRAWN = (
    *_TREE_SOURCE,
    Argument("--output", "picture to write", "tree.png", metavar="PNG"),
    Argument("--levels", "number of levels to draw", 4),
)
_TREE_SETTINGS = (
    *("data", "column", "min_count", "max_vocabulary", "tokenizer"),
    *("recipe", "root", "leaf", "levels", "seed"),
)


def _add_tree(commands: Any) -> None:
    parser = commands.add_parser("tree", help="build, describe or draw trees over words")
    subcommands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    build = subcommands.add_parser(
        "build", help="build a tree and save it", description=_TREE_BUILD
    )
    describe = subcommands.add_parser("describe", help="show the sizes and depths of a tree")
    draw = subcommands.add_parser("draw", help="draw the top levels of a tree and their words")
    for command, arguments, handler in (
        (build, _BUILT, _build_tree),
        (describe, _DESCRIBED, _describe),
        (draw, _DRAWN, _draw),
    ):
        for argument in arguments:
            argument.add(command)
        command.set_defaults(handler=handler)
    add_config_arguments(build, only=_TREE_SETTINGS)


@dataclass(frozen=True)
class _TreeSource:
    """A tree, its words if they are known, and its title."""

    tree: Tree
    vocabulary: Vocabulary | None
    title: str

    @property
    def words(self) -> tuple[str, ...] | None:
        return None if self.vocabulary is None else self.vocabulary.words

    @property
    def frequencies(self) -> npt.NDArray[np.int64] | None:
        return None if self.vocabulary is None else self.vocabulary.frequencies


def _words_file(tree_file: Path) -> Path:
    return tree_file.with_name(tree_file.name + ".vocabulary.txt")


def _open_tree(arguments: argparse.Namespace) -> _TreeSource:
    path = Path(arguments.source)
    if path.is_dir():
        return _open_run(path, arguments.index)
    tree = Tree.load(path)
    if arguments.index != 0:
        raise ValueError(f"--index: {path} holds one tree, so expected 0, got {arguments.index}")
    words = _words_file(path)
    vocabulary = Vocabulary.load(words) if words.is_file() else None
    if vocabulary is not None and len(vocabulary) != tree.n_classes:
        raise ValueError(
            f"{words}: expected {tree.n_classes} words, the number of classes of {path}, "
            f"got {len(vocabulary)}"
        )
    return _TreeSource(tree, vocabulary, str(path))


def _open_run(path: Path, index: int) -> _TreeSource:
    run = load_run(path)
    head = run.model.head
    if not isinstance(head, TreeEnsemble):
        raise ValueError(f"{path}: the head {head.name!r} of this run has no trees")
    trees: list[Tree] = head.trees
    if not 0 <= index < len(trees):
        raise ValueError(f"--index: expected 0 to {len(trees) - 1} for {path}, got {index}")
    return _TreeSource(trees[index], run.vocabulary, f"{path}, tree {index + 1} of {len(trees)}")


def _build_tree(arguments: argparse.Namespace) -> int:
    settings = TrainConfig(**config_values(arguments))
    output = output_file(arguments.output, arguments.output)
    for file in (output, _words_file(output)):
        if os.path.lexists(file):
            raise ValueError(f"{file} already exists; name a new file")
    corpus = load_corpus(
        settings.data,
        column=settings.column,
        min_count=settings.min_count,
        max_vocabulary=settings.max_vocabulary,
        tokenizer=settings.tokenizer,
    )
    vocabulary, statistics = corpus.vocabulary, corpus.statistics()
    vectors = statistics.vectors() if settings.recipe == "cluster" else None
    given = {name: getattr(settings, name) for name in ("n_trees", "root", "leaf", "levels")}
    shape = TreeShape.for_classes(len(vocabulary), **given)
    words = len(vocabulary), statistics.frequencies, vectors
    sizes = shape.root, shape.leaf, shape.levels
    tree = build_tree(settings.recipe, *words, settings.seed, *sizes)
    write_atomic(_words_file(output), vocabulary.to_bytes())
    tree.save(output)
    show(_tree_report(_TreeSource(tree, vocabulary, str(output))))
    return 0


def _tree_report(source: _TreeSource, levels: int = 3) -> str:
    shape = description(source.tree, source.frequencies, source.words, levels)
    return f"{source.title}\n\n{shape}"


def _describe(arguments: argparse.Namespace) -> int:
    source = _open_tree(arguments)
    lines = [_tree_report(source, arguments.levels)]
    for word in arguments.word:
        if source.vocabulary is None:
            raise ValueError(
                f"--word: the words of this tree are unknown: there is no "
                f"{_words_file(Path(arguments.source))}"
            )
        if word not in source.vocabulary:
            raise ValueError(f"--word: {quoted(word)} is not in the vocabulary")
        code = source.tree.code(source.vocabulary[word])
        lines.append(f"  path of {word!r}: children {' '.join(map(str, code))}")
    show("\n".join(lines))
    return 0


def _draw(arguments: argparse.Namespace) -> int:
    source = _open_tree(arguments)
    output = output_file("--output", arguments.output, ".png")
    draw_tree(source.tree, source.words, output, arguments.levels, source.frequencies)
    print(fold(f"picture of {source.title}: {output}", sys.stdout))
    return 0


COMMANDS: tuple[AddCommand, ...] = (_add_train, _add_evaluate, _add_generate, _add_tree)
"""Each registers a command of the reference language model."""
