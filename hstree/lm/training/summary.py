"""The final figures of a run, and the cost of its head next to a flat softmax."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from hstree.heads import Head
from hstree.lm.data import Streams
from hstree.lm.models import LanguageModel
from hstree.lm.runs import HeadCost, Summary, TrainConfig

COST_LOGITS = 2**26  # largest number of logits of the flat softmax in the timing of the head


def head_cost(model: LanguageModel, config: TrainConfig, text: Streams) -> HeadCost:
    """Cost of the head on the context vectors of the first training batch of one process."""
    streams = min(config.batch_size, max(1, COST_LOGITS // (config.bptt * model.head.n_classes)))
    device = model.backbone.embedding.weight.device
    tokens, target = (part[:, :streams].to(device) for part in text.window(0, config.bptt))
    with torch.no_grad():
        hidden, _ = model.hidden(tokens)
    model.head.train()
    try:
        return measure_head_cost(
            model.head,
            hidden.reshape(-1, hidden.shape[-1]),
            target.reshape(-1),
            flat_features=model.backbone.context_size,
        )
    finally:
        model.head.eval()


def measure_head_cost(
    head: Head,
    hidden: Tensor,
    target: Tensor,
    *,
    flat_features: int | None = None,
    repeats: int = 15,
    budget: float = 4.0,
) -> HeadCost:
    """Time one training step of the head alone (forward and backward) against ``F.linear`` +
    ``F.cross_entropy``.

    Args:
        head: any head; its gradients are cleared afterwards.
        hidden: [N, D] context vectors.
        target: int64 [N].
        flat_features: number of features, the last ones, that the flat softmax reads; default: all.
            For a head that reads several layers, the size of the last layer.
        repeats: largest number of timed repetitions, after two for warm-up.
        budget: seconds after which no further repetition starts (at least three are timed).
    """
    hidden = hidden.detach().requires_grad_()
    read = hidden[:, -(flat_features or head.in_features) :]
    flat_hidden = read.detach().contiguous().requires_grad_()
    weight = (
        torch.empty(head.n_classes, flat_hidden.shape[1], device=hidden.device)
        .uniform_(-0.1, 0.1)
        .requires_grad_()
    )
    bias = torch.zeros(head.n_classes, device=hidden.device, requires_grad=True)

    def head_step() -> None:
        loss: Tensor = head(hidden, target).loss
        loss.backward()  # type: ignore[no-untyped-call]
        head.zero_grad(set_to_none=True)
        hidden.grad = None

    def flat_step() -> None:
        loss = F.cross_entropy(
            F.linear(flat_hidden, weight, bias), target, ignore_index=head.ignore_index
        )
        loss.backward()  # type: ignore[no-untyped-call]
        flat_hidden.grad = weight.grad = bias.grad = None

    times: tuple[list[float], list[float]] = ([], [])
    begin = time.perf_counter()
    for repetition in range(repeats + 2):
        for step, measured in zip((head_step, flat_step), times, strict=True):
            seconds = _seconds(step, hidden.device)
            if repetition >= 2:
                measured.append(seconds)
        if repetition >= 4 and time.perf_counter() - begin > budget:
            break
    return HeadCost(len(hidden), statistics.median(times[0]), statistics.median(times[1]))


def _seconds(step: Callable[[], None], device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    begin = time.perf_counter()
    step()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - begin


def format_summary(summary: Summary, other: Summary | None = None) -> str:
    """The summary as a table of plain text, at most 80 columns wide.

    Args:
        summary: of the run.
        other: of a run with another head and otherwise the same settings, to be shown next to it.
    """
    cost = summary.cost
    faster = (
        f"{cost.ratio:.1f} times faster"
        if cost.ratio >= 1
        else f"{1 / cost.ratio:.1f} times slower"
    )
    lines = [
        f"{'perplexity':<34}{'valid':>12}{'test':>12}{'seconds':>10}",
        f"{f'head {summary.head}':<34}{_perplexities(summary)}{summary.seconds:>10,.0f}",
    ]
    if other is not None:
        label = f"head {other.head}, same settings"
        lines.append(
            f"{label:<34}{_perplexities(other)}{other.seconds:>10,.0f}   "
            f"x {other.seconds / summary.seconds:.1f}"
        )
    part = [f"valid: {summary.valid_share:.1%} of the validation text"]
    if summary.valid_share == 1:
        part = []
    return "\n".join(
        [
            *lines,
            f"{'unigram model':<34}{summary.unigram_valid_perplexity:>12,.1f}"
            f"{summary.unigram_test_perplexity:>12,.1f}",
            *part,
            "",
            f"{'parameters of the backbone':<34}{summary.backbone_parameters:>12,}",
            f"{'parameters of the head':<34}{summary.head_parameters:>12,}",
            f"{f'head, one step of {cost.rows:,} rows':<34}{1e3 * cost.head_seconds:>9.2f} ms",
            f"{'flat softmax of the same size':<34}{1e3 * cost.flat_seconds:>9.2f} ms   "
            f"the head is {faster}",
        ]
    )


def _perplexities(summary: Summary) -> str:
    return f"{summary.valid_perplexity:>12,.1f}{summary.test_perplexity:>12,.1f}"
