"""Four studies of output layers, each a plan of runs that go on over days and machines.

    python -m benchmarks.studies trees-study --data ptb/          # trees beside softmaxes
    python -m benchmarks.studies randomized --data ptb/           # copies, trees, feature subsets
    python -m benchmarks.studies transformer-study --data TEXT    # heads of a small transformer
    python -m benchmarks.studies large-vocabulary --data TEXT     # perplexity by training time

makes the runs that are missing in benchmarks/results/NAME.json, one record each, and the page
beside it; without --data the page alone. ``python -m benchmarks.large_text --save TEXT`` makes the
text of the last two. The first seed tries the values of the settings that a contender sweeps; all
seeds have the best, which stands first. A run has one thread, or with --device cuda a GPU. On an
idle machine, --times measures training steps of the heads in turns, in NAME-times.json: other load
slows down the runs by unequal shares, so that the pages compute times from steps.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from matplotlib.ticker import FixedLocator, NullLocator
from torch import Tensor, nn

import hstree
from benchmarks.pages import in_turns, ratios
from benchmarks.smollm2 import read_tokenizer
from benchmarks.trainer import endless_steps
from hstree._files import write_atomic, write_together
from hstree.heads import ForestSoftmax, Head, MixtureOfSoftmaxes, Softmax, TreeEnsemble
from hstree.lab import log_prob_rank
from hstree.lab.comparison import spread
from hstree.lab.report import Report, made_on, provenance, row_table
from hstree.lm.config import TrainConfig
from hstree.lm.data import Corpus, CorpusStatistics, Streams, Subwords, load_corpus
from hstree.lm.model import AWDLSTM, LanguageModel
from hstree.lm.report import (
    Column,
    ConsoleReporter,
    Table,
    decimals,
    legend,
    line_style,
    new_figure,
    table,
)
from hstree.lm.run import read_run
from hstree.lm.train import (
    Trainer,
    TrainingError,
    build_model,
    evaluate,
    head_cost,
    own_parameter_count,
    resume,
    train,
)
from hstree.trees import build_ensemble

RESULTS = Path(__file__).parent / "results"
Settings = Mapping[str, Any]
Figures = Mapping[str, Any]
FACTOR, RATE, DECAY = "head_learning_rate_factor", "learning_rate", "weight_decay"
ONE_THREAD: dict[str, Any] = {"device": "cpu", "threads": 1}
"""Settings of a run without an effect on its result."""


# ---- plans and records


def key(settings: Settings, seed: int) -> str:
    """Identifies a run: equal settings and seed are the same run, whatever its name."""
    return json.dumps([dict(settings), seed], sort_keys=True)


class Records:
    """The finished runs of a study in one file, which may not exist yet, each with the name of the
    contender, its settings, the seed, the text, the figures, and what ``provenance`` says. All are
    about the same text."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._read()

    def _read(self) -> None:
        found = json.loads(self.path.read_text("utf-8")) if self.path.is_file() else []
        self.runs = {key(record["settings"], record["seed"]): record for record in found}

    def figures(self, run: Run) -> Figures | None:
        record = self.runs.get(key(run.settings, run.seed))
        return None if record is None else record["figures"]

    def all(self) -> list[dict[str, Any]]:
        return sorted(self.runs.values(), key=lambda r: (r["name"], key(r["settings"], r["seed"])))

    def check_text(self, text: str) -> None:
        """Raise ValueError for another text. The last number of its description identifies it: a
        rule of the tokenizer that changes may split a few of millions of tokens otherwise."""
        for record in self.runs.values():
            if record["text"].rpartition(" ")[2] != text.rpartition(" ")[2]:
                raise ValueError(f"{self.path}: expected the text {record['text']!r}, got {text!r}")

    def add(self, run: Run, text: str, figures: Figures) -> None:
        """Add a finished run, and write the file with what another process has added meanwhile."""
        self._read()
        self.check_text(text)
        record = {"name": run.contender.name, "settings": dict(run.settings), "seed": run.seed}
        record |= {"text": text, "figures": dict(figures), **provenance()}
        self.runs[key(run.settings, run.seed)] = json.loads(json.dumps(record))
        lines = ",\n".join(json.dumps(one) for one in self.all())
        write_atomic(self.path, f"[\n{lines}\n]\n".encode())

    @property
    def times_path(self) -> Path:
        return self.path.with_name(f"{self.path.stem}-times.json")

    def times(self) -> dict[str, Any]:
        """The times of steps, with ``shares`` by contender; empty before they were measured."""
        file = self.times_path
        return (
            json.loads(file.read_text("utf-8")) if file.is_file() else {"shares": {}, "heads": {}}
        )


@dataclass(frozen=True)
class Contender:
    """One configuration of a study, by name on the command line and by title on the page.

    Attributes:
        sweeps: settings of which the first seed tries some values, each after the one before: the
            best value, which all seeds have and later sweeps too, then the others.
        final: settings of the runs after the sweeps that differ, such as their length.
        seeds: number of seeds, 1, 2, ..., with the best values; 0: its steps are timed only.
    """

    name: str
    title: str
    settings: Settings
    sweeps: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    final: Settings = field(default_factory=dict)
    seeds: int = 3

    def swept(self, name: str) -> dict[float, Run]:
        """The runs of a sweep by value."""
        place = list(self.sweeps).index(name)
        before = {key: values[0] for key, values in [*self.sweeps.items()][:place]}
        own = dict(self.settings) | before
        return {value: Run(self, own | {name: value}, 1) for value in sorted(self.sweeps[name])}

    @property
    def settled(self) -> list[Run]:
        """The runs with the best values, by seed."""
        best = {name: values[0] for name, values in self.sweeps.items()}
        settings = dict(self.settings) | best | self.final
        return [Run(self, settings, seed) for seed in range(1, self.seeds + 1)]

    @property
    def runs(self) -> list[Run]:
        """All runs, in the order in which they are made."""
        return [run for name in self.sweeps for run in self.swept(name).values()] + self.settled


@dataclass(frozen=True)
class Run:
    """A run of a contender."""

    contender: Contender
    settings: Settings
    seed: int

    @property
    def name(self) -> str:
        """For a folder: the contender, the values of its sweeps, and the seed."""
        keys = [*self.contender.sweeps, *self.contender.final]
        values = [f"{key}={self.settings[key]:g}" for key in keys if key in self.settings]
        return "-".join([self.contender.name, *values, f"seed={self.seed}"])


def planned_runs(contenders: Sequence[Contender]) -> list[Run]:
    """The different runs of all contenders."""
    runs = (run for contender in contenders for run in contender.runs)
    return list({key(run.settings, run.seed): run for run in runs}.values())


def tried(contender: Contender, name: str, records: Records) -> dict[float, float | None]:
    """The validation perplexities of the finished runs of a sweep."""
    found = {value: records.figures(run) for value, run in contender.swept(name).items()}
    return {value: own["valid"] for value, own in found.items() if own is not None}


@dataclass(frozen=True)
class Result:
    """The finished runs of a contender with its best settings: the figures of each seed."""

    contender: Contender
    title: str
    runs: Sequence[Figures]

    @property
    def settings(self) -> Settings:
        return self.contender.settled[0].settings

    def mean(self, figure: str) -> float | None:
        """Mean of a figure over the seeds; None if a run has none."""
        values = [run.get(figure) for run in self.runs]
        return None if None in values else fmean(values)

    def spread(self, figure: str, digits: int = 1) -> str:
        """Mean ± standard deviation of a figure over the seeds, as text."""
        if self.mean(figure) is None:
            return "diverged"
        return spread([run[figure] for run in self.runs], digits)


def results(contenders: Sequence[Contender], records: Records) -> list[Result]:
    """The contenders with at least one finished run, in order."""
    found = []
    for contender in contenders:
        sweeps = contender.sweeps.items()
        left = any(len(tried(contender, name, records)) < len(values) for name, values in sweeps)
        runs = [own for run in contender.settled if (own := records.figures(run)) is not None]
        title = contender.title + " (sweep not finished)" * left
        if runs:
            found.append(Result(contender, title, runs))
    return found


