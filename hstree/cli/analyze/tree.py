"""``hstree analyze tree``."""

from __future__ import annotations

import argparse
import dataclasses
from typing import TYPE_CHECKING, Any

from ..arguments import add_config_arguments, add_run_argument, config_values, count
from ..results import add_output_argument, publish, results_folder
from ..runs import run_corpus, run_names

if TYPE_CHECKING:
    from hstree.data import Vocabulary
    from hstree.heads import TreeEnsemble

_DESCRIPTION = """\
What the trees of a run do: which words each of them puts together, how far they agree, and where
on their paths the loss on the test text arises, level by level, for each tree and the mixture; and
the loss by frequency of the word, beside that of other runs of any head. Without --data: the text
that the run was trained on.
"""


def add_command(commands: Any) -> None:
    """Register the command."""
    parser = commands.add_parser(
        "tree", help="words, agreement and losses of trees", description=_DESCRIPTION
    )
    add_run_argument(parser)
    parser.add_argument(
        "--against",
        metavar="RUN",
        nargs="+",
        default=[],
        help="runs of any head over the same words, whose loss by frequency is shown beside",
    )
    parser.add_argument(
        "--word",
        action="append",
        metavar="W",
        help="show what stands nearest to this word in each tree; may be repeated (default: the "
        "most frequent words that no tree has right under its root)",
    )
    options = (
        ("clusters", 8, "heaviest clusters to show of each tree"),
        ("words", 10, "words to show of a cluster, and nearest words"),
    )
    for name, default, text in options:
        parser.add_argument(
            f"--{name}",
            type=count,
            default=default,
            metavar="N",
            help=f"{text} (default: {default})",
        )
    add_config_arguments(parser, only=("data", "device", "threads"))
    add_output_argument(parser, "results/tree")
    parser.set_defaults(handler=_run)


def _run(arguments: argparse.Namespace) -> int:
    from hstree import analysis
    from hstree.training import TrainConfig, choose_device, load_run, set_threads

    settings = TrainConfig(**config_values(arguments))
    set_threads(settings)
    device = choose_device(settings.device)
    paths = [arguments.directory, *arguments.against]
    names = run_names(paths)
    runs = {name: load_run(path, device) for name, path in zip(names, paths, strict=True)}
    own = names[0]
    try:
        head = analysis.check_tree_head(runs[own].model)
    except ValueError as error:
        raise ValueError(f"{arguments.directory}: {error}") from None
    vocabulary = runs[own].vocabulary
    for name, run in runs.items():
        if run.vocabulary != vocabulary:
            raise ValueError(f"--against: expected the words of {own}, got others in {name}")
    chosen = _chosen_words(arguments.word, head, vocabulary)
    corpus = run_corpus(runs[own], settings.data)
    folder = results_folder(arguments)

    frequencies, trees, words = vocabulary.frequencies, head.trees, vocabulary.words
    clusters = [
        analysis.heaviest_clusters(tree, frequencies, arguments.clusters, arguments.words)
        for tree in trees
    ]
    siblings = {
        word: [
            analysis.nearest_classes(tree, vocabulary[word], frequencies, arguments.words)
            for tree in trees
        ]
        for word in chosen
    }
    loss = analysis.tree_loss(runs[own].model, corpus.test)
    bins = {
        name: analysis.frequency_bins(analysis.class_losses(run.model, corpus.test), frequencies)
        for name, run in runs.items()
    }
    tables = [analysis.tree_table(loss, trees, frequencies), analysis.level_table(loss)]
    pictures = {"tree-loss-by-level.png": analysis.level_picture(loss)}
    data: dict[str, Any] = {
        "text": corpus.name,
        "loss": {
            "tokens": loss.tokens,
            "levels": analysis.level_names(loss),
            "parts": loss.parts.tolist(),
            "reached": loss.reached.tolist(),
            "uniform": loss.uniform,
            "mixture": loss.mixture,
            "gate": loss.gate.tolist(),
            "gate_perplexity": loss.gate_perplexity,
        },
    }
    notes = [
        f"{loss.tokens:,} tokens of the test text of {corpus.name}, read as one stream: "
        f"perplexities differ a little from those of hstree evaluate, which cuts it into "
        f"several",
        f"gate {head.gate!r}: the weights spread over {loss.gate_perplexity:.2f} of {len(trees)} "
        f"trees (mean of exp entropy)",
    ]
    if len(trees) > 1:
        agreement = analysis.tree_agreement(trees, frequencies)
        tables += [analysis.mixture_table(loss), analysis.agreement_table(agreement)]
        pictures["tree-agreement.png"] = analysis.agreement_picture(agreement)
        data["agreement"] = {
            name: value if isinstance(value, int) else value.tolist()
            for name, value in vars(agreement).items()
        }
        notes += [
            "the trees were trained as a mixture, which lets each of them specialise: the loss of "
            "a tree by itself is not that of a tree trained alone",
            f"Spearman of depths: over {agreement.pairs:,} random pairs of words, of the depth of "
            f"the node where they part; most pairs part at a wide root",
        ]
    pictures["tree-loss-by-frequency.png"] = analysis.frequency_picture(bins)
    tables += [
        analysis.frequency_table(bins),
        analysis.cluster_table(clusters, words),
        analysis.sibling_table(siblings, words),
    ]
    data["frequency"] = {name: [vars(f) for f in found] for name, found in bins.items()}
    data["clusters"] = [[dataclasses.asdict(c) for c in found] for found in clusters]
    for found in data["clusters"]:
        for cluster in found:
            cluster["words"] = vocabulary.decode(cluster.pop("classes"))
    data["nearest"] = {
        word: [[[words[c], depth] for c, depth in near] for near in found]
        for word, found in siblings.items()
    }
    levels = analysis.level_names(loss)
    rows: list[dict[str, Any]] = [
        {"kind": "level", "run": own, "tree": t + 1, "where": name, "tokens": share, "loss": nats}
        for t in range(len(trees))
        for name, share, nats in zip(levels, loss.reached[t], loss.parts[t], strict=True)
    ]
    for row in rows:  # shares and means become counts and sums
        row["tokens"] = round(row["tokens"] * loss.tokens)
        row["loss"] *= loss.tokens
    rows += [
        {
            "kind": "frequency",
            "run": name,
            "tree": None,
            "where": f"ranks {f.first}-{f.last}",
            "tokens": f.tokens,
            "loss": f.loss,
        }
        for name, found in bins.items()
        for f in found
    ]
    publish(folder, "tree", f"The trees of {own}", tables, data, pictures, notes, rows=rows)
    return 0


def _chosen_words(given: list[str] | None, head: TreeEnsemble, vocabulary: Vocabulary) -> list[str]:
    """Words to look at. Raises ValueError for one that the run does not have."""
    import numpy as np

    from hstree.analysis import root_partition

    for word in given or ():
        if word not in vocabulary:
            raise ValueError(f"--word: {word!r} is not in the vocabulary")
    if given is not None:
        return list(dict.fromkeys(given))
    together = np.ones(len(vocabulary), bool)
    for tree in head.trees:
        partition = root_partition(tree, vocabulary.frequencies)
        together &= np.bincount(partition)[partition] > 1
    order = np.argsort(-vocabulary.frequencies, kind="stable")
    return [vocabulary.words[c] for c in order if together[c]][:6]
