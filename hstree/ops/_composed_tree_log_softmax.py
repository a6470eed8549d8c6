"""Log-probabilities of all classes of a mixture of trees by torch's own operators, for devices
without a kernel, and for the backward pass on those without one for it. Here the classes of groups
have rows of ``score`` in each tree, from ``class_begin`` to ``root_begin``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor

from hstree._numerics import log_add_exp
from hstree.trees import MAX_DEPTH


def composed_log_prob(
    score: Tensor,
    log_gate: Tensor,
    node: Tensor,
    edge: Tensor,
    n_classes: int,
    class_begin: int,
    root_begin: int,
) -> Tensor:
    """log P [N, V]; arguments of :func:`hstree.ops.tree_log_softmax`. Tables are not checked."""
    mixture: Tensor | None = None
    for t in range(len(score)):
        path = _path_log_prob(score[t], node[t], edge[t], n_classes, class_begin, root_begin)
        log_prob = path + log_gate[:, t]
        mixture = log_prob if mixture is None else log_add_exp(mixture, log_prob)
    assert mixture is not None
    return mixture.t().contiguous()


@contextmanager
def _recording() -> Iterator[None]:
    """For a kernel written in Python, which the dispatcher calls below autograd: torch's operators
    are recorded, and can be differentiated within the context. torch.func.vjp would do it too, in a
    tenth to a third more time."""
    include = torch._C._dispatch_tls_local_include_set()
    exclude = torch._C._dispatch_tls_local_exclude_set()
    autograd = torch._C.DispatchKey.AutogradFunctionality
    with torch._C._ForceDispatchKeyGuard(include, exclude.remove(autograd)), torch.enable_grad():
        yield


def composed_backward(
    grad: Tensor,
    log_prob: Tensor,
    score: Tensor,
    log_gate: Tensor,
    node: Tensor,
    edge: Tensor,
    class_begin: int,
    root_begin: int,
) -> tuple[Tensor, Tensor]:
    """Gradients of score [T, R, N] and log_gate [N, T], one tree at a time: a kernel of
    ``hstree::tree_log_softmax_backward``. No gradient from a class where the tree has -inf."""
    n_classes = log_prob.shape[1]
    grad_score, grad_log_gate = torch.zeros_like(score), torch.empty_like(log_gate)
    # The mixture of the paths as they are rounded here: log_prob may come from a kernel.
    mixture = torch.full_like(log_prob.t(), -torch.inf)
    for t in range(len(score)):
        path = _path_log_prob(score[t], node[t], edge[t], n_classes, class_begin, root_begin)
        mixture = torch.logaddexp(mixture, path + log_gate[:, t])
    for t in range(len(score)):
        with _recording():
            leaf = score[t].detach().requires_grad_()
            path = _path_log_prob(leaf, node[t], edge[t], n_classes, class_begin, root_begin)
        term = path.detach() + log_gate[:, t]
        posterior = torch.exp(term - mixture).masked_fill_(term == -torch.inf, 0.0)
        grad_path = posterior.mul_(grad.t())
        grad_log_gate[:, t] = grad_path.sum(0)
        if n_classes > 1:
            with _recording():
                (grad_score[t],) = torch.autograd.grad(path, leaf, grad_path)
    return grad_score, grad_log_gate


def class_rows(node: Tensor, edge: Tensor, n_classes: int) -> Tensor:
    """Class of each row of the groups, int64 [T, V]; 0 where a row belongs to no group."""
    block, row, first_edge, *_ = node.long().unbind(2)
    parent, below = edge.long().unbind(2)
    # Edge e of a group is row e + first_row: the rows of a node follow its edges.
    first_row = (row - first_edge).gather(1, parent)
    of_group = (block == 1).gather(1, parent) & (below < 0)
    place = torch.arange(edge.shape[1], device=edge.device) + first_row
    classes = place.new_zeros(len(node), n_classes + 1)
    # All other edges write into one more column, which is cut off.
    place, below = torch.where(of_group, place, n_classes), torch.where(of_group, below, -1)
    return classes.scatter(1, place, ~below)[:, :n_classes]


def with_class_rows(
    score: Tensor, class_score: Tensor, class_bias: Tensor, classes: Tensor, root_begin: int
) -> Tensor:
    """The scores [T, R + V, N] with those of the classes before the children of the root: score
    [T, R, N], class_score [N, V], class_bias [T, V], classes of :func:`class_rows`."""
    parts = []
    for upper, bias, of_rows in zip(score, class_bias, classes, strict=True):
        rows = class_score.t().index_select(0, of_rows)
        rows = rows + bias.index_select(0, of_rows).unsqueeze(1)
        parts += [upper[:root_begin], rows, upper[root_begin:]]
    return torch.cat(parts).view(len(score), score.shape[1] + classes.shape[1], score.shape[2])


def without_class_rows(
    grad: Tensor, classes: Tensor, root_begin: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of score, class_score and class_bias from that of :func:`with_class_rows`. Tree by
    tree, so that the order of the sums is fixed."""
    n_classes = classes.shape[1]
    root = grad[:, root_begin + n_classes :]
    upper, of_classes = grad[:, :root_begin], grad[:, root_begin : root_begin + n_classes]
    grad_class_score = grad.new_zeros(n_classes, grad.shape[2])
    for of_rows, rows in zip(classes, of_classes, strict=True):
        grad_class_score = grad_class_score.index_add(0, of_rows, rows)
    sums = of_classes.sum(2)
    grad_class_bias = torch.zeros_like(sums).scatter_add(1, classes, sums)
    return torch.cat([upper, root], 1), grad_class_score.t(), grad_class_bias


