"""Output layers at 100,000 classes and more: perplexity against seconds of training, and memory.

    python -m benchmarks.large_text --save FOLDER
    python -m benchmarks.large_vocabulary --data FOLDER
    python -m benchmarks.large_vocabulary --data FOLDER --times

The second command makes the runs that are missing in benchmarks/results/large-vocabulary.json.
Every run has one thread; validation is not counted in its CPU time, which is the same for all
heads. The learning rate of the head is chosen in shorter runs; the softmax makes too few steps in
them, and has the trainer's default. The rate does not fall during a run, so that every point of a
curve is what training until then gives. The third command times steps of all heads in turns, and
writes the page: other load slows down the runs by unequal shares, so that the page computes times
from steps.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from benchmarks import step_times
from benchmarks.large_vocabulary_page import VALID_TOKENS, report
from benchmarks.memory import peak_extra_bytes
from benchmarks.planned import Contender, PlannedRun, PlannedStudy, Records
from benchmarks.study_figures import rows_scored
from hstree.lm.config import TrainConfig
from hstree.lm.data import Corpus
from hstree.lm.train import Trainer, TrainingError, build_model, evaluate, own_parameter_count

TRAINING: dict[str, Any] = {
    "embedding_size": 200,
    "hidden_size": 200,
    "sparse_embedding": True,
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
TRIED_SECONDS, SECONDS, POINTS = 60, 500, 8
"""CPU seconds of a run that tries a rate, those of the others, and points of their curves, each
after twice the time of the one before."""
MEMORY_STEPS = 3


def _contender(name: str, title: str, *, factors: tuple[float, ...] = (), **own: Any) -> Contender:
    common = TRAINING | {FACTOR: 8.0, "seconds": TRIED_SECONDS if factors else SECONDS}
    sweeps = {FACTOR: factors} if factors else {}
    final = {"seconds": SECONDS} if factors else {}
    return Contender(name, title, common | own, sweeps, final=final, seeds=1)


def _all() -> Iterator[Contender]:
    tried = (4.0, 8.0)
    sampled = {"head": "sampled", "sparse": True, "head_option": ("negatives=128",)}
    title = "sampled softmax, 128 negatives and the batch's targets"
    yield _contender("sampled-in-batch", title, factors=tried, **sampled)
    more = sampled | {"head_option": ("negatives=512",)}
    title = "sampled softmax, 512 negatives and the batch's targets"
    yield _contender("sampled-in-batch-512", title, factors=tried, **more)
    forest = sampled | {"head": "forest", "n_trees": 4, "gate": "context"}
    title = "forest of 4 trees, C = 512, 128 negatives"
    yield _contender("forest-4", title, factors=tried, **forest)
    old = sampled | {"head_option": ("negatives=1024", "in_batch=false")}
    yield _contender("sampled", "sampled softmax, 1,024 negatives", factors=tried, **old)
    own = {"head": "trees", "root": 512, "leaf": 1, "sparse": True}
    for n_trees, gate in ((1, "uniform"), (4, "context")):
        title = "one tree" if n_trees == 1 else f"{n_trees} trees"
        own |= {"n_trees": n_trees, "gate": gate}
        title += ", C = 512, binary below"
        yield _contender(f"trees-{n_trees}-binary", title, factors=tried, **own)
    yield _contender("adaptive", "adaptive softmax", factors=(2.0, 4.0), head="adaptive")
    yield _contender("softmax", "softmax", head="softmax")
    dense = sampled | {"sparse_embedding": False}
    yield _contender("sampled-in-batch-dense", "the first, dense word embeddings", **dense)


CONTENDERS: Sequence[Contender] = tuple(_all())


def _config(settings: Mapping[str, Any], seed: int = 1) -> TrainConfig:
    own = {name: value for name, value in settings.items() if name != "seconds"}
    return TrainConfig(seed=seed, **own, **ELSEWHERE)


def measure(run: PlannedRun, corpus: Corpus, given: object = None) -> dict[str, Any]:
    """Train for the CPU time of the run.

    Returns ``valid``: perplexity of the first VALID_TOKENS validation tokens at the end, None if
    training diverged; ``points``: CPU ``seconds`` of training, ``tokens`` seen and ``valid``;
    ``head_parameters``; ``rows`` of ``rows_scored``; ``bytes``: parameters of the head, and what
    the first steps add to the process, None in a run that tries a rate.
    """
    seconds, config = run.settings["seconds"], _config(run.settings, run.seed)
    torch.set_num_threads(ELSEWHERE["threads"])
    statistics = corpus.statistics()
    model = build_model(config, len(corpus.vocabulary), statistics)

    def first_steps() -> None:
        for _ in islice(step_times.endless_steps(Trainer(model, corpus, config)), MEMORY_STEPS):
            pass

    extra = None
    if seconds >= SECONDS:
        extra = peak_extra_bytes(first_steps)
        model = build_model(config, len(corpus.vocabulary), statistics)
    parameters = own_parameter_count(model.head, model.backbone)
    figures: dict[str, Any] = {
        "head_parameters": parameters,
        "rows": rows_scored(model.head, statistics.frequencies, config.batch_size * config.bptt),
        "bytes": None if extra is None else extra + 4 * parameters,
        "points": [],
    }
    trainer, valid = Trainer(model, corpus, config), corpus.valid[:VALID_TOKENS]
    due = [seconds / 2**n for n in range(POINTS if seconds >= SECONDS else 1)]
    tokens, spent = 0, 0.0
    begin = time.process_time()
    try:
        for step in step_times.endless_steps(trainer):
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


def _time_steps(corpus: Corpus, records: Records) -> None:
    configs = {contender.name: _config(contender.settings) for contender in CONTENDERS}
    step_times.save(step_times.measure(configs, corpus), records.path)


STUDY = PlannedStudy(
    "large-vocabulary",
    CONTENDERS,
    measure,
    report,
    [
        "python -m benchmarks.large_text --save FOLDER",
        "python -m benchmarks.large_vocabulary --data FOLDER",
        "python -m benchmarks.large_vocabulary --data FOLDER --times",
    ],
    time_steps=_time_steps,
)

if __name__ == "__main__":
    STUDY.main(__doc__, Path(__file__).parent / "results")