def sweep_table(contenders: Sequence[Contender], records: Records) -> Table:
    rows = []
    for contender in contenders:
        for name in contender.sweeps:
            found = tried(contender, name, records).items()
            values = [f"{v:g}: {math.inf if valid is None else valid:.1f}" for v, valid in found]
            if values:
                rows.append((contender.title, name.replace("_", " "), ", ".join(values)))
    title = "Validation perplexity of the first seed by the value of a setting"
    return row_table(title, ("head", "setting", "value: perplexity"), rows, None)


@dataclass(frozen=True)
class Study:
    """A study; its files are NAME.json, NAME.md and the pictures.

    Attributes:
        measure: makes a run on a text, given the command line too, and returns its figures; among
            them ``valid``, the validation perplexity, None if training diverged.
        report: tables and pictures of the contenders with finished runs.
        time_steps: times of training steps, for --times.
        commands: the command lines that make it.
    """

    name: str
    contenders: Sequence[Contender]
    measure: Callable[[Run, Corpus, argparse.Namespace], dict[str, Any]]
    report: Callable[[Sequence[Contender], Records], Report]
    time_steps: Callable[[Corpus], dict[str, Any]] | None = None
    commands: Sequence[str] = ("--data TEXT",)
    load: Callable[[Path], Corpus] = load_corpus

    def files(self, records: Records) -> dict[str, Any]:
        """The page and the pictures of the records."""
        report = self.report(self.contenders, records)
        notes = f"Records of all runs: [{self.name}.json]({self.name}.json)."
        report = replace(report, appendix=notes, made=made_on(records.all()))
        command = [f"python -m benchmarks.studies {self.name} {flags}" for flags in self.commands]
        if "TEXT" in command[0]:
            command.insert(0, "python -m benchmarks.large_text --save TEXT")
        return report.content(self.name, "\n".join(command))

    def run(self, given: argparse.Namespace) -> None:
        """What the command line asks for."""
        records = Records(given.records / f"{self.name}.json")
        if given.data is not None:
            corpus = self.load(given.data)
            if given.times:
                assert self.time_steps is not None, f"{self.name} has no times"
                times = json.dumps(self.time_steps(corpus), indent=2) + "\n"
                write_atomic(records.times_path, times.encode())
            else:
                self._make_runs(records, corpus, given)
        write_together(given.records, self.files(records))

    def _make_runs(self, records: Records, corpus: Corpus, given: argparse.Namespace) -> None:
        unigram = math.exp(corpus.statistics().unigram_loss(corpus.test[1:]))
        text = (
            f"{len(corpus.train):,} training tokens, {len(corpus.vocabulary):,} classes, "
            f"unigram test perplexity {unigram:.4g}"
        )
        records.check_text(text)
        runs = planned_runs(self.contenders)
        for _ in range(given.limit) if given.limit else count():
            left = [run for run in runs if records.figures(run) is None]
            chosen = [run for run in left if not given.only or run.contender.name in given.only]
            if not chosen:
                break
            run = chosen[0]
            print(f"{run.name}: {len(left)} of {len(runs)} runs are left", flush=True)
            records.add(run, text, self.measure(run, corpus, given))


# ---- what they share


STEPS_OF_A_TURN, ROUNDS = 3, 15


def lstm(size: int, dropout: float, epochs: int, rate: float, schedule: str) -> dict[str, Any]:
    """Settings of a language model with one LSTM layer."""
    return {
        "embedding_size": size,
        "hidden_size": size,
        "layers": 1,
        "dropout": dropout,
        "dropout_input": dropout,
        "epochs": epochs,
        "learning_rate": rate,
        "schedule": schedule,
        "batch_size": 20,
        "bptt": 35,
    }


def step_times(steps: Mapping[str, Iterator[Any]], *, rounds: int = ROUNDS) -> dict[str, Any]:
    """Time training steps, given by name as iterators that make one each: ``shares``, for each name
    the median over the rounds of the CPU seconds of its steps over those of the first one; machine,
    versions and date."""
    torch.set_num_threads(1)

    def turn(of: Iterator[Any], _: int) -> None:
        for _ in range(STEPS_OF_A_TURN):
            next(of)

    turns = {name: partial(turn, its) for name, its in steps.items()}
    return {"shares": ratios(in_turns(turns, rounds)), **provenance()}


def trainer_steps(configs: Mapping[str, TrainConfig], corpus: Corpus) -> dict[str, Iterator[Any]]:
    """Training steps of untrained models."""
    steps: dict[str, Iterator[Any]] = {}
    for name, config in configs.items():
        model = build_model(config, len(corpus.vocabulary), corpus.statistics())
        steps[name] = endless_steps(Trainer(model, corpus, config))
    return steps


def curve_picture(
    curves: Iterable[tuple[str, Sequence[float], Sequence[float], int]],
    size: tuple[float, float],
    ticks: Sequence[float],
    **axes: Any,
) -> Any:
    """Validation perplexity against time: curves of label, times, perplexities and the number of
    the style; ``axes``: properties of the axes."""
    figure = new_figure(*size)
    of = figure.subplots()
    for label, x, y, style in curves:
        label = label.replace("`", "")
        of.plot(x, y, marker="o", markersize=3, label=label, **line_style(style))
    of.set(yscale="log", ylabel="validation perplexity (log scale)", **axes)
    of.yaxis.set_major_locator(FixedLocator(ticks))
    of.yaxis.set_major_formatter("{x:g}")
    of.yaxis.set_minor_locator(NullLocator())
    of.grid(alpha=0.3)
    legend(figure, loc="lower center", ncols=2)
    return figure


# ---- trees beside softmaxes on Penn Treebank

PTB = lstm(200, 0.2, 5, 0.002, "cosine") | {"optimizer": "adamw", FACTOR: 8.0}
OPTION = "head_option"
NEGATIVES = {OPTION: ("negatives=512",)}
FOREST: dict[str, Any] = {"head": "forest", "n_trees": 4, "gate": "context"}


def leaves(n_trees: int, clusters: int) -> dict[str, Any]:
    """Settings of trees of two levels, whose leaves share one output embedding."""
    return {"head": "trees", "n_trees": n_trees, "clusters": clusters, "gate": "context"}


def _ptb(
    name: str,
    title: str,
    *tried: float,
    sweep: str = FACTOR,
    seeds: int = 1,
    final: Settings | None = None,
    **settings: Any,
) -> Contender:
    """``tried``: values of a sweep, the best one first."""
    sweeps = {sweep: tuple(map(float, tried))} if tried else {}
    return Contender(name, title, PTB | settings, sweeps, final or {}, seeds)


def _decayed(
    name: str, title: str, factor: float, decay: float = 0.1, **settings: Any
) -> Contender:
    its = {FACTOR: factor, DECAY: decay}
    title = f"{title}, weight decay {decay:g}"
    return _ptb(f"{name}-decay-{decay:g}", title, factor, **its | settings)


