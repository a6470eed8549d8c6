"""Heads on Penn Treebank with the same backbone, text and epochs; small, quick, not converged.

    python -m benchmarks.ptb --data ptb/ --runs runs/ptb --tries
    python -m benchmarks.ptb --data ptb/ --runs runs/ptb --speed
    python -m benchmarks.ptb --data ptb/ --runs runs/ptb --save benchmarks/results/ptb-reduced

The first command tries learning rates on the beginning of the text. The second times steps with
one thread and with two, alternating, on an idle machine. The third trains every head with the
settings below. It writes the page NAME.md, the perplexities NAME.json, the validation curves
NAME.png and, where the speeds are known, validation perplexity against time, NAME-time.png.
Finished runs are not repeated. Every run has one thread; its cost is the CPU time of its process,
so that other load on the machine counts less.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.plot import perplexity_over_time
from hstree.lab import compare, to_markdown, validation_curves
from hstree.lm._pictures import picture as rendered
from hstree.lm.data import load_corpus
from hstree.lm.runs import EpochRecord, RunFigures, TrainConfig, read_run
from hstree.lm.training import ConsoleReporter, Trainer, build_model, train

COMMON: dict[str, Any] = {
    "embedding_size": 200,
    "hidden_size": 300,
    "context_size": 200,
    "layers": 2,
    "dropout": 0.2,
    "dropout_input": 0.2,
    "dropout_hidden": 0.2,
    "epochs": 3,
    "batch_size": 20,
    "bptt": 35,
    "optimizer": "adamw",
    "learning_rate": 0.006,
    "schedule": "cosine",
    "warmup": 50,
    "clip": 1.0,
    "weight_decay": 0.01,
    "seed": 1,
    "device": "cpu",
    "threads": 1,
}

# The flat heads and the mixture are tied to the word embeddings, as in their published settings;
# the adaptive softmax and the trees have vectors of their own, except `leaves-tied`.
TREES: dict[str, Any] = {"head": "trees", "root": 256, "head_learning_rate_factor": 4.0, "leaf": 1}
LEAVES: dict[str, Any] = TREES | {"n_trees": 4, "root": 1024, "gate": "context", "levels": 2}
HEADS: dict[str, dict[str, Any]] = {
    "softmax": {"head": "softmax", "tied": True, "head_learning_rate_factor": 1.0},
    "plif": {"head": "plif", "tied": True, "head_learning_rate_factor": 1.0},
    "mos": {
        "head": "mos",
        "tied": True,
        "head_option": ("components=5",),
        "head_learning_rate_factor": 1.0,
    },
    "adaptive": {"head": "adaptive", "head_learning_rate_factor": 16.0},
    "tree": TREES | {"n_trees": 1, "gate": "uniform"},
    "trees": TREES | {"n_trees": 4, "gate": "context"},
    "leaves": LEAVES | {"relearn_trees": (2,)},
    "leaves-tied": LEAVES | {"tied": True, "head_learning_rate_factor": 2.0},
}

TITLES = {
    "softmax": "softmax, tied to the word embeddings",
    "plif": "PLIF, tied",
    "mos": "mixture of 5 softmaxes, tied",
    "adaptive": "adaptive softmax",
    "tree": "one tree, C = 256",
    "trees": "four trees, C = 256",
    "leaves": "four trees, C = 1,024, shared leaves",
    "leaves-tied": "four trees, C = 1,024, tied leaves",
}

# Short runs: the beginning of the text, learning rates of the backbone, factors of the head.
TRIED_TOKENS = {"train": 100_000, "valid": 20_000, "test": 20_000}
TRIED_EPOCHS = 2
TRIED: dict[str, list[tuple[float, float]]] = {
    "softmax": [(0.002, 1.0), (0.004, 1.0), (0.008, 1.0)],
    "plif": [(0.002, 1.0), (0.004, 1.0), (0.008, 1.0)],
    "mos": [(0.004, 0.5), (0.004, 1.0), (0.004, 2.0)],
    "adaptive": [
        (0.004, 1.0),
        (0.004, 2.0),
        (0.004, 4.0),
        (0.004, 8.0),
        (0.004, 16.0),
        (0.004, 32.0),
    ],
    "tree": [(0.004, 2.0), (0.004, 4.0), (0.004, 8.0)],
    "trees": [(0.004, 1.0), (0.004, 2.0), (0.004, 4.0), (0.004, 8.0)],
    "leaves": [(0.004, 2.0), (0.004, 4.0), (0.004, 8.0)],
    "leaves-tied": [(0.004, 1.0), (0.004, 2.0), (0.004, 4.0)],
}

CHOICE = (
    "Runs this short favor high rates. The runs above take 14 times as many steps, so the rate of "
    "their backbone is below the best one tried, the same for all heads, and the factors of "
    "`adaptive` and `trees` are half the best ones tried. No other rate was tried at full length. "
    "The factor of a tied flat head applies only to its bias."
)
PLIF_CHOICE = (
    " The slopes of `plif` have a learning rate of their own, 0.02 at the top of the schedule. "
    "With a learning rate of 0.008, slope rates of 0.02, 0.002 and 0.0002 gave 260.7, 259.9 and "
    "264.2, and slopes that stay at their random initial values (`plif-frozen`) 269.2. So the "
    "random slopes rather than their rate seem to cost perplexity so early in training."
)

# Validation and test perplexity at convergence, hundreds of epochs of the presets ptb-*.
PUBLISHED = {"softmax": (59.55, 57.08), "plif": (59.08, 56.80), "mos": (57.14, 54.91)}


class CpuTimes(ConsoleReporter):
    """Also counts the process's CPU seconds: of each epoch's training, and with its validation."""

    def __init__(self) -> None:
        super().__init__()
        self.training: list[float] = []
        self.epochs: list[float] = []
        self._began = self._stepped = 0.0

    def start(self, epochs: int, steps_per_epoch: int, step: int = 0) -> None:
        super().start(epochs, steps_per_epoch, step)
        self._began = time.process_time()

    def step(self, epoch: int, loss: float, tokens: int) -> None:
        super().step(epoch, loss, tokens)
        self._stepped = time.process_time()

    def epoch(self, record: EpochRecord) -> None:
        super().epoch(record)
        now = time.process_time()
        self.training.append(self._stepped - self._began)
        self.epochs.append(now - self._began)
        self._began = now


def finished(run: Path) -> bool:
    return (run / "summary.json").is_file()


def cpu_file(run: Path) -> Path:
    return run.with_name(run.name + ".cpu.json")


def train_once(config: TrainConfig) -> None:
    """Train, unless the run folder holds a finished run; CPU times go beside the folder."""
    assert config.run is not None
    run = Path(config.run)
    if finished(run):
        return
    print(f"{run}:", flush=True)
    times = CpuTimes()
    train(config, times)
    figures = {"training": times.training, "epochs": times.epochs}
    cpu_file(run).write_text(json.dumps(figures) + "\n")


# Tries


def first_tokens(data: Path, folder: Path) -> Path:
    """The first lines of every part of a corpus, up to TRIED_TOKENS, as a corpus of its own."""
    folder.mkdir(parents=True, exist_ok=True)
    for part, limit in TRIED_TOKENS.items():
        lines, tokens = [], 0
        for line in (data / f"{part}.txt").read_text(encoding="utf-8").splitlines():
            tokens += len(line.split()) + 1  # <eos>
            if tokens > limit:
                break
            lines.append(line + "\n")
        (folder / f"{part}.txt").write_text("".join(lines), encoding="utf-8")
    return folder


def try_folder(runs: Path, head: str, rate: float, factor: float) -> Path:
    return runs / "tries" / f"{head}-{rate:g}-{factor:g}"


def make_tries(data: Path, runs: Path, heads: Iterable[str]) -> None:
    text = first_tokens(data, runs / "tries" / "text")
    for head in heads:
        for rate, factor in TRIED[head]:
            settings = COMMON | HEADS[head] | {"epochs": TRIED_EPOCHS, "learning_rate": rate}
            settings["head_learning_rate_factor"] = factor
            run = try_folder(runs, head, rate, factor)
            train_once(TrainConfig(data=str(text), run=str(run), **settings))


def tries_table(runs: Path, heads: Iterable[str]) -> list[str]:
    rows = []
    for head in heads:
        for rate, factor in TRIED[head]:
            run = try_folder(runs, head, rate, factor)
            if finished(run):
                perplexity = read_run(run).valid_perplexity
                rows.append(f"| `{head}` | {rate:g} | {factor:g} | {perplexity:.1f} |")
    if not rows:
        return []
    header = "| head | learning rate | factor of the head | valid perplexity |"
    return [header, "| --- | ---: | ---: | ---: |", *rows]


# Speed


def speed_file(runs: Path) -> Path:
    return runs / "speed.json"


def measure_speed(data: Path, runs: Path, heads: Iterable[str]) -> dict[str, dict[str, float]]:
    """Training tokens per second of each head by number of threads; written to speed_file."""
    corpus = load_corpus(data)
    trainers = {}
    for head in heads:
        config = TrainConfig(**COMMON | HEADS[head])
        model = build_model(config, len(corpus.vocabulary), corpus.statistics())
        part = replace(corpus, train=corpus.train[: 7 * config.batch_size * config.bptt + 1])
        trainers[head] = Trainer(model, part, config)
    found: dict[str, dict[str, list[float]]] = {head: {"1": [], "2": []} for head in trainers}
    for _ in range(6):  # the first round warms up
        for head, trainer in trainers.items():
            for threads, speeds in found[head].items():
                torch.set_num_threads(int(threads))
                for _ in trainer.steps():
                    pass
                trainer.note_validation(0.0)
                speeds.append(trainer.position.tokens_per_second)
    runs.mkdir(parents=True, exist_ok=True)
    speeds_by_head = {
        head: {threads: median(speeds[1:]) for threads, speeds in by_threads.items()}
        for head, by_threads in found.items()
    }
    speed_file(runs).write_text(json.dumps(speeds_by_head, indent=2) + "\n")
    return speeds_by_head


def speeds(runs: Path, heads: Iterable[str]) -> dict[str, dict[str, float]] | None:
    """What --speed found, if it has measured all of the heads."""
    if not speed_file(runs).is_file():
        return None
    found: dict[str, dict[str, float]] = json.loads(speed_file(runs).read_text())
    return found if found.keys() >= set(heads) else None


def speed_text(found: dict[str, dict[str, float]], heads: Iterable[str], picture: str) -> list[str]:
    unit = found["softmax"]["1"]
    one = ", ".join(f"`{head}` {found[head]['1'] / unit:.2f}" for head in heads)
    two = ", ".join(f"`{head}` {found[head]['2'] / found[head]['1']:.2f}" for head in heads)
    return [
        "## Speed",
        "",
        f"Training tokens per second of the whole model, one thread, as multiples of {unit:,.0f}, "
        f"those of `softmax`: {one}. With two threads instead of one: {two}. Medians of five "
        "rounds, the heads alternating, on an idle machine.",
        "",
        f"![Validation perplexity against time]({picture})",
        "",
        "Time is the number of training tokens divided by the speed; validation is not counted.",
        "",
    ]


def time_curves(runs: dict[str, RunFigures], found: dict[str, dict[str, float]]) -> bytes:
    """A PNG of validation perplexity against minutes of training with one thread."""
    curves = []
    for number, (head, run) in enumerate(runs.items()):
        seconds = COMMON["batch_size"] * COMMON["bptt"] / found[head]["1"]
        minutes = [epoch.step * seconds / 60 for epoch in run.epochs]
        perplexities = [epoch.valid_perplexity for epoch in run.epochs]
        curves.append((number, TITLES[head], minutes, perplexities))
    return perplexity_over_time(curves, "minutes of training, one CPU thread")


# The page


def published_text(heads: Iterable[str]) -> str:
    known = {head: PUBLISHED[head] for head in heads if head in PUBLISHED}
    return ", ".join(f"`{head}` {v:.2f} / {t:.2f}" for head, (v, t) in known.items())


def cpu_seconds(run: RunFigures) -> tuple[float, float] | None:
    """CPU seconds of all epochs with their validations, and of the training alone."""
    path = cpu_file(run.path)
    if not path.is_file():
        return None
    figures = json.loads(path.read_text())
    return sum(figures["epochs"]), sum(figures["training"])


def head_text(run: RunFigures) -> str:
    settings = run.settings
    names = ["n_trees", "root", "levels", "gate", "relearn_trees"] if run.head == "trees" else []
    parts = [f"{name}={settings[name]}" for name in names if settings[name]]
    parts += settings["head_option"]
    return ", ".join(["tied" if settings["tied"] else "not tied", *parts])


def head_rows(runs: dict[str, RunFigures]) -> list[str]:
    flat = cpu_seconds(runs["softmax"]) if "softmax" in runs else None
    rows = []
    for name, run in runs.items():
        assert run.final is not None
        cells = [
            f"`{name}`",
            head_text(run),
            f"{run.settings['learning_rate']:g}",
            f"{run.settings['head_learning_rate_factor']:g}",
            f"{run.final.valid_perplexity:.2f}",
            f"{run.final.test_perplexity:.2f}",
            f"{run.final.head_parameters / 1e6:.2f} M",
        ]
        own = cpu_seconds(run)
        if flat is None or own is None:
            cells += ["not measured"] * 3
        else:
            cells += [
                f"{own[0] / flat[0]:.2f}",
                f"{flat[1] / own[1]:.2f}",
                f"{own[0] / 60:.1f}",
            ]
        rows.append(f"| {' | '.join(cells)} |")
    return rows


def epoch_rows(runs: dict[str, RunFigures]) -> list[str]:
    count = max(len(run.epochs) for run in runs.values())
    lines = [
        f"| head | {' | '.join(f'epoch {n}' for n in range(1, count + 1))} |",
        f"| --- |{' ---: |' * count}",
    ]
    for name, run in runs.items():
        values = [f"{epoch.valid_perplexity:.2f}" for epoch in run.epochs]
        lines.append(f"| `{name}` | {' | '.join(values)} |")
    return lines


def cpu_name() -> str:
    from cpuinfo import get_cpu_info  # comes with pytest-benchmark

    return str(get_cpu_info().get("brand_raw", platform.processor()))


def page(runs: dict[str, RunFigures], tries: Sequence[str], name: Path) -> str:
    """The results in Markdown, with the pictures NAME.png and NAME-time.png."""
    first = next(iter(runs.values())).path
    summary = json.loads((first / "summary.json").read_text())
    found = speeds(first.parent, runs)
    heads = " ".join(runs)
    settings = ", ".join(
        f"{name.replace('_', ' ')} {value:g}"
        if isinstance(value, float)
        else f"{name.replace('_', ' ')} {value}"
        for name, value in COMMON.items()
        if name not in ("learning_rate", "device", "threads")
    )
    lines = [
        "# Heads on Penn Treebank, reduced",
        "",
        f"A small backbone, {COMMON['epochs']} epochs, one seed: **not converged**. The order of "
        "the heads here says nothing about their order at convergence.",
        "",
        "| head | options | learning rate | factor of the head | valid perplexity | "
        "test perplexity | head's own parameters | CPU time of an epoch / `softmax` | "
        "tokens per CPU second / `softmax` | CPU minutes of the run |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
        *head_rows(runs),
        f"| unigram | | | | {summary['unigram_valid_perplexity']:.2f} | "
        f"{summary['unigram_test_perplexity']:.2f} | | | | |",
        "",
        f"The same for all heads: {settings}; a backbone of "
        f"{summary['backbone_parameters'] / 1e6:.2f} M parameters, embeddings included.",
        "",
        "CPU time is that of the process, which has one thread, with other load on the machine; an "
        "epoch includes its validation, tokens per second are those of the training alone.",
        "",
        "## Validation perplexity by epoch",
        "",
        *epoch_rows(runs),
        "",
        f"![Validation perplexity by epoch]({name.name}.png)",
        "",
        *(speed_text(found, runs, f"{name.name}-time.png") if found else []),
    ]
    if tries:
        lines += [
            "## Learning rates tried",
            "",
            f"{TRIED_EPOCHS} epochs on the first {TRIED_TOKENS['train']:,} tokens, validated on "
            f"the first {TRIED_TOKENS['valid']:,}; other settings as above.",
            "",
            *tries,
            "",
            CHOICE + (PLIF_CHOICE if "plif" in runs else ""),
            "",
        ]
    if published := published_text(runs):
        lines += [
            "## Published, at convergence",
            "",
            f"Validation / test perplexity of the full models: {published}. These are means of ten "
            "seeds after hundreds of epochs with the settings of the presets `ptb-*`: another "
            "model and another optimizer, so they do not compare with the figures above.",
            "",
        ]
    made_by = ["--tries"] * bool(tries) + ["--speed"] * bool(found)
    made_by.append(f"--save benchmarks/results/{name.name}")
    lines += [
        "## Made by",
        "",
        *(
            f"    python -m benchmarks.ptb --data ptb/ --runs runs/ptb --heads {heads} {do}"
            for do in made_by
        ),
        "",
        f"{cpu_name()}, one thread, torch {torch.__version__}, Python "
        f"{platform.python_version()}, {date.today()}.",
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True, help="folder of Penn Treebank")
    parser.add_argument("--runs", type=Path, required=True, help="folder for the runs")
    parser.add_argument("--heads", nargs="+", choices=HEADS, default=list(HEADS))
    parser.add_argument("--tries", action="store_true", help="try learning rates, then end")
    parser.add_argument("--speed", action="store_true", help="time training steps, then end")
    parser.add_argument("--save", type=Path, help="write NAME.md and pictures", metavar="NAME")
    arguments = parser.parse_args()
    if arguments.tries:
        make_tries(arguments.data, arguments.runs, arguments.heads)
        print("\n".join(tries_table(arguments.runs, arguments.heads)))
        return
    if arguments.speed:
        print(measure_speed(arguments.data, arguments.runs, arguments.heads))
        return
    for head in arguments.heads:
        run = arguments.runs / head
        train_once(TrainConfig(data=str(arguments.data), run=str(run), **COMMON | HEADS[head]))
    comparison = compare(arguments.runs / head for head in arguments.heads)
    print(to_markdown(comparison))
    if arguments.save:
        name = arguments.save
        runs = dict(zip(arguments.heads, comparison.runs, strict=True))
        name.with_suffix(".png").write_bytes(rendered(validation_curves(comparison)))
        if found := speeds(arguments.runs, arguments.heads):
            name.with_name(f"{name.name}-time.png").write_bytes(time_curves(runs, found))
        figures = {
            head: {"valid": run.valid_perplexity, "test": run.test_perplexity}
            for head, run in runs.items()
        }
        name.with_suffix(".json").write_text(json.dumps(figures, indent=2) + "\n")
        text = page(runs, tries_table(arguments.runs, arguments.heads), name)
        name.with_suffix(".md").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
