"""What the trees of an ensemble are worth alone, what mixing them gains, and how alike they err.

The loss of tree t over a text is the mean of -log P_t(y | h), that of the mixture with equal
weights of -log mean_t P_t(y | h), and that of the head of

    -log P(y | h) = -log sum_t pi_t(h) P_t(y | h).

A mixture of T equals is for no word more than log T behind its best tree, so what it gains depends
on whether the trees err at different words: on the correlation of their losses over the words of
the text. The trees were trained as a mixture, so each may specialize: the loss of a single tree is
not that of a tree trained alone. Without --data, the text that the run was trained on is read.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from hstree.heads import TreeEnsemble
from hstree.lm.model import LanguageModel, read_contexts
from hstree.lm.report import panels

from .report import DEVICE, TEXT, Measurement, Report, corpus_of, load_runs, record_table, row_table

FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True)
class TreeLoss:
    """Losses of an ensemble of T trees over a text, in nats per token."""

    tokens: int
    trees: FloatArray  # loss of each single tree, [T]
    uniform: float  # loss of the mixture of the trees with equal weights
    mixture: float  # loss of the head
    correlation: FloatArray  # Pearson's, of the losses of two trees over the tokens, [T, T]
    gate: FloatArray  # mean of pi, [T]
    gate_perplexity: float  # mean of exp(entropy of pi), the number of trees that the gate uses


@torch.no_grad()
def tree_loss(model: LanguageModel, tokens: Any) -> TreeLoss:
    """The losses of a :class:`hstree.heads.TreeEnsemble` over a text [n], n >= 2, read as one
    stream; every token except the first is a target. Raises ValueError for another head."""
    head = model.head
    if not isinstance(head, TreeEnsemble):
        raise ValueError(f"model: expected a head of trees, got the head {head.name!r}")
    losses, weights = [], []  # [N, T] of each window
    for hidden, target in read_contexts(model, tokens, length=512):
        hidden = head.encode(hidden)
        losses.append(-head.log_prob_by_tree(hidden, target).double().cpu())
        weights.append(head.log_gate(hidden).double().cpu())
    loss, log_gate = torch.cat(losses), torch.cat(weights)
    gate = log_gate.exp()
    entropy = -torch.where(gate > 0, gate * log_gate, 0.0).sum(1)
    apart = loss - loss.mean(0)
    apart /= apart.norm(dim=0)  # nan for a tree whose loss does not vary
    return TreeLoss(
        tokens=len(loss),
        trees=loss.mean(0).numpy(),
        uniform=float(-(-loss - math.log(head.n_trees)).logsumexp(1).mean()),
        mixture=float(-(log_gate - loss).logsumexp(1).mean()),
        correlation=(apart.T @ apart).numpy(),
        gate=gate.mean(0).numpy(),
        gate_perplexity=float(entropy.exp().mean()),
    )


def measure(arguments: argparse.Namespace) -> Report:
    ((name, run),) = load_runs(arguments).items()
    corpus = corpus_of(run, arguments)
    loss = tree_loss(run.model, corpus.test)
    head: Any = run.model.head
    mean, names = float(loss.trees.mean()), [f"tree {t + 1}" for t in range(head.n_trees)]
    losses: list[Any] = [*zip(names, loss.trees.tolist(), loss.gate.tolist(), strict=True)]
    losses = [(tree, of, None, weight) for tree, of, weight in losses]
    losses += [
        ("mean of the trees' losses", mean, None, None),
        ("mixture with equal weights", loss.uniform, mean - loss.uniform, None),
        ("mixture with the head's weights", loss.mixture, loss.uniform - loss.mixture, None),
    ]
    records = [
        {"": name, "loss": of, "perplexity": math.exp(of), "gain": gain, "mean weight": weight}
        for name, of, gain, weight in losses
    ]
    forms = {"loss": ",.4f", "perplexity": ",.2f", "gain": ",.4f", "mean weight": ".3f"}
    matrix = [(n, *row) for n, row in zip(names, loss.correlation.tolist(), strict=True)]
    tables = [
        record_table("Losses, and what mixing gains (nats per token)", records, forms),
        row_table("Correlation of the losses", ("", *names), matrix, None, "{:+.3f}".format),
    ]
    notes = [
        f"{loss.tokens:,} tokens of the test text of {corpus.name}, read as one stream: "
        "perplexities differ a little from those of hstree evaluate, which cuts it into several",
        f"gate {head.gate.name!r}: the weights spread over "
        f"{loss.gate_perplexity:.2f} of {len(names)} trees (mean of exp entropy)",
    ]
    return Report(f"The trees of {name}", tables, notes, vars(loss), {"loss": picture_of(loss)})


def picture_of(loss: TreeLoss) -> Any:
    """The losses of trees and mixtures, and the correlation of the losses of each pair of trees."""
    n = len(loss.trees)
    names = [f"tree {t + 1}" for t in range(n)]
    figure, (bars, matrix) = panels(9.0, 2.6 + 0.3 * n, 1, 2, grid=None)
    totals = [*loss.trees, loss.uniform, loss.mixture]
    bars.barh([*names, "equal weights", "mixture"], totals, color=["#0072B2"] * n + ["0.6"] * 2)
    for place, total in enumerate(totals):
        bars.text(total, place, f" {total:.2f}", va="center", fontsize=8)
    bars.invert_yaxis()
    bars.set(xlim=(0, 1.15 * max(totals)), xlabel="loss (nats per token)")
    image = matrix.imshow(loss.correlation, cmap="cividis", vmin=min(0, loss.correlation.min()))
    figure.colorbar(image, ax=matrix, shrink=0.8)
    matrix.set(xticks=range(n), yticks=range(n))
    matrix.set_xticklabels(names, rotation=40, ha="right")
    matrix.set_yticklabels(names)
    matrix.set_title("correlation of the losses", fontsize=9)
    return figure


COMMAND = Measurement(
    "tree",
    "losses of trees and mixture, correlation of errors",
    measure,
    (*TEXT, *DEVICE),
    runs=1,
    output="results/tree",
)