def _ptb_contenders() -> Iterator[Contender]:
    like, four = "leaves-4x256", leaves(4, 256)
    title = "`TreeEnsemble`, 4 trees, C = 256"
    yield _ptb("softmax", "`Softmax`", 64, 2, 4, 8, 16, 32, 128, seeds=3, head="softmax")
    yield _ptb(like, title, 8, 4, 16, seeds=3, **four)
    yield _ptb("leaves-4x1024", "`TreeEnsemble`, 4 trees, C = 1,024", **leaves(4, 1024))
    yield _ptb("leaves-1x256", "`TreeEnsemble`, one tree, C = 256", seeds=3, **leaves(1, 256))
    adaptive = {"head": "adaptive", OPTION: ("cutoffs=[1024]",)}
    yield _ptb("adaptive", "`AdaptiveSoftmax`, 1,024 in the head", 4, 2, 8, seeds=3, **adaptive)
    draws = {"head": "sampled", OPTION: ("negatives=1024", "in_batch=false")}
    yield _ptb(
        "sampled",
        "`SampledSoftmax`, 1,024 negatives, `in_batch=False`",
        8,
        2,
        4,
        16,
        seeds=3,
        **draws,
    )
    for n, tried in ((128, (4, 2, 8)), (512, (2, 4))):
        own = {"head": "sampled", OPTION: (f"negatives={n}",)}
        name, of = f"sampled-in-batch-{n}", f"`SampledSoftmax`, {n} negatives"
        yield _ptb(name, of, *tried, seeds=3, **own)
    name, forest = "forest-sampled", "`ForestSoftmax`, 4 trees, C = 256, 512 negatives"
    draws = FOREST | NEGATIVES
    yield _ptb(name, forest, 2, 1, 4, **draws)
    dropout = {"dropout": 0.4, "dropout_input": 0.4, FACTOR: 4.0}
    yield _ptb(f"{name}-dropout", f"{forest}, dropout 0.4", 4, **draws | dropout)
    for decay in (0.05, 0.1, 0.3):
        yield _decayed(name, forest, 4.0, decay, seeds=3 if decay == 0.1 else 1, **draws)
    tail, last = {"all_classes": 0.1}, "all classes in the last tenth"
    yield _decayed(f"{name}-tail", f"{forest}, {last}", 4.0, seeds=2, **draws | tail)
    for n_trees, clusters in ((1, 256), (2, 256), (8, 256), (4, 64), (4, 1024)):
        of = "one tree" if n_trees == 1 else f"{n_trees} trees"
        shape = NEGATIVES | {"n_trees": n_trees, "clusters": clusters}
        of = f"`ForestSoftmax`, {of}, C = {clusters:,}, 512 negatives"
        yield _decayed(f"{name}-{n_trees}x{clusters}", of, 4.0, **FOREST | shape)
    every = "`ForestSoftmax`, 4 trees, C = 256, all classes"
    yield _decayed("forest", every, 4.0, seeds=3, **FOREST)
    mixture = {"head": "mos", OPTION: ("components=5",)}
    yield _decayed("mos-5", "`MixtureOfSoftmaxes`, K = 5", 8.0, **mixture)
    sampled, draws = "`SampledSoftmax`, 512 negatives", {"head": "sampled", **NEGATIVES}
    yield _decayed("sampled-in-batch-512", sampled, 4.0, **draws)
    yield _decayed("sampled-tail", f"{sampled}, {last}", 4.0, **draws | tail)
    yield _decayed("softmax", "`Softmax`", 8.0, head="softmax")
    yield _decayed(like, title, 8.0, **four)
    one = {"head": "trees", "n_trees": 1, "clusters": 256, "binary": True, "gate": "uniform"}
    yield _ptb("tree", "`TreeEnsemble`, one binary tree, C = 256", 4, 2, 8, **one)
    rates, tied, softmax = (0.004, 0.002, 0.008), {"tied": True}, {"head": "softmax"}
    yield _ptb("softmax-tied", "`Softmax`, tied", *rates, sweep=RATE, seeds=3, **softmax, **tied)
    rates = (0.008, 0.002, 0.004, 0.016)
    of = f"{title}, tied"
    found = _ptb(f"{like}-tied", of, *rates, sweep=RATE, seeds=3, **four, **tied)
    yield replace(found, sweeps={**found.sweeps, FACTOR: (2.0, 1.0, 4.0, 8.0)})
    best = {RATE: 0.008, FACTOR: 2.0}  # those of the one before
    of = "`TreeEnsemble`, 4 trees, C = 1,024, tied"
    yield _ptb("leaves-4x1024-tied", of, seeds=3, **leaves(4, 1024), **tied, **best)
    more, decayed = (0.008, 0.004, 0.016), {**tied, DECAY: 0.1, FACTOR: 2.0}
    for name, of, tried, its in (
        ("softmax", "`Softmax`", (0.016, 0.004, 0.008, 0.032), softmax),
        ("sampled-in-batch-512", sampled, more, draws),
        ("forest-sampled", forest, more, FOREST | NEGATIVES),
        (like, title, more, four),
    ):
        seeds, of = 3 if name == "forest-sampled" else 1, f"{of}, tied, weight decay 0.1"
        own = {**its, **decayed}
        yield _ptb(f"{name}-tied-decay-0.1", of, *tried, sweep=RATE, seeds=seeds, **own)
    for n_trees in (1, 2, 4, 8):
        for clusters in (64, 256, 1024):
            for its in ({}, tied | best):
                name = f"leaves-{n_trees}x{clusters}{'-tied' * bool(its)}-2-epochs"
                own = leaves(n_trees, clusters) | its
                yield _ptb(name, name, final={"epochs": 2}, **own)


def _ptb_config(settings: Settings, **more: Any) -> TrainConfig:
    return TrainConfig(**settings, **ONE_THREAD | {"save_interval": 120.0} | more)


def measure_ptb(run: Run, corpus: Corpus, given: argparse.Namespace) -> dict[str, Any]:
    """Train a model in a folder of its own, or go on with a run there.

    Returns ``valid``, ``test``: perplexities, None if training diverged; ``epochs``: validation
    perplexity by epoch; ``head_parameters``.
    """
    folder = given.runs / run.name
    own = {"data": str(given.data), "run": str(folder), "seed": run.seed}
    try:
        if not folder.exists():
            train(_ptb_config(run.settings, device=given.device, **own), ConsoleReporter())
        elif read_run(folder).final is None:
            resume(folder, ConsoleReporter())
    except TrainingError as error:
        return {"valid": None, "test": None, "error": str(error)}
    found = read_run(folder)
    assert found.final is not None
    return {
        "valid": found.final.valid_perplexity,
        "test": found.final.test_perplexity,
        "epochs": [epoch.valid_perplexity for epoch in found.epochs],
        "head_parameters": found.final.head_parameters,
    }


def time_ptb(corpus: Corpus) -> dict[str, Any]:
    """Steps of some models in turns; those of every head alone, untrained, over ``F.linear`` +
    ``F.cross_entropy``."""
    contenders = tuple(_ptb_contenders())
    configs = {c.name: _ptb_config(c.settings) for c in contenders if is_full(c)}
    times = step_times(trainer_steps({name: configs[name] for name in TIMED}, corpus))

    def share(config: TrainConfig) -> float:
        model = build_model(config, len(corpus.vocabulary), corpus.statistics())
        cost = head_cost(model, config, Streams(corpus.train, config.batch_size))
        return cost.head_seconds / cost.flat_seconds

    return times | {"heads": {name: share(config) for name, config in configs.items()}}


TIMED = (
    "softmax",
    "adaptive",
    "sampled-in-batch-512-decay-0.1",
    "leaves-4x256",
    "leaves-4x256-decay-0.1",
    "forest-sampled-decay-0.1",
)
"""Contenders of the curves over time, the softmax first."""
PTB_TEXT = """\
One LSTM layer, five epochs, one protocol for every head; **not converged**. The learning rate of
the head (of the whole model for tied heads) was chosen for each head by the validation perplexity
of the first seed; further seeds follow with the chosen one. Other shapes of trees take over the
rate of four trees with C = 256. ± is the standard deviation over seeds. *Head step* is
a forward and backward pass of the untrained head alone over 700 contexts, as a share of that of
`F.linear` + `F.cross_entropy` in the same process. With all classes in the last tenth of the steps,
it is that of the others.
"""


def is_full(contender: Contender) -> bool:
    """Whether its runs have the epochs of the page's first table."""
    return "epochs" not in contender.final


def report_ptb(contenders: Sequence[Contender], records: Records) -> Report:
    """The page, its tables and pictures."""
    found = results(contenders, records)
    full = [one for one in found if is_full(one.contender)]
    shapes = [one for one in found if not is_full(one.contender)]
    times = records.times()
    timed = [(r, share) for r in full if (share := times["shares"].get(r.contender.name))]
    title = "CPU time of a training step of the whole model over that with a softmax"
    columns: list[Column] = [
        ("head", lambda pair: pair[0].title),
        ("step / softmax", lambda pair: pair[1], "{:.2f}".format),
    ]
    curves = []
    for one, share in timed:
        perplexities = one.runs[0]["epochs"]
        spent = [share * (n + 1) for n in range(len(perplexities))]
        curves.append((one.title, spent, perplexities, TIMED.index(one.contender.name)))
    ticks = (100, 110, 120, 130, 140, 150, 160, 180, 200)
    x = {"xlim": (0, None), "xlabel": "training time, in epochs of the softmax"}
    return Report(
        "Trees beside softmaxes on Penn Treebank",
        [
            _results(full, times["heads"]),
            table(title, timed, columns),
            *_shapes(shapes),
            sweep_table(contenders, records),
        ],
        [
            "the same for all heads: " + ", ".join(_common(contenders)),
            "steps were timed in turns in one process and those of heads alone one after another, "
            f"medians; {made_on([times]) if timed else 'not yet'}",
        ],
        pictures={"time": curve_picture(curves, (7.5, 4.2), ticks, **x)},
        introduction=PTB_TEXT,
    )


