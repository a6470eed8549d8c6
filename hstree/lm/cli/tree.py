"""``hstree tree build | describe | draw``."""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from hstree._files import write_atomic
from hstree.heads import TreeEnsemble
from hstree.heads.trees import TreeShape
from hstree.lm._arguments import Argument, output_file
from hstree.lm._messages import quoted
from hstree.lm._terminal import fold, show
from hstree.lm.data import Vocabulary, load_corpus
from hstree.lm.draw import draw_tree
from hstree.lm.runs import TrainConfig, load_run
from hstree.lm.runs.flags import add_config_arguments, config_values
from hstree.trees import Tree, build_tree
from hstree.trees import describe as description

_BUILD = """\
Build a tree over the words of a corpus and save it as TREE (safetensors) and its words as
TREE.vocabulary.txt. Clustered trees use word vectors, computed from the neighbors of each word in
the corpus.
"""
_SOURCE = (
    Argument(
        "source",
        "file written by hstree tree build, or run folder of a model with trees",
        metavar="TREE|RUN",
    ),
    Argument("--index", "index of the tree in a run, from 0", 0, type=int, metavar="T"),
)
_BUILT = (Argument("output", "file to write; it must not exist", metavar="TREE"),)
_DESCRIBED = (
    *_SOURCE,
    Argument("--word", "show the path of a word", [], action="append", metavar="W"),
    Argument("--levels", "number of levels to show", 3),
)
_DRAWN = (
    *_SOURCE,
    Argument("--output", "picture to write", "tree.png", metavar="PNG"),
    Argument("--levels", "number of levels to draw", 4),
)
_SETTINGS = (
    *("data", "column", "min_count", "max_vocabulary", "tokenizer"),
    *("recipe", "root", "leaf", "levels", "seed"),
)


def add_command(commands: Any) -> None:
    parser = commands.add_parser("tree", help="build, describe or draw trees over words")
    subcommands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    build = subcommands.add_parser("build", help="build a tree and save it", description=_BUILD)
    describe = subcommands.add_parser("describe", help="show the sizes and depths of a tree")
    draw = subcommands.add_parser("draw", help="draw the top levels of a tree and their words")
    for command, arguments, handler in (
        (build, _BUILT, _build),
        (describe, _DESCRIBED, _describe),
        (draw, _DRAWN, _draw),
    ):
        for argument in arguments:
            argument.add(command)
        command.set_defaults(handler=handler)
    add_config_arguments(build, only=_SETTINGS)


@dataclass(frozen=True)
class _Source:
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


def _open(arguments: argparse.Namespace) -> _Source:
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
    return _Source(tree, vocabulary, str(path))


def _open_run(path: Path, index: int) -> _Source:
    run = load_run(path)
    head = run.model.head
    if not isinstance(head, TreeEnsemble):
        raise ValueError(f"{path}: the head {head.name!r} of this run has no trees")
    trees: list[Tree] = head.trees
    if not 0 <= index < len(trees):
        raise ValueError(f"--index: expected 0 to {len(trees) - 1} for {path}, got {index}")
    return _Source(trees[index], run.vocabulary, f"{path}, tree {index + 1} of {len(trees)}")


def _build(arguments: argparse.Namespace) -> int:
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
    show(_report(_Source(tree, vocabulary, str(output))))
    return 0


def _report(source: _Source, levels: int = 3) -> str:
    shape = description(source.tree, source.frequencies, source.words, levels)
    return f"{source.title}\n\n{shape}"


def _describe(arguments: argparse.Namespace) -> int:
    source = _open(arguments)
    lines = [_report(source, arguments.levels)]
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
    source = _open(arguments)
    output = output_file("--output", arguments.output, ".png")
    draw_tree(source.tree, source.words, output, arguments.levels, source.frequencies)
    print(fold(f"picture of {source.title}: {output}", sys.stdout))
    return 0
