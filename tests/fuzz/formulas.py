"""Log-probabilities of every head in float64 numpy, from its parameters and the formulas."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from fuzz.curves import Bend, Pieces
from fuzz.forests import BINARY, GROUP, ROOT, plant
from fuzz.truth import class_log_prob, log_softmax, log_sum_exp, mixture, sigmoid

Array = npt.NDArray[np.float64]
State = dict[str, Any]
"""The parameters and buffers of a head by name, as arrays."""


def linear(state: State, name: str, x: Array) -> Array:
    y: Array = x @ state[f"{name}.weight"].T
    return y + state[f"{name}.bias"] if f"{name}.bias" in state else y


def logits(state: State, x: Array) -> Array:
    return x @ state["weight"].T + state.get("bias", 0.0)


def softplus(x: Array) -> Array:
    return np.logaddexp(0.0, x)


def pieces(state: State, radius: float) -> Pieces:
    """The PLIF whose slopes are softplus(v); its value at -R does not matter to a softmax."""
    rise = softplus(state["function.v"]) * 2 * radius / len(state["function.v"])
    return Pieces(np.stack([rise.cumsum() - rise, rise], 1), radius)


def monotonic(state: State, intervals: int, radius: float) -> Pieces:
    """Cubic Hermite interpolation of sum_i v_i sigmoid(u_i x + b_i) at evenly spaced knots."""
    u, v, b = (state[f"function.{name}"] for name in "uvb")
    u, v = softplus(u), softplus(v)
    s = sigmoid(np.linspace(-radius, radius, intervals + 1)[:, None] * u + b)
    value, slope = s @ v, (s * (1 - s)) @ (u * v) * 2 * radius / intervals
    rise, begin, end = np.diff(value), slope[:-1], slope[1:]
    columns = [value[:-1], begin, 3 * rise - 2 * begin - end, begin + end - 2 * rise]
    return Pieces(np.stack(columns, 1), radius)


def function(head: Any, state: State) -> Any:
    """f of a flat head."""
    name = head.function.name
    if name == "plif":
        return pieces(state, head.function.radius)
    if name == "monotonic":
        return monotonic(state, head.function.intervals, head.function.radius)
    if name == "gss":
        return Bend(head.function.c, head.function.k)
    return Bend(0.0, 2.0 if name == "sigsoftmax" else 1.0)


def flat(head: Any, state: State, hidden: Array) -> Array:
    return log_softmax(function(head, state).value(logits(state, hidden)))


def latents(head: Any, state: State, hidden: Array) -> tuple[Array, Array]:
    """z [N, K, E] and log pi [N, K] of a mixture."""
    z = np.tanh(linear(state, "latent", hidden))
    z = z.reshape(len(hidden), head.n_components, head.latent_features)
    return z, log_softmax(linear(state, "prior", hidden))


def mixture_of_softmaxes(head: Any, state: State, hidden: Array) -> Array:
    z, prior = latents(head, state, hidden)
    each = log_softmax(function(head, state).value(logits(state, z)))
    return log_sum_exp(each + prior[:, :, None], 1)


def mixture_of_contexts(head: Any, state: State, hidden: Array) -> Array:
    z, prior = latents(head, state, hidden)
    mixed = (np.exp(prior)[:, :, None] * z).sum(1)
    return log_softmax(function(head, state).value(logits(state, mixed)))


def mixtape(head: Any, state: State, hidden: Array) -> Array:
    rows = len(hidden)
    z = np.tanh(linear(state, "latent", hidden)).reshape(rows, 4, head.latent_features)
    q = np.tanh(linear(state, "gate_hidden", hidden)).reshape(rows, 3, head.gate_features)
    scores = np.repeat((hidden @ state["gate_context.weight"].T)[:, :, None], head.n_classes, 2)
    own = np.einsum("njg,vg->njv", q, state["gate_weight"]) + state["gate_bias"].T
    scores[:, :, state["own"].astype(int)] += own
    g1, g2, g3 = np.moveaxis(sigmoid(scores), 1, 0)
    prior = np.stack([g1 * g2, g1 * (1 - g2), (1 - g1) * g3, (1 - g1) * (1 - g3)], 1)
    each = np.einsum("nke,ve->nkv", z, state["weight"])
    return log_softmax((prior * each).sum(1) + state.get("bias", 0.0))


def forest(head: Any, state: State, hidden: Array) -> Array:
    cluster, score = state["cluster"].astype(int), hidden @ state["weight"].T
    score = score + state.get("bias", 0)
    r = hidden @ state["cluster_weight"].T + state["cluster_bias"]
    r = r.reshape(len(hidden), head.n_trees, head.clusters)
    gate = np.zeros((len(hidden), head.n_trees)) + state.get("gate.logits", 0)
    if head.gate.name == "context":
        gate = linear(state, "gate.linear", hidden)
    each = [log_softmax(score + r[:, t][:, cluster[:, t]]) for t in range(head.n_trees)]
    return mixture(each, log_softmax(gate))[0]


def adaptive(head: Any, state: State, hidden: Array) -> Array:
    cutoffs = [*head.cutoffs, head.n_classes]
    top = log_softmax(linear(state, "adaptive.head", hidden))
    by_rank = [top[:, : cutoffs[0]]]
    for i in range(len(head.cutoffs)):
        inner = linear(state, f"adaptive.tail.{i}.0", hidden)
        within = log_softmax(linear(state, f"adaptive.tail.{i}.1", inner))
        by_rank.append(top[:, cutoffs[0] + i, None] + within)
    result = np.empty((len(hidden), head.n_classes))
    result[:, state["order"].astype(int)] = np.concatenate(by_rank, 1)
    return result


def trees(head: Any, state: State, hidden: Array) -> Array:
    """Binary nodes with vectors of their own, or groups with a shared output embedding."""
    forest = plant([tree.to_nested() for tree in head.trees], groups=head.groups)
    gate = np.zeros((len(hidden), head.n_trees))
    if head.n_trees > 1 and head.gate.name == "constant":
        gate = gate + state["gate.logits"]
    if head.n_trees > 1 and head.gate.name == "context":
        gate = linear(state, "gate.linear", hidden)
    each = []
    for t, tree in enumerate(forest.trees):
        chosen = slice(None)
        if "feature_index" in state:
            chosen = state["feature_index"][t].astype(int)
        x, scores = hidden[:, chosen], {}
        if "roots.bias" in state:
            weight = np.zeros((head.below.clusters, head.subset_size))
            if "roots.weight" in state:
                weight += state["roots.weight"][t]
            for k, child in enumerate(tree[0].children):
                if head.groups and child < 0:  # a cluster of one class adds its row
                    weight[k] += state["below.weight"][~child][chosen]
            scores[ROOT] = x @ weight.T + state["roots.bias"][t]
        if "below.bias" in state:
            weight, bias = state["below.weight"], state["below.bias"][t]
            if head.groups:
                scores[GROUP] = hidden @ weight.T + bias
            else:
                scores[BINARY] = x @ weight[t].T + bias
        each.append(class_log_prob(forest, t, scores, len(hidden)))
    return mixture(each, log_softmax(gate))[0]


FORMULAS: dict[str, Callable[[Any, State, Array], Array]] = {
    "softmax": flat,
    "sampled": flat,
    "sigsoftmax": flat,
    "gss": flat,
    "plif": flat,
    "plif-frozen": flat,
    "monotonic": flat,
    "mos": mixture_of_softmaxes,
    "mos-plif": mixture_of_softmaxes,
    "moc": mixture_of_contexts,
    "forest": forest,
    "mixtape": mixtape,
    "adaptive": adaptive,
    "trees": trees,
}