def _common(contenders: Sequence[Contender]) -> Iterator[str]:
    """The settings that all contenders share."""
    for name, value in contenders[0].settings.items():
        if all(contender.settings.get(name) == value for contender in contenders):
            yield f"{name.replace('_', ' ')} {value}"


def _results(found: Sequence[Result], shares: Mapping[str, float]) -> Table:
    """With the head steps by name."""

    def rates(one: Result) -> str:
        return ", ".join(f"{one.settings[name]:g}" for name in one.contender.sweeps or (FACTOR,))

    columns: list[Column] = [
        ("head", lambda r: r.title),
        ("factor or rate", rates, str),
        ("valid", lambda r: r.spread("valid"), str),
        ("test", lambda r: r.spread("test"), str),
        ("seeds", lambda r: len(r.runs), str),
        ("parameters", lambda r: r.mean("head_parameters"), _millions),
        ("head step", lambda r: shares.get(r.contender.name), decimals(2)),
    ]
    return table("Results", found, columns)


def _millions(value: float | None) -> str:
    return "" if value is None else f"{value / 1e6:.2f} M"


def _shapes(found: Sequence[Result]) -> Iterator[Table]:
    """Tables of the numbers of trees and of clusters."""
    for tied in ("", "tied "):
        own = [one for one in found if bool(one.settings.get("tied")) == bool(tied)]
        by_shape = {(r.settings["n_trees"], r.settings["clusters"]): r.spread("valid") for r in own}
        trees, clusters = (sorted({shape[axis] for shape in by_shape}) for axis in (0, 1))
        rows = [(n, *(by_shape.get((n, c), "") for c in clusters)) for n in trees]
        header = ["trees, tied" if tied else "trees", *(f"C = {c:,}" for c in clusters)]
        if own:
            title = (
                f"Validation perplexity of {tied}trees of two levels after "
                f"{own[0].settings['epochs']} epochs, a schedule of their own, one seed"
            )
            yield row_table(title, header, rows, None, str)


# ---- copies, different trees, feature subsets, gates

FEW_CLASSES, FEATURES, RANK_ROWS, TOKENS = 1000, 64, 2000, 300_000
CLUSTERS, START = 32, 0.05
"""Clusters of a tree of a forest; standard deviation of the first vectors of copies of one tree."""
SMALL = lstm(FEATURES, 0.1, 2, 0.004, "cosine")
BEST = 32.0
"""The best factor of one tree, of a forest of four and of a softmax. All trees have the first and
all forests the second."""
FACTORS = {FACTOR: (BEST, 2.0, 4.0, 8.0, 16.0, 64.0)}
BASE, SOFTMAX, FOUR = "cluster-1", "softmax", "forest-cluster-4-gate"


