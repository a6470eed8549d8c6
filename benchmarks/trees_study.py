"""Trees beside softmaxes on Penn Treebank, at equal backbone, text and epochs.

    python -m benchmarks.trees_study --data ptb/

makes the runs that are missing in benchmarks/results/trees-study.json, in the order of their
importance, and the page beside it. The learning rate of every contender is chosen among several
with the first seed, then further seeds follow. A run that was interrupted is resumed. Each run has
one thread, or with --device cuda a GPU. On an idle machine,

    python -m benchmarks.trees_study --data ptb/ --times

measures training steps of some of the heads in turns and those of every head alone, for the page.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks import step_times
from benchmarks.planned import Contender, PlannedRun, PlannedStudy, Records, named
from benchmarks.study_figures import measured_run
from benchmarks.trees_page import TIMED, is_full, report
from hstree.lm.config import TrainConfig
from hstree.lm.data import Corpus

RESULTS = Path(__file__).parent / "results"
COMMON: dict[str, Any] = {
    "embedding_size": 200,
    "hidden_size": 200,
    "layers": 1,
    "dropout": 0.2,
    "dropout_input": 0.2,
    "epochs": 5,
    "batch_size": 20,
    "bptt": 35,
    "optimizer": "adamw",
    "learning_rate": 0.002,
    "schedule": "cosine",
    "head_learning_rate_factor": 8.0,
}
SHORT = {"epochs": 2}
"""What differs in the runs that compare shapes."""
ELSEWHERE: dict[str, Any] = {"device": "cpu", "threads": 1, "save_interval": 120.0}
"""Settings without an effect on the result."""

FACTOR, RATE, DECAY = "head_learning_rate_factor", "learning_rate", "weight_decay"
SOFTMAX_FACTORS, TREE_FACTORS = (2.0, 4.0), (4.0, 8.0)
RATES = (0.002, 0.004)
TREES, CHILDREN = (1, 2, 4, 8), (64, 256, 1024)
MAIN, TIED, SHAPE = range(3)
"""Groups of contenders."""


def leaves(n_trees: int, root: int, tied: bool = False) -> dict[str, Any]:
    """Settings of trees whose leaves share one output embedding."""
    settings = {
        "head": "trees",
        "n_trees": n_trees,
        "root": root,
        "levels": 2,
        "gate": "context",
        "head_option": ("node_vectors=leaves",),
    }
    return settings | ({"tied": True} if tied else {})


def _leaves(
    n_trees: int,
    root: int,
    *,
    tied: bool = False,
    like: str | None = None,
    short: bool = False,
    **more: Any,
) -> Contender:
    trees = "one tree" if n_trees == 1 else f"{n_trees} trees"
    swept = {RATE: RATES} if tied else {}
    return Contender(
        f"leaves-{n_trees}x{root}" + "-tied" * tied + "-2-epochs" * short,
        f"{trees}, C = {root:,}, shared leaves" + ", tied" * tied,
        COMMON | leaves(n_trees, root, tied),
        {} if like else swept | {FACTOR: TREE_FACTORS},
        like,
        SHORT if short else {},
        **more,
    )


def _free(n_trees: int, root: int, **more: Any) -> dict[str, Any]:
    gate = "context" if n_trees > 1 else "uniform"
    own = {"head_option": ("node_vectors=free",)}
    return {"head": "trees", "n_trees": n_trees, "root": root, "gate": gate, **own, **more}


def _other(name: str, title: str, *, seeds: int = 3, **settings: Any) -> Contender:
    factors = TREE_FACTORS if settings["head"] == "trees" else SOFTMAX_FACTORS
    swept = {RATE: RATES} if settings.get("tied") else {FACTOR: factors}
    return Contender(name, title, COMMON | settings, swept, seeds=seeds)


def _more(
    name: str,
    title: str,
    factor: float,
    decay: float | None = None,
    *,
    seeds: int = 1,
    **settings: Any,
) -> Contender:
    """A contender with other regularization, and one factor."""
    what = "dropout" if decay is None else f"decay-{decay:g}"
    its = {} if decay is None else {DECAY: decay}
    return Contender(
        f"{name}-{what}",
        title if decay is None else f"{title}, weight decay {decay:g}",
        COMMON | settings | {FACTOR: factor} | its,
        {FACTOR: (factor,)},
        seeds=seeds,
    )


def _all() -> Iterator[Contender]:
    like = "leaves-4x256"
    yield _other("softmax", "softmax", head="softmax")
    yield _leaves(4, 256)
    yield _leaves(4, 1024, like=like, seeds=1)
    three = _leaves(4, 256, like=like, seeds=1)
    yield replace(
        three,
        name="leaves-4x256-three-levels",
        title=f"{three.title}, three levels, G = 16",
        settings=three.settings | {"levels": 3, "leaf": 16},
    )
    yield replace(
        three,
        name="leaves-4x256-groups",
        title=f"{three.title}, binary above groups of 16",
        settings=three.settings | {"levels": None, "leaf": 16},
        seeds=3,
    )
    yield _leaves(1, 256, like=like)
    one = "cutoffs=[1024]"
    yield _other(
        "adaptive", "adaptive softmax, 1,024 in the head", head="adaptive", head_option=(one,)
    )
    draws = ("negatives=1024", "in_batch=false")
    yield _other("sampled", "sampled softmax, 1,024 negatives", head="sampled", head_option=draws)
    for negatives in (128, 512):
        yield _other(
            f"sampled-in-batch-{negatives}",
            f"sampled softmax, {negatives} negatives and the batch's targets",
            head="sampled",
            head_option=(f"negatives={negatives}",),
        )
    forest = {"head": "forest", "n_trees": 4, "gate": "context"}
    sampled = {"head_option": ("negatives=512",)}
    title = "forest of 4 trees, C = 256, 512 negatives"
    yield _other("forest-sampled", title, seeds=1, **forest, **sampled)
    dropout = {"dropout": 0.4, "dropout_input": 0.4}
    yield _more("forest-sampled", f"{title}, dropout 0.4", 4.0, **forest, **sampled, **dropout)
    for decay in (0.05, 0.1, 0.3):
        seeds = 3 if decay == 0.1 else 1
        yield _more("forest-sampled", title, 4.0, decay, seeds=seeds, **forest, **sampled)
    tail = {"all_classes": 0.1}
    title = f"{title}, all classes in the last tenth"
    yield _more("forest-sampled-tail", title, 4.0, 0.1, seeds=2, **forest, **sampled, **tail)
    for n_trees, clusters in ((1, 256), (2, 256), (8, 256), (4, 64), (4, 1024)):
        trees = "one tree" if n_trees == 1 else f"{n_trees} trees"
        title = f"forest of {trees}, C = {clusters:,}, 512 negatives"
        shape = {"n_trees": n_trees}
        shape["head_option"] = ("negatives=512", f"clusters={clusters}")
        name = f"forest-sampled-{n_trees}x{clusters}"
        yield _more(name, title, 4.0, 0.1, **forest | shape)
    title = "forest of 4 trees, C = 256, all classes"
    yield _more("forest", title, 4.0, 0.1, seeds=3, **forest)
    for components in (5, 15):
        title = f"mixture of {components} softmaxes"
        option = (f"components={components}",)
        yield _more(f"mos-{components}", title, 8.0, 0.1, head="mos", head_option=option)
    draws = "sampled softmax, 512 negatives and the batch's targets"
    yield _more("sampled-in-batch-512", draws, 4.0, 0.1, head="sampled", **sampled)
    title = f"{draws}, all classes in the last tenth"
    yield _more("sampled-tail", title, 4.0, 0.1, head="sampled", **sampled, **tail)
    yield _more("softmax", "softmax", 8.0, 0.1, head="softmax")
    yield _more("leaves-4x256", "4 trees, C = 256, shared leaves", 8.0, 0.1, **leaves(4, 256))
    yield _other("tree", "one tree, C = 256, binary below", seeds=1, **_free(1, 256, leaf=1))
    yield _other("trees", "4 trees, C = 256, binary below", seeds=1, **_free(4, 256, leaf=1))
    yield _other("two-levels", "one tree, C = 256, two levels", seeds=1, **_free(1, 256, levels=2))
    yield replace(_other("softmax-tied", "softmax, tied", head="softmax", tied=True), group=TIED)
    yield _leaves(4, 256, tied=True, group=TIED)
    tied = "leaves-4x256-tied"
    yield _leaves(4, 1024, tied=True, like=tied, group=TIED)
    for name, title, its in (
        ("softmax", "softmax", {"head": "softmax"}),
        ("sampled-in-batch-512", draws, {"head": "sampled", **sampled}),
        ("forest-sampled", "forest of 4 trees, C = 256, 512 negatives", forest | sampled),
        ("leaves-4x256", "4 trees, C = 256, shared leaves", leaves(4, 256)),
    ):
        contender = _other(
            f"{name}-tied-decay-0.1",
            f"{title}, tied, weight decay 0.1",
            seeds=3 if name == "forest-sampled" else 1,
            **its | {"tied": True, DECAY: 0.1, FACTOR: 2.0},
        )
        yield replace(contender, sweeps={RATE: (0.004, 0.008)}, group=TIED)
    for n_trees in TREES:
        for root in CHILDREN:
            yield _leaves(n_trees, root, like=like, short=True, seeds=1, group=SHAPE)
            yield _leaves(n_trees, root, tied=True, like=tied, short=True, seeds=1, group=SHAPE)


CONTENDERS: Sequence[Contender] = tuple(_all())


def _config(settings: Mapping[str, Any], **more: Any) -> TrainConfig:
    return TrainConfig(**settings, **ELSEWHERE | more)


def measure(run: PlannedRun, corpus: Corpus, given: argparse.Namespace) -> dict[str, Any]:
    """Train a model in a folder of its own."""
    own = {"data": str(given.data), "run": str(given.runs / run.name), "seed": run.seed}
    return measured_run(_config(run.settings, device=given.device, **own), corpus)


def _time_steps(corpus: Corpus, records: Records) -> None:
    configs = {name: _config(named(CONTENDERS, name).settings) for name in TIMED}
    times = step_times.measure(configs, corpus)
    heads = {
        contender.name: step_times.head_share(_config(contender.settings), corpus)
        for contender in CONTENDERS
        if is_full(contender)
    }
    step_times.save(times | {"heads": heads}, records.path)


STUDY = PlannedStudy(
    "trees-study",
    CONTENDERS,
    measure,
    report,
    ["python -m benchmarks.trees_study --data ptb/"],
    time_steps=_time_steps,
    devices=("cpu", "cuda"),
)

if __name__ == "__main__":
    STUDY.main(__doc__, RESULTS)
