"""Trees beside softmaxes on Penn Treebank, at equal backbone, text and epochs.

    python -m benchmarks.trees_study --data ptb/ --runs runs/trees-study

makes the runs that are missing in benchmarks/results/trees-study.json, in the order of their
importance, and the page beside it. The learning rate of every contender is chosen among several
with the first seed, then further seeds follow. A run that was interrupted is resumed. Each run has
one thread; its cost is the CPU time of its process.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.studies.command import Study, parser, work
from benchmarks.studies.measure import text_name
from benchmarks.studies.plan import Contender, Run
from benchmarks.studies.training import measured_run
from benchmarks.trees_page import page, pictures
from hstree.data import load_corpus
from hstree.runs import TrainConfig

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
ELSEWHERE = {"device": "cpu", "threads": 1, "save_interval": 120.0}
"""Settings without an effect on the result."""

FACTOR, RATE = "head_learning_rate_factor", "learning_rate"
SOFTMAX_FACTORS, TREE_FACTORS = (0.5, 1.0, 2.0), (4.0, 8.0, 16.0)
RATES = (0.001, 0.002, 0.004)
TREES, CHILDREN = (1, 2, 4, 8), (64, 128, 256, 512, 1024)
RELEARNED = {"": (), "relearn-2": (2,), "relearn-2-3": (2, 3)}


def leaves(n_trees: int, root: int, relearn: str = "", tied: bool = False) -> dict[str, Any]:
    """Settings of trees whose leaves share one output embedding."""
    settings = {
        "head": "trees",
        "n_trees": n_trees,
        "root": root,
        "levels": 2,
        "gate": "context",
        "head_option": ("node_vectors=leaves",),
    }
    if RELEARNED[relearn]:
        settings["relearn_trees"] = RELEARNED[relearn]
    return settings | ({"tied": True} if tied else {})


def leaves_name(n_trees: int, root: int, relearn: str = "", tied: bool = False) -> str:
    """Such as leaves-4x256-relearn-2-tied."""
    parts = [f"leaves-{n_trees}x{root}", relearn, "tied" if tied else ""]
    return "-".join(part for part in parts if part)


def _leaves_title(n_trees: int, root: int, relearn: str, tied: bool) -> str:
    trees = "one tree" if n_trees == 1 else f"{n_trees} trees"
    epochs = ", ".join(map(str, RELEARNED[relearn]))
    parts = [
        f"{trees}, C = {root:,}, shared leaves",
        f"re-learned before epoch {epochs}" if epochs else "",
        "tied" if tied else "",
    ]
    return ", ".join(part for part in parts if part)


def _free(n_trees: int, root: int, **more: Any) -> dict[str, Any]:
    gate = "context" if n_trees > 1 else "uniform"
    return {"head": "trees", "n_trees": n_trees, "root": root, "gate": gate} | more


def _all() -> Iterator[Contender]:
    factors = {FACTOR: TREE_FACTORS}

    def flat(name: str, title: str, **settings: Any) -> Contender:
        swept = {RATE: RATES} if settings.get("tied") else {FACTOR: SOFTMAX_FACTORS}
        return Contender(name, title, COMMON | settings, swept)

    def shared(n_trees: int, root: int, relearn: str = "", tied: bool = False) -> Contender:
        return Contender(
            leaves_name(n_trees, root, relearn, tied),
            _leaves_title(n_trees, root, relearn, tied),
            COMMON | leaves(n_trees, root, relearn, tied),
            {RATE: RATES, **factors} if tied else factors,
        )

    first = [
        flat("softmax", "softmax", head="softmax"),
        shared(4, 256, "relearn-2"),
        shared(4, 1024, "relearn-2"),
        flat("softmax-tied", "softmax, tied", head="softmax", tied=True),
        shared(4, 256, "relearn-2", tied=True),
    ]
    yield from first
    adaptive = {"head": "adaptive"}
    second = {
        "adaptive-1024": ("adaptive softmax, 1,024 in the head", adaptive, "cutoffs=[1024]"),
        "adaptive-2000": ("adaptive softmax, 2,000 and 6,000", adaptive, "cutoffs=[2000,6000]"),
        "sampled": ("sampled softmax, 1,024 negatives", {"head": "sampled"}, "negatives=1024"),
        "tree": ("one tree, C = 256, binary below", _free(1, 256), None),
        "trees": ("4 trees, C = 256, binary below", _free(4, 256), None),
        "two-levels-256": ("one tree, C = 256, two levels", _free(1, 256, levels=2), None),
        "two-levels-1024": ("one tree, C = 1,024, two levels", _free(1, 1024, levels=2), None),
    }
    for name, (title, settings, option) in second.items():
        options = {"head_option": (option,)} if option else {}
        yield Contender(name, title, COMMON | settings | options, factors, group=1)
    done = {contender.name for contender in first}
    for tied in (False, True):
        like = leaves_name(4, 256, "relearn-2", tied)
        for relearn in RELEARNED:
            for n_trees in TREES:
                for root in CHILDREN:
                    name = leaves_name(n_trees, root, relearn, tied)
                    if name in done:
                        continue
                    title = _leaves_title(n_trees, root, relearn, tied)
                    settings = COMMON | leaves(n_trees, root, relearn, tied)
                    yield Contender(name, title, settings, like=like, seeds=1, group=2)


CONTENDERS: Sequence[Contender] = tuple(_all())
STUDY = Study("trees-study", CONTENDERS, page, pictures)


def main() -> None:
    arguments = parser(__doc__, STUDY)
    arguments.add_argument("--data", type=Path, help="folder of Penn Treebank")
    arguments.add_argument("--runs", type=Path, help="folder for the runs in work")
    arguments.add_argument("--keep", action="store_true", help="keep the folders of finished runs")
    given = arguments.parse_args()

    def prepare() -> tuple[str, Any]:
        if given.data is None or given.runs is None:
            arguments.error("expected --data and --runs")
        corpus = load_corpus(given.data)

        def measure(run: Run) -> dict[str, Any]:
            folder = given.runs / run.name
            config = TrainConfig(
                data=str(given.data), run=str(folder), seed=run.seed, **run.settings, **ELSEWHERE
            )
            return measured_run(config, corpus, keep=given.keep)

        return text_name(corpus), measure

    work(STUDY, given, prepare)


if __name__ == "__main__":
    main()
