"""Dynamic evaluation: gradient descent on the text while it is read."""

from __future__ import annotations

import copy
import math
import sys
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from hstree._checks import check_int
from hstree._progress import track
from hstree.lm.data import Streams
from hstree.lm.models import LanguageModel, State, detach

Gradients = dict[str, Tensor]

LEARNING_RATE_RMS = 5e-5
LEARNING_RATE_SGD = 0.1
LARGEST_LOSS = math.log(sys.float_info.max)
"""Nats per token beyond which the perplexity is infinite."""


def gradient_rms(
    model: LanguageModel,
    tokens: Any,
    *,
    segment: int = 5,
    batch_size: int = 100,
    max_batches: int | None = None,
) -> dict[str, Tensor]:
    """Root mean square of every parameter's gradient over batches of a text.

        RMS = sqrt(mean over batches of g^2),  g the gradient of a batch's mean loss, dropout off

    Args:
        model: not changed.
        tokens: the training text, numpy ids [n].
        segment: number of time steps of a batch, over which gradients are propagated.
        batch_size: number of parallel streams.
        max_batches: number of batches to use; None: all.

    Returns:
        A dictionary from the name of each trained parameter to a tensor of its shape.

    Raises:
        ValueError: a number below 1, or fewer than ``batch_size + 1`` tokens.
    """
    check_int("segment", segment)
    if max_batches is not None:
        check_int("max_batches", max_batches)
    model = copy.deepcopy(model).eval()
    squares = {name: torch.zeros_like(p) for name, p in _trained(model).items()}
    count = 0
    for _, _, gradients in _segments(model, tokens, segment, batch_size, "gradient RMS"):
        for name, gradient in gradients.items():
            squares[name].addcmul_(gradient, gradient)
        count += 1
        if count == max_batches:
            break
    return {name: square.div_(count).sqrt_() for name, square in squares.items()}


def evaluate_dynamic(
    model: LanguageModel,
    tokens: Any,
    rms: Mapping[str, Tensor] | None = None,
    *,
    learning_rate: float | None = None,
    decay: float = 2e-3,
    epsilon: float = 2e-5,
    segment: int = 5,
) -> float:
    """Mean negative log-probability (nats per token) of a text read as one stream by a model that
    learns from every segment once it has been scored.

        theta <- theta - learning_rate g / (RMS + epsilon) + d (theta_0 - theta)
        d = min(1, decay RMS / m),  m the mean over parameter tensors of each one's mean RMS

    g is the gradient of the segment's mean loss with respect to theta, theta_0 the given
    weights of the model. Without ``rms`` plain gradient descent: ``theta <- theta - learning_rate g
    + decay (theta_0 - theta)``.

    Args:
        model: not changed; a copy learns, with dropout off.
        tokens: numpy ids [n], n >= 2; every token but the first is a target.
        rms: from :func:`gradient_rms`, on the text that the model was trained on.
        learning_rate: None: 5e-5 with ``rms``, 0.1 without.
        decay: rate at which weights return to theta_0.
        epsilon: constant that keeps steps finite where gradients are tiny.
        segment: number of time steps between updates, over which gradients are propagated. With
            twice as many, use about twice the learning rate and decay.

    Row-sparse gradients are made dense, since the rule updates every row.

    Hyperparameters of the first version of the published code, in which the dynamic evaluation of
    MoS is published too (learning rate 0.002, lambda 0.02, epsilon 0.001; for MoS lambda 0.075 on
    Penn Treebank and epsilon 0.002 on WikiText-2), have other units. There RMS is the root of a sum
    over the B batches of the statistics, and m a sum over the parameter tensors. With n =
    ``len(rms)`` such tensors the same steps are made by::

        learning_rate = eta / math.sqrt(B)
        decay = lambda / n
        epsilon = epsilon / math.sqrt(B)

    Raises:
        ValueError: an argument out of range, ``rms`` of another model, or a loss that is no longer
            finite.

    Source: Krause, Kahembwe, Murray and Renals, *Dynamic Evaluation of Neural Sequence Models*
    (2018), the rule with RMS as a global prior, and the defaults of its code.
    """
    if learning_rate is None:
        learning_rate = LEARNING_RATE_SGD if rms is None else LEARNING_RATE_RMS
    for name, value in {"learning_rate": learning_rate, "decay": decay, "epsilon": epsilon}.items():
        if not (math.isfinite(value) and value >= 0.0):
            raise ValueError(f"{name}: expected a finite number of at least 0, got {value}")
    if rms is not None and epsilon == 0.0:
        raise ValueError("epsilon: expected a positive number with rms, got 0.0")
    if rms is None and decay > 1.0:
        raise ValueError(f"decay: expected at most 1 without rms, got {decay}")
    check_int("segment", segment)
    learner = copy.deepcopy(model).eval()
    start = {name: p.detach() for name, p in _trained(model).items()}
    scale, pull = _scale_and_pull(start, rms, decay, epsilon)
    theta = _trained(learner)
    total, count = 0.0, 0
    for loss, n_targets, gradients in _segments(learner, tokens, segment, 1, "dynamic"):
        if not loss < LARGEST_LOSS:
            raise ValueError(
                f"learning_rate: the loss became {loss} after {count} tokens; "
                f"try a lower one than {learning_rate:g}"
            )
        total += loss * n_targets
        count += n_targets
        with torch.no_grad():
            for name, parameter in theta.items():
                parameter.lerp_(start[name], pull[name])
                if name not in gradients:
                    continue
                if scale is None:
                    parameter.sub_(gradients[name], alpha=learning_rate)
                else:
                    parameter.addcdiv_(gradients[name], scale[name], value=-learning_rate)
    return total / count