def _ensemble(
    n_trees: int,
    recipe: str = "cluster",
    *,
    head: str = "trees",
    subset: int = FEATURES,
    gate: str = "uniform",
    identical: bool = False,
) -> Contender:
    settings = {"head": head, "recipe": recipe, "n_trees": n_trees, "subset": subset}
    settings |= {"gate": gate, "identical": identical}
    features = {1: "all features", 2: "D/2", 4: "D/4"}[FEATURES // subset]
    learned, forest = gate == "context", head == "forest"
    kind = "copies of one tree" if identical else "trees"
    title = f"{n_trees} {kind}" if n_trees > 1 else "one tree"
    title = (
        "`ForestSoftmax`: " * forest + f"{title}, {recipe}, {features}" + ", learned gate" * learned
    )
    name = "forest-" * forest + f"{recipe}-{n_trees}" + f"-s{subset}" * (subset < FEATURES)
    name += "-copies" * identical + "-gate" * learned
    sweeps = FACTORS if name in (BASE, FOUR) else {}
    return Contender(name, title, SMALL | {FACTOR: BEST} | settings, sweeps)


def _randomized() -> Iterator[Contender]:
    half, quarter = FEATURES // 2, FEATURES // 4
    yield _ensemble(1)
    settings = SMALL | {FACTOR: 1.0, "head": "softmax"}
    yield Contender(SOFTMAX, "`Softmax`", settings, {FACTOR: (*FACTORS[FACTOR], 1.0)})
    yield _ensemble(4, identical=True)
    yield _ensemble(4)
    yield _ensemble(4, identical=True, gate="context")
    yield _ensemble(4, gate="context")
    yield _ensemble(4, identical=True, subset=half)
    yield _ensemble(8, identical=True, subset=half)
    for n_trees in (2, 4, 8, 16):
        yield _ensemble(n_trees, subset=half)
    for n_trees in (4, 8, 16):
        yield _ensemble(n_trees, subset=quarter)
    for n_trees in (2, 8, 16):
        yield _ensemble(n_trees)
    yield _ensemble(16, gate="context")
    yield _ensemble(8, subset=half, gate="context")
    for recipe in ("huffman", "random"):
        for n_trees in (1, 4, 16):
            yield _ensemble(n_trees, recipe)
        yield _ensemble(8, recipe, subset=half)
    one = partial(_ensemble, 1, head="forest")
    forest = partial(_ensemble, head="forest", gate="context")
    yield forest(4)
    yield one()
    for n_trees in (2, 8, 16):
        yield forest(n_trees)
    yield forest(4, identical=True)
    yield forest(4, gate="uniform")
    yield forest(4, subset=half)
    yield forest(8, subset=half)
    yield one("random")
    yield forest(4, "random")
    mixture = SMALL | {FACTOR: 4.0, "head": "mos", "components": 4}
    tried = {FACTOR: (16.0, 2.0, 4.0, 8.0, 32.0)}
    yield Contender("mos-4", "`MixtureOfSoftmaxes`, K = 4", mixture, tried)


def first_words(data: Path) -> Corpus:
    """The first TOKENS training tokens, in the words of the FEW_CLASSES most frequent ones."""
    corpus = load_corpus(data, max_vocabulary=FEW_CLASSES)
    return replace(corpus, train=corpus.train[:TOKENS])


def randomized_head(settings: Settings, corpus: Corpus, seed: int) -> Head:
    """The output layer of a run."""
    classes, statistics = len(corpus.vocabulary), corpus.statistics()
    size, frequencies = (FEATURES, classes), statistics.frequencies
    if settings["head"] == "softmax":
        return Softmax(*size, frequencies=frequencies)
    if settings["head"] == "mos":
        components = settings["components"]
        return MixtureOfSoftmaxes(*size, components=components, frequencies=frequencies)
    n_trees, recipe = settings["n_trees"], settings["recipe"]
    vectors = [statistics.vectors(n_features=32)] if recipe == "cluster" else None
    noise = {"noise": 0.3} if recipe == "cluster" and n_trees > 1 else {}
    different = 1 if settings["identical"] else n_trees
    forest = settings["head"] == "forest"
    shape = {"clusters": CLUSTERS} if forest else {}
    trees = build_ensemble(recipe, classes, different, frequencies, vectors, seed, **noise, **shape)
    options = {"gate": settings["gate"], "frequencies": frequencies, "seed": seed}
    trees *= n_trees // different
    if not forest:
        return TreeEnsemble(*size, trees, subset_size=settings["subset"], **options)
    head = ForestSoftmax(*size, trees=trees, **options)
    _prepare(head, settings["subset"], settings["identical"], seed)
    return head


def _prepare(head: ForestSoftmax, subset: int, identical: bool, seed: int) -> None:
    """Copies of a tree start with different vectors, as equal ones would stay equal. The trees read
    ``subset`` random features: the vectors are 0 elsewhere, where they get no gradient."""
    generator = torch.Generator().manual_seed(seed)
    weight = head.cluster_weight
    if identical:
        with torch.no_grad():
            weight.copy_(torch.randn(weight.shape, generator=generator) * START)
    if subset < FEATURES:
        kept = torch.rand(head.n_trees, FEATURES, generator=generator).argsort(1) < subset
        mask = kept.float().repeat_interleave(head.clusters, 0)
        weight.register_hook(lambda gradient: gradient * mask)


def measure_randomized(run: Run, corpus: Corpus, given: object = None) -> dict[str, Any]:
    """Train a model; its perplexities, ``head_parameters``, and the ``rank`` of log P over the
    first RANK_ROWS test contexts."""
    settings = run.settings
    torch.set_num_threads(ONE_THREAD["threads"])
    torch.manual_seed(run.seed)
    own = {key: settings[key] for key in (*SMALL, FACTOR)}
    config = TrainConfig(**own, seed=run.seed, **ONE_THREAD)
    size = len(corpus.vocabulary), config.embedding_size, config.hidden_size
    dropout = {"dropout": config.dropout, "dropout_input": config.dropout_input}
    backbone = AWDLSTM(*size, **dropout)
    head = randomized_head(settings, corpus, run.seed)
    model = LanguageModel(backbone, head)
    trainer = Trainer(model, corpus, config)
    for _ in range(config.epochs):
        for _ in trainer.steps():
            pass
        trainer.note_validation(0.0)
    rows = min(RANK_ROWS, len(corpus.test))
    return {
        "valid": math.exp(evaluate(model, corpus.valid)),
        "test": math.exp(evaluate(model, corpus.test)),
        "head_parameters": sum(parameter.numel() for parameter in head.parameters()),
        "rank": log_prob_rank(model, np.asarray(corpus.test), rows, torch.float64).press_rank,
    }


RANDOMIZED_TEXT = """\
Does an ensemble of randomized hierarchical softmaxes over random feature subsets beat one tree, and
what does the work: more vectors, different trees, or different features? Binary trees over the
1,000 most frequent words of Penn Treebank, an LSTM with D = 64 features, the first 300,000 words,
two epochs. Small on purpose, so that every question gets three seeds. ± is the standard deviation
over seeds. *Copies of one tree* have the same tree and vectors of their own; without a learned gate
and with all features they start equal, and only rounding errors, which the optimizer amplifies,
drive them apart: enough to raise the rank, and no gain. *Rank* is that of the matrix log P over
2,000 contexts of the test text, in float64 (at most 1,000). `ForestSoftmax` has 32 clusters a tree;
its copies of one tree start with small random vectors, since equal ones would stay equal. The other
trees are those of `TreeEnsemble`.
"""


def report_randomized(contenders: Sequence[Contender], records: Records) -> Report:
    """The page, its tables and its picture."""
    found = results(contenders, records)
    return Report(
        "Ensembles of randomized trees",
        [_ensembles(found), _answers(found), sweep_table(contenders, records)],
        [
            "the other trees have the factor of one tree on the head's learning rate, the other "
            "forests that of four trees",
        ],
        pictures={"": _ensemble_picture([r for r in found if r.mean("valid") is not None])},
        introduction=RANDOMIZED_TEXT,
    )


def _ensembles(found: Sequence[Result]) -> Table:
    columns: list[Column] = [
        ("head", lambda r: r.title),
        ("valid", lambda r: r.spread("valid", 2), str),
        ("test", lambda r: r.spread("test", 2), str),
        ("parameters", lambda r: f"{(r.mean('head_parameters') or 0) / 1e3:.0f} k", str),
        ("rank", lambda r: r.spread("rank", 0), str),
    ]
    return table("Results", found, columns)


COMPARISONS = (
    ("Copies of one tree instead of one", "cluster-4-copies", BASE),
    ("Copies with a learned gate", "cluster-4-copies-gate", BASE),
    ("Copies over different halves of the features", "cluster-4-s32-copies", BASE),
    ("Four different trees instead of one", "cluster-4", BASE),
    ("Different trees over halves of the features, parameters of one", "cluster-2-s32", BASE),
    ("Different trees over quarters of the features, parameters of one", "cluster-4-s16", BASE),
    ("Eight trees over halves, parameters of four", "cluster-8-s32", "cluster-4"),
    ("16 trees over quarters, parameters of four", "cluster-16-s16", "cluster-4"),
    ("A learned gate for four trees", "cluster-4-gate", "cluster-4"),
    ("16 trees instead of four", "cluster-16", "cluster-4"),
    ("Four random trees instead of one", "random-4", "random-1"),
    ("Four Huffman trees instead of one", "huffman-4", "huffman-1"),
    ("Four clustered trees instead of a softmax", "cluster-4", SOFTMAX),
    ("`ForestSoftmax` of one tree instead of a softmax", "forest-cluster-1", SOFTMAX),
    ("`ForestSoftmax` of four trees instead of a softmax", FOUR, SOFTMAX),
    ("`ForestSoftmax` of four trees instead of a mixture of four softmaxes", FOUR, "mos-4"),
    ("`ForestSoftmax`: four trees instead of one", FOUR, "forest-cluster-1"),
    ("`ForestSoftmax`: 16 trees instead of four", "forest-cluster-16-gate", FOUR),
    ("`ForestSoftmax`: copies of one tree instead", "forest-cluster-4-copies-gate", FOUR),
    ("`ForestSoftmax`: random clusters instead of learned ones", "forest-random-4-gate", FOUR),
    ("`ForestSoftmax`: trees over halves of the features", "forest-cluster-4-s32-gate", FOUR),
    ("`ForestSoftmax`: weights 1 / 4 instead of a learned gate", "forest-cluster-4", FOUR),
)  # fmt: skip
"""Questions, with the contenders whose perplexities answer them."""


def _answers(found: Sequence[Result]) -> Table:
    runs: Mapping[str, Sequence[Mapping[str, Any]]] = {r.contender.name: r.runs for r in found}
    changes = [
        (question, [100 * (a["valid"] / b["valid"] - 1) for a, b in zip(runs[new], runs[old])])  # noqa: B905
        for question, new, old in COMPARISONS
        if new in runs and old in runs
    ]
    columns: list[Column] = [
        ("change", lambda row: row[0]),
        ("perplexity", lambda row: fmean(row[1]), "{:+.1f}%".format),
        ("range", lambda row: f"{min(row[1]):+.1f}% to {max(row[1]):+.1f}%", str),
    ]
    title = "Change of the validation perplexity, mean and range over seeds"
    return table(title, changes, columns)


_TREES = {"head": "trees", "recipe": "cluster", "gate": "uniform", "subset": 64, "identical": False}
CURVES: Mapping[str, Settings] = {
    "trees, all features": _TREES,
    "trees, half of the features": _TREES | {"subset": 32},
    "trees, a quarter": _TREES | {"subset": 16},
    "copies, all features": _TREES | {"identical": True},
    "copies, half of the features": _TREES | {"subset": 32, "identical": True},
    "forest, learned gate": _TREES | {"head": "forest", "gate": "context"},
}
"""Settings of the runs of each curve."""


def _ensemble_picture(found: Sequence[Result]) -> Any:
    """Validation perplexity against parameters."""
    figure = new_figure(8, 4)
    axes = figure.subplots()
    for number, (label, shape) in enumerate(CURVES.items()):
        points = sorted(
            ((r.mean("head_parameters") or 0) / 1e3, r.mean("valid"), r.settings["n_trees"])
            for r in found
            if shape.items() <= r.settings.items()
        )
        x, y, n_trees = zip(*points, strict=True)
        axes.plot(x, y, marker="o", label=label, **line_style(number))
        for text, *point in zip(n_trees, x, y, strict=True):
            axes.annotate(str(text), point, (3, 3), fontsize=7, textcoords="offset points")
    (softmax,) = (r.mean("valid") for r in found if r.contender.name == SOFTMAX)
    axes.axhline(softmax, color="gray", linestyle=":", label="softmax")
    axes.set(xscale="log", xlabel="parameters of the head, thousands (numbers: trees)")
    axes.set_ylabel("validation perplexity")
    axes.grid(alpha=0.3)
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False, fontsize="small")
    return figure


# ---- a small transformer

