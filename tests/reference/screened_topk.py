"""Reference of :mod:`hstree.ops.screened_topk`, in float64."""

from __future__ import annotations

import torch
from torch import Tensor


def preview_number(preview: Tensor, class_: int, feature: int) -> int:
    """P_vi, by the layout."""
    block, place = preview[class_ // 16], class_ % 16
    if preview.dtype == torch.int8:
        return int(block[feature // 4, place, feature % 4])
    byte = int(block[feature // 8, place, feature % 4])
    return (byte >> 4 if feature % 8 >= 4 else byte & 15) - 8


def preview_rows(preview: Tensor, scale: Tensor, classes: int, features: int) -> Tensor:
    """s_v P_v [V, R]."""
    rows = [[preview_number(preview, v, i) for i in range(features)] for v in range(classes)]
    return torch.tensor(rows, dtype=torch.float64) * scale[:classes, None].double()


def screened_topk_reference(
    query: Tensor,
    rows: Tensor,
    offset: Tensor,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    n: int,
    temperature: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Previews [N, V], all scores [N, V], and both results of sums [N]: ``rows`` are those of
    :func:`preview_rows`, other arguments those of :func:`hstree.ops.screened_topk`."""
    x, shift = query[:, :-1], query[:, -1:]
    step = x.abs().amax(1, keepdim=True) / 127
    rounded = torch.where(step > 0, (x * (1 / step)).round() * step, 0.0).double()
    previews = offset[: len(weight)].double() + shift.double() + rounded @ rows.T
    exact = hidden.double() @ weight.double().T
    if bias is not None:
        exact = exact + bias.double()
    best = previews.sort(dim=1, descending=True, stable=True).indices[:, :n]
    scores = previews.scatter(1, best, exact.gather(1, best))
    rest = previews.scatter(1, best, -torch.inf) / temperature
    return previews, scores, rest.logsumexp(1), (scores / temperature).logsumexp(1)
