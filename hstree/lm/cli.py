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
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn, TypeAlias

import numpy as np
import torch

import hstree
from hstree._extension import describe_cuda
from hstree._files import write_atomic
from hstree._memory import ran_out
from hstree._progress import duration
from hstree.heads import TreeEnsemble, head_names
from hstree.lm.config import (
    GROUPS,
    KINDS,
    PRESETS,
    RESUMABLE,
    ConfigError,
    TrainConfig,
    check_read,
    check_text,
    choose_device,
    flag_name,
    help_texts,
    merged,
    read_settings,
    set_threads,
)
from hstree.lm.data import CorpusStatistics, Vocabulary, prompt_words
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
from hstree.ops._kernels import cpu_capability
from hstree.trees import Tree
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
        choices = ", ".join(map(str, options.get("choices", ())))
        if "type" in options and not choices:
            options.setdefault("metavar", "N" if options["type"] in (int, count) else "X")
        if len(choices) * (2 if "nargs" in options else 1) > _LONG:
            options["metavar"] = "NAME"
            help += f"; one of {choices}"
        if isinstance(default, bool):
            values = ["yes" if default else "no"]
        if default not in (None, "", []):
            help += f" (default: {' '.join(map(str, values))})"
        self.flag, self.options = flag, {"help": help, "default": default, **options}

    def add(self, parser: Any) -> None:
        parser.add_argument(self.flag, **self.options)


def positive(text: str) -> float:
    """A positive, finite number."""
    value = float(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"expected a positive number, got {text}")
    return value


def count(text: str) -> int:
    """A whole number from 1 to 2**31 - 1."""
    value = int(text)
    if not 1 <= value < 2**31:
        limit = "least 1" if value < 1 else f"most {2**31 - 1}"
        raise argparse.ArgumentTypeError(f"expected at {limit}, got {value}")
    return value


_METAVARS = {"data": "PATH", "tokenizer": "FILE", "column": "NAME", "head_option": "KEY=VALUE"}
_METAVARS |= {"all_classes": "SHARE", "finetune": "RUN", "run": "DIR"}


def setting(name: str) -> Argument:
    """The flag of a setting of a run; if it is not given, it sets no attribute."""
    kind, default = KINDS[name], getattr(TrainConfig, name)
    options: dict[str, Any] = {"dest": name}
    if kind.type is bool:
        options["action"] = argparse.BooleanOptionalAction
    elif kind.type is tuple:
        options["action"] = "append"
    elif kind.type is not str:
        options["type"] = kind.type
    if choices := head_names() if name == "head" else kind.choices:
        options["choices"] = choices
    elif name in _METAVARS:
        options["metavar"] = _METAVARS[name]
    shown = None if default == () else default
    argument = Argument(f"--{flag_name(name)}", help_texts()[name], shown, **options)
    argument.options["default"] = argparse.SUPPRESS
    return argument


def given_settings(arguments: argparse.Namespace) -> dict[str, Any]:
    """The settings among the arguments of a command."""
    return {name: value for name, value in vars(arguments).items() if name in KINDS}


AddCommand: TypeAlias = Callable[[Any], None]
"""Registers a command with its subcommands on what ``add_subparsers`` returns. Each command sets
``handler``, a function of the parsed arguments that returns the exit status."""


def command(
    name: str,
    help: str,
    handler: Callable[[argparse.Namespace], int],
    arguments: Iterable[Argument],
    settings: Collection[str] = (),
    description: str | None = None,
) -> AddCommand:
    """A command with arguments of its own, and with flags of these settings of a run."""

    def add(commands: Any) -> None:
        parser = commands.add_parser(name, help=help, description=description)
        for argument in arguments:
            argument.add(parser)
        for heading, names in GROUPS.items():
            group = parser.add_argument_group(heading)  # not shown without flags
            for field in names:
                if field in settings:
                    setting(field).add(group)
        parser.set_defaults(handler=handler)

    return add


RUN = Argument("directory", "run folder of hstree train", metavar="RUN")
TEXT = (
    Argument("--data", "text, as for hstree train (default: that of the run)", metavar="PATH"),
    Argument("--column", "column of text of a dataset or table", metavar="NAME"),
)


def open_run(arguments: argparse.Namespace) -> Run:
    """The run of :data:`RUN`, on the device and with the threads that were given."""
    settings = TrainConfig(**given_settings(arguments))
    set_threads(settings)
    return load_run(arguments.directory, choose_device(settings.device))


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