def _path_log_prob(
    score: Tensor, node: Tensor, edge: Tensor, n_classes: int, class_begin: int, root_begin: int
) -> Tensor:
    """log P_t [V, N] of one tree with the scores [R, N].

    Every node sums the edges above it by pointer jumping: over 1, then 2, 4, 8 ... of its
    ancestors. Six steps are enough for paths of 64 nodes in a tree of any shape.
    """
    if n_classes == 1:
        return score.new_zeros(1, score.shape[1])
    block, row, first_edge, _, edge_above = node.long().unbind(1)
    parent, below = edge.long().unbind(1)
    binary = score[:class_begin]
    others = _log_softmax_by_node(score[class_begin:], node, root_begin - class_begin)
    log_prob = torch.cat([F.logsigmoid(binary), F.logsigmoid(-binary), others])
    first = row + torch.where(block == 1, 2 * class_begin, 0)  # in log_prob
    first = first + torch.where(block == 2, class_begin + root_begin, 0)
    # The right child of a binary node is in the second part of log_prob, class_begin rows later.
    step = torch.where(block == 0, class_begin, 1)

    def of_edges(index: Tensor) -> Tensor:
        above = parent[index]
        place = first[above] + step[above] * (index - first_edge[above])
        return log_prob.index_select(0, place)

    path = torch.cat([score.new_zeros(1, score.shape[1]), of_edges(edge_above[1:])])
    # The root is its own ancestor, with a sum of 0, so that longer jumps add nothing.
    ancestor = F.pad(parent[edge_above[1:]], (1, 0))
    for _ in range((MAX_DEPTH - 1).bit_length()):
        path = path + path.index_select(0, ancestor)
        ancestor = ancestor[ancestor]
    leaf = torch.where(below < 0, ~below, n_classes)
    every_edge = torch.arange(len(edge), device=edge.device)
    leaf_edge = every_edge.new_zeros(n_classes + 1).scatter(0, leaf, every_edge)[:n_classes]
    return path.index_select(0, parent[leaf_edge]) + of_edges(leaf_edge)


def _log_softmax_by_node(score: Tensor, node: Tensor, n_class_rows: int) -> Tensor:
    """Log-softmax within the rows of each group, and of a wide root, whose rows are last: score
    [., N]."""
    if not len(score):
        return score
    block, row, _, width, _ = node.long().unbind(1)
    begin = row + torch.where(block == 2, n_class_rows, 0)
    bounds = torch.where(block > 0, torch.stack([begin, begin + width]), 0).flatten()
    # The first row of each row's node; padding rows act as one more node.
    segment = bounds.new_zeros(len(score) + 1).scatter(0, bounds, bounds).cummax(0).values[:-1]
    fixed, index = score.detach(), segment.unsqueeze(1).expand_as(score)
    largest = torch.full_like(fixed, -torch.inf).scatter_reduce(0, index, fixed, "amax")
    shifted = score - largest.index_select(0, segment)
    total = torch.zeros_like(score).index_add(0, segment, shifted.exp())
    return shifted - total.index_select(0, segment).log()