SUBWORDS, OCCURRING = 49_152, 21_819
"""Subwords of SmolLM2, and those that occur in the text, which come first."""
WIDTH, LAYERS, WINDOW, WINDOWS = 256, 2, 64, 8
"""Features and layers of the transformer; tokens of a window, and windows of a step."""
TRANSFORMER_TOKENS = 32_768
PERPLEXITY_TICKS = (30, 35, 40, 50, 60, 75)
SHORT_STEPS, LONG = 1600, 10_000
TIME_TICKS = (500, 1000, SHORT_STEPS, 3000, 5000, LONG)
WARM_UP, LAST_RATE = 0.05, 0.1
"""Share of the steps in which the rate rises, and the last rate as a share of the highest."""
TRANSFORMER_RATE = 0.001
"""The best of 0.0005, 0.001 and 0.002 for a softmax, a sampled one and forests of one tree and of
four, in runs of SHORT_STEPS on another text: the others were 4 to 13% worse."""
TAILS = {
    "sampled-in-batch": "softmax",
    "forest-4": "forest-4-all",
    "sampled-in-batch-occurring": "softmax-occurring",
}
"""Contenders of which others score all classes in the last steps, and the one with these steps."""


def _transformers(steps: int) -> Iterator[Contender]:
    common = {"learning_rate": TRANSFORMER_RATE, "steps": steps}
    draws = {"negatives": 512}
    forest = "`ForestSoftmax`, 4 trees, C = 256"
    for name, title, head in (
        ("softmax", "`Softmax`", {}),
        ("sampled-in-batch", "`SampledSoftmax`, 512 negatives", draws),
        ("forest-4", f"{forest}, 512 negatives", {"n_trees": 4, **draws}),
        ("forest-1", "`ForestSoftmax`, one tree, C = 256, 512 negatives", {"n_trees": 1, **draws}),
        ("forest-4-all", f"{forest}, all classes", {"n_trees": 4, "negatives": None}),
    ):
        settings = {"head": name.split("-")[0], **head, **common}
        seeds = 1 if steps == LONG or name == "forest-4-all" else 3
        yield Contender(name, title, settings, seeds=seeds)


SHORT: Sequence[Contender] = tuple(_transformers(SHORT_STEPS))


def _with_tail(one: Contender, tail: float) -> Contender:
    """With a share of the steps, the last ones, that score all classes."""
    percent = "" if tail == 0.1 else f"-{100 * tail:.0f}"
    last = f"{100 * tail:.0f}%" if percent else "tenth"
    title = f"{one.title}, all classes in the last {last}"
    settings = {**one.settings, "tail": tail}
    return replace(one, name=f"{one.name}-tail{percent}", title=title, settings=settings)


def _long_transformers() -> Iterator[Contender]:
    long = {one.name: one for one in _transformers(LONG) if one.name != "forest-1"}
    tails = [_with_tail(long[name], 0.1) for name in TAILS if name in long]
    for one in (*long.values(), *tails, _with_tail(long["sampled-in-batch"], 0.4)):
        yield replace(one, name=f"{one.name}-long")


BUDGETS = {SHORT_STEPS: "time", LONG: "time-long"}
"""Steps of a softmax, and what the names of the runs of other heads that take as long end with."""


def _equal_time() -> Iterator[Contender]:
    """Other heads, with steps that take on a CPU about the time of those of a softmax: the page
    names it."""
    by_name = {one.name: one for one in SHORT}
    trees = {"head": "trees", "n_trees": 4, "learning_rate": TRANSFORMER_RATE}
    softmax, sampled = (
        replace(
            one,
            name=f"{one.name}-occurring",
            title=f"{one.title}, over the {OCCURRING:,} subwords that occur",
            settings={**one.settings, "classes": OCCURRING},
        )
        for one in (by_name["softmax"], by_name["sampled-in-batch"])
    )
    for one, steps in (
        (softmax, (3200, 20_000)),
        (_with_tail(sampled, 0.1), (6800, 42_000)),
        (by_name["sampled-in-batch"], (4800, 30_000)),
        (_with_tail(by_name["sampled-in-batch"], 0.1), (4000, 25_000)),
        (_with_tail(by_name["forest-4"], 0.1), (3800, 24_000)),
        (Contender("trees", "`TreeEnsemble`, 4 trees, C = 256", trees), (5200, 32_000)),
    ):
        for end, number in zip(BUDGETS.values(), steps, strict=True):
            seeds = 2 if end == BUDGETS[SHORT_STEPS] else 1
            settings = {**one.settings, "steps": number}
            yield replace(one, name=f"{one.name}-{end}", settings=settings, seeds=seeds)


TRANSFORMERS = (*SHORT, *_long_transformers(), *_equal_time())


def subwords(data: Path) -> Corpus:
    """The text in subwords of SmolLM2."""
    return load_corpus(data, tokenizer=Subwords(read_tokenizer().backend_tokenizer))


class Transformer(nn.Module):
    """A LlamaModel and a head on its embeddings."""

    def __init__(self, settings: Mapping[str, Any], corpus: Corpus) -> None:
        from transformers import LlamaConfig, LlamaModel

        super().__init__()
        config = LlamaConfig(
            vocab_size=settings.get("classes", SUBWORDS),
            hidden_size=WIDTH,
            intermediate_size=8 * WIDTH // 3,
            num_hidden_layers=LAYERS,
            num_attention_heads=WIDTH // 64,
            max_position_embeddings=WINDOW,
            use_cache=False,
        )
        self.backbone = LlamaModel(config)
        of_training = ("head", "learning_rate", "steps", "tail", "classes")
        own = {k: v for k, v in settings.items() if k not in of_training}
        self.head = make_head(settings["head"], self.backbone.embed_tokens, corpus, own)

    def forward(self, window: Tensor, target: Tensor) -> hstree.HeadOutput:
        return self.head(self.backbone(input_ids=window).last_hidden_state, target)


def make_head(name: str, embedding: nn.Embedding, corpus: Corpus, options: Any) -> Head:
    """A head tied to an embedding. Trees are learned from the text."""
    size = embedding.embedding_dim, embedding.num_embeddings
    statistics = CorpusStatistics.from_tokens(corpus.train, embedding.num_embeddings)
    counts = {"frequencies": statistics.frequencies, "embedding": embedding}
    if name == "softmax":
        return hstree.Softmax(*size, **counts, **options)
    if name == "sampled":
        return hstree.SampledSoftmax(*size, **counts, **options)
    if name == "trees":
        return hstree.TreeEnsemble.from_tokens(*size, statistics.tokens, **counts, **options)
    return hstree.ForestSoftmax.from_tokens(*size, statistics.tokens, **counts, **options)


