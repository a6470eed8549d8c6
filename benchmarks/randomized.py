"""Does an ensemble of randomized trees beat one tree, and by what: copies, trees, feature subsets?

    python -m benchmarks.randomized --data ptb/

Binary trees over the most frequent words of Penn Treebank, and forests of softmaxes, on a small
LSTM, three seeds.
The command makes the runs that are missing in benchmarks/results/randomized.json, each with one
thread, and the page beside it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.planned import Contender, PlannedRun, PlannedStudy
from benchmarks.randomized_page import report
from hstree.heads import ForestSoftmax, Head, MixtureOfSoftmaxes, Softmax, TreeEnsemble
from hstree.lab import log_prob_rank
from hstree.lm.config import TrainConfig
from hstree.lm.data import Corpus, load_corpus
from hstree.lm.model import AWDLSTM, LanguageModel
from hstree.lm.train import Trainer, evaluate
from hstree.trees import build_ensemble

CLASSES, FEATURES, RANK_ROWS, TOKENS = 1000, 64, 2000, 300_000
CLUSTERS, START = 32, 0.05
"""Clusters of a tree of a forest; standard deviation of the first vectors of copies of one tree."""
TRAINING: dict[str, Any] = {
    "embedding_size": FEATURES,
    "hidden_size": FEATURES,
    "layers": 1,
    "dropout": 0.1,
    "dropout_input": 0.1,
    "epochs": 2,
    "learning_rate": 0.004,
    "schedule": "cosine",
    "batch_size": 20,
    "bptt": 35,
}
ELSEWHERE = {"device": "cpu", "threads": 1}
FACTOR = "head_learning_rate_factor"
FACTORS = {FACTOR: (2.0, 4.0, 8.0)}


def _trees(
    n_trees: int,
    recipe: str = "cluster",
    *,
    subset: int | None = None,
    gate: str = "uniform",
    identical: bool = False,
) -> Contender:
    settings = {
        "head": "trees",
        "recipe": recipe,
        "n_trees": n_trees,
        "subset": subset or FEATURES,
        "gate": gate,
        "identical": identical,
    }
    features = {None: "all features", FEATURES // 2: "D/2", FEATURES // 4: "D/4"}[subset]
    kind = "copies of one tree" if identical else "trees"
    title = f"{n_trees} {kind}" if n_trees > 1 else "one tree"
    parts = [f"{title}, {recipe}", features, "learned gate" if gate == "context" else ""]
    name = [recipe, str(n_trees), f"s{subset}" if subset else "", "copies" if identical else ""]
    name.append("gate" if gate == "context" else "")
    like = None if recipe == "cluster" and n_trees == 1 and subset is None else "cluster-1"
    return Contender(
        "-".join(part for part in name if part),
        ", ".join(part for part in parts if part),
        TRAINING | {FACTOR: 4.0} | settings,
        {} if like else FACTORS,
        like,
    )


def _forest(
    n_trees: int,
    recipe: str = "cluster",
    *,
    subset: int | None = None,
    gate: str = "context",
    identical: bool = False,
) -> Contender:
    gate = gate if n_trees > 1 else "uniform"
    found = _trees(n_trees, recipe, subset=subset, gate=gate, identical=identical)
    settings = dict(found.settings) | {"head": "forest", FACTOR: 4.0}
    first = found.name == "cluster-4-gate"
    return replace(
        found,
        name=f"forest-{found.name}",
        title=f"forest: {found.title}",
        settings=settings,
        sweeps=FACTORS if first else {},
        like=None if first else "forest-cluster-4-gate",
    )


def _all() -> Iterator[Contender]:
    half, quarter = FEATURES // 2, FEATURES // 4
    yield _trees(1)
    settings = TRAINING | {FACTOR: 1.0, "head": "softmax"}
    yield Contender("softmax", "softmax", settings, {FACTOR: (1.0, 2.0, 4.0)})
    yield _trees(4, identical=True)
    yield _trees(4)
    yield _trees(4, identical=True, gate="context")
    yield _trees(4, gate="context")
    yield _trees(4, identical=True, subset=half)
    yield _trees(8, identical=True, subset=half)
    for n_trees in (2, 4, 8, 16):
        yield _trees(n_trees, subset=half)
    for n_trees in (4, 8, 16):
        yield _trees(n_trees, subset=quarter)
    for n_trees in (2, 8, 16):
        yield _trees(n_trees)
    yield _trees(16, gate="context")
    yield _trees(8, subset=half, gate="context")
    for recipe in ("huffman", "random"):
        for n_trees in (1, 4, 16):
            yield _trees(n_trees, recipe)
        yield _trees(8, recipe, subset=half)
    yield _forest(4)
    for n_trees in (1, 2, 8, 16):
        yield _forest(n_trees)
    yield _forest(4, identical=True)
    yield _forest(4, gate="uniform")
    yield _forest(4, subset=half)
    yield _forest(8, subset=half)
    for n_trees in (1, 4):
        yield _forest(n_trees, "random")
    mixture = TRAINING | {FACTOR: 4.0, "head": "mos", "components": 4}
    yield Contender("mos-4", "mixture of 4 softmaxes", mixture, FACTORS)


CONTENDERS: Sequence[Contender] = tuple(_all())


def first_words(data: Path) -> Corpus:
    """The first TOKENS training tokens, in the words of the CLASSES most frequent ones."""
    corpus = load_corpus(data, max_vocabulary=CLASSES)
    return replace(corpus, train=corpus.train[:TOKENS])


def build_head(settings: Mapping[str, Any], corpus: Corpus, seed: int) -> Head:
    """The output layer of a run."""
    classes, statistics = len(corpus.vocabulary), corpus.statistics()
    frequencies = statistics.frequencies
    if settings["head"] == "softmax":
        return Softmax(FEATURES, classes, frequencies=frequencies)
    if settings["head"] == "mos":
        components = settings["components"]
        return MixtureOfSoftmaxes(FEATURES, classes, components=components, frequencies=frequencies)
    n_trees, recipe = settings["n_trees"], settings["recipe"]
    vectors = [statistics.vectors(n_features=32)] if recipe == "cluster" else None
    noise = {"noise": 0.3} if recipe == "cluster" and n_trees > 1 else {}
    different = 1 if settings["identical"] else n_trees
    forest = settings["head"] == "forest"
    shape = {"root": CLUSTERS, "levels": 2} if forest else {}
    trees = build_ensemble(recipe, classes, different, frequencies, vectors, seed, **noise, **shape)
    options = {"gate": settings["gate"], "frequencies": frequencies, "seed": seed}
    trees *= n_trees // different
    if forest:
        head = ForestSoftmax(FEATURES, classes, trees=trees, **options)
        _prepare(head, settings["subset"], settings["identical"], seed)
        return head
    return TreeEnsemble(FEATURES, classes, trees, subset_size=settings["subset"], **options)


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


def measure(run: PlannedRun, corpus: Corpus, given: object = None) -> dict[str, Any]:
    """Train a model; its perplexities, ``head_parameters``, the ``rank`` of log P over the first
    RANK_ROWS test contexts, and CPU ``seconds`` of an epoch."""
    settings = run.settings
    torch.set_num_threads(ELSEWHERE["threads"])
    torch.manual_seed(run.seed)
    config = TrainConfig(
        **{key: settings[key] for key in (*TRAINING, FACTOR)}, seed=run.seed, **ELSEWHERE
    )
    backbone = AWDLSTM(
        len(corpus.vocabulary),
        config.embedding_size,
        config.hidden_size,
        dropout=config.dropout,
        dropout_input=config.dropout_input,
    )
    head = build_head(settings, corpus, run.seed)
    model = LanguageModel(backbone, head)
    trainer, seconds = Trainer(model, corpus, config), 0.0
    for _ in range(config.epochs):
        begin = time.process_time()
        for _ in trainer.steps():
            pass
        seconds += time.process_time() - begin
        trainer.note_validation(0.0)
    return {
        "valid": math.exp(evaluate(model, corpus.valid)),
        "test": math.exp(evaluate(model, corpus.test)),
        "head_parameters": sum(parameter.numel() for parameter in head.parameters()),
        "rank": log_prob_rank(
            model, np.asarray(corpus.test), min(RANK_ROWS, len(corpus.test)), torch.float64
        ).press_rank,
        "seconds": seconds / config.epochs,
    }


STUDY = PlannedStudy(
    "randomized",
    CONTENDERS,
    measure,
    report,
    ["python -m benchmarks.randomized --data ptb/"],
    load=first_words,
)

if __name__ == "__main__":
    STUDY.main(__doc__, Path(__file__).parent / "results")
