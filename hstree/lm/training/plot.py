"""The learning curve as a picture."""

from __future__ import annotations

from collections.abc import Sequence

from hstree.lm._pictures import new_figure, picture
from hstree.lm.runs import EpochRecord, perplexity


def learning_curve(records: Sequence[EpochRecord], unigram_loss: float, title: str) -> bytes:
    """A PNG of training and validation perplexity by epoch, the unigram perplexity of the
    validation text, and a line where averaging of the weights begins.

    Args:
        records: one for each epoch, at least one.
        unigram_loss: loss of the unigram distribution on the validation text, nats per token.
        title: title of the picture.
    """
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

    figure = new_figure(6.4, 4.2)
    axes = figure.add_subplot()
    epochs = [record.epoch for record in records]
    axes.plot(
        epochs,
        [record.train_perplexity for record in records],
        "o-",
        color="#4c78a8",
        label="training, from sampled classes" if records[0].sampled else "training",
        ms=4,
    )
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
        axes.axvline(
            averaged[0] - 0.5,
            color="#54a24b",
            ls=":",
            lw=1.5,
            label="averaging of the weights begins",
        )
    unigram = perplexity(unigram_loss)
    axes.axhline(
        unigram, color="#767676", ls="--", lw=1, label=f"unigram model, validation ({unigram:.1f})"
    )
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 1.5, 2, 3, 5, 7)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    axes.set_xlabel("epoch (passes over the training text)")
    axes.set_ylabel("perplexity per token (log scale)")
    axes.set_title(title, fontsize=10)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    return picture(figure)