def batches(tokens: npt.NDArray[Any], seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Windows and targets [WINDOWS, WINDOW], in a random order for every pass over the text."""
    first = np.arange(0, len(tokens) - WINDOW, WINDOW)
    generator = np.random.default_rng(seed)
    for _ in count():
        order = generator.permutation(first)
        for place in range(0, len(order) - WINDOWS + 1, WINDOWS):
            chosen = order[place : place + WINDOWS, None] + np.arange(WINDOW + 1)
            rows = torch.from_numpy(tokens[chosen].astype(np.int64))
            yield rows[:, :-1], rows[:, 1:]


def rate_at(step: int, steps: int) -> float:
    """Share of the highest rate: a linear rise, then half a cosine."""
    rise = max(1, round(WARM_UP * steps))
    if step < rise:
        return (step + 1) / rise
    done = (step - rise) / max(1, steps - rise)
    return LAST_RATE + (1 - LAST_RATE) * 0.5 * (1 + math.cos(math.pi * done))


def transformer_steps(
    settings: Mapping[str, Any], corpus: Corpus, seed: int, device: str = "cpu"
) -> Iterator[Transformer]:
    """The model before every step. After the last one it goes on at the last rate."""
    torch.manual_seed(seed)
    model = Transformer(settings, corpus).to(device)
    optimizer = hstree.optim.AdamW(model.parameters(), lr=settings["learning_rate"])
    steps, stream = settings["steps"], batches(corpus.train, seed)
    tail = round((1 - settings["tail"]) * steps) if "tail" in settings else None
    for step in count():
        yield model
        if step == tail:
            model.head.samples_in_training = False
        for group in optimizer.param_groups:
            group["lr"] = settings["learning_rate"] * rate_at(min(step, steps), steps)
        optimizer.zero_grad()
        model(*(part.to(device) for part in next(stream))).loss.backward()
        hstree.optim.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


@torch.no_grad()
def perplexity(model: Transformer, tokens: npt.NDArray[Any]) -> float:
    """Of the first TRANSFORMER_TOKENS of a text, in windows."""
    model.eval()
    rows = torch.from_numpy(tokens[: TRANSFORMER_TOKENS + 1].astype(np.int64))
    rows = rows.to(model.backbone.device)
    pairs = zip(rows[:-1].split(8 * WINDOW), rows[1:].split(8 * WINDOW), strict=True)
    losses = [
        float(model(window.view(-1, WINDOW), target.view(-1, WINDOW)).loss)
        for window, target in pairs
    ]
    model.train()
    return math.exp(sum(losses) / len(losses))


def measure_transformer(run: Run, corpus: Corpus, given: argparse.Namespace) -> dict[str, Any]:
    """Train. Returns ``valid``: perplexity, None if training diverged; ``head_parameters`` beside
    the embeddings."""
    torch.set_num_threads(1)
    steps = transformer_steps(run.settings, corpus, run.seed, given.device)
    model = next(steps)
    tied = {id(parameter) for parameter in model.backbone.parameters()}
    own = sum(p.numel() for p in model.head.parameters() if id(p) not in tied)
    for _ in range(run.settings["steps"]):
        next(steps)
    valid = perplexity(model, corpus.valid)
    return {"valid": valid if math.isfinite(valid) else None, "head_parameters": own}


TRANSFORMER_TEXT = f"""\
A Llama of {LAYERS} layers and {WIDTH} features (RMSNorm), its embeddings tied to the output layer;
AdamW, a warmed-up cosine for each run, steps of {WINDOWS} windows of {WINDOW} subwords. The
learning rate is {TRANSFORMER_RATE}. On another text, {SHORT_STEPS:,} steps with 0.0005 and 0.002
had perplexities 4 to 13% higher for the softmax, the sampled one and the forests of one tree and of
four; for {LONG:,} steps no other rate was tried. ± is the standard deviation over seeds. *Valid* is
the perplexity of the first {TRANSFORMER_TOKENS:,} tokens. *Step* and *time*, which is relative to
that of the softmax, are of a CPU. *Parameters* are those beside the embeddings. With all classes in
the last steps, *step* is the mean of both kinds. Every run has a schedule of its own
number of steps; a line of the picture joins runs of one head.
"""


def report_transformer(contenders: Sequence[Contender], records: Records) -> Report:
    """The page."""
    found, shares = results(contenders, records), records.times()["shares"]

    def share(one: Result) -> float:
        """The mean time of a step over that with a softmax; NaN before it was measured."""
        name = one.contender.name.partition("-t")[0].removesuffix("-long")  # -time, -tail
        tail = one.settings.get("tail", 0.0)
        last = shares.get(TAILS[name] if tail else name, math.nan)
        return (1 - tail) * shares.get(name, math.nan) + tail * last

    def run_time(one: Result) -> float:
        """Of all steps, in steps with a softmax."""
        return one.settings["steps"] * share(one)

    columns: list[Column] = [
        ("head", lambda r: r.title),
        ("valid", lambda r: r.spread("valid"), str),
        ("seeds", lambda r: len(r.runs), str),
    ]
    of_a_step: Column = ("step / softmax", share, decimals(2))
    size: Column = ("parameters", lambda r: r.mean("head_parameters"), "{:,.0f}".format)
    tables = []
    for steps, end in BUDGETS.items():
        rows = [one for one in found if one.settings["steps"] == steps]
        tables.append(table(f"After {steps:,} steps", rows, [*columns, of_a_step, size]))
        softmax = [one for one in rows if one.title == "`Softmax`"]
        rows = softmax + [one for one in found if one.contender.name.endswith(end)]
        title = f"In the time of {steps:,} steps with a softmax"
        of_time: Column = ("time", lambda r, n=steps: run_time(r) / n, decimals(2))
        number: Column = ("steps", lambda r: r.settings["steps"], "{:,}".format)
        if len(rows) > 1:
            tables.append(table(title, rows, [*columns, number, of_time]))
    texts = " and ".join(dict.fromkeys(record["text"] for record in records.all()))
    return Report(
        "Output layers of a small transformer",
        [table for table in tables if table.rows],
        [f"the text: {texts}; the other subwords of {SUBWORDS:,} do not occur"],
        introduction=TRANSFORMER_TEXT,
        pictures={"": _time_picture(found, run_time)},
    )


UNDRAWN = ("forest-1", "forest-4", "forest-4-all", "sampled-in-batch-tail-40")


def _time_picture(found: Sequence[Result], run_time: Callable[[Result], float]) -> Any:
    """Validation perplexity of whole runs against their time."""
    points: dict[str, list[tuple[float, float]]] = {}
    for one in found:
        if one.contender.name.removesuffix("-long") in UNDRAWN:
            continue
        if (valid := one.mean("valid")) is not None and math.isfinite(run_time(one)):
            label = one.title.replace(", C = 256", "").replace(", 512 negatives", "")
            label = label.replace("the 21,819 subwords", "subwords")
            points.setdefault(label, []).append((run_time(one), valid))
    lines = {label: sorted(of) for label, of in points.items()}
    curves = ((label, *zip(*of, strict=True), n) for n, (label, of) in enumerate(lines.items()))
    label = "time of the whole run, in steps with a softmax (log scale)"
    figure = curve_picture(curves, (8, 5), PERPLEXITY_TICKS, xscale="log", xlabel=label)
    axis = figure.axes[0].xaxis
    axis.set_major_locator(FixedLocator(TIME_TICKS))
    axis.set_major_formatter("{x:,.0f}")
    axis.set_minor_locator(NullLocator())
    return figure


def time_transformer(corpus: Corpus) -> dict[str, Any]:
    contenders = {one.name: one for one in SHORT} | {
        name: next(one for one in TRANSFORMERS if one.name == f"{name}-time")
        for name in ("trees", "softmax-occurring")
    }
    sampled = contenders["sampled-in-batch"]
    own = {**sampled.settings, "classes": OCCURRING}
    contenders["sampled-in-batch-occurring"] = replace(sampled, settings=own)
    return step_times(
        {name: transformer_steps(one.settings, corpus, 1) for name, one in contenders.items()}
    )


# ---- 100,000 classes and more

VALID_TOKENS = 24_576
LARGE_TIMES = (1000, 2000, 4000, 8000, 16000, 30000)
"""Times that have a column in the table, in steps of the first contender."""
LARGE = lstm(200, 0.1, 1000, 0.002, "constant") | {"sparse_embedding": True}
"""The CPU time ends a run."""
TRIED_SECONDS, SECONDS, POINTS = 60, 500, 8
"""CPU seconds of a run that tries a rate, those of the others, and points of their curves, each
after twice the time of the one before."""


def _large(name: str, title: str, *factors: float, **own: Any) -> Contender:
    """``factors``: the best one first."""
    common = LARGE | {FACTOR: 8.0, "seconds": TRIED_SECONDS if factors else SECONDS}
    sweeps = {FACTOR: factors} if factors else {}
    final = {"seconds": SECONDS} if factors else {}
    seeds = int(bool(factors) or name == "softmax")  # the steps of the others are timed only
    return Contender(name, title, common | own, sweeps, final=final, seeds=seeds)


def _large_contenders() -> Iterator[Contender]:
    sampled = {"head": "sampled", "sparse": True, "head_option": ("negatives=128",)}
    title = "`SampledSoftmax`, 128 negatives"
    yield _large("sampled-in-batch", title, 4.0, 2.0, 8.0, **sampled)
    more = sampled | {"head_option": ("negatives=512",)}
    title = "`SampledSoftmax`, 512 negatives"
    yield _large("sampled-in-batch-512", title, 4.0, 2.0, 8.0, **more)
    forest = sampled | {"head": "forest", "n_trees": 4, "gate": "context"}
    title = "`ForestSoftmax`, 4 trees, C = 512, 128 negatives"
    yield _large("forest-4", title, 2.0, 1.0, 4.0, 8.0, **forest)
    old = sampled | {"head_option": ("negatives=1024", "in_batch=false")}
    yield _large(
        "sampled", "`SampledSoftmax`, 1,024 negatives, `in_batch=False`", 8.0, 4.0, 16.0, **old
    )
    trees = {"head": "trees", "clusters": 512, "binary": True, "sparse": True}
    one, four = ({"n_trees": n, "gate": g} for n, g in ((1, "uniform"), (4, "context")))
    yield _large(
        "trees-1-binary",
        "`TreeEnsemble`, one binary tree, C = 512",
        2.0,
        1.0,
        4.0,
        8.0,
        **trees,
        **one,
    )
    yield _large("trees-4-binary", "`TreeEnsemble`, 4 binary trees, C = 512", **trees, **four)
    yield _large("adaptive", "`AdaptiveSoftmax`", head="adaptive")
    yield _large("softmax", "`Softmax`", head="softmax")
    dense = sampled | {"sparse_embedding": False}
    yield _large("sampled-in-batch-dense", "the first, dense word embeddings", **dense)


LARGE_CONTENDERS = tuple(_large_contenders())


def _large_config(settings: Mapping[str, Any], seed: int = 1) -> TrainConfig:
    own = {name: value for name, value in settings.items() if name != "seconds"}
    return TrainConfig(seed=seed, **own, **ONE_THREAD)


def measure_large(run: Run, corpus: Corpus, given: object = None) -> dict[str, Any]:
    """Train for the CPU time of the run.

    Returns ``valid``: perplexity of the first VALID_TOKENS validation tokens at the end, None if
    training diverged; ``points``: CPU ``seconds`` of training, ``tokens`` seen and ``valid``;
    ``head_parameters``.
    """
    seconds, config = run.settings["seconds"], _large_config(run.settings, run.seed)
    torch.set_num_threads(ONE_THREAD["threads"])
    model = build_model(config, len(corpus.vocabulary), corpus.statistics())
    figures: dict[str, Any] = {
        "head_parameters": own_parameter_count(model.head, model.backbone),
        "points": [],
    }
    trainer, valid = Trainer(model, corpus, config), corpus.valid[:VALID_TOKENS]
    due = [seconds / 2**n for n in range(POINTS if seconds >= SECONDS else 1)]
    tokens, spent = 0, 0.0
    begin = time.process_time()
    try:
        for step in endless_steps(trainer):
            tokens += step.tokens
            spent += time.process_time() - begin
            if spent >= due[-1]:
                perplexity = math.exp(evaluate(model, valid))
                point = {"seconds": round(spent, 1), "tokens": tokens, "valid": perplexity}
                figures["points"].append(point)
                print(run.name, point, flush=True)
                while due and spent >= due[-1]:
                    due.pop()
            if not due:
                break
            begin = time.process_time()
    except TrainingError as error:
        print(run.name, error, flush=True)
        return figures | {"valid": None, "error": str(error)}
    return figures | {"valid": figures["points"][-1]["valid"]}


LARGE_TEXT = f"""\
Validation perplexity (first {VALID_TOKENS:,} tokens) by training time on one core, one LSTM layer
of 200 features, a constant learning rate, one seed. *Time* is the number of steps times the time of
a step, in units of a step with the first head. *Step* is that of the whole model, timed for all
heads in turns in one process: the runs shared the machine with other load, which slows down some
more than others. Between two points of a curve, perplexity is interpolated.

The gradients of the word embeddings are row-sparse: a dense update of them takes most of a step.
The factor of the head's rate was chosen in runs of 60 CPU seconds; the final runs have 500. A
softmax makes too few steps in 60: it has the default of 8.
"""

Curve = Sequence[tuple[float, float]]
"""Time and perplexity, by time."""


def report_large(contenders: Sequence[Contender], records: Records) -> Report:
    """The page, its tables and its picture."""
    step = records.times()["shares"]
    found = [
        (one, curve(one, step))
        for one in results(contenders, records)
        if one.runs[0].get("points") and one.contender.name in step
    ]
    curves = [(r.title, *zip(*its, strict=True), n) for n, (r, its) in enumerate(found)]
    ticks = (45, 60, 80, 100, 150, 200, 300, 500)
    x = {"xscale": "log", "xlabel": "training time, in steps of the first head"}
    return Report(
        "Output layers at 100,000 classes and more",
        [_curve_table(found, step), sweep_table(contenders, records)],
        [f"the text: {records.all()[0]['text']}", "learning rates were tried in the shorter runs"],
        pictures={"": curve_picture(curves, (7, 4.8), ticks, **x)},
        introduction=LARGE_TEXT,
    )


def curve(one: Result, step: Mapping[str, float]) -> Curve:
    """The points of the run."""
    tokens = one.settings["batch_size"] * one.settings["bptt"]
    share = step[one.contender.name] / tokens
    return [(point["tokens"] * share, point["valid"]) for point in one.runs[0]["points"]]


def perplexity_at(points: Curve, time: float) -> float | None:
    """The perplexity at a time, interpolated in the logarithms of both; None outside the curve."""
    times, perplexities = zip(*points, strict=True)
    if not times[0] <= time <= times[-1]:
        return None
    return float(np.exp(np.interp(np.log(time), np.log(times), np.log(perplexities))))


def _curve_table(found: Sequence[tuple[Result, Curve]], step: Mapping[str, float]) -> Table:
    def or_nothing(form: str) -> Callable[[float | None], str]:
        return lambda value: "" if value is None else form.format(value)

    columns: list[Column] = [("head", lambda pair: pair[0].title)]
    columns += [
        (f"time {time:,}", lambda p, time=time: perplexity_at(p[1], time), or_nothing("{:.1f}"))
        for time in LARGE_TIMES
    ]
    columns += [
        ("end", lambda p: p[1][-1][1], decimals(1)),
        ("time of the end", lambda p: p[1][-1][0], decimals(0)),
        ("step", lambda p: step[p[0].contender.name], decimals(2)),
        ("parameters", lambda p: p[0].runs[0]["head_parameters"] / 1e6, "{:.1f} M".format),
    ]
    return table("Validation perplexity by training time", found, columns)


def time_large(corpus: Corpus) -> dict[str, Any]:
    configs = {c.name: _large_config(c.settings) for c in LARGE_CONTENDERS}
    return step_times(trainer_steps(configs, corpus))


# ---- the command

STUDIES = (
    Study(
        "trees-study",
        tuple(_ptb_contenders()),
        measure_ptb,
        report_ptb,
        time_ptb,
        ("--data ptb/", "--data ptb/ --times"),
    ),
    Study(
        "randomized",
        tuple(_randomized()),
        measure_randomized,
        report_randomized,
        commands=("--data ptb/",),
        load=first_words,
    ),
    Study(
        "transformer-study",
        TRANSFORMERS,
        measure_transformer,
        report_transformer,
        time_transformer,
        load=subwords,
    ),
    Study(
        "large-vocabulary",
        LARGE_CONTENDERS,
        measure_large,
        report_large,
        time_large,
        ("--data TEXT", "--data TEXT --times"),
    ),
)


def main(arguments: Sequence[str] | None = None) -> None:
    studies = {study.name: study for study in STUDIES}
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.studies",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    add = parser.add_argument
    add("study", choices=studies)
    add("--data", type=Path, metavar="FOLDER", help="folder of the text")
    add("--only", nargs="+", metavar="NAME", help="contenders to run (default: all)")
    add("--limit", type=int, metavar="N", help="stop after N more runs")
    add("--device", choices=("cpu", "cuda"), default="cpu", help="(default: %(default)s)")
    add("--times", action="store_true", help="time training steps in turns")
    text = "folder for run folders (default: %(default)s)"
    add("--runs", type=Path, metavar="FOLDER", default=Path("studies"), help=text)
    text = "folder of the records (default: %(default)s)"
    add("--records", type=Path, metavar="FOLDER", default=RESULTS, help=text)
    given = parser.parse_args(arguments)
    studies[given.study].run(given)


if __name__ == "__main__":
    main()
