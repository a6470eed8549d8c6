"""Perplexities of a run as pictures."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from hstree.lm._pictures import line_style, panels, perplexity_axes, picture
from hstree.lm.runs import EpochRecord, RunResults, perplexity


def learning_curve(records: Sequence[EpochRecord], unigram_loss: float, title: str) -> bytes:
    """A PNG of training and validation perplexity by epoch (at least one), the perplexity of the
    unigram distribution on the validation text, whose loss is in nats per token, and a line where
    averaging of the weights begins."""
    figure, axes = panels(6.4, 4.2)
    epochs = [record.epoch for record in records]
    train = [record.train_perplexity for record in records]
    name = "training, from sampled classes" if records[0].sampled else "training"
    axes.plot(epochs, train, "o-", color="#4c78a8", label=name, ms=4)
    valid = [record.valid_perplexity for record in records]
    axes.plot(epochs, valid, "s-", color="#e45756", label="validation", ms=4)
    best = min(range(len(valid)), key=valid.__getitem__)
    axes.annotate(
        f"{valid[best]:.1f}",
        (epochs[best], valid[best]),
        (0, 7),
        textcoords="offset points",
        ha="center",
        color="#e45756",
    )
    averaged = [record.epoch for record in records if record.averaged]
    if averaged:
        style = {"color": "#54a24b", "ls": ":", "lw": 1.5}
        axes.axvline(averaged[0] - 0.5, **style, label="averaging of the weights begins")
    unigram = perplexity(unigram_loss)
    name = f"unigram model, validation ({unigram:.1f})"
    axes.axhline(unigram, color="#767676", ls="--", lw=1, label=name)
    perplexity_axes(axes)
    axes.set_ylabel("perplexity per token (log scale)")
    axes.set_title(title, fontsize=10)
    axes.legend(loc="upper right", frameon=False)  # a search for the best place can take long
    return picture(figure)


def against_time(runs: Sequence[RunResults]) -> bytes:
    """A PNG of validation perplexity against training time, with a curve for each run, named by
    its head. Every run has a finished epoch."""
    figure, axes = panels(6.4, 4.2)
    longest = max(sum(epoch.seconds for epoch in run.epochs) for run in runs)
    unit, seconds = ("minutes", 60) if longest > 180 else ("seconds", 1)
    for number, run in enumerate(runs):
        times = [total / seconds for total in accumulate(epoch.seconds for epoch in run.epochs)]
        valid = [epoch.valid_perplexity for epoch in run.epochs]
        axes.plot(times, valid, "o", **line_style(number), label=f"head {run.head}", ms=4)
    perplexity_axes(axes)
    axes.set_xlim(left=0)
    axes.set_xlabel(f"training time, {unit}")
    axes.set_ylabel("validation perplexity per token (log scale)")
    axes.legend(loc="upper right", frameon=False)
    return picture(figure)
