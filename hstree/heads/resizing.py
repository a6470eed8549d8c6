"""Another number of classes for a head that has a row and a bias for each class."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from hstree._checks import check_int, smoothed_frequencies
from hstree.heads.state import HasWeight, weight_to_tie


@torch.no_grad()
def resized_head(
    head: Any,
    num_classes: int,
    frequencies: npt.ArrayLike | None,
    embedding: HasWeight | None,
) -> Any:
    """See :meth:`hstree.heads.FlatHead.resized`."""
    size, old = check_int("num_classes", num_classes), head.n_classes
    if old <= head.ignore_index < size:
        raise ValueError(
            f"num_classes: expected at most {head.ignore_index}, the ignore_index of the head, "
            f"which would become a class, got {size}"
        )
    if embedding is not None and not head.tied:
        raise ValueError("embedding: expected None, since the head is not tied")
    weight, bias = _own(head, "weight"), _own(head, "bias")
    assert weight is not None
    counts = None if frequencies is None else smoothed_frequencies(frequencies, size)
    made = copy.deepcopy(head)
    made.n_classes, made.frequencies = size, counts
    if counts is None and head.frequencies is not None:
        new = np.exp(np.log(head.frequencies).mean())
        made.frequencies = np.append(head.frequencies, np.full(max(size - old, 0), new))[:size]
    if embedding is None:
        made.weight = _parameter(resized_rows(weight, size), weight)
    else:
        made.weight = weight_to_tie(embedding, size, weight.shape[1])
    made.tied = embedding is not None
    if bias is not None:
        rows = resized_rows(bias, size)
        if counts is not None and size > old:
            # Where W h is 0: exp f(b) of a new class is its share of the sum of the old ones.
            share = torch.from_numpy(np.log(counts[old:]) - np.log(counts[:old].sum()))
            scores = head.function(torch.float64, bias.device)(bias.double())
            rows[old:] = head.function.solve(share.to(bias.device) + scores.logsumexp(0))
        made.bias = _parameter(rows, bias)
    if head.class_weight is not None:
        class_weight = resized_rows(head.class_weight, size)
        made.register_constant("class_weight", class_weight)
        made.class_weight = class_weight  # on the device of the head
    made.resize_tables(old, counts)
    return made


def resized_rows(values: Tensor, size: int) -> Tensor:
    """The first ``size`` of the values [V, ...]; those beyond V are the mean of the finite ones."""
    added = max(size - len(values), 0)
    known = values.double() if values.dtype == torch.float64 else values.float()
    mean = known.masked_fill(~known.isfinite(), torch.nan).nanmean(0).nan_to_num()
    return torch.cat([values[:size], mean.to(values).expand(added, *values.shape[1:])])


def _own(head: nn.Module, name: str) -> Any:
    value = getattr(head, name)
    if value is None:
        return None
    computed = head._parameters.get(name) is not value
    if computed or value.is_meta or hasattr(value, "device_mesh"):
        raise ValueError(
            f"resized: expected a whole {name} with data, a parameter of the head itself, got one "
            "that is computed from others, sharded, or on the meta device; first end pruning or "
            "parametrization (torch.nn.utils.prune.remove, parametrize.remove_parametrizations), "
            "and resize a head before it is sharded"
        )
    return value


def _parameter(values: Tensor, old: nn.Parameter) -> nn.Parameter:
    return nn.Parameter(values.to(old), requires_grad=old.requires_grad)
