"""The learning curve as a picture."""

from __future__ import annotations

from collections.abc import Sequence

from hstree.lm._pictures import panels, perplexity_axes, picture
from hstree.lm.runs import EpochRecord, perplexity


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
