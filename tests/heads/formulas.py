"""Log-probabilities [N, V] of every head by definition, from hidden [N, D] in the dtype of the
head; differentiable, but for those of trees."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from heads.support import Formula, probabilities
from heads.test_forest import formula as forest


def linear(layer: Any, x: Tensor) -> Tensor:
    """Of a layer of torch, or the logits of a head."""
    product = x @ layer.weight.t()
    return product if layer.bias is None else product + layer.bias


logits = linear


def integral(function: Any, x: Tensor) -> Tensor:
    """Of the slopes: each interval adds its slope times the way covered in it."""
    slopes, radius = F.softplus(function.v), function.radius
    width = 2 * radius / len(slopes)
    begin = -radius + width * torch.arange(len(slopes), dtype=x.dtype)
    f = ((x[..., None] - begin).clamp(0, width) * slopes).sum(-1)
    f = f + slopes[0] * (x + radius).clamp(max=0)
    return f + slopes[-1] * (x - radius).clamp(min=0)


def curve(head: Any, x: Tensor) -> Tensor:
    """f of the logits."""
    f = head.function
    if f.name == "gss":
        return f.k * (x - f.c) + f.c - (f.k - 1) * F.softplus(x - f.c)
    if f.name == "sigsoftmax":
        return x + F.logsigmoid(x)
    if f.name == "plif":
        return integral(f, x)
    if f.name == "monotonic":
        units = torch.sigmoid(F.softplus(f.u) * x[..., None] + f.b)
        return (units * F.softplus(f.v)).sum(-1)
    if f.name == "scaled":
        return f.soft_cap * (f.scale * x / f.soft_cap).tanh()
    assert f.name == "softmax"
    return x


def flat(head: Any, hidden: Tensor) -> Tensor:
    return curve(head, logits(head, hidden)).log_softmax(1)


def latents(head: Any, hidden: Tensor, components: int) -> Tensor:
    """z [N, K, E]: tanh(U_k h + a_k), U_k the k-th block of rows."""
    z = torch.tanh(linear(head.latent, hidden))
    return z.view(len(hidden), components, head.latent_features)


def mixture_of_softmaxes(head: Any, hidden: Tensor) -> Tensor:
    log_prior = linear(head.prior, hidden).log_softmax(1)
    each = curve(head, logits(head, latents(head, hidden, head.n_components))).log_softmax(2)
    return (log_prior[:, :, None] + each).logsumexp(1)


def mixture_of_contexts(head: Any, hidden: Tensor) -> Tensor:
    prior = linear(head.prior, hidden).softmax(1)
    context = (prior[:, :, None] * latents(head, hidden, head.n_components)).sum(1)
    return curve(head, logits(head, context)).log_softmax(1)


def priors_of_mixtape(head: Any, hidden: Tensor) -> Tensor:
    """pi [N, V, 4]: g = sigmoid(v_x . tanh(Q_j h + q_j) + u_j . h + c_xj), or sigmoid(u_j . h) for
    classes without gates of their own."""
    size, g = head.gate_features, []
    q = torch.tanh(linear(head.gate_hidden, hidden))
    one_hot = F.one_hot(head.own, head.n_classes)
    for j in range(3):
        own = q[:, j * size : (j + 1) * size] @ head.gate_weight.t() + head.gate_bias[:, j]
        score = own @ one_hot.to(own.dtype)
        g.append(torch.sigmoid(score + (hidden @ head.gate_context.weight[j])[:, None]))
    g1, g2, g3 = g
    return torch.stack([g1 * g2, g1 * (1 - g2), (1 - g1) * g3, (1 - g1) * (1 - g3)], -1)


def mixtape(head: Any, hidden: Tensor) -> Tensor:
    each = latents(head, hidden, 4) @ head.weight.t()
    mixed = (priors_of_mixtape(head, hidden) * each.transpose(1, 2)).sum(2)
    return (mixed if head.bias is None else mixed + head.bias).log_softmax(1)


def adaptive(head: Any, hidden: Tensor) -> Tensor:
    """A head of the frequent classes and of clusters; the classes stand in order of rank."""
    first = head.cutoffs[0]
    top = linear(head.adaptive.head, hidden).log_softmax(1)
    by_rank = [top[:, :first]]
    for i, (inner, outer) in enumerate(head.adaptive.tail):
        within = linear(outer, linear(inner, hidden)).log_softmax(1)
        by_rank.append(top[:, first + i, None] + within)
    return torch.cat(by_rank, 1)[:, head.order.argsort()]


def trees(head: Any, hidden: Tensor) -> Tensor:
    return torch.from_numpy(probabilities(head, hidden)).log()


FORMULAS: dict[str, Formula] = {
    **dict.fromkeys(("softmax", "sampled", "sigsoftmax", "gss", "monotonic"), flat),
    **dict.fromkeys(("plif", "plif-frozen"), flat),
    **dict.fromkeys(("mos", "mos-plif"), mixture_of_softmaxes),
    "moc": mixture_of_contexts,
    "mixtape": mixtape,
    "forest": forest,
    "adaptive": adaptive,
    "trees": trees,
}
"""By the name of the head."""