def build_parser(commands: Iterable[AddCommand], description: str) -> argparse.ArgumentParser:
    parser = _Parser(
        prog="hstree",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    versions = f"torch {torch.__version__}, Python {platform.python_version()}"
    kernels = f"CPU kernels for {cpu_capability()}, {describe_cuda()}"
    version = fold(f"hstree {hstree.__version__} ({versions}), {kernels}", sys.stdout)
    parser.add_argument(
        "--version",
        action="version",
        version=version,
        help="show versions and instruction set and exit",
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
        number: int = getattr(interrupt, "signal", None) or signal.SIGINT
        return _fail(interrupt, f"interrupted{_kept(interrupt)}", 128 + number)
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
            f"; the weights of epoch {best.epoch} (validation perplexity {value:.1f}) and the last "
            f"state are kept in {interrupt.run}"
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

_TRAIN = """\
Train an LSTM language model and write a run folder with its settings, vocabulary, metrics,
learning curve and best weights. Without arguments it trains on the docstrings and help topics of
this Python installation, with a sampled softmax, in a few minutes on two CPU cores. --preset uses
the published settings of an AWD-LSTM, which need a GPU and hours; --finetune starts from the best
weights of another run. Ctrl-C and SIGTERM save the state and stop; --resume continues from the last
saved state. To train in several processes: torchrun -m -- hstree train.
"""
_CHANGED = ", ".join(f"--{flag_name(name)}" for name in RESUMABLE)
_SOURCES = (
    Argument("--preset", "published settings, which flags override", choices=tuple(PRESETS)),
    Argument(
        "--config",
        "settings, which flags override: what --print-config wrote, or a part of it",
        metavar="FILE",
    ),
    Argument(
        "--resume",
        f"resume this run where it stopped; only {_CHANGED} can be changed",
        metavar="RUN",
    ),
    Argument(
        "--print-config",
        "print all settings as JSON, as --config reads them, and exit",
        action="store_true",
    ),
)


def _train(arguments: argparse.Namespace) -> int:
    if arguments.resume is not None:
        _refuse_both(arguments, "resume", "preset", "config", "print_config")
        result = resume(arguments.resume, ConsoleReporter(), **given_settings(arguments))
    else:
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
    given = given_settings(arguments)
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


_EVALUATED = (
    RUN,
    *TEXT,
    Argument(
        "--streams",
        "number of parallel streams into which the texts are cut, or one number for the validation "
        "and one for the test text; published perplexities: 10,1 (default: at most 20 of at least "
        "50 tokens)",
        type=_streams,
        metavar="N[,N]",
    ),
    Argument("--json", "print one JSON object", action="store_true"),
)


def _evaluate(arguments: argparse.Namespace) -> int:
    run = open_run(arguments)
    text = run.held_out(arguments.data, arguments.column)
    unigram = CorpusStatistics(run.vocabulary.frequencies, np.empty(0, np.int32))
    streams_valid, streams_test = arguments.streams or (None, None)
    result: dict[str, dict[str, Any]] = {}
    for split, tokens in text.parts.items():
        if len(tokens) < 2:
            raise ValueError(
                f"{text.name}: the part {split} has {len(tokens)} tokens, at least 2 are needed"
            )
        loss = evaluate(run.model, tokens, streams_valid if split == "valid" else streams_test)
        if not math.isfinite(perplexity(loss)):
            raise ValueError(
                f"expected a finite perplexity, got {perplexity(loss)} on the part {split}, with a "
                f"loss of {loss} nats per token"
            )
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

_GENERATE = """\
Generate text with a trained model. Each word is drawn given all words before it: by the head's own
sampler, or from the probabilities of all words if --temperature, --top-k or --top-p is given. <unk>
is never drawn. For a run with --tokenizer, words are the tokens of that tokenizer.

The words drawn per second are written to standard error.
"""
_DRAWN = (
    RUN,
    Argument("--prompt", "text to continue (default: a new sentence)", "", metavar="TEXT"),
    Argument("--words", "number of words to draw", 60),
    Argument("--samples", "number of texts to draw", 1),
    Argument(
        "--temperature",
        "values below 1 sharpen the distribution, values above 1 flatten it",
        type=float,
    ),
    Argument("--top-k", "draw only from the K most probable words", type=count, metavar="K"),
    Argument(
        "--top-p",
        "draw only from the most probable words that together reach the probability P",
        type=float,
        metavar="P",
    ),
    Argument("--seed", "seed of the draws", 0, type=int),
)


def _generate(arguments: argparse.Namespace) -> int:
    run = open_run(arguments)
    words = prompt_words(arguments.prompt, run.vocabulary, run.tokenizer)
    unknown = [word for word in words if word not in run.vocabulary]
    if unknown:
        listed = shortened(", ".join(unknown), 1000)
        line = f"hstree: not in the vocabulary, read as <unk>: {listed}"
        print(fold(line, sys.stderr), file=sys.stderr)
    prompt = [run.vocabulary.end, *run.vocabulary.encode(words)]
    start = time.perf_counter()
    options = {name: getattr(arguments, name) for name in ("seed", "temperature", "top_k", "top_p")}
    options["avoid"] = run.vocabulary.unknown
    try:
        samples = generate(run.model, prompt, arguments.words, arguments.samples, **options)
    except ValueError as error:  # which begins with the name of an argument
        name, colon, rest = str(error).removeprefix("n_").partition(":")
        flag = f"--{flag_name(name)}" if name in vars(arguments) else name
        raise ValueError(f"{flag}{colon}{rest}") from error
    speed = arguments.words * arguments.samples / (time.perf_counter() - start)
    for number, sample in enumerate(samples):
        if number:
            show("-" * 40)
        show(run.tokenizer.join([*words, *run.vocabulary.decode(sample)]))
    sys.stdout.flush()
    print(fold(f"hstree: {speed:,.0f} tokens/s", sys.stderr), file=sys.stderr)
    return 0


# hstree tree describe | draw

_TREE = (
    Argument("directory", "run folder of a model with trees", metavar="RUN"),
    Argument("--index", "index of the tree, from 0", 0, type=int, metavar="T"),
)
_SHOWN = (
    *_TREE,
    Argument("--word", "show the path of a word", [], action="append", metavar="W"),
    Argument("--levels", "number of levels to show", 3),
)
_PAINTED = (
    *_TREE,
    Argument("--output", "picture to write", "tree.png", metavar="PNG"),
    Argument("--levels", "number of levels to draw", 4),
)


def _open_tree(arguments: argparse.Namespace) -> tuple[Tree, Vocabulary, str]:
    """A tree of a run, its words and its title."""
    path, index = arguments.directory, arguments.index
    run = load_run(path)
    head = run.model.head
    if not isinstance(head, TreeEnsemble):
        raise ValueError(f"{path}: the head {head.name!r} of this run has no trees")
    trees: list[Tree] = head.trees
    if not 0 <= index < len(trees):
        raise ValueError(f"--index: expected 0 to {len(trees) - 1} for {path}, got {index}")
    return trees[index], run.vocabulary, f"{path}, tree {index + 1} of {len(trees)}"


def _describe(arguments: argparse.Namespace) -> int:
    tree, vocabulary, title = _open_tree(arguments)
    shape = description(tree, vocabulary.frequencies, vocabulary.words, arguments.levels)
    lines = [f"{title}\n\n{shape}"]
    for word in arguments.word:
        if word not in vocabulary:
            raise ValueError(f"--word: {quoted(word)} is not in the vocabulary")
        code = tree.code(vocabulary[word])
        lines.append(f"  path of {word!r}: children {' '.join(map(str, code))}")
    show("\n".join(lines))
    return 0


def _draw(arguments: argparse.Namespace) -> int:
    output = Path(arguments.output)
    if output.suffix.lower() != ".png":
        raise ValueError(f"--output: expected a name that ends in .png, got {output}")
    if not output.absolute().parent.is_dir():
        raise ValueError(f"--output: there is no folder {output.parent}")
    tree, vocabulary, title = _open_tree(arguments)
    draw_tree(tree, vocabulary.words, output, arguments.levels, vocabulary.frequencies)
    print(fold(f"picture of {title}: {output}", sys.stdout))
    return 0


def _add_tree(commands: Any) -> None:
    parser = commands.add_parser("tree", help="describe or draw the trees of a model")
    subcommands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    command("describe", "show the sizes and depths of a tree", _describe, _SHOWN)(subcommands)
    command("draw", "draw the top levels of a tree and their words", _draw, _PAINTED)(subcommands)


COMMANDS: tuple[AddCommand, ...] = (
    command("train", "train a language model", _train, _SOURCES, KINDS, _TRAIN),
    command(
        "evaluate",
        "perplexity of a trained model",
        _evaluate,
        _EVALUATED,
        ("device", "threads"),
        _EVALUATE,
    ),
    command(
        "generate",
        "text from a trained model",
        _generate,
        _DRAWN,
        ("device", "threads"),
        _GENERATE,
    ),
    _add_tree,
)
"""The commands of the reference language model."""