def _scale_and_pull(
    start: Mapping[str, Tensor], rms: Mapping[str, Tensor] | None, decay: float, epsilon: float
) -> tuple[dict[str, Tensor] | None, dict[str, Tensor]]:
    """RMS + epsilon (None without ``rms``), and d, for each parameter."""
    if rms is None:
        return None, {name: p.new_tensor(decay) for name, p in start.items()}
    if set(rms) != set(start):
        odd = sorted(set(rms) ^ set(start))
        raise ValueError(
            f"rms: expected one tensor for each trained parameter, but {', '.join(odd)} "
            f"{'is' if len(odd) == 1 else 'are'} only in one of the two"
        )
    for name, p in start.items():
        if rms[name].shape != p.shape:
            raise ValueError(
                f"rms[{name!r}]: expected shape {tuple(p.shape)}, got {tuple(rms[name].shape)}"
            )
    own = {name: rms[name].to(p) for name, p in start.items()}
    mean = torch.stack([value.mean() for value in own.values()]).mean()
    if not (torch.isfinite(mean) and mean > 0):
        raise ValueError(f"rms: expected finite values, not all 0, got a mean of {float(mean)}")
    scale = {name: value + epsilon for name, value in own.items()}
    return scale, {name: (decay / mean * value).clamp_(max=1.0) for name, value in own.items()}


def _segments(
    model: LanguageModel, tokens: Any, length: int, batch_size: int, description: str
) -> Iterator[tuple[float, int, Gradients]]:
    """For each segment of a text its mean negative log-likelihood, its number of targets, and dense
    gradients of the head's loss; the state is carried over. Parameters may change between
    segments."""
    ignore = model.head.ignore_index
    streams = Streams(tokens, batch_size, ignore_index=ignore)
    device = model.backbone.embedding.weight.device
    parameters = _trained(model)
    state: State | None = None
    windows = track(streams.windows(length), description, -(-len(streams) // length))
    for window, target in windows:
        n_targets = int((target != ignore).sum())
        with torch.enable_grad(), _differentiable_lstm(device):
            hidden, state = model.hidden(window.to(device), state)
            output = model.head(hidden, target.to(device))
            loss = output.loss.sum()
            if model.head.reduction != "mean":
                loss = loss / n_targets
            found = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
        state = detach(state)
        yield (
            -output.output.sum().item() / n_targets,
            n_targets,
            {
                name: gradient.to_dense() if gradient.is_sparse else gradient
                for name, gradient in zip(parameters, found, strict=True)
                if gradient is not None
            },
        )


def _trained(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def _differentiable_lstm(device: torch.device) -> AbstractContextManager[None]:
    """cuDNN has no backward for an LSTM in evaluation mode; torch's own kernels have."""
    if device.type != "cuda":
        return nullcontext()
    return torch.backends.cudnn.flags(enabled=False)
