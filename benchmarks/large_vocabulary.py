"""Output layers at 100,000 classes and more: perplexity against seconds of training, and memory.

    python -m benchmarks.large_text --save FOLDER
    python -m benchmarks.large_vocabulary --data FOLDER

The second command makes the runs that are missing in benchmarks/results/large-vocabulary.json, and
the page beside it. Every run has one thread and the same CPU time; validation is not counted. The
learning rate of the head is chosen in shorter runs; the softmax makes too few steps in them, and
has the trainer's default. It does not fall during a run, so that every point of a curve is what
training until then gives.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.large_vocabulary_page import page, pictures
from benchmarks.memory import peak_extra_bytes
from benchmarks.studies.command import Study, parser, work
from benchmarks.studies.measure import rows_scored, text_name
from benchmarks.studies.plan import Contender, Run
from hstree.data import Corpus, load_corpus
from hstree.runs import TrainConfig
from hstree.training import Trainer, TrainingError, build_model, evaluate
from hstree.training.build import own_parameter_count

TRAINING: dict[str, Any] = {
    "embedding_size": 200,
    "hidden_size": 200,
    "layers": 1,
    "dropout": 0.1,
    "dropout_input": 0.1,
    "epochs": 1000,  # the CPU time ends a run
    "learning_rate": 0.002,
    "schedule": "constant",
    "batch_size": 20,
    "bptt": 35,
}
ELSEWHERE = {"device": "cpu", "threads": 1}
FACTOR = "head_learning_rate_factor"
TRIED_SECONDS, SECONDS, POINTS = 60, 400, 8
"""CPU seconds of a run that tries a rate, those of the others, and points of their curves."""
VALID_TOKENS = 10_000
MEMORY_STEPS = 3


def _contender(
    name: str, title: str, *, factors: tuple[float, ...] = (), like: str | None = None, **own: Any
) -> Contender:
    common = TRAINING | {FACTOR: 8.0, "seconds": TRIED_SECONDS if factors or like else SECONDS}
    sweeps = {FACTOR: factors} if factors else {}
    final = {"seconds": SECONDS} if factors or like else {}
    return Contender(name, title, common | own, sweeps, like, final, seeds=1)


def _all() -> Iterator[Contender]:
    trees = {"head": "trees", "n_trees": 4, "root": 512, "sparse": True, "gate": "context"}
    like = "three-levels"
    yield _contender(
        "sampled",
        "sampled softmax, 1,024 negatives",
        factors=(2.0, 4.0),
        head="sampled",
        head_option=("negatives=1024", "sparse=true"),
    )
    yield _contender("adaptive", "adaptive softmax", factors=(2.0, 4.0), head="adaptive")
    title = "4 trees, C = 512, shared leaves"
    yield _contender(
        like, f"{title}, three levels", factors=(4.0, 8.0), levels=3, leaf=16, **trees
    )
    yield _contender("two-levels", title, like=like, levels=2, **trees)
    yield _contender("binary", "4 trees, C = 512, binary below", like=like, leaf=1, **trees)
    yield _contender("softmax", "softmax", head="softmax")

CONTENDERS: Sequence[Contender] = tuple(_all())
STUDY = Study("large-vocabulary", CONTENDERS, page, pictures)


def measure(run: Run, corpus: Corpus) -> dict[str, Any]:
    """Train for the CPU time of the run.

    Returns:
        ``valid``: perplexity of the first VALID_TOKENS validation tokens at the end, None if
        training diverged; ``points``: CPU ``seconds`` of training, ``tokens`` seen and ``valid``;
        ``head_parameters``; ``rows`` of ``rows_scored``; ``bytes``: parameters of the head, and
        what the first steps add to the process: gradients, optimizer state and workspaces, those
        of the backbone included.
    """
    settings = dict(run.settings)
    seconds = settings.pop("seconds")
    config = TrainConfig(seed=run.seed, **settings, **ELSEWHERE)
    torch.set_num_threads(ELSEWHERE["threads"])
    statistics = corpus.statistics()
    model = build_model(config, len(corpus.vocabulary), statistics)
    parameters = own_parameter_count(model.head, model.backbone)

    def first_steps() -> None:
        for _ in _steps(Trainer(model, corpus, config), MEMORY_STEPS):
            pass

    extra = peak_extra_bytes(first_steps)
    model = build_model(config, len(corpus.vocabulary), statistics)
    figures: dict[str, Any] = {
        "head_parameters": parameters,
        "rows": rows_scored(model.head, statistics.frequencies),
        "bytes": None if extra is None else extra + 4 * parameters,
        "points": [],
    }
    trainer, valid = Trainer(model, corpus, config), corpus.valid[:VALID_TOKENS]
    every = seconds / (POINTS if seconds == SECONDS else 1)
    tokens, spent, due = 0, 0.0, every
    begin = time.process_time()
    try:
        for step_tokens in _steps(trainer):
            tokens += step_tokens
            spent += time.process_time() - begin
            if spent >= due:
                perplexity = math.exp(evaluate(model, valid))
                point = {"seconds": round(spent, 1), "tokens": tokens, "valid": perplexity}
                figures["points"].append(point)
                print(run.name, point, flush=True)
                due = spent + every
            if spent >= seconds:
                break
            begin = time.process_time()
    except TrainingError as error:
        print(run.name, error, flush=True)
        return figures | {"valid": None, "error": str(error)}
    return figures | {"valid": math.exp(evaluate(model, valid))}


def _steps(trainer: Trainer, most: int | None = None) -> Iterator[int]:
    """Make steps, epoch after epoch; yields the number of targets of each."""
    made = 0
    while True:
        for step in trainer.steps():
            yield step.tokens
            made += 1
            if made == most:
                return
        trainer.note_validation(0.0)


def main() -> None:
    arguments = parser(__doc__, STUDY)
    arguments.add_argument("--data", type=Path, help="folder of the text")
    given = arguments.parse_args()

    def prepare() -> tuple[str, Any]:
        if given.data is None:
            arguments.error("expected --data")
        corpus = load_corpus(given.data)
        return text_name(corpus), lambda run: measure(run, corpus)

    work(STUDY, given, prepare)


if __name__ == "__main__":
    main()
