"""Trees that are re-learned during training, from the mean hidden state before each word."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from hstree._progress import track
from hstree.heads import ForestSoftmax, Head, TreeEnsemble
from hstree.lm.data import Streams
from hstree.lm.models import LanguageModel, State
from hstree.lm.runs import ConfigError, TrainConfig
from hstree.trees import ContextMeans, tree_seed

from .distributed import Processes

WINDOW = 128  # time steps that are computed together
FITTED_CONTEXTS = 1 << 16  # to which the nodes above the leaf groups are fitted
SHAPE = ("root", "leaf", "levels")


def check_relearnable(head: Head) -> None:
    if isinstance(head, ForestSoftmax):
        return
    if isinstance(head, TreeEnsemble) and head.node_vectors == "leaves":
        return
    vectors = f" with node_vectors={head.node_vectors}" if isinstance(head, TreeEnsemble) else ""
    raise ConfigError(
        "--relearn-trees: expected the head 'forest', or 'trees' with --head-option "
        "node_vectors=leaves, whose words keep their vectors in other trees, got the head "
        f"{head.name!r}{vectors}"
    )


def relearn(
    model: LanguageModel, streams: Streams, config: TrainConfig, epoch: int, processes: Processes
) -> list[nn.Parameter]:
    """Give the head of a model trees that cluster words by their mean hidden state; see
    :meth:`hstree.heads.TreeEnsemble.relearn` and :meth:`hstree.heads.ForestSoftmax.relearn`. The
    same for the same weights, text, seed and epoch that follows, in all processes. Returns the
    parameters of the head that have new values."""
    means, hidden, target = read_contexts(model, streams, processes)
    options = config.head_options()
    head = model.head
    seed = tree_seed(config.seed, epoch)
    if options.get("recipe", "cluster") != "cluster":
        options["tree_options"] = None
    given: dict[str, Any] = {
        "seed": seed,
        "frequencies": means.count.cpu(),
        "tree_options": options.get("tree_options"),
    }
    if isinstance(head, ForestSoftmax):
        restarted = head.relearn(means.vectors(), **given)
    else:
        assert isinstance(head, TreeEnsemble)
        shape = {name: options[name] for name in SHAPE if options.get(name) is not None}
        restarted = head.relearn(means.vectors(), at=means.mean, **given, **shape)
        head.fit_nodes(hidden, target, seed=seed)
    return [head.get_parameter(name) for name in restarted]


@torch.no_grad()
def read_contexts(
    model: LanguageModel,
    streams: Streams,
    processes: Processes,
    n_contexts: int = FITTED_CONTEXTS,
) -> tuple[ContextMeans, Tensor, Tensor]:
    """Mean hidden state of the contexts before each word, in evaluation mode, and about
    ``n_contexts`` of the contexts: hidden states [N, D] and next words [N].

    Args:
        model: language model, temporarily set to evaluation mode.
        streams: the text; each process reads an equal part of the streams.
        processes: they get the same results.
        n_contexts: number of contexts to return, spread over the text.
    """
    device = model.backbone.embedding.weight.device
    means = ContextMeans(model.head.n_classes, model.head.in_features, device=device)
    width = streams.batch_size // processes.size
    columns = slice(processes.rank * width, (processes.rank + 1) * width)
    state: State | None = None
    contexts = len(streams) * streams.batch_size
    kept = max(1, WINDOW * n_contexts // max(contexts, n_contexts))  # of each window
    sample: list[tuple[Tensor, Tensor]] = []
    training = model.training
    model.eval()
    try:
        n_windows = -(-len(streams) // WINDOW)
        for window in track(streams.windows(WINDOW), "reading the text", n_windows):
            tokens, target = (part[:, columns].to(device) for part in window)
            hidden, state = model.hidden(tokens, state)
            counted = target != model.head.ignore_index
            means.add(hidden[counted], target[counted])
            sample.append((hidden[:kept].flatten(0, 1), target[:kept].flatten()))
    finally:
        model.train(training)
    processes.add((means.count, means.sum, means.second_moment))
    states, words = (
        torch.cat(processes.gather(torch.cat(part))) for part in zip(*sample, strict=True)
    )
    return means, states, words
