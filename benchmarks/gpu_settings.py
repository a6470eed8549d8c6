"""Sizes and contestants of benchmarks.gpu by name. Does not import torch: benchmarks.gpu_proof
lists them before anything is built."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Setting:
    """Sizes of a step.

    Attributes:
        rows, features, classes: numbers of rows, N, features, D, and classes, V.
        trees: number of binary trees, T.
        wide_trees, root: number of trees, T, and width of the root, C, of the wide heads.
        dtype: dtype of input and weights.
        intervals: number of intervals of the piecewise linear functions, K.
        elements: number of elements of the piecewise linear function alone, and of the copy that
            measures the bandwidth.
        product: rows and columns of the matrices of the reference product.
        rounds: number of timed steps.
    """

    rows: int
    features: int
    classes: int
    trees: int = 8
    wide_trees: int = 4
    root: int = 1024
    dtype: str = "bfloat16"
    intervals: int = 10_000
    elements: int = 2**27
    product: int = 8192
    rounds: int = 20

    def __str__(self) -> str:
        return f"N = {self.rows}, D = {self.features}, V = {self.classes}, {self.dtype}"


TINY = "tiny"
"""Checks on a CPU, in seconds, that everything runs."""

SETTINGS = {
    "4096x128k": Setting(8192, 4096, 128_256),
    "2304x256k": Setting(8192, 2304, 256_000),
    "768x50k": Setting(16_384, 768, 50_257, root=256),
    TINY: Setting(40, 64, 300, 3, 2, 16, "float32", 100, 2**12, 64, 3),
}


@dataclass(frozen=True)
class Entry:
    """A contestant.

    Attributes:
        title: title in tables.
        kind: name of the function that builds it; see benchmarks.gpu_contestants.
        options: arguments of that function.
        package: distribution that it needs.
        seconds: time limit of its process, instead of the default.
    """

    title: str
    kind: str
    options: Mapping[str, Any] = field(default_factory=dict)
    package: str | None = None
    seconds: float | None = None

    @property
    def ours(self) -> bool:
        return self.kind in ("paths", "wide", "head", "function")


def _paths() -> Iterator[tuple[str, Entry]]:
    """A contestant of binary trees, by the share of features that each tree reads, and how they are
    drawn."""
    for part in (4, 2):
        for recipe in ("huffman", "random"):
            for block in (1, 16):
                name = f"{recipe}-{part}" + ("-blocks" if block > 1 else "")
                kind = "Huffman" if recipe == "huffman" else "balanced"
                drawn = f"blocks of {block}" if block > 1 else "single features"
                yield (
                    name,
                    Entry(
                        f"{kind} trees, S = D/{part}, {drawn}",
                        "paths",
                        {"recipe": recipe, "part": part, "block": block},
                    ),
                )


CONTESTANTS: dict[str, Entry] = {
    **dict(_paths()),
    "huffman-4-dense": Entry(
        "Huffman trees, S = D/4, single features, dense gradients",
        "paths",
        {"recipe": "huffman", "part": 4, "block": 1, "sparse": False},
    ),
    "wide-32": Entry("wide trees, groups of 32 leaves", "wide", {"leaf": 32}),
    "wide-128": Entry("wide trees, groups of 128 leaves", "wide", {"leaf": 128}),
    "wide-binary": Entry("wide root over binary nodes", "wide", {"leaf": 1}),
    "leaves": Entry(
        "trees of two levels, one output embedding for all leaves",
        "wide",
        {"levels": 2, "node_vectors": "leaves"},
    ),
    "leaves-dense": Entry(
        "the same, dense gradients",
        "wide",
        {"levels": 2, "node_vectors": "leaves", "sparse": False},
    ),
    "plif-function": Entry("PLIF of float32 elements by itself", "function"),
    "softmax": Entry("head `softmax`", "head", {"head": "softmax"}),
    "plif": Entry("head `plif`", "head", {"head": "plif"}),
    "sigsoftmax": Entry("head `sigsoftmax`", "head", {"head": "sigsoftmax"}),
    "eager": Entry("F.linear + F.cross_entropy", "flat", {"loss": "eager"}),
    "compiled": Entry("torch.compile of it", "flat", {"loss": "compiled"}),
    "cut": Entry("cut-cross-entropy", "flat", {"loss": "cut"}, "cut-cross-entropy"),
    "liger": Entry("Liger", "flat", {"loss": "liger"}, "liger-kernel"),
    "quack": Entry("QuACK, not tuned", "flat", {"loss": "quack"}, "quack-kernels"),
    "chunked": Entry("F.linear_cross_entropy", "flat", {"loss": "chunked"}),
    "adaptive": Entry("AdaptiveLogSoftmaxWithLoss", "adaptive"),
}
"""The contestants: first those of hstree, kernels before whole heads; then the baselines."""

EAGER = "eager"

FAULTS: dict[str, Entry] = {
    "crash": Entry("a contestant that crashes", "crash"),
    "hang": Entry("a contestant that hangs", "hang", seconds=2.0),
}
"""Only in the setting `tiny`, to check that failures do not affect other contestants."""


def contestants(setting: str) -> dict[str, Entry]:
    """The contestants of a setting, by name, in the order of the tables."""
    if setting != TINY:
        return CONTESTANTS
    return {"crash": FAULTS["crash"], **CONTESTANTS, "hang": FAULTS["hang"]}
